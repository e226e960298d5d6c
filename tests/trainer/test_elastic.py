"""A run has the same results if its number of processes changes or some processes are lost."""

import contextlib
import os
import signal
import subprocess
import sys

import pytest
from ranks import IN_STEP, ROOT, environment, lines_in, wait_until
from test_torchrun import TORCHRUN, assert_same_steps

from runtime.checkpoint import find_newest


@pytest.mark.parametrize(("processes", "sequences", "micro_batch"), [(3, 4, 8), (2, 7, 3)])
@pytest.mark.slow
def test_a_batch_need_not_be_divisible(train_in_processes, processes, sequences, micro_batch):
    """Process r of W has sequences r*B//W to (r+1)*B//W, in as many micro-batches as it takes."""
    options = f"batch_tokens={16 * sequences}", "max_steps=4"
    whole = train_in_processes("whole", 1, *options, "runtime.micro_batch=1")
    shared = train_in_processes("shared", processes, *options, f"runtime.micro_batch={micro_batch}")
    assert_same_steps(whole, shared, tolerance=1e-9)


@contextlib.contextmanager
def torchrun(script, *arguments, max_restarts=3):
    """A torchrun of two processes, which restarts them."""
    launcher = [sys.executable, *TORCHRUN, "--standalone", "--nproc_per_node=2", f"--max-restarts={max_restarts}"]
    options = {"cwd": ROOT, "env": environment(), "text": True, "start_new_session": True}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([*launcher, script, *arguments], **options, **pipes)
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


@pytest.mark.slow
def test_torchrun_restarts_a_run_that_lost_a_process(train_in_processes, tiny_args, tmp_path):
    """It recovers automatically from the loss of either and writes bit for bit what an undisturbed run writes."""
    options = ["max_steps=20", "checkpoint.every=2", "eval.every=10", "runtime.dtype=float64"]
    undisturbed = train_in_processes("undisturbed", 2, *options)
    when = f"(step, rank) in [(5, 0), (13, 1)] and not os.path.exists(f'{tmp_path}/{{step}}')"
    dies = tmp_path / "dies.py"
    dies.write_text(IN_STEP.format(when=when, fault=f"os.mkdir(f'{tmp_path}/{{step}}'); os.kill(os.getpid(), 9)"))
    with torchrun(dies, *tiny_args, *options) as process:
        out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert out.count(f"resuming {tmp_path / 'run'} after step") == 2
    assert "step 20 of 20 saved" in out
    assert_same_steps(undisturbed, tmp_path / "run", tolerance=0)


@pytest.mark.slow
def test_a_lost_process_is_told_in_one_line_although_torchrun_stops_the_other(tiny_args, tmp_path):
    dies = tmp_path / "dies.py"
    dies.write_text(IN_STEP.format(when="(step, rank) == (3, 1)", fault="os.kill(os.getpid(), 9)"))
    with torchrun(dies, *tiny_args, max_restarts=0) as process:
        _, err = process.communicate(timeout=240)
    assert err.count("error: rank 0 lost contact with another process") == 1
    assert "saving and stopping" not in err


@pytest.mark.slow
def test_a_signal_to_torchrun_stops_and_saves(tiny_args, tmp_path):
    log = tmp_path / "run" / "metrics.jsonl"
    with torchrun(
        "train.py", *tiny_args, "max_steps=100000", "checkpoint.every=100000", "eval.every=100000"
    ) as process:
        wait_until(lambda: lines_in(log) > 5 or process.poll() is not None, "5 steps")
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=240)
    step = int(find_newest(tmp_path / "run").name[5:])
    assert step > 5
    assert f"stopped by SIGTERM: step {step} of 100,000 is saved" in out
