"""scripts/bench_decode.py runs, sees which states are constant and which grow, and stretches them as texts would."""

import json
import sys

import pytest
import torch

from common.settings import decode
from model.gpt import GPT, GPTConfig
from tools.bench.decode import Ours, state_bytes, stretched

SMALL = ["n_layer=1", "n_embd=32", "n_head=2", "head_dim=16", "n_vocab=64"]
OPTIONS = (f"set=runtime.device=cpu,{','.join(f'model.{option}' for option in SMALL)}", "steps=3")
KEYS_AND_VALUES = 4 * 2 * 2 * 16  # bytes of a token's
ATTENTION = [
    {"name": "fixed", "size": 4, "width": 2},
    {"name": "linear"},
    {"name": "log_space"},
    {"name": "log_space_signed"},
    {"name": "longformer", "window": 4, "n_global": 3},
    {"name": "projection"},
    {"name": "projection", "values": "keys"},
    {"name": "sliding_window", "window": 4, "dilation": 1},
    {"name": "softmax"},
    {"name": "softmax", "n_kv_head": 1},
    {"name": "strided", "stride": 4},
]


def bench(command, folder, *arguments):
    result = command("scripts/bench_decode", *arguments, *OPTIONS, f"out={folder}")
    assert result.status == 0, result.err
    rows = json.loads((folder / "bench.json").read_text())["rows"]
    return {row["model"]: [one for one in rows if one["model"] == row["model"]] for row in rows}, result.out


def test_state_is_constant_in_log_space_and_grows_with_softmax(command, restored_torch, tmp_path):
    models, shown = bench(command, tmp_path, "models=heinsen_1m,gpt2_124m", "positions=1100,40")
    assert list(models) == ["heinsen_1m", "gpt2_124m"]
    for found in models.values():
        assert [row["position"] for row in found] == [40, 1000, 1100, 32_000, 1_000_000]
        speeds = {row["position"]: row["tokens_per_second"] for row in found}
        assert min(speeds[40], speeds[1100]) > 0  # more than the 1,024 positions of gpt2_124m
        assert speeds[1000] is speeds[32_000] is None
    log_space = 4 * (2 * (16 * 16 + 16) + 32)  # a head's two sums, and the recurrence's
    assert {row["bytes_of_state"] for row in models["heinsen_1m"]} == {log_space}
    assert all(row["bytes_of_state"] == row["position"] * KEYS_AND_VALUES for row in models["gpt2_124m"])
    assert "heinsen_1m" in shown
    assert "1,100" in shown
    assert f"{1_000_000 * KEYS_AND_VALUES:,}" in shown


def test_every_mechanism_in_one_shape(command, restored_torch, tmp_path):
    models, _ = bench(command, tmp_path, "models=gpt2_124m", "attention=all", "positions=40")
    assert {f"gpt2_124m, {given['name']}" for given in ATTENTION} < set(models)
    sizes = {
        name.partition(", ")[2]: {row["position"]: row["bytes_of_state"] for row in rows}
        for name, rows in models.items()
    }
    constant = {name for name, size in sizes.items() if size[1000] == size[32_000]}
    log_space = {"log_space", "log_space_forgets", "log_space_signed"}
    assert constant == log_space | {"linear", "longformer", "sliding_window"}


@pytest.mark.slow
def test_beside_hugging_face(command, restored_torch, tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed")
    models, shown = bench(command, tmp_path, "models=gpt2_124m", "hf=gpt2_124m", "positions=40,1100")
    assert all(row["x_hugging_face"] > 0 for row in models["gpt2_124m"] if row["position"] in (40, 1100))
    assert "Hugging Face" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hf=gpt2_124m"], "transformers is not installed: pip install -e '.[hf]'"),
        (["hf=gpt9"], "model=gpt9 does not exist: "),
        (["models=gpt2_123m"], "model=gpt2_123m does not exist: did you mean 'gpt2_124m'?"),
        (["attention=sliding"], "model/attention=sliding does not exist: did you mean 'sliding_window'?"),
    ],
    ids=["transformers", "hf", "models", "attention"],
)
def test_mistakes_are_one_line(arguments, message, command, restored_torch, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)  # an import of it fails
    result = command("scripts/bench_decode", *arguments, *OPTIONS, "positions=40", f"out={tmp_path}")
    assert result.status == 1
    assert result.err.startswith(f"error: {message}")
    assert result.err.count("\n") == 1


def tiny(attention, position):
    raw = {"n_vocab": 16, "n_layer": 2, "n_head": 2, "n_embd": 16, "attention": attention, "block": {"name": "mlp"}}
    torch.manual_seed(0)
    return GPT(decode(GPTConfig, raw | {"position": {"name": position}}))


STRETCHED = [
    (attention, position)
    for attention in ATTENTION
    for position in ("learned", "rotary", "log_recurrence")
    if position != "rotary" or not attention["name"].startswith("log_space")
]


@torch.inference_mode()
@pytest.mark.parametrize(
    ("attention", "position"),
    STRETCHED,
    ids=["-".join([*map(str, attention.values()), position]) for attention, position in STRETCHED],
)
def test_a_stretched_state_has_the_shapes_of_a_real_one(attention, position):
    gpt = tiny(attention, position)
    token_ids = torch.randint(16, (1, 23))
    short, real = (gpt(token_ids[:, :n], return_state=True)[1] for n in (8, 23))
    made = stretched(gpt, short, 23)
    assert shapes(made) == shapes(real)
    assert state_bytes(made) == state_bytes(real)
    assert shapes(gpt(token_ids[:, :1], made, return_state=True)[1]) == shapes(
        gpt(token_ids[:, :1], real, return_state=True)[1]
    )


def shapes(state):
    """Shapes of its tensors and its counts of tokens, in a tree."""
    if isinstance(state, torch.Tensor):
        return tuple(state.shape)
    return [type(state), *map(shapes, state)] if isinstance(state, tuple) else state if isinstance(state, int) else None


@torch.inference_mode()
def test_decoding_copies_a_cache_once():
    gpt = tiny({"name": "softmax"}, "rotary")
    token_ids = torch.zeros(1, 8, dtype=torch.long)
    decoder = Ours(gpt, stretched(gpt, gpt(token_ids, return_state=True)[1], 100))
    memory = []
    for _ in range(5):
        decoder(token_ids[:, :1])
        memory.append(decoder.state.layers[0].k.data_ptr())
    assert decoder.state.position.tolist() == [105]
    assert len(set(memory)) == 1
