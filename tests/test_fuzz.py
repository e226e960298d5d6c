"""Files with random but reproducible changes: reading them soon gives a valid result or a UserError."""

import contextlib
import copy
import hashlib
import json
import shutil
import time

import pytest
import test_hostile
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.settings import UserError
from data.document_index import find_documents
from data.shards import TokenStream, read_manifest
from data.tokenizers.build import load_tokenizer
from runtime.checkpoint import find_newest, load_model, open_checkpoint

pytestmark = pytest.mark.usefixtures("restored_torch")

SECONDS = 20
"""No example takes a tenth of it on an idle machine; one that works through a size from the file takes for ever."""


def fuzz(examples):
    """The same examples at every run."""
    return settings(
        derandomize=True,
        database=None,
        deadline=None,
        max_examples=examples,
        suppress_health_check=list(HealthCheck),
    )


@contextlib.contextmanager
def nothing_but_user_errors():
    """Fails on any other exception, and on a message that is not one short line."""
    started = time.monotonic()
    message = ""
    try:
        yield
    except UserError as error:
        message = str(error)
    assert test_hostile.fit_for_a_terminal(message)
    assert time.monotonic() - started < SECONDS


# ----- what is done to files


@st.composite
def damaged(draw, content):
    """`content` in which up to 4 stretches, or all from there on, are other bytes, gone or doubled."""
    content = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(content)))
        stop = min(len(content), start + draw(st.sampled_from([0, 1, 2, 4, 8, 100])))
        new = draw(st.one_of(st.binary(max_size=9), st.sampled_from([b"", content[start:stop] * 2])))
        content[start : draw(st.sampled_from([stop, stop, len(content)]))] = new
    return bytes(content)


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, -1, 1, 2, 2**16, 2**31, 2**63 - 1, 2**63, 2**64, 10**30, 10**400, -(10**400)]),
    st.sampled_from([0.0, -0.0, 1e-320, 1e308, float("nan"), float("inf"), 0.5]),
    st.sampled_from(
        ["", "0", "1", "\0", "\x1b[2J\n", "../../x", "/dev/zero", "${oc.env:HOME}", "a" * 10**5, "é\ud800"]
    ),
    st.sampled_from([[], {}, [[]], {"_target_": "os.system"}, {"name": "none"}, {"": None}, ["a"] * 1000]),
).map(copy.deepcopy)


@st.composite
def mutated(draw, value):
    """JSON data in which up to 3 members are replaced by odd values or each other, dropped, or new."""
    value = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, 3))):
        places = list(inside(value))
        parent, key = draw(st.sampled_from(places))
        how = draw(st.sampled_from(["odd", "odd", "odd", "drop", "add", "swap"]))
        other, there = draw(st.sampled_from(places))
        if how == "drop":
            del parent[key]
        elif how == "add" and isinstance(parent, dict):
            parent[draw(st.sampled_from(["x", "_target_", "name", "\x1b[2J\n"]))] = draw(ODD)
        else:
            parent[key] = copy.deepcopy(other[there]) if how == "swap" else draw(ODD)
    return value


def inside(value):
    """Every (container, key) in JSON data, at all levels; of long lists the first few."""
    keys = []
    if isinstance(value, dict):
        keys = list(value)[:50]
    elif isinstance(value, list):
        keys = range(min(len(value), 5))
    for key in keys:
        yield value, key
        yield from inside(value[key])


def values(content):
    """JSON with other values, such as NaN and half surrogate pairs."""
    return mutated(json.loads(content)).map(lambda value: json.dumps(value).encode())


def overwritten(content):
    """Content of the right length, because a wrong length is detected immediately."""
    return damaged(content).map(lambda other: other.ljust(len(content), b"\xff")[: len(content)])


# ----- what is done with them


@pytest.fixture(scope="module")
def dataset(dataset_dir, tmp_path_factory):
    """A dataset whose files each example spoils and puts back."""
    return shutil.copytree(dataset_dir, tmp_path_factory.mktemp("fuzz") / "dataset")


@contextlib.contextmanager
def replaced(path, content):
    """A file with other content for a while."""
    before = path.read_bytes()
    path.write_bytes(content)
    try:
        yield
    finally:
        path.write_bytes(before)


def use_dataset(folder):
    """What training and scripts/inspect_dataset.py do with a dataset."""
    load_tokenizer(folder / "tokenizer.json")
    manifest = read_manifest(folder)
    for split in manifest.splits:
        list(find_documents(TokenStream(folder, manifest, split), 50, 1000))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("manifest.json", values),
        ("train-00000.idx", overwritten),
        ("tokenizer.json", values),
    ],
)
@fuzz(60)
@given(data=st.data())
def test_any_change_of_a_dataset_is_harmless_or_a_user_error(dataset, data, name, change):
    path = dataset / name
    with replaced(path, data.draw(change(path.read_bytes()))), nothing_but_user_errors():
        use_dataset(dataset)


@pytest.fixture
def checkpoint(run_of):
    """The only one of a run, after 2 of 4 steps, whose files each example spoils and puts back."""
    return find_newest(run_of({"max_steps": 4, "schedule.warmup_steps": 1, "stop_at": 2}))


def use_checkpoint(path):
    """What sampling does, and finding what to resume."""
    open_checkpoint(path.parent.parent)
    load_model(path)


def signed(path, name, content):
    """The manifest of a checkpoint in which one file has this content, as an attacker would write it."""
    manifest = json.loads((path / "manifest.json").read_bytes())
    manifest["sha256"][name] = hashlib.sha256(content).hexdigest()
    return json.dumps(manifest).encode()


@pytest.mark.parametrize(
    ("name", "change", "right_sum"),
    [
        ("manifest.json", values, False),
        ("state.json", values, True),
        ("model.safetensors", damaged, True),
    ],
)
@fuzz(30)
@given(data=st.data())
def test_any_change_of_a_checkpoint_is_harmless_or_a_user_error(checkpoint, data, name, change, right_sum):
    content = data.draw(change((checkpoint / name).read_bytes()))
    manifest = checkpoint / "manifest.json"
    with (
        replaced(manifest, signed(checkpoint, name, content) if right_sum else manifest.read_bytes()),
        replaced(checkpoint / name, content),
        nothing_but_user_errors(),
    ):
        use_checkpoint(checkpoint)
