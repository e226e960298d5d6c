"""States in files: a text goes on with the bits of one run, and what does not fit the model is refused in one line."""

import io
import itertools
import json
import re
from dataclasses import replace

import pytest
import safetensors.torch
import torch
from texts import BYTES, Recorded, gpt_of, random_ids

from common.settings import UserError, decode
from data.tokenizer import GPT2Config, build_tokenizer
from inference.engine import Engine, stream
from inference.load import Loaded
from inference.prefill import CHUNK, Request, prefill
from inference.sample import SampleConfig, run_sampling
from inference.sampling import SamplingConfig
from inference.state_file import load_state, save_state, sum_of
from model.attention import ATTENTION
from model.attention.cache import _Buffer
from trainer.runtime import Runtime

pytestmark = pytest.mark.usefixtures("restored_torch")

NAMES = sorted(cls.model_fields["name"].annotation.__args__[0] for cls in ATTENTION)
SMALL = {"strided": {"stride": 20}, "fixed": {"size": 20, "width": 3}, "sliding_window": {"window": [3, 70]}}
MODELS = [
    *({"attention": {"name": name} | SMALL.get(name, {})} for name in NAMES),
    *({"attention": {"name": name, "decay": "head", "conv": 4}} for name in ("log_space", "linear", "softmax")),
    {"attention": {"name": "projection", "values": "own"}, "position": {"name": "learned", "max_len": 1000}},
    {"attention": {"name": "softmax"}, "position": {"name": "rotary"}, "block": {"name": "mlp", "conv": 4}},
    {"attention_pattern": ["log_space", "softmax"], "attention": {"name": "log_space"}, "eot_id": 256},
    {"attention": {"name": "linear", "decay": "head", "conv": 4}, "position": {"name": "rotary"}, "eot_id": 256},
    {"attention": {"name": "sliding_window", "window": 400}, "position": {"name": "rotary"}, "eot_id": 256},
    {"ngrams": [1, 2]},
    {"attention": {"name": "softmax"}, "ngrams": [2], "eot_id": 256},
]


def loaded_of(dtype=torch.float32, eot_id=None, **changes):
    """A model of bytes as `load` gives it."""
    return Loaded(None, gpt_of(eot_id, **changes).to(dtype), BYTES, Runtime(torch.device("cpu"), dtype), "a" * 64)


def continued(loaded, request, n=5):
    """What the model draws next, and from which logits."""
    request = replace(request, max_tokens=n, sampling=SamplingConfig(repetition_penalty=1.1), seed=3)
    generation, engine = Recorded(request, BYTES), Engine(loaded.gpt, 257, 1)
    engine.submit([generation])
    assert "".join(stream(engine, generation)) == generation.text
    return generation.drawn, torch.stack(generation.logits)


def beginning(*ids):
    return Request((256, *ids))


LENGTHS = [300, 255, 100]


@pytest.mark.parametrize(
    ("changes", "n_first"),
    [*((changes, LENGTHS[i % 2]) for i, changes in enumerate(MODELS)), *(({}, n) for n in LENGTHS)],
    ids=lambda value: re.sub(r"[^\w-]+", "-", json.dumps(value)).strip("-"),
)
def test_a_text_goes_on_with_the_bits_of_one_run(tmp_path, changes, n_first):
    """255 tokens and <|endoftext|> are a whole piece; of 100, none is read."""
    loaded, ids, path = loaded_of(**changes), random_ids(520), tmp_path / "state.safetensors"
    if "eot_id" in changes:
        ids = (*ids[:200], 256, *ids[200:])
    save_state(path, prefill(loaded.gpt, BYTES, beginning(*ids[:n_first])), loaded)
    state = load_state(path, loaded)
    assert (state.n_before // CHUNK, len(state.ids)) == divmod(n_first + 1, CHUNK)
    after = continued(loaded, prefill(loaded.gpt, BYTES, replace(state, ids=(*state.ids, *ids[n_first:]))))
    whole = continued(loaded, beginning(*ids))
    assert after[0] == whole[0]
    assert torch.equal(after[1], whole[1])


# The command


@pytest.fixture
def sampled(run_of, capsys, tmp_path, monkeypatch):
    """Does what sample.py does, and returns what it printed on each output; files are in the current folder."""
    run_dir = run_of({"max_steps": 2})
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()

    def run(**options):
        usual = {"max_new_tokens": 12, "temperature": 5, "runtime": {"device": "cpu", "dtype": "float32"}}
        run_sampling(decode(SampleConfig, {"checkpoint": run_dir} | usual | options))
        return capsys.readouterr()

    return run


def test_a_book_is_read_once_and_asked_many_times(sampled, tmp_path):
    book, questions = "All day long. " * 50, ["Who? ", "Where did it end, "]
    (tmp_path / "book.txt").write_text(book)
    (tmp_path / "questions.txt").write_text("\n".join(questions))
    read = sampled(prompt_file="book.txt", state_out="book.safetensors", max_new_tokens=0)
    assert read.out == ""
    size = (tmp_path / "book.safetensors").stat().st_size
    assert f"the state after 701 tokens is written to book.safetensors ({size:,} bytes)" in read.err
    whole = [sampled(prompt=book + question).out.removeprefix(book) for question in questions]
    assert [sampled(state_in="book.safetensors", prompt=question).out for question in questions] == whole
    at_once = sampled(state_in="book.safetensors", prompts_file="questions.txt", output="json", num_samples=2).out
    first, second, *others = map(json.loads, at_once.splitlines())
    assert first["prompt"] + first["text"] + "\n" == whole[0]
    assert (first["prompt_tokens"], first["seed"], second["seed"], len(others)) == (705, 1, 2, 2)


def test_a_state_goes_on_and_on(sampled):
    """Each goes on from the last, which it replaces; without a prompt, too."""
    parts = ["abc " * 30, "def " * 70, "g", ""]
    sampled(prompt=parts[0], state_out="s", max_new_tokens=0)
    for part in parts[1:]:
        text = sampled(prompt=part, state_in="s", state_out="s").out
    assert "".join(parts) + text == sampled(prompt="".join(parts)).out


def test_a_conversation_goes_on_where_it_ended(sampled, monkeypatch):
    def talk(lines, **options):
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        return sampled(interactive=True, temperature=0, **options).out

    whole = talk("one\ntwo\n")
    first = talk("one\n", state_out="s")
    assert first + talk("two\n", state_in="s") == whole


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"state_out": "nowhere/s"}, "state_out=nowhere/s cannot be written: there is no folder nowhere"),
        ({"state_out": "."}, r"\. is a link, a folder, a pipe or a device: put a regular file there"),
        ({"state_out": "notes.txt"}, "notes.txt exists and is not from this command, which would replace it"),
        ({"state_in": "s"}, "cannot read s: No such file or directory"),
        ({"prompts_file": "p", "state_out": "s"}, "state_out is for one text: give prompt or prompt_file"),
        ({"max_new_tokens": 0}, "max_new_tokens=0 only reads the prompt: give state_out=FILE too, or more tokens"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_one_line(sampled, tmp_path, options, message):
    (tmp_path / "notes.txt").write_text("of a person")
    with pytest.raises(UserError, match=message):
        sampled(**options)


def test_a_full_disk_is_one_line(sampled, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("inference.state_file.write_atomic", full)
    with pytest.raises(UserError, match="state_out=s cannot be written: No space left on device"):
        sampled(prompt="x", state_out="s")


def test_the_progress_of_a_long_prompt_is_shown(monkeypatch, capsys):
    monkeypatch.setattr("common.console._SECONDS_BETWEEN_LINES", 0.0)
    loaded = loaded_of()
    prefill(loaded.gpt, BYTES, Request(random_ids(3 * CHUNK)))
    assert capsys.readouterr().out == ""
    monkeypatch.setattr("inference.prefill._LONG", 600)
    prefill(loaded.gpt, BYTES, Request(random_ids(3 * CHUNK)))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" (")[0] for line in lines] == [f"reading: tokens {n} of 768" for n in (256, 512, 768)]


def test_a_gpu_reads_a_prompt_in_larger_pieces(monkeypatch):
    gpt = loaded_of().gpt.to("meta")  # any device but the CPU
    sizes = []
    monkeypatch.setattr("inference.prefill.read", lambda _, ids, *rest: (sizes.append(ids.shape[1]), None))
    left = prefill(gpt, BYTES, Request(random_ids(3 * 2048 + 300)))
    assert (sizes, len(left.ids)) == ([2048] * 3, 300)


# Files that do not fit


KINDS = {
    "log_space": {},
    "softmax": {"attention": {"name": "softmax"}},
    "fixed": {"attention": {"name": "fixed"}},
    "ngrams": {"ngrams": [1, 2]},
}


@pytest.fixture(params=KINDS)
def written(request, tmp_path):
    """A model and the file of a state of it."""
    loaded, path = loaded_of(**KINDS[request.param]), tmp_path / "state.safetensors"
    save_state(path, prefill(loaded.gpt, BYTES, beginning(*random_ids(600))), loaded)
    return loaded, path


def refuses(path, loaded, message):
    with pytest.raises(UserError, match=message) as caught:
        load_state(path, loaded)
    assert str(path) in str(caught.value)
    assert str(caught.value).isprintable()


def test_a_state_of_something_else_is_refused(written, tmp_path, rank_file):
    loaded, path = written
    refuses(path, loaded._replace(identity="b" * 64), "another model .aaaaaaaaaaaa, not bbbb")
    tokenizer = build_tokenizer(GPT2Config(name="gpt2", path=rank_file))
    refuses(path, loaded._replace(tokenizer=tokenizer), "another tokenizer")
    wide = loaded._replace(gpt=loaded.gpt.double(), runtime=Runtime(torch.device("cpu"), torch.float64))
    refuses(path, wide, r"another dtype .float32, not float64.: use the same, or read the text again")
    other = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"x": torch.zeros(3)}, other)
    refuses(other, loaded, "is not a state: give a file that state_out= wrote")
    other.write_bytes(b"PK\x03\x04 no safetensors at all")
    refuses(other, loaded, "is not a whole safetensors file")


@pytest.mark.parametrize("written", ["fixed"], indirect=True)
def test_a_file_that_is_cut_or_has_another_bit_is_refused(written):
    loaded, path = written
    whole = path.read_bytes()
    places = torch.randint(len(whole), (12,), generator=torch.Generator().manual_seed(0)).tolist()
    for place in [*range(0, 24, 4), *range(100, 1500, 197), *places]:
        path.write_bytes(whole[:place])
        refuses(path, loaded, ".")
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        refuses(path, loaded, ".")
    path.write_bytes(whole)
    load_state(path, loaded)


def changed(path, change):
    """Rewrite a state with other tensors or another header, and the right sum."""
    with safetensors.safe_open(path, "pt") as file:
        header, tensors = file.metadata(), {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    change(tensors, header)
    header["sha256"] = sum_of(tensors, header)
    path.write_bytes(safetensors.torch.save(tensors, header))


CACHE = "state.layers.0."
CHANGES = {
    "log_space": [
        (lambda t, h: t.pop("seen"), "'seen' is missing"),
        (lambda t, h: t.update(logits=t["logits"][:, :-1].clone()), r"logits has the shape \[1, 256\], must have"),
        (lambda t, h: t.update(logits=t["logits"].double()), "logits has the type float64, must have float32"),
        (lambda t, h: t.update({f"{CACHE}log_z": t[f"{CACHE}log_z"].repeat(2, 1, 1)}), "log_z has the shape"),
        (lambda t, h: t.update(rest=t["rest"] + 200), "its token counts or ids are out of range"),
        (lambda t, h: t.update(rest=-1 - t["rest"]), "its token counts or ids are out of range"),
        (lambda t, h: h.update(tokens="many"), "is damaged: tokens='many' in its header is not a count"),
        (lambda t, h: h.update(tokens="0"), "unknown"),
        (lambda t, h: h.update(format="log-gpt state 2"), "is not a state"),
        (lambda t, h: h.pop("dtype"), "another dtype .none, not float32"),
    ],
    "softmax": [
        (lambda t, h: t.update({f"{CACHE}lengths": torch.tensor([511])}), "token counts or ids"),
        (lambda t, h: h.update(tokens="768"), "token counts or ids"),
        (lambda t, h: t.update({f"{CACHE}v": t[f"{CACHE}v"][:, :, 1:].clone()}), "v has the shape"),
        (
            lambda t, h: t.update({f"{CACHE}{x}": t[f"{CACHE}{x}"][:, :, 1:].clone() for x in "kv"}),
            "token counts or ids",
        ),
    ],
    "ngrams": [
        (lambda t, h: t["state.ngrams.recent"].add_(257), "token counts or ids"),
        (lambda t, h: t["state.ngrams.table"].bitwise_or_(257), "token counts or ids"),
    ],
    "fixed": [
        (lambda t, h: t[f"{CACHE}place"].add_(10**6), "token counts or ids"),
        (lambda t, h: t[f"{CACHE}place"].mul_(-1), "token counts or ids"),
    ],
}


@pytest.mark.parametrize(
    ("written", "change", "message"),
    [(kind, *case) for kind, cases in CHANGES.items() for case in cases],
    indirect=["written"],
)
def test_a_state_that_the_model_cannot_have_is_refused(written, change, message):
    loaded, path = written
    changed(path, change)
    refuses(path, loaded, message)


# Memory


def test_what_does_not_fit_into_memory_is_refused_with_numbers(monkeypatch):
    monkeypatch.setattr("inference.engine.available_memory", lambda: 10**6)
    for kind in KINDS:
        engine = Engine(loaded_of(**KINDS[kind]).gpt, 257, 1)
        if kind in ("log_space", "ngrams"):
            engine.check(Request((), 10**9))
            continue
        engine.check(Request((), 100))
        message = r"a text of 1,000,000 tokens does not fit .* [\d,]+ bytes, .* 1,000,000 bytes"
        with pytest.raises(UserError, match=message):
            engine.check(Request((), 10**6 + 1))


def test_a_cache_that_grows_takes_what_is_said(monkeypatch):
    """Buffers that exist at once have at most three times the bytes of the keys and values, and at least as many."""
    loaded, sizes = loaded_of(attention={"name": "softmax"}, n_layer=1, position={"name": "none"}), []
    init = _Buffer.__init__

    def counted(self, k, v, columns):
        init(self, k, v, columns)
        sizes.append(self.k.nbytes + self.v.nbytes)

    monkeypatch.setattr(_Buffer, "__init__", counted)
    n_read = prefill(loaded.gpt, BYTES, beginning(*random_ids(5000))).n_before
    needed = n_read * 2 * 2 * 8 * 4
    assert needed <= max(map(sum, itertools.pairwise(sizes))) <= 3.1 * needed
    monkeypatch.setattr("inference.engine.available_memory", lambda: 3 * needed - 1)
    engine = Engine(loaded.gpt, 257, 1)
    engine.check(Request((), n_read))  # the last is not read
    with pytest.raises(UserError, match=f"{needed:,} bytes"):
        engine.check(Request((), n_read + 1))
