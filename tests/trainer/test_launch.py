"""python train.py in several processes that it starts: how many, what they print, and how they end."""

import json
import os
import signal
import time

import pytest
import ranks
import torch
from test_resume import assert_same_run
from test_signals import STUCK
from test_torchrun import assert_same_steps

from common.exits import AGAIN
from runtime import launch
from runtime.launch import free_memory, usable_cores
from trainer.launch import n_processes

GB = 2**30


@pytest.mark.parametrize(
    ("cores", "sequences", "tokens", "bytes_each", "processes"),
    [
        (2, 8, 1024, GB, 2),
        (8, 8, 1024, GB, 4),  # 256 tokens are the fewest that are worth an exchange of gradients
        (4, 3, 10**6, GB, 3),  # a sequence is not cut
        (1, 8, 10**6, GB, 1),
        (2, 8, 256, GB, 1),
        (2, 8, 10**6, 8 * GB, 2),  # half of the 32 GB
        (2, 8, 10**6, 9 * GB, 1),
        (16, 2, 10**6, GB, 1),  # threads use the other cores
    ],
)
def test_a_process_a_core_where_batch_and_memory_suffice(cores, sequences, tokens, bytes_each, processes):
    assert launch._choose(cores, sequences, tokens, bytes_each, free_bytes=32 * GB) == processes


@pytest.mark.parametrize(
    ("cgroup", "files", "cores", "memory"),
    [
        ("0::/", {}, 4, 2**42),
        ("0::/job", {"job/cpu.max": "max 100000", "cpu.max": "250000 100000", "job/memory.max": "7"}, 2, 7),
        ("0::/elsewhere", {"cpu.max": "50000 100000", "memory.max": "max"}, 1, 2**42),
        (
            "3:cpu,cpuacct:/a\n2:memory:/a",
            {"cpu,cpuacct/cpu.cfs_quota_us": "-1", "memory/memory.limit_in_bytes": "9"},
            4,
            9,
        ),
        ("3:cpu:/a", {"cpu/a/cpu.cfs_quota_us": "300000", "cpu/a/cpu.cfs_period_us": "100000"}, 3, 2**42),
    ],
)
def test_cores_and_memory_are_those_of_this_container(tmp_path, monkeypatch, cgroup, files, cores, memory):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4), raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    files = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in {"proc/self/cgroup": cgroup, "proc/meminfo": f"MemAvailable: {2**32} kB", **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert (usable_cores(tmp_path), free_memory(tmp_path)) == (cores, memory)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # as with OMP_NUM_THREADS=1
    assert usable_cores(tmp_path) == 1


def test_a_run_chooses_once_and_other_launchers_choose_for_it(tiny, monkeypatch):
    cores = 2
    for module in ("trainer", "runtime"):
        monkeypatch.setattr(f"{module}.launch.usable_cores", lambda: cores)
    config = tiny({"batch_tokens": 4096})
    assert n_processes(config) == 2
    assert n_processes(tiny()) == 1, "a small batch"
    assert n_processes(tiny({"runtime.processes": 5})) == 5
    config.run_dir.mkdir()
    for before, chosen in [(1, 1), (2, 2), (3, 2), ("damaged", 2)]:
        (config.run_dir / "config.json").write_text(json.dumps({"environment": {"processes": before}}))
        assert n_processes(config) == chosen
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert n_processes(config) == n_processes(tiny({"runtime.processes": 5})) == 1


def test_where_processes_cannot_meet_one_does_the_work(tiny, monkeypatch, capsys):
    def refused(*_):
        raise OSError

    monkeypatch.setattr("socket.create_connection", refused)
    assert launch.launch_processes(2, lambda config: config.seed, tiny()) == 1
    assert capsys.readouterr().out.startswith("processes cannot meet here")


@pytest.fixture
def args(tiny_args):
    return [*tiny_args, "runtime.micro_batch=1", "runtime.processes=2"]


def ended(process):
    (end,) = ranks.finish(process)
    return end


def test_a_run_in_two_processes_is_one_run(command, args, tmp_path):
    assert command("train", *args, "runtime.processes=1", f"run_dir={tmp_path / 'one'}").status == 0
    end = ranks.run_alone("train.py", *args)
    assert (end.status, end.err) == (0, "")
    assert end.out.count("device    the CPU: 2 processes of one thread, in float32\n") == 1
    assert len(lines := end.out.splitlines()) == len(set(lines)), "nothing is printed twice"
    assert_same_steps(tmp_path / "one", tmp_path / "run", tolerance=1e-5)
    environment = json.loads((tmp_path / "run" / "config.json").read_text())["environment"]
    assert (environment["processes"], environment["threads"]) == (2, 1)
    result = command("train", *args, "runtime.processes=1", "max_steps=7")
    assert "changed: processes=1 (was 2)\n" in result.out


def test_all_processes_of_eval_read_the_same_whole_checkpoint(command, args, tmp_path):
    assert command("train", *args, "runtime.processes=1", "checkpoint.every=2").status == 0
    newest = max((tmp_path / "run" / "checkpoints").glob("step-*"))
    with open(newest / "model.safetensors", "r+b") as file:
        file.truncate(100)
    end = ranks.run_alone("eval.py", f"checkpoint={tmp_path / 'run'}", "runtime.device=cpu", "contexts=[]")
    assert end.status == 0
    assert end.err.count("warning") == 1, "the damaged one is named once"


@pytest.mark.slow
def test_resuming_does_not_change_a_bit(args, tmp_path):
    ranks.run(2, "train.py", *args, f"run_dir={tmp_path / 'whole'}")
    for options in (["stop_at=4"], []):
        assert ranks.run_alone("train.py", *args, *options).status == 0
    assert_same_run(tmp_path / "whole", tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
@pytest.mark.parametrize("group", [False, True])
def test_a_signal_saves_and_stops_with_the_lines_of_one_process(args, tmp_path, number, group):
    args = [*args, "max_steps=10000", "checkpoint.every=10000", "eval.every=10000"]
    log = tmp_path / "run" / "metrics.jsonl"
    with ranks.alone("train.py", *args) as process:
        ranks.wait_until(lambda: ranks.lines_in(log) > 5, "5 steps")
        (os.killpg if group else os.kill)(process.pid, number)
        stopped = ended(process)
    assert stopped.status == AGAIN
    assert stopped.err == f"warning: {number.name}: saving and stopping; a second signal stops at once\n"
    step = int(json.loads(log.read_text().splitlines()[-1])["step"])
    last = f"stopped by {number.name}: step {step:,} of 10,000 is saved, and the same command resumes from it"
    assert stopped.out.splitlines()[-1] == last


@pytest.mark.slow
def test_a_second_signal_ends_processes_that_hang(args, tmp_path):
    with ranks.alone("-c", STUCK, *args) as process:
        ranks.wait_until(lambda: ranks.lines_in(tmp_path / "run" / "metrics.jsonl") == 2, "2 steps")
        for _ in range(2):
            os.kill(process.pid, signal.SIGINT)
            time.sleep(1)
        end = ended(process)
    assert end.status == 128 + signal.SIGINT
    assert end.err.splitlines()[1:] == [
        "error: SIGINT, the second signal: stopped at once; steps since the last save "
        "(all, if there is none) are lost, and the same command takes them again"
    ]
    assert not processes_of(process)


def processes_of(process):
    """The processes of a session that still run."""
    sessions = {}
    for stat in ranks.Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z":
            sessions.setdefault(int(fields[3]), []).append(int(stat.parent.name))
    return sessions.get(process.pid, [])


def faulty(rank, fault):
    """The code of a run in which a process has a fault after step 3."""
    return ranks.IN_STEP.format(when=f"(step, rank) == (3, {rank})", fault=fault)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_process_ends_the_run_with_a_line(args, rank):
    with ranks.alone("-c", faulty(rank, "os.kill(os.getpid(), 9)"), *args) as process:
        end = ended(process)
    assert end.status == AGAIN
    line = f"error: process {rank} was ended by SIGKILL (for lack of memory? Then use fewer runtime.processes): "
    assert end.err == f"{line}start the same command again\n"
    assert not processes_of(process)


@pytest.mark.slow
def test_a_killed_parent_lets_its_processes_save_and_leaves_none(args, tmp_path):
    fault = "os.kill(os.getppid(), 9); __import__('time').sleep(0.5)"
    with ranks.alone("-c", faulty(1, fault), *args, "max_steps=10000", "checkpoint.every=10000") as process:
        end = ended(process)
        assert (end.status, end.err) == (-signal.SIGKILL, "")
        ranks.wait_until(lambda: not processes_of(process), "the end of its processes", seconds=20)
        (end,) = ranks.finish(process)
    assert "stopped by SIGINT: step " in end.out


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_in_one_process_is_one_line_and_a_bug_a_traceback(args, rank):
    fault = "from common.settings import UserError; raise UserError('the disk: is full')"
    end = ranks.run_alone("-c", faulty(rank, fault), *args)
    assert (end.status, end.err) == (1, "error: the disk: is full\n")
    end = ranks.run_alone("-c", faulty(rank, "1 / 0"), *args, "runtime.device=cpu")
    assert end.status == 1
    assert end.err.count("Traceback") == end.err.count("ZeroDivisionError: division by zero\n") == 1
