"""A step of training, against its definition."""

import json
import shutil

import numpy as np
import pytest
import torch
from alone import open_run
from forged import edit

from common.settings import UserError
from model.gpt import GPT
from runtime.checkpoint import find_newest
from trainer.loop import fit
from trainer.records.run_dir import check_folder

pytestmark = pytest.mark.usefixtures("restored_torch")


class UnevenBatches:
    """8 sequences whose targets are partly -1: one not at all, one wholly."""

    batch_size = 8

    def __init__(self):
        rng = np.random.default_rng(0)
        self.ids, self.targets = rng.integers(0, 257, (2, 8, 16))
        self.targets[1] = -1
        self.targets[2, 3:] = -1
        self.targets[5, ::2] = -1

    def batch(self, step, start, stop):
        return self.ids[start:stop], self.targets[start:stop]


@pytest.mark.parametrize("micro_batch", [1, 2, 4, 8])
def test_loss_and_gradient_are_means_over_the_valid_tokens_of_the_global_batch(tiny, micro_batch):
    changes = {"batch_tokens": 128, "runtime.dtype": "float64", "runtime.micro_batch": micro_batch}
    run = open_run(tiny(changes | {"optim.grad_clip": None}))
    run.batches = UnevenBatches()
    run.optimizer.step = run.optimizer.zero_grad = lambda: None  # keep weights and gradients, to look at
    loss = run.train_step()["loss"]

    direct = GPT(run.config.model).double()
    direct.load_state_dict(run.gpt.state_dict())
    logits = direct(torch.from_numpy(run.batches.ids)).log_softmax(-1)
    targets = torch.from_numpy(run.batches.targets)
    losses = [-logits[b, t, targets[b, t]] for b, t in (targets >= 0).nonzero().tolist()]
    mean = torch.stack(losses).mean()
    mean.backward()
    torch.testing.assert_close(loss, mean.item(), rtol=1e-13, atol=0)  # sums of 100 float64 numbers
    for (name, p), q in zip(run.gpt.named_parameters(), direct.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-14, msg=lambda text, name=name: f"{name}: {text}")


def test_gradients_are_clipped_to_the_norm_that_is_asked_for(tiny):
    run = open_run(tiny({"optim.grad_clip": 1e-3, "runtime.dtype": "float64"}))
    run.optimizer.zero_grad = lambda: None  # keep them, to look at
    line = run.train_step()
    norm = torch.stack([p.grad.norm() for p in run.gpt.parameters()]).norm()
    assert line["grad_norm"] > 1e-3
    assert norm.item() == pytest.approx(1e-3, rel=1e-3)  # torch adds 1e-6 to the norm it divides by


def test_an_empty_validation_split_is_refused_before_training(tiny, tmp_path):
    config = tiny({"dataset_dir": str(tmp_path / "data"), "run_dir": str(tmp_path / "runs" / "new")})
    shutil.copytree(tiny().dataset_dir, config.dataset_dir)
    edit(config.dataset_dir / "manifest.json", lambda raw: raw["splits"]["val"].update(sets={}, shards=[]))
    with pytest.raises(UserError, match="has no text in its split val: prepare it with val_tokens"):
        fit(config)
    assert not (tmp_path / "runs").exists()


def test_the_folder_of_something_else_is_refused(tiny, tmp_path):
    config = tiny()
    before = sorted(config.dataset_dir.iterdir())
    with pytest.raises(UserError, match="is a dataset or a checkpoint: choose another folder for the run"):
        fit(config.model_copy(update={"run_dir": config.dataset_dir}))
    assert sorted(config.dataset_dir.iterdir()) == before
    fit(config)
    with pytest.raises(UserError, match="is a dataset or a checkpoint: choose another folder for the run"):
        check_folder(find_newest(config.run_dir))
    (tmp_path / "runs" / "a" / "checkpoints").mkdir(parents=True)
    with pytest.raises(UserError, match="has runs in it, such as a: choose a folder beside them"):
        fit(config.model_copy(update={"run_dir": tmp_path / "runs"}))
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["a"]
    (mine := tmp_path / "mine").mkdir()
    (mine / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"mine is no run, and training would overwrite its config\.json: choose"):
        fit(config.model_copy(update={"run_dir": mine}))
    assert (mine / "config.json").read_text() == "{}"


def test_a_run_writes_what_it_promises(tiny):
    config = tiny()
    fit(config)
    lines = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    train = [line for line in lines if "loss" in line]
    val = [line for line in lines if "val_loss" in line]
    assert [(line["step"], line["tokens"]) for line in train] == [(step, 64 * step) for step in range(1, 7)]
    assert [line["lr"] for line in train] == [0.01 * config.schedule.factor(step - 1, 6) for step in range(1, 7)]
    assert [line["step"] for line in val] == [3, 6]
    assert set(train[0]) == {"step", "tokens", "loss", "lr", "grad_norm", "tokens_per_second", "mfu"}
    stderrs = {f"{key}_{more}" for key in ("val_loss", "val_bits_per_byte") for more in ("stderr", "groups")}
    assert set(val[0]) == {"step", "tokens", "val_loss", "val_bits_per_byte", *stderrs}
    assert train[0]["mfu"] is None  # a CPU's peak is not known
    stored = json.loads((config.run_dir / "config.json").read_text())
    assert stored["config"] == config.model_dump(mode="json")
    assert {"python", "torch", "git_commit", "device", "processes"} <= set(stored["environment"])


def test_null_leaves_the_last_evaluation_and_the_last_checkpoint(tiny):
    config = tiny({"eval.every": None, "checkpoint.every": None})
    fit(config)
    lines = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "val_loss" in line] == [6]
    assert [path.name for path in (config.run_dir / "checkpoints").glob("step-*")] == ["step-00000006"]


def test_training_lowers_the_loss(tiny):
    config = tiny({"max_steps": 60, "schedule.warmup_steps": 5, "eval.every": 60, "checkpoint.every": 60})
    fit(config)
    losses = [json.loads(line).get("loss") for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert losses[0] > 5 > 4 > losses[59]  # log 257 = 5.55 at the start; this text has 28 different bytes


def test_bfloat16_trains_float32_weights(tiny):
    run = open_run(tiny({"runtime.dtype": "bfloat16"}))
    exact = open_run(tiny())
    assert {p.dtype for p in run.gpt.parameters()} == {torch.float32}
    loss = run.train_step()["loss"]
    expected = exact.train_step()["loss"]
    assert loss != expected
    assert loss == pytest.approx(expected, rel=2**-7)  # bfloat16 has 8 bits


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.n_vocab": 256}, "tokenizer bytes of 257 ids.*set model.n_vocab=257"),
        ({"seq_len": 100_000, "batch_tokens": 200_000}, "seq_len=100000 needs 100001 tokens"),
    ],
)
def test_a_configuration_that_the_dataset_does_not_fit_is_refused(tiny, changes, message):
    with pytest.raises(UserError, match=message):
        open_run(tiny(changes))


def test_a_batch_that_the_processes_cannot_share_is_refused(tiny):
    with pytest.raises(UserError, match=r"batch_tokens=64 is 4 sequences, fewer than 5 processes"):
        open_run(tiny(), size=5)
    with pytest.raises(UserError, match=r"batch_tokens=48 is 3 sequences, not divisible among 2 processes"):
        open_run(tiny({"batch_tokens": 48, "runtime.strategy": "fsdp"}), size=2)
    with pytest.raises(UserError, match=r"4 sequences with epochs=2 \(with max_steps, batch_tokens stays\), fewer"):
        open_run(tiny({"epochs": 2}), size=5)
