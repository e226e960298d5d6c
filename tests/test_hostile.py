"""Untrusted checkpoints, datasets and settings: anything invalid gives a one-line error and never runs code."""

import contextlib
import json
import os
import pickle
import shutil
import signal
import socket
import struct
from pathlib import Path

import pytest
import torch
from forged import edit, sign
from safetensors.torch import load_file, save_file

from cli.compose import compose, to_dict
from common.files import open_file, read_json, sha256_file, write_atomic
from common.settings import UserError, decode
from data.documents import documents_in, read_index
from data.shards import read_manifest
from data.tokenizer import read_rank_file
from inference.evaluate import EvaluateConfig, run_evaluation
from inference.sample import SampleConfig, run_sampling
from model.gpt import GPT, GPTConfig
from trainer.checkpoint import load_model, newest, open_checkpoint
from trainer.config import TrainConfig
from trainer.loop import fit
from trainer.tensor_file import read_tensors

pytestmark = pytest.mark.usefixtures("restored_torch", "in_time")

CPU = {"device": "cpu", "dtype": "float32"}


@pytest.fixture
def in_time():
    """No test waits forever, for example on a pipe or an endless device."""

    def too_late(*_):
        pytest.fail("still waiting, or working, after five minutes")

    before = signal.signal(signal.SIGALRM, too_late)
    signal.alarm(300)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


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


DEEP = [b"[" * 65 + b"]" * 65, b'{"a":' * 65 + b"1" + b"}" * 65]


@pytest.mark.parametrize(
    "content",
    [
        *(b"[NaN]", b"[Infinity]", b'{"a": -Infinity}', b"1e999", b"9" * 5000, b"[" * 10**6, *DEEP),
        *(b'"\\ud800"', b'{"\\udfff": 1}', b"\xff", b"\xef\xbb\xbf{}", b'"\x00"', b"", b"{", b"{} {}"),
    ],
)
def test_what_is_not_json_of_finite_numbers_whole_characters_and_64_levels_is_refused(tmp_path, content):
    (tmp_path / "x.json").write_bytes(content)
    with refused(rf"cannot read .*x\.json: {'.* more than 64 levels deep' if content in DEEP else ''}"):
        read_json(tmp_path / "x.json")


def test_json_as_it_should_be_is_read(tmp_path):
    path = tmp_path / "x.json"
    for value in ([1, -2.5, 1e308, None, True, "é🙂\n\\ud800"], {"a": {"b": [[]]}}, json.loads("[" * 64 + "]" * 64)):
        for ascii in (True, False):
            path.write_text(json.dumps(value, ensure_ascii=ascii), encoding="utf-8")
            assert read_json(path) == value


def test_a_file_beyond_the_limit_of_bytes_is_not_read(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("[1, 2, 3]")
    assert read_json(path, limit=9) == [1, 2, 3]
    with refused("is larger than 8 bytes"):
        read_json(path, limit=8)
    os.truncate(path, 2**40)
    with refused("is larger than 268,435,456 bytes"):
        read_json(path)
    with refused():
        read_rank_file(path)


def link(path):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def dangling(path):
    path.unlink()
    path.symlink_to("nowhere")


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def folder(path):
    path.unlink()
    path.mkdir()


def listening(path):
    path.unlink()
    with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as server:  # its paths must be short
        server.bind(path.name)


def endless(path):
    path.unlink()
    path.symlink_to("/dev/zero")


NO_FILES = [link, dangling, pipe, folder, listening, endless]


def tensors_in(path):
    return read_tensors([path], EXPECTED)


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


def test_a_folder_may_be_reached_by_a_link_and_a_rank_file_may_be_one(checkpoint, dataset, rank_file, tmp_path):
    for name, target in (("run", checkpoint), ("data", dataset), ("ranks", rank_file)):
        (tmp_path / f"linked-{name}").symlink_to(target)
    assert load_model(tmp_path / "linked-run")[0].config == load_model(checkpoint)[0].config
    assert read_manifest(tmp_path / "linked-data") == read_manifest(dataset)
    assert read_rank_file(tmp_path / "linked-ranks") == read_rank_file(rank_file)


def test_a_path_with_a_zero_byte_is_refused(tmp_path):
    with refused("is not a valid path"):
        read_json(Path(f"{tmp_path}/\0"))


def test_nothing_is_written_through_a_link_that_waits_for_it(tmp_path):
    (tmp_path / "mine").write_text("mine")
    for name in ("x.json", "x.json.tmp"):
        (tmp_path / name).symlink_to("mine")
    write_atomic(tmp_path / "x.json", "new")
    assert not (tmp_path / "x.json").is_symlink()
    assert ((tmp_path / "x.json").read_text(), (tmp_path / "mine").read_text()) == ("new", "mine")
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError, match=r"/folder'$"):
        write_atomic(tmp_path / "folder", "new")


# ----- tensors

FLOATS = (torch.float32, torch.float64)
EXPECTED = {"a": (torch.Size([2, 3]), FLOATS), "b": (torch.Size([]), (torch.int64,))}
GOOD = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "I64", "shape": [], "data_offsets": [24, 32]},
}


def tensor_file(path, header, body=bytes(32), length=None):
    """A safetensors file by hand."""
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + body)
    return path


def changed(name, **changes):
    return GOOD | {name: GOOD[name] | changes}


def test_the_tensors_that_are_expected_are_read(tmp_path):
    tensors = {"a": torch.randn(2, 3), "b": torch.tensor(7)}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    read = read_tensors([tmp_path / "x.safetensors"], EXPECTED)
    assert list(read) == ["a", "b"]
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)
    assert torch.equal(read_tensors([tensor_file(tmp_path / "y.safetensors", GOOD)], EXPECTED)["a"], torch.zeros(2, 3))
    save_file({}, tmp_path / "none.safetensors")
    assert read_tensors([tmp_path / "none.safetensors"], {}) == {}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"a": GOOD["a"], "c": GOOD["b"]}, "'b' is missing"),
        (GOOD | {"c\n": {"dtype": "U8", "shape": [0], "data_offsets": [32, 32]}}, r"'c\\n' is unknown"),
        (changed("a", shape=[3, 2]), r"a has the shape \[3, 2\], must have \[2, 3\]"),
        (changed("b", shape=[1]), r"b has the shape \[1\], must have \[\]"),
        (changed("a", dtype="I32"), "a has the type int32, must have float32 or float64"),
        (changed("a", shape=[2**40, 2**40]), "not a whole"),
        (changed("a", dtype="F8_E4M3"), "not a whole"),
        (changed("a", data_offsets=[0, 2**60]), "not a whole"),
        ({"a": GOOD["a"]}, "not a whole"),
        (GOOD | {"a": [1]}, "not a whole"),
        (json.dumps(GOOD).encode().replace(b'"b"', b'"a"'), "not a whole"),
        (b"", "not a whole"),
        (b"[" * 60_000, "not a whole"),
    ],
)
def test_tensors_that_are_not_those_expected_are_refused(tmp_path, header, message):
    with refused(rf"x\.safetensors .*{message}"):
        read_tensors([tensor_file(tmp_path / "x.safetensors", header)], EXPECTED)


@pytest.mark.parametrize("cut", [0, 1, 7, 8, 9, 60, -33, -32, -1])
def test_a_tensor_file_that_was_cut_off_or_has_something_behind_it_is_refused(tmp_path, cut):
    path = tensor_file(tmp_path / "x.safetensors", GOOD)
    content = path.read_bytes()
    for damaged in (content[:cut], content + b"x"):
        path.write_bytes(damaged)
        with refused(r"x\.safetensors is not a whole safetensors file"):
            read_tensors([path], EXPECTED)


_MEASURE = """
import resource, sys, torch
from pathlib import Path
from common.settings import UserError
from trainer.tensor_file import read_tensors

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

good, *paths = map(Path, sys.argv[1:])
expected = {"a": (torch.Size([2, 3]), [torch.float32]), "b": (torch.Size([]), [torch.int64])}
read_tensors([good], expected)
before = peak()
for path in paths:
    try:
        read_tensors([path], expected)
    except UserError:
        print("refused", path.name)
print(peak() - before)
"""


@pytest.mark.slow
def test_a_header_of_terabytes_takes_no_memory(tmp_path, run_process):
    """Long headers, and headers that describe large tensors, in sparse files of the full size."""
    huge = changed("a", shape=[2**38], data_offsets=[0, 2**40])
    paths = [
        tensor_file(tmp_path / "long", GOOD, length=2**64 - 1),
        tensor_file(tmp_path / "large", huge),
        tensor_file(tmp_path / "both", huge, length=2**30),
        tensor_file(tmp_path / "many", {str(i): GOOD["a"] for i in range(10**6)}),
        tensor_file(tmp_path / "just", GOOD),
    ]
    for path in paths:
        os.truncate(path, 2**41)
    good = tensor_file(tmp_path / "good", GOOD)
    (result,) = run_process(["-c", _MEASURE, good, *paths])
    *said, growth = result.out.splitlines()
    assert said == [f"refused {path.name}" for path in paths]
    assert int(growth) < 2**25


# ----- the architecture


@pytest.mark.parametrize(
    "key",
    [
        *("n_vocab", "pad_vocab", "n_layer", "n_head", "head_dim", "n_embd"),
        *("attention.d_key", "attention.d_val", "block.expansion", "position.max_len"),
    ],
)
@pytest.mark.parametrize(
    "value", [0, -1, 2**24 + 1, 2**63, 10**400], ids=["zero", "negative", "more", "overflow", "huge"]
)
def test_a_size_that_no_model_has_is_refused(raw, key, value):
    model = raw["model"] | {"position": {"name": "learned"}}
    part, _, name = key.rpartition(".")
    (model[part] if part else model)[name] = value
    with refused(key):
        decode(GPTConfig, model)


@pytest.mark.parametrize("attention", ["log_space_signed", "softmax"])
@pytest.mark.slow
def test_the_largest_model_that_is_allowed_can_be_laid_out(attention):
    largest = {"n_vocab": 2**24, "pad_vocab": 2**16, "n_layer": 1024, "n_head": 2**12, "head_dim": 2**16}
    sizes = {} if attention == "softmax" else {"d_key": 2**24, "d_val": 2**24}
    parts = {"attention": {"name": attention, **sizes}, "block": {"name": "mlp", "expansion": 2**24}}
    parts |= {"position": {"name": "learned", "max_len": 2**24}}
    with torch.device("meta"):
        gpt = GPT(decode(GPTConfig, {**largest, "n_embd": 2**17, **parts}))
    assert max(p.numel() for p in gpt.parameters()) * 8 < 2**63


# ----- settings

STRANGE = ["${oc.env:HOME}", "${oc.decode:1}", "{{7*7}}", "$(id)", "!!python/object/apply:os.system"]


@pytest.fixture
def raw(tiny):
    return tiny().model_dump(mode="json")


@pytest.mark.parametrize("part", ["", "model", "model.attention", "optim", "schedule", "runtime", "tracker", "data"])
def test_a_target_is_an_unknown_key_everywhere(raw, part):
    node = raw
    for key in filter(None, part.split(".")):
        node = node[key]
    node["_target_"] = "os.system"
    with refused(f"{part and f'config {part}: '}unknown key '_target_'"):
        decode(TrainConfig, raw)


@pytest.mark.parametrize("text", STRANGE)
def test_text_stays_text(raw, text):
    assert str(decode(TrainConfig, raw | {"dataset_dir": text}).dataset_dir) == text
    for key in ("seed", "model", "resume"):
        with refused(key):
            decode(TrainConfig, raw | {key: text})


@pytest.mark.parametrize(
    "text",
    ["seed: [1\n", "# @package _global_\nhydra: null\n", "# @package _global_\nseed: ${oc.env:HOME}\n"],
)
def test_a_strange_experiment_is_one_line(tmp_path, text):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "strange.yaml").write_text(text)
    with refused():
        to_dict(compose("train", ["experiment=strange", "dataset_dir=x"], str(tmp_path)))


def test_a_folder_of_experiments_may_have_any_name(tmp_path):
    folder = tmp_path / "it's, [mine]"
    (folder / "experiment").mkdir(parents=True)
    (folder / "experiment" / "own.yaml").write_text("# @package _global_\nseed: 7\n")
    assert compose("train", ["experiment=own"], str(folder)).seed == 7


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
        (lambda m: first_shard(m).update(sha256="0"), "sha256"),
        (lambda m: first_shard(m).pop("index_sha256"), "index_sha256"),
        (lambda m: m["splits"]["train"].update(shards=[]), "tokens of train: .* in its shards"),
        (lambda m: next(iter(m["splits"]["train"]["sets"].values())).update(documents=0), "documents of train: 0 in"),
        (lambda m: m["splits"]["train"]["sets"].update(other=m["splits"]["train"]["sets"].popitem()[1]), "set 'other'"),
        (lambda m: m["splits"]["train"]["shards"].append(first_shard(m)), "shard 1 of train is"),
        (lambda m: m["splits"].update(test=m["splits"]["val"]), "test"),
        (lambda m: m["splits"].pop("val"), "splits"),
        (lambda m: m.update({"\x1b[2J\n": 1}), "is damaged"),
        (lambda m: m.update(format_version=2), "has format version 2, this program reads 3"),
        (lambda m: m.update(format_version="\x1b[2J" * 10**5), r"has format version '\\x1b"),
        (lambda m: m.update(set_names=["\x1b[2J"]), "printable"),
        (lambda m: m.update(set_names=m["set_names"] * 2), "has a name twice"),
        (lambda m: m.update(set_names=[*m["set_names"], *map(str, range(2**16))]), "at most 65536 items"),
        (lambda m: m["tokenizer"].update(n_vocab=2**40), "n_vocab"),
        (lambda m: m["tokenizer"].update(name="x" * 10**6, n_vocab=0), "is damaged"),
        (lambda m: m.update(inputs=[7]), "is damaged"),
    ],
)
def test_a_dataset_with_a_strange_manifest_is_refused(dataset, change, message):
    edit(dataset / "manifest.json", change)
    with refused(message):
        read_manifest(dataset)


SPOILT = ["manifest.json", "train-00000.bin", "train-00000.idx", "val-00000.bin", "tokenizer.json"]


@pytest.mark.parametrize(("name", "replace"), zip(SPOILT, NO_FILES[:5], strict=True))
def test_what_is_no_file_in_a_dataset_is_refused(dataset, tiny, name, replace):
    replace(dataset / name)
    with refused(name):
        fit(tiny({"dataset_dir": str(dataset)}))
    if "tokenizer" not in name:
        with refused(name):
            read_manifest(dataset)


def test_an_index_that_becomes_a_link_is_not_followed(dataset):
    manifest = read_manifest(dataset)
    link(dataset / "train-00000.idx")
    with refused("is a link"):
        read_index(dataset, manifest, manifest.splits["train"].shards[0])
    with refused("is a link"):
        next(documents_in(dataset, manifest, "train", 0, 1))


# ----- checkpoints

TENSORS = ["model.safetensors", "optimizer.safetensors", "random.safetensors"]
FILES = [*TENSORS, "state.json", "tokenizer.json"]


FOUR_STEPS = {"max_steps": 4, "schedule.warmup_steps": 1}


@pytest.fixture
def config(tiny):
    return tiny(FOUR_STEPS)


@pytest.fixture
def checkpoint(run_of):
    """The folder of the only checkpoint of a run that was stopped after 2 of its 4 steps."""
    return newest(run_of(FOUR_STEPS | {"stop_at": 2}))


@pytest.fixture
def uses(config, checkpoint):
    """The ways to use a checkpoint: each succeeds or is refused."""
    raw = {"checkpoint": str(checkpoint), "runtime": CPU}
    return {
        "sample": lambda: run_sampling(decode(SampleConfig, raw | {"max_new_tokens": 2, "prompt": "def"})),
        "eval": lambda: run_evaluation(decode(EvaluateConfig, raw | {"batches": 1})),
        "train": lambda: fit(config),
    }


def refusals(uses):
    """The names of the uses that were refused, in one line."""
    names = []
    for name, use in uses.items():
        try:
            use()
        except UserError as error:
            names.append(name if fit_for_a_terminal(error) else f"{name}: {error}")
    return names


def test_a_checkpoint_as_it_should_be_is_used(checkpoint, uses):
    sign(checkpoint)
    assert sorted(p.name for p in checkpoint.iterdir()) == sorted([*FILES, "manifest.json"])
    assert refusals(uses) == []


class Payload:
    """Unpickled, it makes a folder."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("name", [*FILES, "manifest.json", "../latest", "../../config.json", "../../metrics.jsonl"])
def test_a_pickle_in_any_place_is_not_run(checkpoint, uses, tmp_path, name):
    marker = tmp_path / "marker"
    if name == "model.safetensors":
        torch.save({"weight": Payload(marker)}, checkpoint / name)
    else:
        (checkpoint / name).write_bytes(pickle.dumps(Payload(marker)))
    if name in FILES:
        sign(checkpoint)
    refused_ = refusals(uses)
    with contextlib.suppress(UserError):
        open_checkpoint(checkpoint / "../latest")
    assert not marker.exists()
    if name in ("optimizer.safetensors", "random.safetensors"):
        assert refused_ == ["train"]
    elif name in FILES:
        assert len(refused_) >= 2


def test_the_pickle_would_have_run(tmp_path):
    pickle.loads(pickle.dumps(Payload(tmp_path / "marker")))
    assert (tmp_path / "marker").is_dir()


@pytest.mark.parametrize(("name", "replace"), zip([*FILES, "manifest.json"], NO_FILES, strict=True))
def test_what_is_no_file_in_a_checkpoint_is_refused(checkpoint, uses, name, replace):
    replace(checkpoint / name)
    assert refusals(uses) == (["train"] if name in TENSORS[1:] else list(uses))


@pytest.mark.parametrize("replace", [link, dangling, pipe, folder])
@pytest.mark.parametrize(
    "name",
    [
        *("config.json", "metrics.jsonl", "loss.png", "checkpoints/latest", "checkpoints/best"),
        *("config.json.tmp", "metrics.jsonl.tmp", "loss.png.tmp", "checkpoints/latest.tmp"),
        "checkpoints/step-00000004.tmp",
    ],
)
@pytest.mark.slow
def test_what_is_no_file_elsewhere_in_a_run_is_never_followed(config, checkpoint, name, replace):
    """Training continues beside it, or names the obstacle; the target of a link is never written to."""
    path = config.run_dir / name
    path.touch()
    before = path.read_bytes()
    replace(path)
    with contextlib.suppress(UserError, OSError):
        fit(config)
    assert replace is not link or path.with_name("elsewhere").read_bytes() == before
    assert not path.with_name("nowhere").exists()


@pytest.mark.parametrize("value", [float("nan"), 1e38])
def test_weights_that_are_no_numbers_break_nothing(checkpoint, uses, value):
    change_tensors(checkpoint / "model.safetensors", lambda tensors: [w.fill_(value) for w in tensors.values()])
    sign(checkpoint)
    refusals(uses)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m["sha256"].update({"../../x": "0" * 64}),
        lambda m: m["sha256"].update({"../" + name: m["sha256"].pop(name) for name in list(m["sha256"])}),
        lambda m: m["sha256"].pop("state.json"),
        lambda m: m.update(format_version="\x1b[2J\n" * 10**5),
    ],
)
def test_a_checkpoint_with_a_strange_manifest_is_refused(checkpoint, uses, change):
    edit(checkpoint / "manifest.json", change)
    assert refusals(uses) == list(uses)


@pytest.mark.parametrize("name", ["state.json", "manifest.json"])
def test_json_of_a_checkpoint_that_is_too_large_is_refused(checkpoint, name):
    (checkpoint / name).write_text('{"x": "' + "x" * 2**22 + '"}')
    if name != "manifest.json":
        sign(checkpoint)
    with refused(rf"{name} is larger than"):
        load_model(checkpoint)


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.update(format_version=99),
        lambda s: s.update({"\x1b[2J\n": 1}),
        lambda s: s["model"].update(_target_="os.system"),
        lambda s: s["model"].update(n_layer=64),
        lambda s: s["model"].update(n_embd=2**17),
        lambda s: s["model"]["attention"].update(name="${oc.env:HOME}"),
        lambda s: s["model"].update(position={"name": "learned", "max_len": 10**18}),
        lambda s: s.update(run_id="../../x"),
        lambda s: s.update(step=-1),
        lambda s: s.update(seq_len=0),
        lambda s: s.update(seed="x" * 10**6),
    ],
)
def test_a_checkpoint_with_a_strange_state_is_refused(checkpoint, uses, change):
    edit(checkpoint / "state.json", change)
    sign(checkpoint)
    assert refusals(uses) == list(uses)


@pytest.mark.parametrize(
    "named",
    ["${oc.env:HOME}", "/dev/zero", "../../x", "\0", "\x1b[2J\nx", "/" + "x/" * 5000, "x" * 10**6],
    ids=["interpolation", "device", "above", "zero byte", "escapes", "deep", "long"],
)
def test_a_dataset_that_a_state_names_is_looked_for_and_no_more(checkpoint, uses, named, capsys):
    edit(checkpoint / "state.json", lambda s: s.update(dataset_dir=named))
    sign(checkpoint)
    assert "eval" in refusals(uses)
    said = capsys.readouterr()
    assert os.environ["HOME"] + "\n" not in said.out + said.err
    assert "\x1b[2J" not in said.out + said.err


def test_a_window_that_no_model_was_trained_with_takes_no_memory(checkpoint, uses):
    """seq_len is the length of eval.py's windows."""
    edit(checkpoint / "state.json", lambda s: s.update(seq_len=10**9))
    sign(checkpoint)
    assert "train" in refusals(uses)


def change_tensors(path, change):
    tensors = {name: value.clone() for name, value in load_file(path).items()}
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize("file", TENSORS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, name: t.pop(name), "missing"),
        (lambda t, name: t.update({"x\x1b[2J\n": torch.zeros(3)}), "unknown"),
        (lambda t, name: t.update({name: t[name][None]}), "has the shape"),
        (lambda t, name: t.update({name: torch.zeros(t[name].shape, dtype=torch.int16)}), "has the type"),
    ],
)
def test_a_checkpoint_with_strange_tensors_is_refused(checkpoint, uses, file, change, message):
    change_tensors(checkpoint / file, lambda tensors: change(tensors, sorted(tensors)[0]))
    sign(checkpoint)
    assert refusals(uses) == (list(uses) if file == "model.safetensors" else ["train"])
    with refused(rf"{file} .*{message}"):
        (uses["train"])()


def test_a_generators_state_that_is_none_breaks_nothing(checkpoint, uses):
    """Bytes of the right number and type, which torch may still not take."""
    change_tensors(checkpoint / "random.safetensors", lambda t: [value.fill_(255) for value in t.values()])
    sign(checkpoint)
    assert refusals(uses) in ([], ["train"])


@pytest.mark.parametrize("n_vocab", [10, 256, 300])
def test_a_model_of_other_tokens_than_its_tokenizer_is_refused(checkpoint, uses, n_vocab):
    """The tokenizer has ids that the model lacks; the reverse is harmless."""
    edit(checkpoint / "state.json", lambda s: s["model"].update(n_vocab=n_vocab))

    def resize(tensors):
        tensors["embed.weight"] = torch.zeros(n_vocab, tensors["embed.weight"].shape[1])

    change_tensors(checkpoint / "model.safetensors", resize)
    sign(checkpoint)
    assert set(refusals(uses)) >= ({"train", "sample", "eval"} if n_vocab < 257 else {"train"})


@pytest.mark.parametrize(
    "content",
    [
        *(b"../../x", b"/etc/passwd", b"step-00000002/../../x", b"\xff\0", b"", b"hello", b"\x1b[2J"),
        b"step-" + b"1" * 10**6,
    ],
)
def test_a_pointer_that_leads_elsewhere_is_refused(checkpoint, content):
    (checkpoint.parent / "latest").write_bytes(content)
    with refused("does not name a checkpoint"):
        open_checkpoint(checkpoint.parent / "latest")


def test_the_folder_of_checkpoints_is_the_run(checkpoint):
    assert open_checkpoint(checkpoint.parent).path == open_checkpoint(checkpoint.parents[1]).path == checkpoint


def test_what_is_no_checkpoint_is_named(checkpoint, dataset_dir, tmp_path):
    with refused("is a dataset: give the directory of a run"):
        open_checkpoint(dataset_dir)
    with refused(r"holds no checkpoint itself: give a run in it, such as .*/run$"):
        open_checkpoint(tmp_path)
    (tmp_path / "export").mkdir()
    with refused("holds no checkpoint: give a run directory"):
        open_checkpoint(tmp_path / "export")
    shutil.copy(checkpoint / "model.safetensors", tmp_path / "export")
    with refused("holds no checkpoint, but a model for other programs: give the run that it was exported from"):
        open_checkpoint(tmp_path / "export")
