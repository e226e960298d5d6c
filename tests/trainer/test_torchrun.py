"""Several processes are one: the same run from 1 or 2 processes, on one machine or as two agents."""

import json

import pytest
import ranks
import torch
from faults import metrics
from safetensors.torch import load_file

from runtime.checkpoint import find_newest

TORCHRUN = ["-m", "torch.distributed.run"]


@pytest.fixture
def args(tiny_args):
    return [*tiny_args, "max_steps=10", "runtime.micro_batch=1", "checkpoint.every=5", "eval.every=5"]


def assert_same_steps(a, b, tolerance):
    """Line for line the same run, its numbers at most `tolerance` apart."""
    for one, two in zip(metrics(a), metrics(b), strict=True):
        assert one.keys() == two.keys()
        for key in one:
            scale = max(1, one[key]) if key == "grad_norm" else 1
            assert one[key] == pytest.approx(two[key], rel=0, abs=scale * tolerance), (one["step"], key)


def assert_same_checkpoint(a, b, tolerance):
    """The same tensors, at most `tolerance` apart."""
    for name in ("model", "optimizer"):
        first, second = (load_file(checkpoint / f"{name}.safetensors") for checkpoint in (a, b))
        torch.testing.assert_close(first, second, rtol=0, atol=tolerance)


def in_two_processes(*arguments):
    """What two processes print on standard output, together; they print nothing else."""
    results = ranks.run(2, *arguments)
    assert [result.err for result in results] == ["", ""]
    return "".join(result.out for result in results)


def test_two_processes_take_the_steps_of_one(command, args, tmp_path):
    assert command("train", *args, f"run_dir={tmp_path / 'one'}").status == 0
    out = in_two_processes("train.py", *args)
    assert_same_steps(tmp_path / "one", tmp_path / "run", tolerance=1e-5)
    assert (
        out.count("the CPU: 2 processes of one thread") == out.count("step 10 of 10 saved") == 1
    )  # one process speaks
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == sorted(p.name for p in (tmp_path / "one").iterdir())

    evaluation = [f"checkpoint={tmp_path / 'run'}", "runtime.device=cpu", "runtime.dtype=float64", "micro_batch=3"]
    evaluation += ["stride=12", "contexts=[20,1000]"]
    assert command("eval", *evaluation).status == 0
    alone = json.loads((tmp_path / "run" / "eval.json").read_text())
    in_two_processes("eval.py", *evaluation)
    together = json.loads((tmp_path / "run" / "eval.json").read_text())
    assert_same_values(together, alone)


@pytest.mark.slow
def test_two_processes_may_compile(command, args, tmp_path):
    """torch cuts a compiled model into a graph for each bucket of gradients that DDP sends."""
    args = [*args, "max_steps=4", "model.n_embd=256", "model.n_layer=3"]  # 9.5 MB of gradients: more than one bucket
    assert command("train", *args, f"run_dir={tmp_path / 'one'}").status == 0
    in_two_processes("train.py", *args, "runtime.compile=true", "runtime.recompute=block")
    assert_same_steps(tmp_path / "one", tmp_path / "run", tolerance=1e-5)


def assert_same_values(a, b):
    """The same JSON, up to the order of summation."""
    if isinstance(b, dict | list):
        assert list(a) == list(b) if isinstance(b, dict) else len(a) == len(b)
        for key in b if isinstance(b, dict) else range(len(b)):
            assert_same_values(a[key], b[key])
    else:
        assert a == (pytest.approx(b, rel=1e-12) if isinstance(b, float) else b)


OTHERWISE = """
import os, runpy, sys
import torch
import runtime.distributed
script, *sys.argv[1:], other = sys.argv[1:]
if os.environ["RANK"] == "1" and other.startswith("+"):
    sys.argv += other[1:].split()
elif os.environ["RANK"] == "1":
    exec(other)
runpy.run_path(script, run_name="__main__")
"""
CODE = "runtime.distributed.code_digest = lambda: 'mine'"


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (
            "+optim.max_lr=0.5 seed=2",
            "optim.max_lr=0.5 (process 0: 0.01), seed=2 (process 0: 1): start the same command",
        ),
        pytest.param("+dataset_dir=OTHER", "dataset_fingerprint=", marks=pytest.mark.slow),
        pytest.param("torch.__version__ = '2.9'", "torch=2.9 (process 0: ", marks=pytest.mark.slow),
        pytest.param(CODE, "code=mine (process 0: ", marks=pytest.mark.slow),
    ],
)
def test_processes_that_were_started_differently_are_refused_by_each(args, make_dataset, tmp_path, other, said):
    if "OTHER" in other:
        other = other.replace("OTHER", str(make_dataset(seed=1)))
    for result in ranks.run(2, "-c", OTHERWISE, "train.py", *args, other, status=1):
        (line,) = result.err.splitlines()
        assert "process 1 differs from process 0 in " in line
        assert said in line
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.slow
def test_two_agents_end_with_the_weights_of_one_process(command, run_process, args, tmp_path):
    args = [*args, "runtime.dtype=float64"]
    assert command("train", *args, f"run_dir={tmp_path / 'one'}").status == 0
    port = ranks.free_port()
    rendezvous = ["--nnodes=2", "--rdzv_backend=c10d", f"--rdzv_endpoint=localhost:{port}", "--rdzv_id=test"]
    agent = [*TORCHRUN, *rendezvous, "--nproc_per_node=1", "train.py", *args]
    run_process(agent, agent)
    assert_same_steps(tmp_path / "one", tmp_path / "run", tolerance=1e-9)
    assert_same_checkpoint(find_newest(tmp_path / "one"), find_newest(tmp_path / "run"), tolerance=1e-9)
