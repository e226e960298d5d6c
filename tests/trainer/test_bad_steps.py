"""A loss or gradient that is not finite, on any process, never reaches the weights."""

import json
import math

import numpy as np
import pytest
import ranks
import torch
from alone import open_run
from safetensors.torch import load_file
from test_resume import assert_same_run, metrics

from common.settings import UserError
from data.documents import documents_in
from data.loader import TrainBatches, step_windows
from data.shards import TokenStream, read_manifest
from model.gpt import GPT
from trainer.checkpoint import newest, open_checkpoint
from trainer.guard import LossStatistics, bad_steps_before, why_bad
from trainer.loop import fit
from trainer.run import Run

pytestmark = pytest.mark.usefixtures("restored_torch")


def evidence(run_dir, step):
    return json.loads((run_dir / "bad_steps" / f"step-{step:08}.json").read_text())


def test_halt_leaves_evidence_and_the_run_as_it_was(tiny, tmp_path, factor_at):
    factor_at({5: float("nan")})
    with pytest.raises(UserError, match=r"step 5: loss is nan .* .*step-00000005.json lists.*max_lr") as error:
        fit(tiny())
    assert "\n" not in str(error.value)
    assert open_checkpoint(tmp_path / "run").state.step == 4
    found = evidence(tmp_path / "run", 5)
    assert (found["step"], found["loss"]) == (5, "nan")
    assert found["processes"] == [{"sequences": [0, 4], "sum_of_losses": "nan"}]
    assert "embed.weight" in found["gradients_not_finite"]

    manifest = read_manifest(tiny().dataset_dir)
    stream = TokenStream(tiny().dataset_dir, manifest, "train")
    windows = step_windows(TrainBatches(stream, 16, 4, seed=1), 5)
    assert [s["first_token"] for s in found["batch"]] == [start for start, _ in windows]
    for sequence, (start, stop) in zip(found["batch"], windows, strict=True):
        places = list(documents_in(tiny().dataset_dir, manifest, "train", start, stop))
        assert sequence["documents"] == [{"set": p.set_name, "input": p.input, "number": p.number} for p in places]


def test_a_halted_run_goes_on_when_the_fault_is_gone(tiny, tmp_path, factor_at):
    fit(tiny({"run_dir": tmp_path / "whole"}))
    factor_at({5: float("inf")}, times=1)
    with pytest.raises(UserError, match="step 5: loss is inf"):
        fit(tiny())
    fit(tiny())
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def reference_without(config, bad):
    """The weights after plain steps on all batches except those of the `bad` steps."""
    run = open_run(config)
    gpt = GPT(config.model).double()
    gpt.load_state_dict(run.gpt.state_dict())
    optimizer = config.optim.build(gpt)
    for step in range(config.max_steps):
        if step + 1 in bad:
            continue
        ids, targets = (torch.from_numpy(x) for x in run.batches.batch(step))
        logits = gpt(ids)
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(gpt.parameters(), config.optim.grad_clip)
        for group in optimizer.param_groups:
            group["lr"] = config.optim.max_lr * config.schedule.factor(step, config.max_steps)
        optimizer.step()
        optimizer.zero_grad()
    return dict(gpt.named_parameters())


def test_skip_passes_over_the_batch_and_nothing_else(tiny, tmp_path, factor_at):
    changes = {"runtime.on_nonfinite": "skip", "runtime.dtype": "float64"}
    expected = reference_without(tiny(changes | {"run_dir": tmp_path / "other"}), {3, 4})
    factor_at({3: float("nan"), 4: float("-inf")})
    fit(tiny(changes))
    weights = load_file(newest(tmp_path / "run") / "model.safetensors")
    for name, value in expected.items():  # 6 steps of sums in another order
        torch.testing.assert_close(weights[name], value.detach(), rtol=1e-9, atol=1e-11)
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines if "val_loss" not in line] == [1, 2, 3, 4, 5, 6]
    assert [(line["step"], line["event"]) for line in lines if "event" in line] == [(3, "skipped"), (4, "skipped")]
    assert evidence(tmp_path / "run", 4)["loss"] == "-inf"


def test_a_run_that_skipped_goes_on_to_the_bit(tiny, tmp_path, factor_at):
    changes = {"runtime.on_nonfinite": "skip", "runtime.max_bad_steps": 2}
    factor_at({3: float("nan"), 4: float("nan")})
    fit(tiny(changes | {"run_dir": tmp_path / "whole"}))
    fit(tiny(changes | {"stop_at": 3}))
    fit(tiny(changes))
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def test_too_many_in_a_row_halt_even_across_a_restart(tiny, factor_at):
    changes = {"runtime.on_nonfinite": "skip", "runtime.max_bad_steps": 2}
    factor_at(dict.fromkeys([1, 3, 4, 5], float("nan")))
    fit(tiny(changes | {"stop_at": 4}))
    with pytest.raises(
        UserError, match=r"step 5: loss is nan.*, after 2 bad steps in a row; the weights are unchanged"
    ):
        fit(tiny(changes))


@pytest.mark.parametrize("bad", [1, 5])
def test_rollback_heals_weights_that_went_bad(tiny, tmp_path, monkeypatch, factor_at, bad, capsys):
    """The memory is at fault once, not the batch: skipping the step would continue with broken weights."""
    changes = {"runtime.on_nonfinite": "rollback"}
    factor_at({bad: float("nan")})
    fit(tiny({"runtime.on_nonfinite": "skip", "run_dir": tmp_path / "skipped"}))
    monkeypatch.undo()

    accumulate, broken = Run._step, []
    name = next(n for n, _ in open_run(tiny()).gpt.named_parameters() if n.startswith("blocks.0"))
    monkeypatch.setattr(Run, "_step", lambda run: _break(run, name, bad, broken, accumulate))
    fit(tiny(changes))
    assert broken == [bad - 1]
    assert f"back to step {bad // 2 * 2}, and that step will be skipped" in capsys.readouterr().err.replace("\n", "")
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert (newest(tmp_path / "run") / file).read_bytes() == (newest(tmp_path / "skipped") / file).read_bytes()
    events = [
        [{k: v for k, v in line.items() if k != "reason"} for line in metrics(tmp_path / name)]
        for name in ("run", "skipped")
    ]
    assert events[0] == events[1]


def _break(run, name, bad, broken, accumulate):
    if run.step + 1 == bad and not broken:
        broken.append(run.step)
        with torch.no_grad():
            dict(run.gpt.named_parameters())[name].view(-1)[0] = float("nan")
    return accumulate(run)


def test_rollbacks_end(tiny, factor_at):
    """Every batch after a checkpoint is bad: some are skipped, then the run stops."""
    factor_at(dict.fromkeys(range(3, 100), float("nan")))
    changes = {"runtime.on_nonfinite": "rollback", "runtime.max_bad_steps": 3, "max_steps": 20}
    with pytest.raises(UserError, match=r"step 6: .*after 3 bad steps in a row"):
        fit(tiny(changes))


def test_each_bad_step_costs_one_rollback(tiny, factor_at, capsys):
    """Four bad steps far from each other, and no checkpoint between them: the fourth repeats three, already known."""
    factor_at(dict.fromkeys((4, 8, 12, 16), float("nan")))
    changes = {
        "runtime.on_nonfinite": "rollback",
        "runtime.max_bad_steps": 2,
        "checkpoint.every": 100,
        "eval.every": 100,
    }
    config = tiny({**changes, "max_steps": 20})
    fit(config)
    assert capsys.readouterr().err.count("back to step 0") == 4
    skipped = [line["step"] for line in metrics(config.run_dir) if line.get("event") == "skipped"]
    assert skipped == [4, 8, 12, 16]


def test_a_gradient_that_is_not_finite_is_named(tiny, monkeypatch):
    build = GPT.__init__

    def building(self, config, *eot_id):
        build(self, config, *eot_id)
        self.norm.bias.register_hook(lambda grad: grad * float("inf"))

    monkeypatch.setattr(GPT, "__init__", building)
    with pytest.raises(UserError, match=r"step 1: loss is \d.* and the gradient's norm (inf|nan)"):
        fit(tiny())
    assert evidence(tiny().run_dir, 1)["gradients_not_finite"] == ["norm.bias"]


def test_statistics_are_those_of_the_losses():
    losses = np.random.default_rng(0).normal(3, 0.5, 80)
    statistics = LossStatistics()
    for loss in losses:
        statistics = statistics.after(loss)
    assert statistics.count == 80
    assert statistics.mean == pytest.approx(losses.mean(), rel=1e-12)
    assert statistics.variance == pytest.approx(losses.var(), rel=1e-9)
    for _ in range(2000):  # then they forget
        statistics = statistics.after(1.0)
    assert statistics.mean == pytest.approx(1.0, abs=1e-6)
    assert statistics.variance == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(
    ("loss", "norm", "sigmas", "count", "bad"),
    [
        (3.0, 1.0, None, 500, False),
        (1e9, 1.0, None, 500, False),
        (3.9, 1.0, 2.0, 500, False),
        (4.1, 1.0, 2.0, 500, True),
        (4.1, 1.0, 2.0, 99, False),  # too few to know what is usual
        (float("nan"), 1.0, 2.0, 500, True),
        (3.0, float("inf"), None, 0, True),
        (-float("inf"), 1.0, None, 0, True),
    ],
)
def test_what_is_bad(loss, norm, sigmas, count, bad):
    statistics = LossStatistics(count=count, mean=3.0, variance=0.25)
    assert (why_bad(loss, norm, statistics, sigmas) is not None) is bad


def test_bad_steps_in_a_row():
    assert bad_steps_before(7, {}) == 0
    assert bad_steps_before(7, {3: "", 5: "", 6: "", 7: ""}) == 2


@pytest.mark.slow
def test_a_spike_is_treated_as_other_bad_steps_are_and_is_off_by_default(tiny, tmp_path, factor_at):
    changes = {"max_steps": 130, "eval.every": 130, "checkpoint.every": 65, "runtime.on_nonfinite": "skip"}
    factor_at({120: 100.0})
    fit(tiny(changes | {"runtime.spike_sigmas": 8.0, "run_dir": tmp_path / "watched"}))
    fit(tiny(changes | {"runtime.spike_sigmas": 8.0, "stop_at": 100}))  # what is usual is remembered
    fit(tiny(changes | {"runtime.spike_sigmas": 8.0}))
    assert_same_run(tmp_path / "watched", tmp_path / "run")
    assert [line["step"] for line in metrics(tmp_path / "run") if "event" in line] == [120]
    fit(tiny(changes | {"run_dir": tmp_path / "unwatched"}))
    assert [line for line in metrics(tmp_path / "unwatched") if "event" in line] == []


POISONED = """
import sys
import trainer.step
from trainer.run import Run
from trainer.step import SummedLoss
poisoned, accumulate, forward = [False], Run._step, SummedLoss.forward
def accumulating(run):
    poisoned[0] = run.step + 1 == 3 and run.world.rank == run.world.size - 1
    return accumulate(run)
Run._step = accumulating
SummedLoss.forward = lambda *args: forward(*args) * (float("nan") if poisoned[0] else 1.0)
import runpy
runpy.run_path("train.py", run_name="__main__")
"""


@pytest.mark.parametrize("policy", ["skip", "rollback", "halt"])
@pytest.mark.slow
def test_what_is_bad_on_one_process_is_bad_on_all(tiny_args, tmp_path, policy):
    args = [*tiny_args, "runtime.micro_batch=1", "runtime.dtype=float64", f"runtime.on_nonfinite={policy}"]
    results = ranks.run(2, "-c", POISONED, *args)
    assert [r.status for r in results] == ([1, 1] if policy == "halt" else [0, 0]), [r.err for r in results]
    found = evidence(tmp_path / "run", 3)
    assert [p["sequences"] for p in found["processes"]] == [[0, 2], [2, 4]]
    first, second = (p["sum_of_losses"] for p in found["processes"])
    assert second == "nan"
    assert math.isfinite(float(first))
    if policy != "halt":
        (alone,) = ranks.run(1, "-c", POISONED, *args, f"run_dir={tmp_path / 'alone'}")
        assert alone.status == 0
        one, two = (load_file(newest(tmp_path / name) / "model.safetensors") for name in ("alone", "run"))
        for name in one:
            assert (one[name] - two[name]).abs().max() <= 1e-9, name


def test_rollback_does_not_care_how_the_run_was_to_begin(tiny, tmp_path, factor_at):
    factor_at({5: float("nan")})
    changes = {"runtime.on_nonfinite": "rollback"}
    fit(tiny(changes | {"run_dir": tmp_path / "other"}))
    fit(tiny(changes | {"resume": "never"}))
    assert_same_run(tmp_path / "other", tmp_path / "run")


def test_a_rollback_keeps_the_choice_of_the_micro_batch(tiny, tmp_path, monkeypatch, factor_at):
    """It goes back to a checkpoint from another machine, whose choice would be made again at the next start."""
    changes = {"runtime.on_nonfinite": "rollback", "runtime.micro_batch": "auto"}
    fit(tiny(changes | {"stop_at": 4}))
    monkeypatch.setattr("trainer.run.device_name", lambda device: "another CPU")
    factor_at({5: float("nan")})
    fit(tiny(changes))
    state = open_checkpoint(tmp_path / "run").state
    assert (state.step, state.micro_batch_for) == (6, "1 x another CPU")


def test_rollback_needs_something_to_go_back_to(tiny, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("trainer.saving.save_checkpoint", full)
    with pytest.raises(UserError, match="the save after step 0 failed"):
        fit(tiny({"runtime.on_nonfinite": "rollback", "checkpoint.on_error": "continue"}))
