"""scripts/bench_train.py runs, and compares models with the control, and with nanoGPT if its folder is given."""

import json

import pytest
import torch

from tools.bench import train

SMALL = ["model.n_layer=1", "model.n_embd=32", "model.n_head=2", "model.head_dim=16", "model.n_vocab=65"]
NANOGPT = """
from dataclasses import dataclass
import torch

@dataclass
class GPTConfig:
    block_size: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int
    bias: bool

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


@pytest.mark.slow
def test_measures_models_beside_the_control_and_nanogpt(run_process, nanogpt, tmp_path):
    options = ["models=heinsen_125m", "rounds=1", "steps=1", "seq_len=32", f"set={','.join(SMALL)}"]
    (done,) = run_process(["scripts/bench_train.py", *options, f"nanogpt={nanogpt}", f"out={tmp_path}"])
    assert done.status == 0, done.err
    control, model, other = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert (control["model"], model["model"], other["model"]) == ("gpt2_124m", "heinsen_125m", "nanoGPT")
    for key in ("tokens_per_second", "peak_gigabytes"):
        assert model[f"x_{key}"] == model[key] / control[key] > 0
    assert model["x_nanogpt"] == model["tokens_per_second"] / other["tokens_per_second"] > 0
    assert "heinsen_125m" in done.out


def test_nanogpt_has_the_controls_sizes_and_tokens(nanogpt, restored_torch, monkeypatch):
    built = {}
    monkeypatch.setattr(train, "timed", lambda step: built.setdefault(step.__self__, step) and (lambda: 0.0))
    overrides = [*SMALL, "runtime.device=cpu", "runtime.dtype=float32"]
    train.measure(train.NANOGPT, overrides, seq_len=8, batch=2, steps=1, nanogpt=nanogpt)
    train.measure("heinsen_125m", overrides, seq_len=8, batch=2, steps=1)
    theirs, ours = built
    gpt = theirs.summed_loss.gpt
    assert vars(gpt.config) == {
        "block_size": 8, "vocab_size": 128, "n_layer": 1, "n_head": 2, "n_embd": 32, "bias": False
    }  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(theirs.batch[0], ours.batch[0], strict=True))
    before = gpt.table.weight.detach().clone()
    theirs.step()
    assert not torch.equal(gpt.table.weight, before)


def test_a_folder_without_nanogpt_is_refused_in_one_line(command, tmp_path):
    result = command("scripts/bench_train", f"nanogpt={tmp_path}", f"out={tmp_path}")
    refusal = f"error: nanogpt={tmp_path} has no model.py: name the folder of a clone of nanoGPT\n"
    assert (result.status, result.err) == (1, refusal)
