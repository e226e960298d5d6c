"""Checkpoints that every process writes a part of: whole or absent, and read by any number of processes."""

import errno
import itertools
import shutil
import threading
from types import SimpleNamespace

import pytest
import ranks
import torch
from faults import assert_same, finish, is_whole, kills, live, metrics, names_given, result, steps_of
from forged import edit
from safetensors.torch import load_file, save_file

import trainer.checkpoint
from common.settings import UserError
from data.tokenizer import load_tokenizer
from trainer.checkpoint import checkpoints_dir, load_model, newest, open_checkpoint, save_checkpoint
from trainer.tensor_file import read_tensors

pytestmark = pytest.mark.usefixtures("restored_torch")


def expected(tensors):
    return {name: (value.shape, (value.dtype,)) for name, value in tensors.items()}


def split(tensors, count):
    """Parts as fsdp makes them: rows as torch.chunk divides them, and tensors without rows in the first."""
    parts = [{} for _ in range(count)]
    for name, value in tensors.items():
        rows = torch.chunk(value, count) if value.dim() else (value,)
        for part, chunk in itertools.zip_longest(parts, rows):
            if chunk is not None or value.dim():
                part[name] = value[:0].clone() if chunk is None else chunk.clone()
    return parts


def write(folder, parts):
    paths = [folder / f"{number}.safetensors" for number in range(len(parts))]
    for part, path in zip(parts, paths, strict=True):
        save_file(part, path)
    return paths


def set_vectors(parts, *values):
    for part, value in zip(parts, values, strict=True):
        part["vector"] = torch.tensor(value, dtype=torch.float64)


TENSORS = {
    "matrix": torch.randn(7, 3, generator=torch.Generator().manual_seed(1)),
    "row": torch.randn(1, 2, generator=torch.Generator().manual_seed(2)).bfloat16(),
    "vector": torch.arange(5.0, dtype=torch.float64),
    "none": torch.zeros(0, 4),
    "step": torch.tensor(3.0),
}


@pytest.mark.parametrize("count", [1, 2, 3, 5, 9])
def test_every_range_of_rows_is_read_from_any_number_of_parts(tmp_path, count):
    paths = write(tmp_path, split(TENSORS, count))
    for name, value in read_tensors(paths, expected(TENSORS)).items():
        assert (value.dtype, value.shape) == (TENSORS[name].dtype, TENSORS[name].shape), name
        assert torch.equal(value, TENSORS[name]), name
    for start, stop in itertools.combinations_with_replacement(range(8), 2):
        some = read_tensors(paths, expected(TENSORS), {"matrix": slice(start, stop)})
        assert torch.equal(some["matrix"], TENSORS["matrix"][start:stop])
        assert torch.equal(some["vector"], TENSORS["vector"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda parts: parts.pop(), r"matrix has the shape \[6, 3\], must have \[7, 3\]"),
        (lambda parts: parts[1].pop("matrix"), r"matrix has the shape \[4, 3\], must have"),
        (lambda parts: parts[1].update(matrix=torch.zeros(3, 4)), r"matrix has the shape \[3, 4\], must have"),
        (lambda parts: parts[1].update(matrix=torch.zeros(3)), r"matrix has the shape \[3\], must have"),
        (
            lambda parts: parts[1].update(matrix=torch.tensor(1.0)),
            "matrix is in several parts, and one of them is a single number",
        ),
        (lambda parts: parts[2].update(matrix=parts[2]["matrix"].double()), "matrix has the type float64, must"),
        (lambda parts: parts[1].update(step=torch.tensor(3.0)), "step is in several parts, and one of them is a"),
        (
            lambda parts: set_vectors(parts, 1.0, 2.0, [3.0, 4.0, 5.0]),
            "vector is in several parts, and one of them is",
        ),
        (lambda parts: parts[2].update(other=torch.zeros(1)), "'other' is unknown"),
        (lambda parts: [part.pop("vector") for part in parts], "'vector' is missing"),
    ],
)
def test_parts_that_do_not_make_up_the_tensors_are_refused(tmp_path, change, message):
    parts = split(TENSORS, 3)
    change(parts)
    with pytest.raises(UserError, match=message) as error:
        read_tensors(write(tmp_path, parts), expected(TENSORS), {"matrix": slice(0, 2)})
    assert "\n" not in str(error.value)


def together(count, save):
    """Call `save(rank, exchange)` in `count` threads at once; returns the errors by rank."""
    errors, texts, barrier = [None] * count, [""] * count, threading.Barrier(count)

    def process(rank):
        def exchange(text):
            texts[rank] = text
            barrier.wait(60)
            everyones = list(texts)
            barrier.wait(60)
            return everyones

        try:
            save(rank, exchange)
        except OSError as error:
            errors[rank] = error

    threads = [threading.Thread(target=process, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return errors


@pytest.fixture
def run(run_of, tiny, dataset_dir):
    """A run of 6 steps, its model and optimizer, and a function that writes its last checkpoint in three parts."""
    run_dir = run_of()
    path = newest(run_dir)
    tensors = {name: load_file(path / f"{name}.safetensors") for name in ("model", "optimizer", "random")}
    state, tokenizer = open_checkpoint(path).state, load_tokenizer(dataset_dir / "tokenizer.json")
    parts = {name: split(tensors[name], 3) for name in ("model", "optimizer")}

    def write_parts(step=6, before=lambda rank: None):
        def save(rank, exchange):
            own = {name: parts[name][rank] for name in parts} | {"random": {} if rank else tensors["random"]}
            at_step = state.model_copy(update={"step": step})
            save_checkpoint(run_dir, own, at_step, tokenizer, lambda: before(rank), rank, exchange)

        return together(3, save)

    return SimpleNamespace(dir=run_dir, tensors=tensors, write_parts=write_parts)


PART_NAMES = [f"{name}-0000{i}-of-00003.safetensors" for name in ("model", "optimizer") for i in (1, 2, 3)]


def test_a_checkpoint_in_parts_is_read_like_any_other(run):
    before, _ = load_model(run.dir)
    assert run.write_parts() == [None] * 3
    path = newest(run.dir)
    others = ["manifest.json", "random.safetensors", "state.json", "tokenizer.json"]
    assert sorted(p.name for p in path.iterdir()) == sorted([*PART_NAMES, *others])
    checkpoint = open_checkpoint(run.dir)
    for name, tensors in run.tensors.items():
        read = checkpoint.tensors(name, expected(tensors))
        assert all(torch.equal(read[key], value) for key, value in tensors.items())
    after, _ = load_model(run.dir)
    assert all(torch.equal(value, after.state_dict()[key]) for key, value in before.state_dict().items())
    assert not list(path.parent.glob("*.tmp"))


@pytest.mark.parametrize("name", PART_NAMES)
def test_damage_in_any_part_is_named(run, name):
    run.write_parts()
    file = newest(run.dir) / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    for damaged in (bytes(content), content[:-1], None):
        file.unlink()
        if damaged is not None:
            file.write_bytes(damaged)
        with pytest.raises(UserError, match=f"step-00000006/{name} is missing or damaged") as error:
            open_checkpoint(newest(run.dir))
        assert "\n" not in str(error.value)
    assert open_checkpoint(run.dir).state.step == 4


@pytest.mark.parametrize(
    "change",
    [
        lambda sums: sums.pop(PART_NAMES[0]),
        lambda sums: sums.pop(PART_NAMES[5]),
        lambda sums: [sums.pop(name) for name in PART_NAMES[:3]],
        lambda sums: sums.update({"model-00004-of-00003.safetensors": "0"}),
        lambda sums: [sums.pop(name) for name in PART_NAMES],
        lambda sums: sums.update({"model.safetensors": "0"}),
        lambda sums: sums.update({"model/../../x": sums.pop(PART_NAMES[0])}),
        lambda sums: sums.update({f"model{i}": "0" for i in range(10_000)}),
    ],
)
def test_a_manifest_must_list_all_parts_and_nothing_else(run, change):
    run.write_parts()
    edit(newest(run.dir) / "manifest.json", lambda manifest: change(manifest["sha256"]))
    with pytest.raises(UserError, match=r"manifest\.json is damaged: it must list .*, or all of their parts$"):
        open_checkpoint(newest(run.dir))


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("when", "failing"), [*itertools.product(["before", "save_file"], [0, 1, 2]), ("save_tokenizer", 0), ("rename", 0)]
)
def test_an_error_in_one_process_is_an_error_in_all_and_leaves_nothing(run, monkeypatch, failing, when):
    files = sorted(checkpoints_dir(run.dir).iterdir())

    def fail(rank):
        if rank == failing:
            raise FULL

    def save(tensors, path):
        fail(int(path.name.partition("-0000")[2][:1]) - 1)
        save_file(tensors, path)

    if when == "save_tokenizer":
        monkeypatch.setattr(trainer.checkpoint, "save_tokenizer", lambda tokenizer, path: fail(0))
    if when == "rename":
        monkeypatch.setattr(trainer.checkpoint.os, "rename", lambda path, to: fail(0))
    if when == "save_file":
        monkeypatch.setattr(trainer.checkpoint, "save_file", save)
    errors = run.write_parts(step=8, before=fail if when == "before" else lambda rank: None)
    assert errors[failing] is FULL
    others = {str(error) for rank, error in enumerate(errors) if rank != failing}
    assert others == {f"process {failing}: No space left on device"}
    assert sorted(checkpoints_dir(run.dir).iterdir()) == files


# ----- with processes


@pytest.fixture
def train(tiny_args, tmp_path):
    """Trains with fsdp in some processes, two steps between checkpoints; returns the results by rank."""

    def run(name, processes, *options, script=("train.py",)):
        how = "runtime.strategy=fsdp", "runtime.hang_seconds=30", "runtime.micro_batch=1", "eval.every=6"
        return ranks.run(processes, *script, *tiny_args, *how, f"run_dir={tmp_path / name}", *options)

    return run


def assert_ended(results, statuses):
    assert [result.status for result in results] == statuses, [result.err for result in results]


def assert_same_end(a, b):
    """The same tensors, to the byte, in the newest checkpoints of two runs, and the same lines of metrics."""
    first, second = ({path.name: path.read_bytes() for path in newest(run).glob("*.safetensors")} for run in (a, b))
    assert first == second
    assert metrics(a) == metrics(b)


WITHOUT_A_WHOLE = """
import runpy
from trainer.distributed import World

full = World.full

def only_numbers(world, tensor):
    assert tensor.dim() == 0, "no process holds a whole tensor"
    return full(world, tensor)

World.full = only_numbers
runpy.run_path("train.py", run_name="__main__")
"""


@pytest.mark.slow
def test_each_process_saves_its_rows_and_resumes_as_from_one_file(train, tmp_path, command):
    assert_ended(train("run", 2, "stop_at=4", script=("-c", WITHOUT_A_WHOLE)), [0, 0])
    path = newest(tmp_path / "run")
    assert path.name == "step-00000004"

    one = shutil.copytree(tmp_path / "run", tmp_path / "one")
    files = {name: sorted(path.glob(f"{name}*")) for name in ("model", "optimizer", "random")}
    assert [len(parts) for parts in files.values()] == [2, 2, 1]
    tensors = {}
    for name, parts in files.items():
        loaded = [load_file(part) for part in parts]
        tensors[name] = {
            key: torch.cat([part[key] for part in loaded if key in part]) if value.dim() else value
            for key, value in loaded[0].items()
        }
        whole = sum(value.nbytes for value in tensors[name].values())
        assert all(sum(value.nbytes for value in part.values()) < 0.6 * whole for part in loaded) or name == "random"
    checkpoint = open_checkpoint(path)
    shutil.rmtree(newest(one))
    save_checkpoint(one, tensors, checkpoint.state, load_tokenizer(path / "tokenizer.json"))
    assert (newest(one) / "model.safetensors").is_file()

    for name, processes, options in [("four", 4, []), ("two", 2, []), ("alone", 1, []), ("ddp", 2, ["ddp"])]:
        for start in ("run", "one"):
            shutil.copytree(tmp_path / start, tmp_path / f"{name}-{start}")
            strategy = [f"runtime.strategy={strategy}" for strategy in options]
            assert_ended(train(f"{name}-{start}", processes, *strategy), [0] * processes)
        assert_same_end(tmp_path / f"{name}-one", tmp_path / f"{name}-run")
    sampled = command("sample", f"checkpoint={path}", "prompt=def", "max_new_tokens=2", "runtime.device=cpu")
    assert sampled.status == 0, sampled.err


FAULT = """
import os, runpy, signal
import trainer.checkpoint

save_file, killed, step = trainer.checkpoint.save_file, {killed}, "step-0000000{step}"

def save(tensors, path):
    if os.environ["RANK"] == "1" and step in str(path) and path.name.startswith("optimizer"):
        if not killed:
            raise OSError(28, "No space left on device")
        save_file(tensors, path)
        os.truncate(path, path.stat().st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)
    save_file(tensors, path)

trainer.checkpoint.save_file = save
runpy.run_path("train.py", run_name="__main__")
"""


def fault(killed, step):
    return "-c", FAULT.replace("{killed}", str(killed)).replace("{step}", str(step))


@pytest.mark.slow
@pytest.mark.parametrize("step", [4, 6], ids=["while_others_train", "in_the_last_save"])
def test_a_process_that_is_killed_while_its_part_is_half_written(train, tmp_path, step):
    """The others end by themselves, and the same command resumes from the checkpoint before."""
    assert_ended(train("whole", 2), [0, 0])
    results = train("run", 2, script=fault(True, step))
    assert_ended(results, [75, -9])
    assert "rank 0 lost contact with another process" in results[0].err
    assert newest(tmp_path / "run").name == f"step-0000000{step - 2}"
    assert open_checkpoint(newest(tmp_path / "run"))
    assert_ended(train("run", 2), [0, 0])
    assert_same_end(tmp_path / "whole", tmp_path / "run")


@pytest.mark.slow
def test_a_full_disk_under_one_process(train, tmp_path):
    assert_ended(train("whole", 2), [0, 0])
    why = "the save after step 4 failed (process 1: No space left on device)"
    results = train("run", 2, script=fault(False, 4))
    assert_ended(results, [1, 1])
    assert why in results[0].err
    assert steps_of(tmp_path / "run") == [2]
    results = train("on", 2, "checkpoint.on_error=continue", script=fault(False, 4))
    assert_ended(results, [0, 0])
    assert why in results[0].err
    assert_same_end(tmp_path / "whole", tmp_path / "on")


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_killed_at_some_operations_on_the_parts(quick, rank):
    """Either process is killed before or in an operation, also by a power cut, and then the other."""
    config = quick({"runtime.strategy": "fsdp", "runtime.micro_batch": 2})
    operations = finish(config, processes=2, rank=rank).operations
    expected = result(config.run_dir)
    saved = {done.path[-len("model-00001-of-00002.safetensors") :] for done in operations if done.name == "save_file"}
    assert f"model-0000{rank + 1}-of-00002.safetensors" in saved
    assert f"model-0000{2 - rank}-of-00002.safetensors" not in saved
    assert bool(names_given([done for done in operations if done.thread == "other"])) == (rank == 0)
    shutil.rmtree(config.run_dir)
    chosen = [
        *list(kills(operations))[:: 30 if rank == 0 else 2],
        *list(kills(operations, "half", power=True))[:: 6 if rank == 0 else 2],
    ]
    assert len(chosen) > 8
    for kill in chosen:
        assert live(config, processes=2, kill=kill, rank=rank).killed, kill
        for step in steps_of(config.run_dir):
            assert is_whole(config.run_dir, step), kill
        life = finish(config, processes=2)
        assert life.err == "", kill
        assert_same(config.run_dir, expected, kill)
        shutil.rmtree(config.run_dir)
