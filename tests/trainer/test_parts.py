"""Checkpoints of older versions, where every process wrote a part, are read by any number of processes."""

import itertools
import shutil

import pytest
import torch
from faults import metrics
from forged import edit, sign
from safetensors.torch import load_file, save_file

from common.settings import UserError
from trainer.checkpoint import load_model, newest, open_checkpoint
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
        (lambda parts: parts[1].update(matrix=torch.zeros(3, 4)), "the parts of matrix do not fit together"),
        (lambda parts: parts[1].update(matrix=torch.tensor(1.0)), "the parts of matrix do not fit"),
        (lambda parts: parts[2].update(matrix=parts[2]["matrix"].double()), "matrix has the type float64, must"),
        (lambda parts: set_vectors(parts, 1.0, 2.0, [3.0, 4.0, 5.0]), "the parts of vector do not fit"),
        (lambda parts: parts[2].update(other=torch.zeros(1)), "'other' is unknown"),
        (lambda parts: [part.pop("vector") for part in parts], "'vector' is missing"),
    ],
)
def test_parts_that_do_not_make_up_the_tensors_are_refused(tmp_path, change, message):
    parts = split(TENSORS, 3)
    change(parts)
    with pytest.raises(UserError, match=message):
        read_tensors(write(tmp_path, parts), expected(TENSORS), {"matrix": slice(0, 2)})


def divide(checkpoint, count):
    """Write a checkpoint's model and optimizer in parts instead, as older versions did."""
    for file in ("model", "optimizer"):
        whole = checkpoint / f"{file}.safetensors"
        for number, part in enumerate(split(load_file(whole), count), start=1):
            save_file(part, checkpoint / f"{file}-{number:05}-of-{count:05}.safetensors")
        whole.unlink()
    names = sorted(path.name for path in checkpoint.iterdir() if path.name != "manifest.json")
    edit(checkpoint / "manifest.json", lambda manifest: manifest.update(sha256=dict.fromkeys(names)))
    sign(checkpoint)


@pytest.fixture
def run_dir(run_of):
    """A run of 6 steps; its last checkpoint is in three parts."""
    run_dir = run_of()
    divide(newest(run_dir), 3)
    return run_dir


PART_NAMES = [f"{name}-0000{i}-of-00003.safetensors" for name in ("model", "optimizer") for i in (1, 2, 3)]


def test_a_checkpoint_in_parts_is_read_like_any_other(run_of, tmp_path):
    whole = run_of()
    divided = shutil.copytree(whole, tmp_path / "divided")
    divide(newest(divided), 3)
    assert {path.name for path in newest(divided).iterdir()} >= {*PART_NAMES, "manifest.json", "random.safetensors"}
    for name in ("model", "optimizer", "random"):
        tensors = load_file(newest(whole) / f"{name}.safetensors")
        read = open_checkpoint(divided).tensors(name, expected(tensors))
        assert all(torch.equal(read[key], value) for key, value in tensors.items())
    (before, _), (after, _) = load_model(whole), load_model(divided)
    assert all(torch.equal(value, after.state_dict()[key]) for key, value in before.state_dict().items())


@pytest.mark.parametrize("name", PART_NAMES[2:4])
def test_damage_in_any_part_is_named(run_dir, name):
    file = newest(run_dir) / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    for damaged in (bytes(content), content[:-1], None):
        file.unlink()
        if damaged is not None:
            file.write_bytes(damaged)
        with pytest.raises(UserError, match=f"step-00000006/{name} is missing or damaged"):
            open_checkpoint(newest(run_dir))
    assert open_checkpoint(run_dir).state.step == 4


@pytest.mark.parametrize(
    "change",
    [
        lambda sums: sums.pop(PART_NAMES[5]),
        lambda sums: [sums.pop(name) for name in PART_NAMES[:3]],
        lambda sums: sums.update({"model-00004-of-00003.safetensors": "0"}),
        lambda sums: sums.update({"model.safetensors": "0"}),
        lambda sums: sums.update({"model/../../x": sums.pop(PART_NAMES[0])}),
        lambda sums: sums.update({f"model{i}": "0" for i in range(10_000)}),
    ],
)
def test_a_manifest_must_list_all_parts_and_nothing_else(run_dir, change):
    edit(newest(run_dir) / "manifest.json", lambda manifest: change(manifest["sha256"]))
    with pytest.raises(UserError, match=r"manifest\.json is damaged: it must list .*, or all of their parts$"):
        open_checkpoint(newest(run_dir))


# ----- with processes


@pytest.mark.slow
def test_any_number_of_processes_resumes_from_parts_as_from_one_file(train_in_processes, tmp_path, command):
    how = "runtime.micro_batch=1", "eval.every=6"
    train_in_processes("one", 2, *how, "runtime.strategy=fsdp", "stop_at=4")
    divide(newest(shutil.copytree(tmp_path / "one", tmp_path / "parts")), 2)
    for processes, strategy in [(4, "fsdp"), (1, "ddp")]:
        ends = []
        for start in ("one", "parts"):
            shutil.copytree(tmp_path / start, tmp_path / f"{start}-{processes}-{strategy}")
            run_dir = train_in_processes(
                f"{start}-{processes}-{strategy}", processes, *how, f"runtime.strategy={strategy}"
            )
            files = {path.name: path.read_bytes() for path in newest(run_dir).glob("*.safetensors")}
            ends.append((files, metrics(run_dir)))
        assert ends[0] == ends[1]
        assert sorted(ends[0][0]) == ["model.safetensors", "optimizer.safetensors", "random.safetensors"]
    path = newest(tmp_path / "parts")
    sampled = command("sample", f"checkpoint={path}", "prompt=def", "max_new_tokens=2", "runtime.device=cpu")
    assert sampled.status == 0, sampled.err
