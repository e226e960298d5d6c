"""scripts/bench.py: what it times, what it compares with, and what it refuses to time."""

import json
import os

import pytest
import torch
import zstandard
from printed import assert_one_line

from tools.bench import measuring, operators, training

TINY = ("lengths=64", "heads=2", "head_dim=8", "seconds=0", "rounds=1", "device=cpu")
SMALL = ["model.n_layer=1", "model.n_embd=32", "model.n_head=2", "model.head_dim=16", "model.n_vocab=64"]
MODELS = (f"set={','.join(SMALL)}", "rounds=1", "device=cpu", "steps=3")
KEYS_AND_VALUES = 4 * 2 * 2 * 16  # bytes of a token's


def figures(result, out):
    assert result.status == 0, result.err
    assert f"written to {out}" in result.out
    return json.loads(out.read_text())


# ----- operators


def test_operators_are_timed_beside_softmax(command, tmp_path):
    out = tmp_path / "new" / "bench.json"
    result = command("scripts/bench", *TINY, f"out={out}")
    found = figures(result, out)
    assert {"cpu", "threads", "torch", "git_commit", "load"} <= set(found["machine"])
    assert (found["options"]["heads"], found["options"]["what"]) == (2, ["operators"])
    rows = {row["operator"]: row for row in found["operators"]}
    assert {"SDPA", "published", "log attention", "linear attention", "window 256"} <= set(rows)
    for row in rows.values():
        for key in ("forward", "both"):
            assert row[f"{key}_x"] == rows["SDPA"][f"{key}_ms"] / row[f"{key}_ms"] > 0
    assert "longformer 256 + 16" in result.out


def test_what_would_not_fit_into_half_of_the_memory_is_skipped(command, tmp_path, monkeypatch):
    monkeypatch.setattr(operators, "free_memory", lambda: 1e6)
    result = command("scripts/bench", *TINY, "lengths=[128,512]", f"out={tmp_path / 'bench.json'}")
    assert "skipped at 512 tokens: published, it takes about 0.0031 GB\n" in result.out
    rows = [(row["operator"], row["T"]) for row in figures(result, tmp_path / "bench.json")["operators"]]
    assert ("window 256", 512) not in rows
    assert ("published", 512) not in rows
    assert ("log attention", 512) in rows
    assert operators.estimate_bytes("window 256", (1, 12, 16384, 64), "cpu") > 50e9


# ----- training


NANOGPT = """
import torch

class GPTConfig:
    def __init__(self, *, block_size, vocab_size, n_layer, n_head, n_embd, bias):
        vars(self).update(locals())
        del self.self

class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.table = torch.nn.Embedding(config.vocab_size, config.vocab_size)

    def forward(self, idx, targets):
        logits = self.table(idx)
        return logits, torch.nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        assert device_type == "cpu"
        return torch.optim.AdamW(self.parameters(), learning_rate, betas, weight_decay=weight_decay)
"""


@pytest.fixture
def nanogpt(tmp_path):
    """A folder with nanoGPT's interface."""
    (tmp_path / "model.py").write_text(NANOGPT)
    return tmp_path


@pytest.mark.parametrize(
    ("call", "why"), [([os.abort], "terminated abruptly"), ([int, "x"], "ValueError: invalid literal")]
)
@pytest.mark.slow
def test_a_process_that_crashes_is_an_error_like_others(call, why):
    with pytest.raises(RuntimeError, match=why):
        measuring.call_in_process(*call)


@pytest.mark.slow
def test_training_steps_are_timed_beside_nanogpt(command, restored_torch, nanogpt, tmp_path):
    options = ["what=train", "models=gpt2_124m", "seq_len=32", f"nanogpt={nanogpt}"]
    out = tmp_path / "bench.json"
    found = figures(command("scripts/bench", *options, *MODELS, f"out={out}"), out)
    reference, ours = found["train"]
    assert (reference["model"], ours["model"]) == ("nanoGPT", "gpt2_124m")
    assert ours["x"] == ours["tokens_per_second"] / reference["tokens_per_second"] > 0
    assert ours["peak_gigabytes"] > 0.1
    assert ours["ms_a_step"] > 0


def test_nanogpt_has_the_sizes_and_tokens_of_the_first_model(nanogpt, restored_torch):
    config = training.compose_steps(["model=gpt2_124m", *SMALL, "runtime.device=cpu", "runtime.dtype=float32"], 8, 2)
    theirs = training.Training(config, 2, nanogpt)
    ours = training.Training(config, 2)
    gpt = theirs.summed_loss.gpt
    sizes = {"block_size": 8, "vocab_size": 64, "n_layer": 1, "n_head": 2, "n_embd": 32}
    assert vars(gpt.config) == sizes | {"bias": False}
    assert all(map(torch.equal, theirs.batch[0], ours.batch[0]))
    before = gpt.table.weight.detach().clone()
    theirs.step()
    assert not torch.equal(gpt.table.weight, before)


# ----- decoding


def test_a_state_is_constant_in_log_space_and_grows_with_softmax(command, restored_torch, tmp_path):
    out = tmp_path / "bench.json"
    models = ["models=gpt2_124m,heinsen_1m", "positions=1100,40"]
    result = command("scripts/bench", "what=decode", *models, *MODELS, f"out={out}")
    found = figures(result, out)
    log_space = 4 * (2 * (16 * 16 + 16) + 32)  # a head's two sums, and the recurrence's
    assert [(row["model"], row["position"], row["bytes_of_state"]) for row in found["decode"]] == [
        ("gpt2_124m", 40, 40 * KEYS_AND_VALUES),
        ("gpt2_124m", 1100, 1100 * KEYS_AND_VALUES),  # more than its 1,024 positions
        ("heinsen_1m", 40, log_space),
        ("heinsen_1m", 1100, log_space),
    ]
    softmax, _, other, _ = found["decode"]
    assert other["x"] == pytest.approx(other["tokens_per_second"] / softmax["tokens_per_second"])
    assert f"{1100 * KEYS_AND_VALUES:,}" in result.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("what=train nanogpt=configs", "nanogpt=configs has no model.py: name the folder of a clone of nanoGPT"),
        ("what=decode models=gpt2_123m", "did you mean 'model=gpt2_124m'?"),
    ],
)
def test_mistakes_are_one_line(arguments, message, command, restored_torch):
    assert_one_line(command("scripts/bench", *arguments.split(), *MODELS, "positions=40"), message)


# ----- data


@pytest.mark.slow
def test_preparing_is_timed_beside_the_tokenizer(command, tmp_path, monkeypatch, rank_file):
    monkeypatch.chdir(tmp_path)
    lines = "".join(json.dumps({"text": f"these are the words of {i}, " * 20}) + "\n" for i in range(3000))
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(lines.encode()))
    out = tmp_path / "bench.json"
    source = f"set=[data=jsonl,data.path=a.jsonl.zst,tokenizer=gpt2,tokenizer.path={rank_file},workers=2]"
    rows = figures(command("scripts/bench", "what=data", source, "rounds=1", f"out={out}"), out)
    alone, prepared = rows["data"]
    assert (alone["what"], prepared["what"]) == ("the tokenizer, one thread", "prepared")
    assert alone["x"] == 1 / 2  # of two workers
    assert prepared["x"] == prepared["MB_per_second"] / (2 * alone["MB_per_second"]) > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl.zst", "bench.json"]
