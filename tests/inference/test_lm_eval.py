"""lm-evaluation-harness on our models: tasks from local files, against the model's own forward pass in float64."""

import functools
import itertools
import json
import math

import pytest
import torch
from texts import BYTES, CHAT, drawn_without_engine, gpt_of

from inference.sampling import SamplingConfig
from runtime.checkpoint import load_model
from runtime.device import DeviceConfig, choose_compute

pytest.importorskip("lm_eval", reason="the optional lm-evaluation-harness is not installed")
import lm_eval.tasks
from lm_eval.api.instance import Instance

from inference import harness_model

pytestmark = pytest.mark.usefixtures("restored_torch")

EOT = BYTES.eot_id
TEXTS = ["def self return", "the (", "日本 🙂 é", "x" * 70, "a"]


@pytest.fixture
def compute():
    return choose_compute(DeviceConfig(device="cpu", dtype="float64"))


@pytest.fixture
def model(compute):
    """The adapter around a tiny model of bytes."""
    return harness_model.HarnessModel(gpt_of().double(), BYTES, None, 2, compute)


def direct(gpt, ids, n_before):
    """Log-likelihood of ids[n_before:] and whether all are greedy, from one call for one text."""
    with torch.no_grad():
        log_p = gpt(torch.tensor([ids[:-1]]))[0].log_softmax(-1)
    targets = torch.tensor(ids[n_before:])
    rows = log_p[n_before - 1 :]
    return rows[torch.arange(len(targets)), targets].sum().item(), bool((rows.argmax(-1) == targets).all())


@pytest.mark.parametrize("attention", ["log_space", "softmax", {"name": "sliding_window", "window": 8}], ids=str)
def test_scores_are_those_of_a_forward_pass(compute, monkeypatch, attention):
    monkeypatch.setattr(harness_model, "_TEXT_CHUNK", 7)  # texts go through the model in several chunks
    monkeypatch.setattr(harness_model, "_LOGITS", 1000)
    gpt = gpt_of(attention=attention).double()
    ids = [[EOT, *BYTES.encode(text)] for text in TEXTS]
    greedy = [EOT]
    for _ in range(12):
        greedy.append(int(gpt(torch.tensor([greedy]))[0, -1].argmax()))
    texts = [(i, n) for i in ids for n in (1, len(i) - 1)] + [(greedy, 5)]
    expected = [direct(gpt, *text) for text in texts]
    assert expected[-1][1]
    for micro_batch in (1, 3, 100):
        *found, nothing = harness_model.score_texts(gpt, [*texts, (ids[0], len(ids[0]))], micro_batch, compute)
        assert nothing == (0.0, True)
        for score, expected_score in zip(found, expected, strict=True):
            assert score == pytest.approx(expected_score, rel=1e-10)


def request(kind, *arguments):
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


def test_log_likelihoods_of_continuations_are_the_models(model):
    # A context's last space goes to what follows.
    wanted = [("def self", " return"), ("", "the"), ("a", " b"), ("日本", "🙂")]
    pairs = [("def self", " return"), ("", "the"), ("a ", "b"), ("日本", "🙂")]
    found = model.loglikelihood([request("loglikelihood", *pair) for pair in pairs])
    for (context, continuation), score in zip(wanted, found, strict=True):
        before = BYTES.encode(context) or [EOT]
        expected = direct(model.gpt, [*before, *BYTES.encode(continuation)], len(before))
        assert score == pytest.approx(expected, rel=1e-10)


def test_rolling_log_likelihoods_carry_the_state_through_a_text_of_any_length(model):
    found = model.loglikelihood_rolling([request("loglikelihood_rolling", text) for text in [*TEXTS, ""]])
    expected = [direct(model.gpt, [EOT, *BYTES.encode(text)], 1)[0] for text in TEXTS]
    assert found == pytest.approx([*expected, 0.0], rel=1e-10)


def test_a_conversation_is_that_of_training(compute):
    model = harness_model.HarnessModel(gpt_of(n_vocab=262), CHAT, None, 2, compute)
    talk = [("system", "be <|end|>"), ("user", "<|user|>é"), ("assistant", " a\n"), ("user", "")]
    messages = [{"role": role, "content": text} for role, text in talk]
    asked = [EOT, *CHAT.encode_chat(talk, answer=True)]
    assert model.tok_encode(model.apply_chat_template(messages)) == asked
    begun = [EOT, *CHAT.encode_chat(talk[:3])][:-1]
    assert model.tok_encode(model.apply_chat_template(messages[:3], add_generation_prompt=False)) == begun


def test_continuations_are_greedy_and_end_before_their_stop_strings(model):
    prompts = ["def self", "", "the the the", "日本"]
    settings = {"until": ["\x00\x00"], "max_gen_toks": 9, "do_sample": False}
    found = model.generate_until([request("generate_until", prompt, settings) for prompt in prompts])
    greedy = SamplingConfig(temperature=0)
    for prompt, text in zip(prompts, found, strict=True):
        ids = torch.tensor(BYTES.encode(prompt) or [EOT])
        (drawn,) = drawn_without_engine(model.gpt, [ids], 9, BYTES.n_vocab, greedy).tolist()
        new = [*itertools.takewhile(lambda token_id: token_id != EOT, drawn)]
        assert text == BYTES.decode_bytes(new).decode(errors="replace")
    stop = found[0][4:6]
    (stopped,) = model.generate_until([request("generate_until", prompts[0], settings | {"until": [stop]})])
    assert stopped == found[0][: found[0].index(stop)]


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
    choice = {"doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}"}
    rolling = {"doc_to_text": "", "doc_to_target": "{{question}}{{choices[0]}}"}
    continued = {"doc_to_text": "{{question}}", "doc_to_target": "{{choices[0]}}"}
    continued["generation_kwargs"] = {"until": ["\n"], "max_gen_toks": 5}
    for kind, metric, task in [
        ("multiple_choice", "acc", choice),
        ("loglikelihood_rolling", "bits_per_byte", rolling),
        ("generate_until", "exact_match", continued),
    ]:
        task |= {"task": f"local_{kind}", "output_type": kind, "metric_list": [{"metric": metric}]}
        files = {"data_files": {"test": str(folder / "data.jsonl")}, "cache_dir": str(tmp_path / "cache")}
        task |= {"dataset_path": "json", "dataset_kwargs": files, "test_split": "test"}
        (folder / f"{kind}.yaml").write_text(json.dumps(task))  # JSON is YAML
    return folder


@pytest.mark.slow
def test_the_command_runs_tasks_of_every_kind(command, run_of, tasks, monkeypatch):
    own_tasks_alone = functools.partial(lm_eval.tasks.TaskManager, include_defaults=False)  # of thousands
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", own_tasks_alone)
    run_dir = run_of({"runtime.dtype": "float64", "max_steps": 2, "eval.batches": 1})
    gpt, _ = load_model(run_dir)
    names = "local_multiple_choice,local_loglikelihood_rolling, local_generate_*"
    arguments = [f"checkpoint={run_dir}", f"include_path={tasks}", "runtime.device=cpu", "runtime.dtype=float64"]
    done = command("scripts/lm_eval", f"tasks={names}", *arguments)
    assert done.status == 0, done.err
    found = json.loads((run_dir / "lm_eval.json").read_text())
    results = found["results"]
    lines = [json.loads(line) for line in (tasks / "data.jsonl").read_text().splitlines()]
    texts = [BYTES.encode(line["question"] + line["choices"][0]) for line in lines]
    nats = sum(direct(gpt, [EOT, *ids], 1)[0] for ids in texts)
    bits = -nats / math.log(2) / sum(map(len, texts))
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
