"""Batch-size warm-up: a run whose batch doubles reads, counts, plans and goes on as it must."""

import json

import numpy as np
import pytest
from alone import open_run
from test_elastic import train  # noqa: F401 (a fixture)
from test_resume import assert_same_run, metrics
from test_torchrun import assert_same_steps

from common.settings import UserError, decode
from data.loader import TrainBatches
from tools.convert.export_hf import export
from tools.plan.plan import PlanConfig, plan
from tools.plan.report import table_of
from trainer.loop import fit

pytestmark = pytest.mark.usefixtures("restored_torch")

DOUBLED = {"batch_doublings": [2, 3], "max_steps": 6}
SIZES = [1, 1, 2, 4, 4, 4]  # of 16 tokens each


def test_a_run_reads_the_sequences_of_any_other_in_order(tiny, monkeypatch, tmp_path):
    read = {}

    class Recorded(TrainBatches):
        def batch(self, step, start, stop):
            read[step] = self.windows(self.sizes.before(step) + np.arange(start, stop)).tolist()
            return super().batch(step, start, stop)

    monkeypatch.setattr("trainer.run.TrainBatches", Recorded)
    fit(tiny(DOUBLED))
    assert [len(read[step]) for step in range(6)] == SIZES
    in_order = [window for step in range(6) for window in read[step]]
    assert in_order == open_run(tiny({"run_dir": tmp_path / "plain"})).batches.windows(np.arange(16)).tolist()


def test_metrics_count_the_tokens_that_were_read(run_of):
    lines = metrics(run_of(DOUBLED))
    counted = dict(zip(range(1, 7), np.cumsum(SIZES) * 16, strict=True))
    assert all(line["tokens"] == counted[line["step"]] for line in lines)
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 7))


def test_the_rate_is_that_of_the_steps_own_tokens(tiny, monkeypatch):
    run = open_run(tiny(DOUBLED))
    rates = [run.train_step()["tokens_per_second"] * seconds for seconds in _seconds(monkeypatch)]
    assert rates == pytest.approx([16 * size for size in SIZES])


def _seconds(monkeypatch):
    """Makes the clock say that each step takes 2 seconds."""
    now = [0.0]

    def tick():
        now[0] += 2
        return now[0]

    monkeypatch.setattr("trainer.run.time.perf_counter", tick)
    return [2.0] * 6


def test_a_run_goes_on_to_the_bit(tiny, tmp_path):
    fit(tiny(DOUBLED | {"run_dir": tmp_path / "whole"}))
    fit(tiny(DOUBLED | {"stop_at": 3}))
    fit(tiny(DOUBLED))
    assert_same_run(tmp_path / "whole", tmp_path / "run")


@pytest.mark.slow
def test_a_run_goes_from_1_process_to_2_and_back(train):  # noqa: F811
    options = "batch_tokens=128", "batch_doublings=[6,13]", "runtime.dtype=float64", "runtime.micro_batch=1"
    whole = train("whole", 1, *options)
    for processes, stop_at in [(2, 7), (1, 12), (2, 20)]:
        elastic = train("elastic", processes, f"stop_at={stop_at}", *options)
    assert_same_steps(whole, elastic, tolerance=1e-9)


@pytest.mark.slow
def test_parts_of_a_model_take_the_same_steps(train):  # noqa: F811
    options = "batch_tokens=128", "batch_doublings=[6,13]", "runtime.dtype=float64"
    whole, shared = (train(name, 2, f"runtime.strategy={name}", *options) for name in ("ddp", "fsdp"))
    assert_same_steps(whole, shared, tolerance=1e-9)


def test_a_bad_step_is_of_the_sequences_that_it_read(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("trainer.run.why_bad", lambda *_: "a test")
    config = tiny(DOUBLED | {"runtime.on_nonfinite": "skip", "runtime.max_bad_steps": 10})
    fit(config)
    begins = (open_run(config).batches.windows(np.arange(16)) * 16).tolist()
    for step in (1, 3, 6):
        found = json.loads((tmp_path / "run" / "bad_steps" / f"step-{step:08}.json").read_text())
        read = slice(sum(SIZES[: step - 1]), sum(SIZES[:step]))
        assert [sequence["first_token"] for sequence in found["batch"]] == begins[read]
        assert found["processes"][0]["sequences"] == [0, SIZES[step - 1]]


def test_a_step_is_shown_with_its_own_documents(run_of, command):
    run_dir = run_of(DOUBLED)
    for step in (2, 3, 4):
        shown = command("scripts/inspect_dataset", f"step={step}", f"run_dir={run_dir}")
        assert shown.status == 0, shown.err
        assert shown.out.count("--- row") == (SIZES[step - 1] if SIZES[step - 1] > 1 else 0)


def test_a_plan_counts_the_tokens_of_the_run(tiny):
    config = decode(PlanConfig, tiny(DOUBLED).model_dump() | {"device": "h100", "tokens_per_second": 8.0})
    found = plan(config)
    assert found["time"]["tokens"] == 16 * sum(SIZES)
    assert found["time"]["seconds"] == 2 * sum(SIZES)
    assert found["disk"]["bytes_of_all_tokens"] == 2 * 16 * sum(SIZES)
    assert "1 to 4 x 16" in [str(cell) for cell in table_of(found).columns[2].cells]


def test_an_export_says_how_many_tokens_the_model_has_read(run_of, tmp_path):
    export(run_of(DOUBLED), tmp_path / "out")
    assert "6 steps of up to 64 tokens, 256 in all" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_doublings": [3, 2]}, r"batch_doublings=\[3, 2\] does not ascend"),
        ({"batch_doublings": [2, 2]}, r"batch_doublings=\[2, 2\] does not ascend"),
        ({"batch_doublings": [0]}, "batch_doublings"),
        ({"batch_doublings": [1, 2, 3]}, r"batch_tokens=64 is not divisible by seq_len=16 x 2\^3, .*: use 128"),
        ({"batch_doublings": [1], "batch_tokens": 80}, r"=80 is not divisible by seq_len=16 x 2\^1, .*: use 64"),
        ({"batch_doublings": list(range(1, 100))}, "batch_doublings"),
    ],
)
def test_doublings_that_cannot_be_are_one_line(tiny, changes, message):
    with pytest.raises(UserError, match=message) as error:
        tiny(changes)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("size", "strategy", "message"),
    [
        (2, "ddp", "2 batch_doublings of batch_tokens=64 begin with 1 sequences, fewer than 2 processes"),
        (2, "fsdp", "begin with 1 sequences, fewer than 2 processes"),
    ],
)
def test_a_first_batch_that_is_too_small_is_refused_before_training(tiny, size, strategy, message):
    with pytest.raises(UserError, match=message):
        open_run(tiny(DOUBLED | {"runtime.strategy": strategy}), size)


def test_a_first_batch_that_fsdp_cannot_divide_is_refused(tiny):
    config = tiny({"batch_tokens": 96, "batch_doublings": [2], "runtime.strategy": "fsdp"})
    with pytest.raises(UserError, match="begin with 3 sequences, not divisible among 2 processes"):
        open_run(config, 2)
    with pytest.raises(UserError, match="begin with 3 sequences, fewer than n_device=4"):
        decode(PlanConfig, config.model_dump() | {"n_device": 4})


def test_doublings_cannot_change_within_a_run(run_of, tiny):
    run_of(DOUBLED)
    with pytest.raises(UserError, match=r"batch_doublings.*checkpoint"):
        fit(tiny(DOUBLED | {"batch_doublings": [2, 4], "max_steps": 8}))


def test_the_largest_batch_decides_the_micro_batch(tiny, monkeypatch):
    asked = []
    monkeypatch.setattr("trainer.run.choose_micro_batch", lambda module, share, *rest: asked.append(share) or share)
    run = open_run(tiny(DOUBLED | {"runtime.micro_batch": "auto"}))
    assert asked == [4]
    assert [[len(ids) for ids, _ in run.share(step)] for step in range(6)] == [[size] for size in SIZES]
