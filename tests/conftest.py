"""What tests share: the device that they run on, a tiny dataset, a tiny run, and commands in this process.

Tests run on the CPU, with kernels in Triton's interpreter, and see no GPU. Only `pytest -m gpu` sees it: tests marked
gpu then make their tensors there. The same tests also run on the CPU, except those that need what only a GPU has.
"""

import base64
import gc
import json
import os
import random
import resource
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest
import surroundings  # noqa: F401 (before rich)
import torch
from made_on import MadeOn, suspended

from common.console import console
from common.files import write_atomic
from common.settings import decode

pytest.register_assert_rewrite("faults", "ranks")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what it runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests press Ctrl-C; what they start inherits this
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # as nohup starts what it runs
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
torch.set_num_threads(int(os.environ.get("TEST_THREADS", "1")))  # tests run side by side
torch.cpu._is_amx_tile_supported = lambda: False  # in this process, the same types on every CPU

ROOT = Path(__file__).resolve().parent.parent
WORDS = ["def", "self", "return", "the", "of", "(", ")", ":", "\n", "é", "日本", "🙂"]


def pytest_configure(config):
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # read when torch first looks for GPUs
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # as runtime/device.py sets it
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported


def pytest_collection_finish():
    gc.collect()
    gc.freeze()  # later collections need not look at what is imported: that takes a third of a second each time


def pytest_runtest_setup(item):
    """Skip tests marked gpu where they cannot run, and everywhere else those marked gpu(alone=True)."""
    marker = item.get_closest_marker("gpu")
    if marker is None:
        return
    if item.config.option.markexpr == "gpu" and not torch.cuda.is_available():
        pytest.skip("needs a GPU, and torch sees none")
    if marker.kwargs.get("alone") and not torch.cuda.is_available():
        pytest.skip("runs on a GPU only: python -m pytest -m gpu")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call():
    """Lift a test's limit on the size of files before pytest reports, as its own output may be a larger file."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        return (yield)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


@pytest.fixture(autouse=True)
def device(request):
    """The GPU for tests marked gpu under `pytest -m gpu`, else the CPU. What the test makes is there."""
    if not (request.node.get_closest_marker("gpu") and torch.cuda.is_available()):
        yield torch.device("cpu")
        return
    with MadeOn(torch.device("cuda")) as mode:
        yield mode.device


class Result(NamedTuple):
    """A command's exit status and output."""

    status: int
    out: str
    err: str


@pytest.fixture(scope="session")
def make_dataset(tmp_path_factory):
    """Makes datasets: of given documents, or of 40,000 bytes to train on and 4,000 to validate."""
    from data.prepare.dataset import PrepareConfig, prepare_dataset

    def make(seed=0, tokenizer=None, documents=None, val_fraction=0.1, data="jsonl"):
        folder = tmp_path_factory.mktemp("corpus")
        rng = random.Random(seed)
        documents = documents or [{"text": " ".join(rng.choices(WORDS, k=80))} for _ in range(160)]
        (folder / "corpus.jsonl").write_text("\n".join(map(json.dumps, documents)), encoding="utf-8")
        raw = {
            "data": {"name": data, "path": str(folder / "corpus.jsonl")},
            "tokenizer": tokenizer or {"name": "bytes"},
            "out_dir": str(folder / "dataset"),
            "val_fraction": val_fraction,
        }
        prepare_dataset(decode(PrepareConfig, raw))
        return folder / "dataset"

    return make


@pytest.fixture(scope="session")
def dataset_dir(make_dataset):
    """The dataset of most tests."""
    return make_dataset()


@pytest.fixture(scope="session")
def chat_dir(make_dataset):
    """Conversations, with questions and answers of many lengths."""
    rng = random.Random(0)

    def said(role):
        return {"role": role, "content": " ".join(rng.choices(WORDS, k=rng.randrange(1, 12)))}

    roles = [["system", *["user", "assistant"] * rng.randrange(1, 4)] for _ in range(100)]
    return make_dataset(documents=[{"messages": [*map(said, each)]} for each in roles], data="chat")


@pytest.fixture(scope="session")
def rank_file(tmp_path_factory):
    """A tiny vocabulary for tokenizer=gpt2: the 256 bytes and three pairs, 260 ids with <|endoftext|>."""
    path = tmp_path_factory.mktemp("ranks") / "tiny.tiktoken"
    tokens = [bytes([i]) for i in range(256)] + [b"th", b"re", b"se"]
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)))
    return path


@pytest.fixture
def gpt2_ranks():
    """GPT-2's own rank file."""
    path = ROOT.parent / "shared" / "tokenizer" / "gpt2.tiktoken"
    if not path.is_file():
        pytest.skip("no copy of GPT-2's rank file here")
    return path


@pytest.fixture
def tiny(dataset_dir, tmp_path):
    """Builds a TrainConfig of a tiny model; settings given as {"optim.max_lr": 1e-3} replace its own."""
    from trainer.config import TrainConfig

    def build(changes=None):
        raw = {
            "run_dir": str(tmp_path / "run"),
            "dataset_dir": str(dataset_dir),
            "seq_len": 16,
            "batch_tokens": 64,
            "max_steps": 6,
            "model": {
                "n_vocab": 257,
                "n_layer": 1,
                "n_head": 2,
                "n_embd": 16,
                "attention": {"name": "log_space"},
                "block": {"name": "mlp"},
                "position": {"name": "log_recurrence"},
            },
            "optim": {"name": "adamw", "max_lr": 1e-2},
            "schedule": {"name": "one_cycle", "warmup_steps": 2},
            "runtime": {"device": "cpu", "dtype": "float32", "micro_batch": 2},
            "checkpoint": {"every": 2},
            "eval": {"every": 3, "batches": 4},
        }
        for key, value in (changes or {}).items():
            *path, last = key.split(".")
            node = raw
            for part in path:
                node = node.setdefault(part, {})
            node[last] = value
        return decode(TrainConfig, raw)

    return build


@pytest.fixture(scope="session")
def kept_runs(tmp_path_factory):
    """Where `run_of` keeps its runs, and the runs so far, by their settings."""
    return tmp_path_factory.mktemp("kept"), {}


@pytest.fixture
def run_of(tiny, kept_runs):
    """Gives a test's run_dir the run of tiny(changes), which is trained once for all tests and copied."""
    from trainer.loop import fit

    def copy(changes=None):
        folder, kept = kept_runs
        run_dir = tiny().run_dir
        key = json.dumps(changes)
        if key not in kept:
            fit(tiny(changes))
            kept[key] = run_dir.rename(folder / str(len(kept)))
        return Path(shutil.copytree(kept[key], run_dir, dirs_exist_ok=True))

    return copy


@pytest.fixture
def tiny_args(dataset_dir, tmp_path):
    """The same tiny run as arguments of train.py."""
    usual = "model=heinsen_1m model.n_layer=1 model.n_head=2 model.n_embd=16 seq_len=16 batch_tokens=64 max_steps=6 "
    usual += "optim.max_lr=1e-2 schedule.warmup_steps=2 runtime.device=cpu runtime.dtype=float32 "
    usual += "runtime.micro_batch=2 checkpoint.every=2 eval.every=3 eval.batches=4"
    return [f"run_dir={tmp_path / 'run'}", f"dataset_dir={dataset_dir}", *usual.split()]


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs an entry point ("train", "sample", ...) in this process, as if typed, and returns its status and output."""
    from hydra.core.global_hydra import GlobalHydra

    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")  # the command sets it; the environment is put back after the test
    monkeypatch.delenv("HYDRA_FULL_ERROR")

    def run(script, *arguments):
        GlobalHydra.instance().clear()
        monkeypatch.setattr(sys, "argv", [f"{script}.py", *arguments])
        capsys.readouterr()
        status = 0
        try:
            with suspended():
                runpy.run_path(str(ROOT / f"{script}.py"), run_name="__main__")
        except SystemExit as exit_:
            status = exit_.code or 0
        return Result(status, *capsys.readouterr())

    return run


@pytest.fixture
def pictures():
    """Asked for by tests of loss.png and eval.png."""


@pytest.fixture(autouse=True)
def no_pictures(request, monkeypatch):
    """In other tests these are files that say so: drawing takes longer than a tiny run."""
    if "pictures" not in request.fixturenames:
        monkeypatch.setattr(
            "trainer.records.run_records.draw_losses",
            lambda _, path, *titles: write_atomic(path, b"a picture"),
        )
        monkeypatch.setattr("inference.evaluate.draw_evaluation", lambda *_: b"a picture")


@pytest.fixture
def restored_torch():
    """Restores the process-wide settings that choose_compute changes."""
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    precision = torch.get_float32_matmul_precision()
    n_threads = torch.get_num_threads()
    yield
    torch.use_deterministic_algorithms(is_deterministic)
    torch.set_float32_matmul_precision(precision)
    torch.set_num_threads(n_threads)
    console.quiet = False


@pytest.fixture
def memory(tmp_path):
    """A folder where fsync is free, if there is one: a killed process leaves the same files in any folder."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path) as folder:
        yield Path(folder)


@pytest.fixture
def run_process():
    """Starts each command in its own process, with one thread, and waits for all of them, which must end well."""
    running = []

    def run(*command_lines, timeout=240):
        env = os.environ | {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"}
        options = {"cwd": ROOT, "stdout": -1, "stderr": -1, "text": True, "env": env, "start_new_session": True}
        started = [subprocess.Popen([sys.executable, *map(str, line)], **options) for line in command_lines]
        running.extend(started)
        results = []
        for process in started:
            output = process.communicate(timeout=timeout)
            results.append(Result(process.returncode, *output))
        assert [result.status for result in results] == [0] * len(results), results
        return results

    yield run
    for process in running:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # torchrun's children too: they hold the pipes
            process.communicate()
