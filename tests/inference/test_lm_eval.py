"""lm-evaluation-harness on our models: tasks from local files, against the model's own forward pass in float64."""

import functools
import json

import pytest
import torch

from common.settings import decode
from data.chat import ChatTokenizer
from data.tokenizer import load_tokenizer
from model.gpt import GPT
from runtime.checkpoint import load_model
from runtime.device import choose_compute

pytestmark = pytest.mark.usefixtures("restored_torch")

DEVICE = {"device": "cpu", "dtype": "float64"}
LEARNED = {"model.position": {"name": "learned", "max_len": 24}}
TEXTS = ["def self return", "the (", "日本 🙂 é", "x" * 70, "a"]


@pytest.fixture
def compute():
    from inference.harness import HarnessConfig

    return choose_compute(decode(HarnessConfig, {"checkpoint": ".", "tasks": "x", "runtime": DEVICE}).runtime)


@pytest.fixture
def build(tiny, dataset_dir):
    """Builds a tiny model, with the settings given, in float64, and loads its tokenizer."""

    def make(changes=None):
        torch.manual_seed(1)
        return GPT(tiny(changes).model).double(), load_tokenizer(dataset_dir / "tokenizer.json")

    return make


@pytest.fixture
def trained(run_of):
    """Gives the test such a model's run, trained once for all tests."""
    return lambda changes: run_of({"runtime.dtype": "float64", "max_steps": 2, "eval.batches": 1} | changes)


@pytest.fixture
def harness_model(build, compute):
    """Builds the adapter around such a model."""
    pytest.importorskip("lm_eval", reason="the optional lm-evaluation-harness is not installed")
    from inference.harness_model import HarnessModel

    def wrap(changes=None, max_length=None, micro_batch=2, compute=compute):
        gpt, tokenizer = build(changes)
        return HarnessModel(gpt, tokenizer, max_length or gpt.config.max_len, micro_batch, compute)

    return wrap


def direct(gpt, ids, n_before):
    """Log-likelihood of ids[n_before:] and whether all are greedy, from one call for one text."""
    with torch.no_grad():
        log_p = gpt(torch.tensor([ids[:-1]]))[0].log_softmax(-1)
    targets = torch.tensor(ids[n_before:])
    rows = log_p[n_before - 1 :]
    return rows[torch.arange(len(targets)), targets].sum().item(), bool((rows.argmax(-1) == targets).all())


@pytest.mark.parametrize("attention", ["log_space", "softmax", "sliding_window"])
def test_scores_are_those_of_a_forward_pass(build, compute, monkeypatch, attention):
    harness_model = pytest.importorskip("inference.harness_model", reason="lm-evaluation-harness is not installed")
    monkeypatch.setattr(harness_model, "_CHUNK", 7)  # texts go through the model in several chunks
    monkeypatch.setattr(harness_model, "_LOGITS", 1000)
    settings = {"model.attention": {"name": attention} | ({"window": 8} if attention == "sliding_window" else {})}
    gpt, tokenizer = build(settings)
    ids = [[tokenizer.eot_id, *tokenizer.encode(text)] for text in TEXTS]
    greedy = ids[0][:1]
    for _ in range(12):
        greedy = [*greedy, int(gpt(torch.tensor([greedy]))[0, -1].argmax())]
    texts = [(i, n) for i in ids for n in (1, len(i) - 1)] + [(greedy, 5), (ids[0], len(ids[0]))]
    for micro_batch in (1, 3, 100):
        found = harness_model.score(gpt, texts, micro_batch, compute)
        assert found[-2][1]
        assert found[-1] == (0.0, True)  # nothing is asked for
        for text, (log_likelihood, is_greedy) in zip(texts[:-1], found, strict=False):
            expected = direct(gpt, *text)
            assert log_likelihood == pytest.approx(expected[0], rel=1e-10)
            assert is_greedy == expected[1]


def request(kind, *arguments):
    from lm_eval.api.instance import Instance

    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


def test_log_likelihoods_of_continuations_are_the_models(harness_model):
    model = harness_model()
    pairs = [("def self", " return"), ("", "the"), ("a ", "b"), ("日本", "🙂")]  # a's space goes to what follows
    found = model.loglikelihood([request("loglikelihood", *pair) for pair in pairs])
    for (context, continuation), (log_likelihood, is_greedy) in zip(pairs, found, strict=True):
        before = model._tokenizer.encode(context.rstrip(" ")) or [model._tokenizer.eot_id]
        ids = [*before, *model._tokenizer.encode((context + continuation)[len(context.rstrip(" ")) :])]
        assert (log_likelihood, is_greedy) == pytest.approx(direct(model.gpt, ids, len(before)), rel=1e-10)


def test_rolling_log_likelihoods_carry_the_state_through_a_text_of_any_length(harness_model):
    model = harness_model()
    found = model.loglikelihood_rolling([request("loglikelihood_rolling", text) for text in [*TEXTS, ""]])
    expected = [direct(model.gpt, [model._tokenizer.eot_id, *model._tokenizer.encode(text)], 1)[0] for text in TEXTS]
    assert found == pytest.approx([*expected, 0.0], rel=1e-10)


def test_a_conversation_is_that_of_training(harness_model):
    from inference.harness_model import HarnessModel

    plain = harness_model()
    tokenizer = ChatTokenizer(plain._tokenizer)
    model = HarnessModel(plain.gpt, tokenizer, None, 2, plain.compute)
    talk = [("system", "be <|end|>"), ("user", "<|user|>é"), ("assistant", " a\n"), ("user", "")]
    messages = [{"role": role, "content": text} for role, text in talk]
    asked = [tokenizer.eot_id, *tokenizer.encode_chat(talk, answer=True)]
    assert model.tok_encode(model.apply_chat_template(messages)) == asked
    begun = [tokenizer.eot_id, *tokenizer.encode_chat(talk[:3])][:-1]
    assert model.tok_encode(model.apply_chat_template(messages[:3], add_generation_prompt=False)) == begun


def greedy_text(model, prompt, n):
    ids = model._tokenizer.encode(prompt) or [model._tokenizer.eot_id]
    new = []
    for _ in range(n):
        new.append(int(model.gpt(torch.tensor([ids + new]))[0, -1, : model._tokenizer.n_vocab].argmax()))
        if new[-1] == model._tokenizer.eot_id:
            new.pop()
            break
    return model._tokenizer.decode_bytes(new).decode(errors="replace")


def test_continuations_are_greedy_and_end_before_their_stop_strings(harness_model):
    model = harness_model(micro_batch=2)
    prompts = ["def self", "", "the the the", "日本"]
    settings = {"until": ["\x00\x00"], "max_gen_toks": 9, "do_sample": False}
    found = model.generate_until([request("generate_until", prompt, settings) for prompt in prompts])
    expected = [greedy_text(model, prompt, 9) for prompt in prompts]
    assert found == expected
    text = expected[0]
    stop = text[4:6]
    stopped = settings | {"until": [stop]}
    (found,) = model.generate_until([request("generate_until", prompts[0], stopped)])
    assert found == text[: text.index(stop)]


@pytest.fixture
def tasks(tmp_path):
    """A folder with task files of all kinds on local data."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    lines = [
        {"question": "def", "choices": [" self", " 🙂🙂", " of"], "answer": 0},
        {"question": "return the", "choices": [" return", "x", " é"], "answer": 2},
    ]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    kinds = {
        "multiple_choice": {"doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}", "metrics": ["acc"]},
        "loglikelihood_rolling": {"doc_to_target": "{{question}}{{choices[0]}}", "metrics": ["bits_per_byte"]},
        "generate_until": {"doc_to_target": "{{choices[0]}}", "metrics": ["exact_match"]},
    }
    files = {"data_files": {"test": str(folder / "data.jsonl")}, "cache_dir": str(tmp_path / "cache")}
    for kind, task in kinds.items():
        common = {
            "task": f"local_{kind}",
            "dataset_path": "json",
            "dataset_kwargs": files,
            "test_split": "test",
            "output_type": kind,
            "doc_to_text": "" if kind == "loglikelihood_rolling" else "{{question}}",
            "metric_list": [{"metric": metric} for metric in task.pop("metrics")],
        }
        if kind == "generate_until":
            common["generation_kwargs"] = {"until": ["\n"], "max_gen_toks": 5}
        (folder / f"{kind}.yaml").write_text(json.dumps(common | task))  # JSON is YAML
    return folder


@pytest.fixture
def own_tasks_alone(monkeypatch):
    """Leaves out the harness's thousands of tasks, which take seconds to find."""
    library = pytest.importorskip("lm_eval.tasks", reason="the optional lm-evaluation-harness is not installed")
    alone = functools.partial(library.TaskManager, include_defaults=False)
    monkeypatch.setattr(library, "TaskManager", alone)


@pytest.mark.usefixtures("own_tasks_alone")
@pytest.mark.slow
def test_the_command_runs_tasks_of_every_kind(command, trained, tasks):
    run_dir = trained({})
    gpt, tokenizer = load_model(run_dir)
    names = "local_multiple_choice,local_loglikelihood_rolling, local_generate_*"
    arguments = [f"checkpoint={run_dir}", f"include_path={tasks}", "runtime.device=cpu", "runtime.dtype=float64"]
    done = command("scripts/lm_eval", f"tasks={names}", *arguments)
    assert done.status == 0, done.err
    found = json.loads((run_dir / "lm_eval.json").read_text())
    lines = [json.loads(line) for line in (tasks / "data.jsonl").read_text().splitlines()]

    def likelihood(before, after):
        ids = tokenizer.encode(before)
        return direct(gpt, [*ids, *tokenizer.encode(after)], len(ids))[0]

    right = [
        max(line["choices"], key=functools.partial(likelihood, line["question"])) == line["choices"][line["answer"]]
        for line in lines
    ]
    results = found["results"]
    assert results["local_multiple_choice"]["acc,none"] == sum(right) / 2
    texts = [(line["question"] + line["choices"][0]) for line in lines]
    nats = sum(direct(gpt, [tokenizer.eot_id, *tokenizer.encode(text)], 1)[0] for text in texts)
    bits = -nats / torch.tensor(2.0).double().log().item() / sum(len(text.encode()) for text in texts)
    assert results["local_loglikelihood_rolling"]["bits_per_byte,none"] == pytest.approx(bits, rel=1e-9)
    assert "exact_match,none" in results["local_generate_until"]
    assert found["step"] == 2
    (kept,) = (run_dir / "evals").glob("step-00000002,lm_eval,*tasks=*.json")
    assert json.loads(kept.read_text()) == found
    assert ",runtime.dtype=float64" in kept.name
    assert f"written to {run_dir / 'lm_eval.json'}" in done.out
    table = [line.split() for line in done.out.splitlines()]
    assert ["task", "filter", "metric", "shots", "examples", "value", "standard", "error"] in table
    accuracy, error = [f"{results['local_multiple_choice'][f'acc{kind},none']:.4f}" for kind in ("", "_stderr")]
    assert ["local_multiple_choice", "none", "acc", "0", "2", accuracy, error] in table
