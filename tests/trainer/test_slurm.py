"""scripts/slurm/train.sbatch, run with stand-ins for srun and scontrol that start real processes."""

import os
import signal
import subprocess
import sys

import pytest
from ranks import IN_STEP, ROOT, Result, environment, lines_in

from trainer.records.run_dir import own_run

SCRIPT = ROOT / "scripts" / "slurm" / "train.sbatch"

SRUN = """#!/bin/bash
# Starts the tasks; its status is the highest of theirs, as srun's is.
echo "$*" >> "$STANDIN/srun.log"
while [[ $1 == --* ]]; do shift; done
for ((task = 0; task < SLURM_NTASKS; task++)); do
    SLURM_PROCID=$task SLURM_LOCALID=$task "$@" &
    pids+=($!)
done
highest=0
for pid in "${pids[@]}"; do
    wait "$pid"
    status=$?
    ((status > highest)) && highest=$status
done
exit $highest
"""
SCONTROL = """#!/bin/bash
# Knows the job's machines and its state, and notes everything else.
case "$1 $2" in
    "show hostnames") printf 'localhost\\nnode2\\n' ;;
    "show job") echo "   JobState=${JOB_STATE:-RUNNING} Reason=None" ;;
    *) echo "$*" >> "$STANDIN/scontrol.log" ;;
esac
"""


@pytest.fixture
def job(tmp_path, tiny_args):
    """Runs the script as SLURM would, on two tasks; call it with options of train.py and more environment.

    python: in bash, what takes Python's place.
    """
    standin = tmp_path / "standin"
    standin.mkdir()
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (standin / name).write_text(text)
        (standin / name).chmod(0o755)

    def run(*options, python='exec "$REAL_PYTHON" "$@"', **more_environment):
        (standin / "python").write_text(f"#!/bin/bash\n{python}\n")
        (standin / "python").chmod(0o755)
        slurm = {
            "PATH": f"{standin}:{os.environ['PATH']}",
            "STANDIN": str(standin),
            "PYTHON": str(standin / "python"),
            "REAL_PYTHON": sys.executable,
            "SLURM_JOB_ID": str(os.getpid()),
            "SLURM_JOB_NODELIST": "node[1-2]",
            "SLURM_NTASKS": "2",
            "SLURM_CPUS_PER_TASK": "1",
        }
        env = environment() | slurm | more_environment
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        command = ["bash", str(SCRIPT), *tiny_args, *options]
        process = subprocess.Popen(command, cwd=ROOT, env=env, text=True, start_new_session=True, **pipes)
        try:
            out, err = process.communicate(timeout=240)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        return Result(process.returncode, out, err)

    (standin / "scontrol.log").touch()
    run.requeues = lambda: (standin / "scontrol.log").read_text().splitlines()
    run.srun = lambda: (standin / "srun.log").read_text()
    return run


@pytest.mark.slow
def test_a_job_at_its_time_limit_is_requeued_and_its_next_start_finishes_the_run(job, tmp_path):
    steps = "max_steps=200", "checkpoint.every=1000", "eval.every=1000"
    train = tmp_path / "train.py"  # SLURM's --signal=USR1@300: to every process of the step
    train.write_text(IN_STEP.format(when="step == 20", fault="os.kill(os.getpid(), signal.SIGUSR1)"))
    first = job(*steps, python=f'[[ $2 == --cfg ]] || set -- {train} "${{@:2}}"\nexec "$REAL_PYTHON" "$@"')
    assert first.status == 0, first.err
    assert job.requeues() == [f"requeue {os.getpid()}"], first.out + first.err
    saved = int((tmp_path / "run" / "checkpoints" / "latest").read_text().strip().removeprefix("step-"))
    assert 20 <= saved < 200
    assert f"requeued, to go on from step-{saved:08}" in first.out

    second = job(*steps, SLURM_RESTART_COUNT="1", SLURM_NTASKS="1")
    assert second.status == 0, second.err
    assert f"resuming {tmp_path / 'run'} after step {saved}" in second.out
    assert "step 200 of 200 saved" in second.out
    assert len(job.requeues()) == 1
    assert lines_in(tmp_path / "run" / "metrics.jsonl") == 201  # 200 training lines, one evaluation
    assert "--kill-on-bad-exit=0" in job.srun()


@pytest.mark.slow
def test_an_error_that_a_person_must_mend_is_not_requeued(job, tmp_path):
    """Only the first process checks the run's directory; the other only sees that the first is gone."""
    (tmp_path / "run").mkdir()
    with own_run(tmp_path / "run"):
        failed = job()
    assert failed.status == 1, failed.err
    assert job.requeues() == []
    assert "error: process 1 stops: process 0 ended with an error, see its message" in failed.err
    assert len(failed.err.splitlines()) == 2, failed.err


@pytest.mark.parametrize(
    ("environment", "status", "requeued"),
    [
        ({"STATUS": "137"}, 0, True),  # a process that the kernel killed
        ({"STATUS": "75", "SLURM_RESTART_COUNT": "2"}, 0, True),
        ({"STATUS": "75", "SLURM_RESTART_COUNT": "3"}, 75, False),  # again and again, and no new checkpoint
        ({"STATUS": "75", "JOB_STATE": "CANCELLED"}, 75, False),
        ({"STATUS": "1"}, 1, False),
    ],
)
@pytest.mark.slow
def test_what_is_requeued(job, environment, status, requeued):
    ended = job(python='[[ $2 == --cfg || $RANK != "$LOCAL_RANK" ]] || exit "$STATUS"', **environment)
    assert ended.status == status, ended.err
    assert job.requeues() == ([f"requeue {os.getpid()}"] if requeued else []), ended.out + ended.err
