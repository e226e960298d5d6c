"""An interrupted and resumed run has the same results as an uninterrupted one."""

import re
import shutil

import pytest
from faults import metrics
from forged import edit, sign
from printed import snapshot

from common.settings import UserError
from data.loader import TrainBatches
from data.shards import read_manifest
from runtime.checkpoint import find_newest, open_checkpoint
from trainer.loop import fit
from trainer.schedule import WSD, OneCycle

pytestmark = pytest.mark.usefixtures("restored_torch")


def assert_same_run(a, b):
    first = find_newest(a)
    second = find_newest(b)
    assert first.name == second.name
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (first / name).read_bytes() == (second / name).read_bytes(), name
    states = [open_checkpoint(path).state.model_dump(exclude={"run_id"}) for path in (first, second)]
    assert states[0] == states[1]
    assert metrics(a) == metrics(b)


def test_a_run_reads_each_sequence_of_an_epoch_once_and_ends_the_same_whatever_interrupts_it(
    tiny, tmp_path, monkeypatch
):
    changes = {"max_steps": 12, "seq_len": 256, "batch_tokens": 4096, "runtime.micro_batch": 16}
    read = []
    changes |= {"model.attention": {"name": "softmax"}, "model.position.name": "none", "eval.batches": 1}
    fit(tiny(changes | {"run_dir": tmp_path / "whole"}))

    class Recorded(TrainBatches):
        def batch(self, step, start, stop):
            read.extend(self.numbers(step, start, stop).tolist())
            return super().batch(step, start, stop)

    monkeypatch.setattr("trainer.start.TrainBatches", Recorded)
    for stop_at in (3, 10, 12):
        fit(tiny(changes | {"stop_at": stop_at}))
    tokens = read_manifest(tiny().dataset_dir).splits["train"].total.tokens
    n_windows = (tokens - 1) // 256
    assert 10 * 16 < n_windows < 11 * 16, "the first epoch ends in the eleventh step, soon after the run goes on"
    assert sorted(read[:n_windows]) == list(range(n_windows))
    assert len(set(read[n_windows:])) == 12 * 16 - n_windows
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def test_a_run_from_before_a_model_had_an_option_goes_on(tiny, tmp_path):
    fit(tiny({"run_dir": tmp_path / "whole"}))
    fit(tiny({"stop_at": 4}))
    path = find_newest(tmp_path / "run")

    def forget(state):
        for option in ("norm", "bias", "logit_cap"):
            del state["model"][option]
        del state["model"]["attention"]["qk_norm"]

    edit(path / "state.json", forget)
    sign(path)
    fit(tiny())
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def test_a_finished_run_says_so_and_changes_nothing(tiny, tmp_path, capsys):
    fit(tiny())
    before = snapshot(tmp_path / "run")
    for changes, said in [
        ({}, f"a max_steps above 6; without a jump of the learning rate: {OneCycle.longer}\n"),
        ({"schedule.name": "wsd"}, f"a max_steps above 6; without a jump of the learning rate: {WSD.longer}\n"),
        ({"schedule.name": "constant", "stop_at": 3}, "a max_steps above 6\n"),
        ({"stop_at": 3, "max_steps": 8}, "a stop_at above 6, or leave it out"),
    ]:
        capsys.readouterr()
        fit(tiny(changes))
        assert f"already at step 6: nothing to train. To continue, give {said}" in capsys.readouterr().out
    assert snapshot(tmp_path / "run") == before


def test_a_finished_run_goes_on_when_it_is_made_longer_and_keeps_its_name(tiny, tmp_path):
    fit(tiny())
    name = open_checkpoint(tmp_path / "run").state.run_id
    fit(tiny({"max_steps": 8}))
    state = open_checkpoint(tmp_path / "run").state
    assert (state.step, state.run_id) == (8, name)
    assert [line["step"] for line in metrics(tmp_path / "run") if "loss" in line] == list(range(1, 9))


@pytest.mark.parametrize(
    ("schedule", "before", "after", "advice"),
    [
        ({"name": "one_cycle"}, "0.001", "0.0055", OneCycle.longer),
        ({"name": "wsd", "decay": 0.5}, "0", "0.00833", WSD.longer),
        ({"name": "constant"}, None, None, None),
    ],
)
@pytest.mark.slow
def test_a_jump_of_the_learning_rate_is_said_before_the_first_step(tiny, capsys, schedule, before, after, advice):
    schedule = {"schedule": {"warmup_steps": 2, **schedule}}
    fit(tiny(schedule | {"stop_at": 4}))
    fit(tiny(schedule))
    assert capsys.readouterr().err == "", "a run that goes on as planned has no jump"
    fit(tiny(schedule | {"max_steps": 12}))
    rates = f"warning: the learning rate goes from {before} (step 6) to {after} (step 7)"
    assert capsys.readouterr().err == (f"{rates}; for a longer run without this jump: {advice}\n" if advice else "")
    fit(tiny(schedule | {"max_steps": 13, "optim.max_lr": 1e-4}))
    said = re.search(r"the learning rate goes from \S+ \(step 12\) to \S+ \(step 13\)$", capsys.readouterr().err)
    assert bool(said) == (before != "0"), "from 0 to 0 nothing changes"


@pytest.mark.slow
def test_wsd_continued_from_before_its_decay_is_the_longer_run(tiny, tmp_path, capsys):
    wsd = {"schedule": {"name": "wsd", "warmup_steps": 2, "decay": 0.5}, "checkpoint": {"every": 2, "keep_every": 2}}
    fit(tiny(wsd))
    shutil.copytree(tmp_path / "run", tmp_path / "longer")
    for step in (4, 6):
        shutil.rmtree(tmp_path / "longer" / "checkpoints" / f"step-{step:08}")
    fit(tiny(wsd | {"max_steps": 12, "run_dir": tmp_path / "longer"}))
    fit(tiny(wsd | {"max_steps": 12, "run_dir": tmp_path / "whole"}))
    assert capsys.readouterr().err == ""
    assert_same_run(tmp_path / "whole", tmp_path / "longer")


def test_the_dataset_may_move(tiny, tmp_path):
    fit(tiny({"run_dir": tmp_path / "whole"}))
    fit(tiny({"stop_at": 4}))
    moved = shutil.copytree(tiny().dataset_dir, tmp_path / "moved")
    fit(tiny({"dataset_dir": moved}))
    assert open_checkpoint(tmp_path / "run").state.dataset_dir == moved
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optim": {"name": "muon"}}, r"another run: optimizer=muon \(checkpoint: adamw\)"),
        ({"model.attention": {"name": "softmax"}}, r"model.attention.name=softmax \(checkpoint: log_space\)"),
        ({"seed": 2}, r"seed=2 \(checkpoint: 1\)"),
        ({"batch_tokens": 128}, r"batch_tokens=128 \(checkpoint: 64\)"),
    ],
)
def test_another_run_than_the_one_that_is_there_is_refused(tiny, tmp_path, changes, message):
    fit(tiny({"stop_at": 2}))
    before = snapshot(tmp_path / "run")
    with pytest.raises(UserError, match=message):
        fit(tiny(changes))
    assert snapshot(tmp_path / "run") == before
