"""A run has the same results if its number of processes changes or some processes are lost."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import ranks
from ranks import ROOT, environment, lines_in, wait_until
from test_torchrun import TORCHRUN, assert_same_steps, read_lines

from trainer.checkpoint import newest


@pytest.fixture
def train(tiny_args, tmp_path):
    """Trains with train.py in some processes; returns the run directory."""

    def run(name, processes, *options):
        args = [*tiny_args, "max_steps=20", "eval.every=5", f"run_dir={tmp_path / name}", *options]
        for result in ranks.run(processes, "train.py", *args):
            assert result.status in (0, 75), result.err
        return tmp_path / name

    return run


@pytest.mark.slow
@pytest.mark.parametrize("optim", ["adamw", "muon"])
def test_a_run_goes_from_2_processes_to_1_and_to_4(train, optim):
    """Same batches, same losses, at every step; a batch that was lost or came twice would be seen."""
    whole = train("whole", 1, "runtime.micro_batch=1", f"optim={optim}")
    for processes, stop_at in [(2, 7), (1, 12), (4, 20)]:
        elastic = train("elastic", processes, f"stop_at={stop_at}", "runtime.micro_batch=1", f"optim={optim}")
        assert newest(elastic).name == f"step-{stop_at:08}"
    assert_same_steps(whole, elastic, tolerance=1e-5)
    steps = [line["step"] for line in read_lines(elastic) if "loss" in line]
    assert steps == list(range(1, 21))


@pytest.mark.parametrize(("processes", "sequences", "micro_batch"), [(3, 4, 8), (4, 6, 1), (2, 7, 3)])
@pytest.mark.slow
def test_a_batch_need_not_be_divisible(train, processes, sequences, micro_batch):
    """Process r of W has sequences r*B//W to (r+1)*B//W, in as many micro-batches as it takes."""
    options = f"batch_tokens={16 * sequences}", "runtime.dtype=float64", "max_steps=6"
    whole = train("whole", 1, *options, "runtime.micro_batch=1")
    shared = train("shared", processes, *options, f"runtime.micro_batch={micro_batch}")
    assert_same_steps(whole, shared, tolerance=1e-9)


def children(pid):
    """The processes that this one has started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            _, _, rest = stat.read_text().rpartition(") ")
        except OSError:  # gone since
            continue
        if int(rest.split()[1]) == pid:
            found.append(int(stat.parent.name))
    return found


def rank_of(pid):
    variables = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return int(dict(variable.split("=", 1) for variable in variables if "=" in variable)["RANK"])


@pytest.mark.slow
def test_torchrun_restarts_a_run_that_lost_a_process(train, tiny_args, tmp_path):
    """It recovers automatically from the loss of either and writes bit for bit what an undisturbed run writes."""
    options = ["max_steps=100", "checkpoint.every=10", "eval.every=50", "runtime.hang_seconds=30"]
    undisturbed = train("undisturbed", 2, *options)
    log = tmp_path / "run" / "metrics.jsonl"
    torchrun = [sys.executable, *TORCHRUN, "--standalone", "--nproc_per_node=2", "--max-restarts=3"]
    process = subprocess.Popen(
        [*torchrun, "train.py", *tiny_args, *options],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )

    def lose(rank, step):
        wait_until(lambda: lines_in(log) > step or process.poll() is not None, f"step {step}")
        ranks_there_are = {rank_of(pid): pid for pid in children(process.pid)}
        os.kill(ranks_there_are[rank], signal.SIGKILL)

    try:
        lose(rank=0, step=25)
        lose(rank=1, step=65)
        out, err = process.communicate(timeout=240)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert process.returncode == 0, err
    assert out.count(f"resuming {tmp_path / 'run'} after step") == 2
    assert "step 100 of 100 saved" in out
    assert_same_steps(undisturbed, tmp_path / "run", tolerance=0)
