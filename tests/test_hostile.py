"""Untrusted checkpoints, datasets and settings: anything invalid gives a one-line error and never runs code."""

import contextlib
import json
import os
import pickle
import shutil
import struct

import pytest
import torch
from forged import edit, sign
from safetensors.torch import load_file, save_file

from common.files import open_file, read_json, sha256_file, write_atomic
from common.settings import UserError, decode
from data.shards import read_manifest
from data.tokenizers.build import read_rank_file
from inference.evaluate import EvaluateConfig, run_evaluation
from inference.sample import SampleConfig, run_sampling
from runtime.checkpoint import find_newest, open_checkpoint
from runtime.tensor_file import load_tensors
from trainer.loop import fit

pytestmark = pytest.mark.usefixtures("restored_torch")

CPU = {"device": "cpu", "dtype": "float32"}


def fit_for_a_terminal(error):
    """A short line without commands to the terminal."""
    return str(error).isprintable() and len(str(error)) < 1500


@contextlib.contextmanager
def refused(message="."):
    """A UserError of one short line that a terminal can be given."""
    with pytest.raises(UserError, match=message) as caught:
        yield
    assert fit_for_a_terminal(caught.value)


# ----- files and JSON


@pytest.mark.parametrize(
    "content",
    [
        *(b"[NaN]", b"[Infinity]", b'{"a": -Infinity}', b"1e999", b"9" * 5000, b"[" * 10**6),
        *(b'"\\ud800"', b'{"\\udfff": 1}', b"\xff", b"\xef\xbb\xbf{}", b'"\x00"', b"", b"{", b"{} {}"),
    ],
)
def test_what_is_not_json_of_finite_numbers_and_whole_characters_is_refused(tmp_path, content):
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with refused(r"cannot read .*x\.json: "):
        read_json(path)


def test_a_file_beyond_the_limit_of_bytes_is_not_read(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("[1, 2, 3]")
    assert read_json(path, limit=9) == [1, 2, 3]
    with refused("is larger than 8 bytes"):
        read_json(path, limit=8)
    os.truncate(path, 2**40)
    for read in (read_json, read_rank_file):
        with refused(r"x\.json "):
            read(path)


def link(path):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def folder(path):
    path.unlink()
    path.mkdir()


def endless(path):
    path.unlink()
    path.symlink_to("/dev/zero")


NO_FILES = [link, pipe, folder, endless]


def tensors_in(path):
    return load_tensors([path], EXPECTED)


@pytest.mark.parametrize("replace", NO_FILES)
def test_what_is_no_file_is_refused_at_once(tmp_path, replace):
    path = tmp_path / "x.json"
    path.write_text("{}")
    replace(path)
    for read in (read_json, open_file, sha256_file, tensors_in):
        with refused(r"x\.json is a link, a folder, a pipe or a device"):
            read(path)
    if replace is not link:  # a rank file may be a link
        with refused():
            read_rank_file(path)


def test_nothing_is_written_through_a_link_that_waits_for_it(tmp_path):
    (tmp_path / "mine").write_text("mine")
    for name in ("x.json", "x.json.tmp"):
        (tmp_path / name).symlink_to("mine")
    write_atomic(tmp_path / "x.json", "new")
    assert not (tmp_path / "x.json").is_symlink()
    assert (tmp_path / "x.json").read_text() == "new"
    assert (tmp_path / "mine").read_text() == "mine"


# ----- tensors

EXPECTED = {"a": (torch.Size([2, 3]), (torch.float32, torch.float64)), "b": (torch.Size([]), (torch.int64,))}
GOOD = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "I64", "shape": [], "data_offsets": [24, 32]},
}


def tensor_file(path, header):
    """A safetensors file by hand."""
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(32))
    return path


def changed(name, **changes):
    return GOOD | {name: GOOD[name] | changes}


def test_the_tensors_that_are_expected_are_read(tmp_path):
    tensors = {"a": torch.randn(2, 3), "b": torch.tensor(7)}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    read = load_tensors([tmp_path / "x.safetensors"], EXPECTED)
    assert list(read) == ["a", "b"]
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)
    by_hand = load_tensors([tensor_file(tmp_path / "y.safetensors", GOOD)], EXPECTED)
    assert torch.equal(by_hand["a"], torch.zeros(2, 3))


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"a": GOOD["a"], "c": GOOD["b"]}, "'b' is missing"),
        (GOOD | {"c\n": {"dtype": "U8", "shape": [0], "data_offsets": [32, 32]}}, r"'c\\n' is unknown"),
        (changed("a", shape=[3, 2]), r"a has the shape \[3, 2\], must have \[2, 3\]"),
        (changed("b", shape=[1]), r"b has the shape \[1\], must have \[\]"),
        (changed("a", dtype="I32"), "a has the type int32, must have float32 or float64"),
        (changed("a", shape=[2**40, 2**40]), "not a whole"),
        (changed("a", data_offsets=[0, 2**60]), "not a whole"),
        ({"a": GOOD["a"]}, "not a whole"),
        (GOOD | {"a": [1]}, "not a whole"),
        (json.dumps(GOOD).encode().replace(b'"b"', b'"a"'), "not a whole"),
        (b"[" * 60_000, "not a whole"),
    ],
)
def test_tensors_that_are_not_those_expected_are_refused(tmp_path, header, message):
    with refused(rf"x\.safetensors .*{message}"):
        load_tensors([tensor_file(tmp_path / "x.safetensors", header)], EXPECTED)


# ----- settings


@pytest.mark.parametrize("section", ["model.attention", "optim"])
def test_a_target_is_an_unknown_key_in_every_section(tiny, section):
    with refused(f"config {section}: unknown key '_target_'"):
        tiny({f"{section}._target_": "os.system"})


# ----- datasets


@pytest.fixture
def dataset(dataset_dir, tmp_path):
    """A copy of the dataset that may be spoilt."""
    return shutil.copytree(dataset_dir, tmp_path / "dataset")


def first_shard(manifest):
    return manifest["splits"]["train"]["shards"][0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: first_shard(m).update(file="../../x"), "shard 0 of train is '../../x', must be 'train-00000.bin'"),
        (lambda m: first_shard(m).update(tokens=2**60), "less than or equal to 281474976710656"),
        (lambda m: m["splits"].pop("val"), "splits"),
        (lambda m: m.update({"\x1b[2J\n": 1}), "is damaged"),
        (lambda m: m.update(format_version=1), "has format version 1, this program reads 3"),
        (lambda m: m.update(set_names=["\x1b[2J"]), "printable"),
        (lambda m: m.update(set_names=[*m["set_names"], *map(str, range(2**16))]), "at most 65536 items"),
        (lambda m: m["tokenizer"].update(n_vocab=2**40), "n_vocab"),
    ],
)
def test_a_dataset_with_a_strange_manifest_is_refused(dataset, change, message):
    edit(dataset / "manifest.json", change)
    with refused(message):
        read_manifest(dataset)


# ----- checkpoints

TENSORS = ["model.safetensors", "optimizer.safetensors", "random.safetensors"]
FILES = [*TENSORS, "state.json", "tokenizer.json"]


FOUR_STEPS = {"max_steps": 4, "schedule.warmup_steps": 1}


@pytest.fixture
def checkpoint(run_of):
    """The folder of the only checkpoint of a run that was stopped after 2 of its 4 steps."""
    return find_newest(run_of(FOUR_STEPS | {"stop_at": 2}))


@pytest.fixture
def uses(tiny, checkpoint):
    """The ways to use a checkpoint: each succeeds or is refused."""
    config = tiny(FOUR_STEPS)
    raw = {"checkpoint": str(checkpoint), "runtime": CPU}
    return {
        "sample": lambda: run_sampling(decode(SampleConfig, raw | {"max_new_tokens": 2, "prompt": "def"})),
        "eval": lambda: run_evaluation(decode(EvaluateConfig, raw | {"batches": 1})),
        "train": lambda: fit(config),
    }


def refused_uses(uses):
    """The names of the uses that were refused, in one line that a terminal can be given."""
    refused_names = []
    for name, use in uses.items():
        try:
            use()
        except UserError as error:
            refused_names.append(name if fit_for_a_terminal(error) else f"{name}: {error}")
    return refused_names


def test_a_checkpoint_as_it_should_be_is_used(checkpoint, uses):
    sign(checkpoint)
    assert sorted(p.name for p in checkpoint.iterdir()) == sorted([*FILES, "manifest.json"])
    assert refused_uses(uses) == []


class Payload:
    """Unpickled, it makes a folder."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("name", [*FILES, "manifest.json", "../../config.json"])
def test_a_pickle_in_any_place_is_not_run(checkpoint, uses, tmp_path, name):
    marker = tmp_path / "marker"
    if name == "model.safetensors":
        torch.save({"weight": Payload(marker)}, checkpoint / name)
    else:
        (checkpoint / name).write_bytes(pickle.dumps(Payload(marker)))
    if name in FILES:
        sign(checkpoint)
    refused_names = refused_uses(uses)
    with contextlib.suppress(UserError):
        open_checkpoint(checkpoint / "../latest")
    assert not marker.exists()
    if name in ("optimizer.safetensors", "random.safetensors"):
        assert refused_names == ["train"]
    elif name in FILES:
        assert len(refused_names) >= 2
    pickle.loads(pickle.dumps(Payload(marker)))
    assert marker.is_dir(), "it would have run"


@pytest.mark.parametrize(("name", "replace"), zip([*FILES, "manifest.json"], NO_FILES * 2, strict=False))
def test_what_is_no_file_in_a_checkpoint_is_refused(checkpoint, uses, name, replace):
    replace(checkpoint / name)
    assert refused_uses(uses) == (["train"] if name in TENSORS[1:] else list(uses))


HOME = "${oc.env:HOME}"
STRANGE_JSON = {
    "a file above": ("manifest.json", lambda m: m["sha256"].update({"../../x": "0" * 64})),
    "a file without a sum": ("manifest.json", lambda m: m["sha256"].pop("state.json")),
    "a long version": ("manifest.json", lambda m: m.update(format_version="\x1b[2J\n" * 10**5)),
    "4 MB of state": ("state.json", lambda s: s.update(x="x" * 2**22)),
    "a target": ("state.json", lambda s: s["model"].update(_target_="os.system")),
    "a huge model": ("state.json", lambda s: s["model"].update(n_embd=2**17)),
    "an id above": ("state.json", lambda s: s.update(run_id="../../x")),
    "an interpolation": ("state.json", lambda s: s["model"]["attention"].update(name=HOME)),
}


@pytest.mark.parametrize(("file", "change"), STRANGE_JSON.values(), ids=STRANGE_JSON)
def test_a_checkpoint_with_strange_json_is_refused(checkpoint, uses, file, change):
    edit(checkpoint / file, change)
    if file != "manifest.json":
        sign(checkpoint)
    assert refused_uses(uses) == list(uses)


@pytest.mark.parametrize("named", [HOME, "\0", "\x1b[2J\nx"], ids=["interpolation", "zero byte", "escapes"])
def test_a_dataset_that_a_state_names_is_looked_for_and_no_more(checkpoint, uses, named, capsys):
    edit(checkpoint / "state.json", lambda s: s.update(dataset_dir=named))
    sign(checkpoint)
    assert "eval" in refused_uses(uses)
    said = capsys.readouterr()
    assert os.environ["HOME"] + "\n" not in said.out + said.err
    assert "\x1b[2J" not in said.out + said.err


@pytest.mark.parametrize("file", TENSORS)
def test_a_checkpoint_with_an_unknown_tensor_is_refused(checkpoint, uses, file):
    save_file(load_file(checkpoint / file) | {"x\x1b[2J\n": torch.zeros(3)}, checkpoint / file)
    sign(checkpoint)
    assert refused_uses(uses) == (list(uses) if file == "model.safetensors" else ["train"])
    with refused(rf"{file} .*unknown"):
        uses["train"]()


@pytest.mark.parametrize("content", [b"/etc/passwd", b"step-00000002/../../x", b"\xff\0", b"step-" + b"1" * 10**6])
def test_a_pointer_that_leads_elsewhere_is_refused(checkpoint, content):
    (checkpoint.parent / "latest").write_bytes(content)
    with refused("does not name a checkpoint"):
        open_checkpoint(checkpoint.parent / "latest")


def test_what_is_no_checkpoint_is_named(checkpoint, dataset_dir, tmp_path):
    assert open_checkpoint(checkpoint.parent).path == open_checkpoint(checkpoint.parents[1]).path == checkpoint
    with refused("is a dataset: give the directory of a run"):
        open_checkpoint(dataset_dir)
    with refused(r"holds no checkpoint: give a run directory, such as .*/run$"):
        open_checkpoint(tmp_path)
    (tmp_path / "export").mkdir()
    with refused("holds no checkpoint: give a run directory"):
        open_checkpoint(tmp_path / "export")
