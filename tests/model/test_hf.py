"""Exported folders give our logits in transformers, without us; and GPT-2's weights give transformers' logits here."""

import ast
import fcntl
import itertools
import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_attention_contract import OWN

from common.settings import decode, variant_names
from data.tokenizers.build import BytesConfig, build_tokenizer
from data.tokenizers.chat import ChatTokenizer
from model.attention import ATTENTION
from model.attention.log_space import LogSpaceConfig
from model.attention.softmax import SoftmaxConfig
from model.config import GPTConfig
from model.gpt import GPT
from tools.convert.export_hf import export_checkpoint
from tools.convert.hf_tokenizer import tokenizer_files
from tools.convert.hugging_face.exported_code import collect_sources
from tools.convert.hugging_face.gpt2 import is_gpt2
from tools.convert.import_gpt2 import read_gpt2
from tools.convert.new_run import begin_run

needs_transformers = pytest.mark.skipif(
    find_spec("transformers") is None, reason="transformers is not installed: pip install -e '.[hf]'"
)
BYTES = build_tokenizer(BytesConfig(name="bytes"))
CHAT = ChatTokenizer(BYTES)
# Sums of some hundred products of numbers of order 1, in an order that the kernels choose, in float64.
CLOSE = {"rtol": 0, "atol": 1e-11}
LENGTHS = (11, 20, 17)
SIDES = {"left": 1.0, "right": 0.0, "both": 0.5}  # the share of a row's padding that stands before its text


def config_of(**changes):
    raw = {
        "n_vocab": 257,
        "n_layer": 2,
        "n_head": 4,
        "n_embd": 24,
        "attention": {"name": "softmax"},
        "block": {"name": "mlp"},
        "position": {"name": "learned", "max_len": 64},
    }
    return decode(GPTConfig, raw | changes)


def configs():
    """Each mechanism, each block, each position; GPT-2s; and a pattern of layers with a padded embedding."""
    for i, cls in enumerate(ATTENTION):
        name = variant_names(cls)[0]
        heads = {"n_kv_head": 2} if "n_kv_head" in cls.model_fields else {}
        rotary = {"name": "rotary" if cls.traits.rotary else "none"}
        position = [{"name": "log_recurrence"}, {"name": "learned", "max_len": 64}, rotary][i % 3]
        attention = {"name": name, **OWN.get(name, [{}])[0], **heads}
        yield name, config_of(attention=attention, block={"name": ["glu", "mlp"][i % 2]}, position=position)
    yield "gpt2", config_of()
    yield "gpt2_documents", config_of()
    yield "gpt2_wide", config_of(pad_vocab=64, block={"name": "mlp", "expansion": 3}, n_head=3)
    flagship = {"name": "log_space", "decay": "head", "product": True, "gate": "silu"}
    parts = {"attention": flagship, "block": {"name": "mlp", "conv": 4}, "position": {"name": "none"}}
    yield "flagship", config_of(**parts, ngrams=[1, 3])
    attention = {"name": "log_space", "decay": "head", "gate": "sigmoid"}
    block = {"name": "mlp", "conv": 4, "activation": "swiglu"}
    rest = {"ngrams": [1, 2], "tied": False, "position": {"name": "none"}}
    yield "all_parts", config_of(attention=attention, block=block, **rest)
    forgets = {"name": "softmax", "decay": "head"}
    yield "forgets", config_of(attention=forgets, block={"name": "mlp"}, position={"name": "rotary"})
    pattern = ["log_space", {"name": "sliding_window", "window": 5}]
    changes = {"attention": {"name": "log_space"}, "attention_pattern": pattern, "position": {"name": "none"}}
    attention = {"name": "softmax", "qk_norm": True}
    block = {"name": "mlp", "activation": "relu2"}
    rest = {"norm": "rms", "bias": False, "tied": False, "logit_cap": 5.0, "position": {"name": "rotary"}}
    yield "modern", config_of(attention=attention, block=block, **rest)
    yield "pattern", config_of(n_layer=3, pad_vocab=64, **changes)


CONFIGS = dict(configs())
PLAIN = {"gpt2", "gpt2_wide"}  # transformers has these models
DOCUMENTS = ("flagship", "softmax", "gpt2_documents")  # models whose documents don't see each other


def gpt_of(name):
    torch.manual_seed(1)
    gpt = GPT(CONFIGS[name], BYTES.eot_id if name in DOCUMENTS else None).double()
    for parameter in gpt.parameters():  # biases and norms too are what no program would begin with
        torch.nn.init.normal_(parameter, std=0.3)
    return gpt


def run_of(gpt, run_dir):
    begin_run(gpt, BYTES, run_dir, seq_len=16, batch_tokens=64)
    return run_dir


def padded(token_ids, share):
    """The first LENGTHS tokens of the rows as a tokenizer would pad them, and their mask."""
    ids = torch.full((len(LENGTHS), max(LENGTHS)), BYTES.eot_id)
    mask = torch.zeros_like(ids)
    for b, n in enumerate(LENGTHS):
        first = int(share * (max(LENGTHS) - n))
        ids[b, first : first + n], mask[b, first : first + n] = token_ids[b, :n], 1
    return {"input_ids": ids, "attention_mask": mask}


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """The results of transformers for the exports of all CONFIGS: made once for all workers of pytest."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    with (shared / "hf.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (shared / "hf" / "said.json").exists():
            make_results(shared / "hf")
    return shared / "hf"


def make_results(work):
    """Export all CONFIGS into a folder, and let transformers read them in a process of its own."""
    (work / "results").mkdir(parents=True)
    token_ids = torch.randint(256, (3, 40), generator=torch.Generator().manual_seed(2))
    token_ids[0, 9] = BYTES.eot_id
    save_file({"token_ids": token_ids}, work / "input.safetensors")
    (work / "prompts").mkdir()
    for side, share in SIDES.items():
        save_file(padded(token_ids, share), work / "prompts" / f"{side}.safetensors")
    for name in CONFIGS:
        export_checkpoint(run_of(gpt_of(name), work / "runs" / name), work / "exports" / name / "model")
    env = os.environ | {"HF_HOME": str(work / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    env.pop("PYTHONPATH", None)
    script = Path(__file__).with_name("hf_process.py")
    line = [sys.executable, "-P", str(script), str(work)]
    result = subprocess.run(line, cwd=work, env=env, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr[-3000:]


def greedy(gpt, token_ids, n):
    """The text and its n most likely tokens, by the definition: all of it is read for each."""
    for _ in range(n):
        logits = gpt(token_ids.unsqueeze(0))[0, -1, :257]
        token_ids = torch.cat([token_ids, logits.argmax(-1, keepdim=True)])
    return token_ids[-n:]


@needs_transformers
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.slow
def test_logits_and_generated_texts_are_ours(work, name):
    gpt, ids = gpt_of(name), load_file(work / "input.safetensors")["token_ids"]
    got = load_file(work / "results" / f"{name}.safetensors")
    with torch.no_grad():
        wanted = gpt(ids)[..., :257]
        after_padding = gpt(ids[1:2, 3:])[..., :257]
        texts = [greedy(gpt, ids[b, 3 if b == 1 else 0 : 20], 16) for b in range(3)]
    assert got["logits"].dtype == torch.float64
    torch.testing.assert_close(got["logits"], wanted, **CLOSE)
    torch.testing.assert_close(got["of_base_model"], wanted, **CLOSE)
    torch.testing.assert_close(got["in_pieces"], wanted, **CLOSE)
    torch.testing.assert_close(got["last"], wanted[:, -2:], **CLOSE)
    torch.testing.assert_close(got["padded"][0], wanted[0], **CLOSE)
    if not is_gpt2(gpt.config):  # transformers' own counts positions from the padding on, but for `generate`
        torch.testing.assert_close(got["padded"][1, 3:], after_padding[0], **CLOSE)
    torch.testing.assert_close(got["padded"][2, :-9], wanted[2, :-9], **CLOSE)
    torch.testing.assert_close(got["padded_behind"][:, :-9], wanted[:, :-9], **CLOSE)
    loss = torch.nn.functional.cross_entropy(wanted[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(got["loss"].double(), loss, rtol=1e-6, atol=0)  # transformers' is in float32
    for b, text in enumerate(texts):
        assert got["generated"][b, 20:].tolist() == text[:8].tolist()
        assert got["continued"][b, 20:].tolist() == text.tolist()
    assert torch.equal(got["generated_without_cache"], got["generated"])
    assert torch.equal(got["beams_without_cache"], got["beams"])


@needs_transformers
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.slow
def test_texts_of_a_batch_are_continued_as_each_alone_wherever_they_are_padded(work, name):
    gpt, ids = gpt_of(name), load_file(work / "input.safetensors")["token_ids"]
    got = load_file(work / "results" / f"{name}.safetensors")
    with torch.no_grad():
        alone = [greedy(gpt, ids[b, :n], 8).tolist() for b, n in enumerate(LENGTHS)]
    # GPT2LMHeadModel is transformers' own code, which continues texts with padding in front alone.
    for side, use_cache in itertools.product(["left"] if is_gpt2(gpt.config) else SIDES, [True, False]):
        assert got[f"{side}, {use_cache=}"][:, max(LENGTHS) :].tolist() == alone, (side, use_cache)


@needs_transformers
@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in PLAIN])
@pytest.mark.slow
def test_an_export_is_finetuned_as_any_model_of_transformers(work, name):
    """An adapter that the model passes by shows only once it is merged, and has no gradient."""
    got = load_file(work / "results" / f"{name}.safetensors")
    torch.testing.assert_close(got["adapted"], got["merged"], **CLOSE)
    assert (got["adapted"] - got["logits"]).abs().max() > 0.01
    once, twice = "checkpointing=False, ", "checkpointing=True, "
    for key in (key for key in got if key.startswith(once)):
        assert got[key].any()
        torch.testing.assert_close(got[key.replace(once, twice)], got[key], **CLOSE)


@needs_transformers
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"output_hidden_states": True}, "output_hidden_states=True: this model returns logits"),
        ({"input_ids": None, "inputs_embeds": torch.zeros(1, 2, 8)}, "tune it by LoRA, not by prompts"),
    ],
)
@pytest.mark.slow
def test_what_an_export_does_not_read_or_return_is_refused(given, message):
    from tools.convert.hugging_face.configuration_log_gpt import LogGPTConfig
    from tools.convert.hugging_face.modeling_log_gpt import LogGPTForCausalLM

    model = LogGPTForCausalLM(LogGPTConfig(config_of().model_dump(mode="json")))
    with pytest.raises(ValueError, match=message):
        model(**{"input_ids": torch.zeros(1, 2, dtype=torch.int64), **given})


def test_an_export_of_a_chat_model_says_how_it_talks(tmp_path):
    begin_run(GPT(config_of(n_vocab=262)), CHAT, tmp_path / "run", seq_len=16, batch_tokens=64)
    export_checkpoint(tmp_path / "run", tmp_path / "out")
    ends = json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"]
    assert ends == [CHAT.eot_id, *range(CHAT.n_vocab - 5, CHAT.n_vocab)]
    assert "<|assistant|>" in json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())["chat_template"]
    assert "tokenizer.apply_chat_template(messages," in (tmp_path / "out" / "README.md").read_text()


@needs_transformers
@pytest.mark.slow
def test_gpt2s_are_plain_and_all_others_bring_their_code(work):
    classes = json.loads((work / "said.json").read_text())["classes"]
    plain = {name for name, class_ in classes.items() if class_ == "GPT2LMHeadModel"}
    assert plain == PLAIN
    assert set(classes.values()) == {"GPT2LMHeadModel", "LogGPTForCausalLM"}
    for name in classes:
        code = {path.suffix for path in (work / "exports" / name / "model").iterdir()} & {".py"}
        assert bool(code) == (name not in plain)
        card = (work / "exports" / name / "model" / "README.md").read_text()
        assert ("trust_remote_code" in card) == (name not in plain)
        weights = load_file(work / "exports" / name / "model" / "model.safetensors").values()
        assert f"{sum(map(torch.Tensor.numel, weights)):,} " in card.splitlines()[7]
        assert gpt_of(name).size(257) in card


@needs_transformers
@pytest.mark.slow
def test_the_tokenizer_of_an_export_gives_our_ids(work):
    said = json.loads((work / "said.json").read_text())
    text = said["text"].removesuffix("<|endoftext|>")
    ids = [*BYTES.encode(text), BYTES.eot_id]
    assert said["ids"] == [[BYTES.eot_id] * (len(ids) - 1) + BYTES.encode("a"), ids]
    assert said["mask"][0] == [0] * (len(ids) - 1) + [1]
    assert said["decoded"] == said["text"]


@pytest.fixture
def gpt2(work, tmp_path):
    """A folder that transformers wrote, with a tokenizer."""
    folder = tmp_path / "gpt2"
    shutil.copytree(work / "gpt2", folder)
    for name, content in tokenizer_files(BYTES, 64).items():
        (folder / name).write_text(json.dumps(content))
    return folder


@needs_transformers
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.slow
def test_transformers_weights_give_transformers_logits_here(work, gpt2, dtype):
    token_ids = load_file(work / "input.safetensors")["token_ids"]
    wanted = load_file(gpt2 / "logits.safetensors")["logits"]
    weights = load_file(gpt2 / "model.safetensors")
    save_file({name: value.to(dtype) for name, value in weights.items()}, gpt2 / "model.safetensors", {"format": "pt"})
    try:
        gpt, tokenizer = read_gpt2(gpt2)
    finally:
        save_file(weights, gpt2 / "model.safetensors", {"format": "pt"})
    assert tokenizer.sha256 == BYTES.sha256
    assert {p.dtype for p in gpt.parameters()} == {torch.promote_types(dtype, torch.float32)}
    # 32 roundings of logits of some 10, or weights of 8 bits
    tolerance = {torch.float64: 1e-12, torch.bfloat16: 1.0}[dtype]
    torch.testing.assert_close(gpt(token_ids).double(), wanted, rtol=0, atol=tolerance)


@needs_transformers
@pytest.mark.slow
def test_files_of_old_versions_give_the_same_weights(gpt2, tmp_path):
    """Names without their prefix, causal masks among the weights, and a separate output layer."""
    weights = {key.removeprefix("transformer."): value for key, value in load_file(gpt2 / "model.safetensors").items()}
    for layer in range(2):
        weights[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 64, 64).tril()
        weights[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    weights["lm_head.weight"] = weights["wte.weight"].clone()
    save_file(weights, tmp_path / "model.safetensors")
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).symlink_to(gpt2 / name)  # as in the folders of huggingface_hub's cache
    before, after = read_gpt2(gpt2)[0].state_dict(), read_gpt2(tmp_path)[0].state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


@pytest.mark.parametrize(
    ("changes", "is_one"),
    [
        ({}, True),
        ({"attention": {"name": "softmax", "n_kv_head": 4}}, True),
        ({"attention": {"name": "softmax", "n_kv_head": 2}}, False),
        ({"attention_pattern": ["softmax", "log_space"]}, False),
        ({"head_dim": 5}, False),
        ({"head_dim": 6, "n_head": 5}, False),
        ({"head_dim": 6}, True),
        ({"block": {"name": "mlp", "conv": 4}}, False),
        ({"position": {"name": "rotary"}}, False),
        ({"block": {"name": "mlp", "activation": "swiglu"}}, False),
        ({"attention": {"name": "softmax", "decay": "head"}}, False),
        ({"attention": {"name": "softmax", "gate": "silu"}}, False),
        ({"attention": {"name": "softmax", "qk_norm": True}}, False),
        ({"norm": "rms"}, False),
        ({"bias": False}, False),
        ({"tied": False}, False),
        ({"logit_cap": 30.0}, False),
        ({"ngrams": [1]}, False),
    ],
)
def test_a_gpt2_is_known_by_its_settings(changes, is_one):
    assert is_gpt2(config_of(**changes)) == is_one


def test_an_exports_code_imports_nothing_that_is_missing_beside_transformers():
    """Files import each other, or packages that come with transformers; triton only if it is installed."""
    files = collect_sources(ATTENTION)
    needed = {"torch", "transformers", "pydantic", "pydantic_core", "yaml"}  # transformers needs yaml, too
    for name, text in files.items():
        for node in ast.walk(ast.parse(text, name)):
            if isinstance(node, ast.ImportFrom) and node.level:
                names = [node.module] if node.module else [alias.name for alias in node.names]
                assert all(f"{module}.py" in files for module in names), f"{name}: {names}"
            elif isinstance(node, ast.Import | ast.ImportFrom):
                module = node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
                top = module.split(".")[0]
                assert top in needed or top in sys.stdlib_module_names or top == "triton", f"{name} imports {top}"
        outside = [node for node in ast.parse(text).body if isinstance(node, ast.Import | ast.ImportFrom)]
        assert not any(ast.unparse(node).split()[1].startswith("triton") for node in outside), name
    triton = "log_attention_triton_attention", "log_recurrence_triton_recurrence"
    for module in (*triton, "linear_cross_entropy_triton_cross_entropy"):
        assert f"model_ops_{module}.py" in files, "only GPUs import it"


def test_an_export_holds_only_its_own_mechanisms():
    files = collect_sources([LogSpaceConfig, SoftmaxConfig, SoftmaxConfig])
    assert {name for name in files if name.startswith("model_attention_")} == {
        f"model_attention_{name}.py" for name in ("base", "cache", "log_space", "softmax")
    }
    assert "model_ops_log_attention.py" in files
