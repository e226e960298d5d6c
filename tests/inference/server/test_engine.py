"""The engine, turn by turn: a text in a batch is the same as the model would write for it alone."""

import itertools

import pytest
import torch
from texts import BYTES

from inference.engine import PROMPT_CHUNK, Engine
from inference.generation import Generation, Request
from inference.sampling import SamplingConfig, sample_next_tokens
from inference.server.responses import ApiError
from inference.server.worker import Worker

SAMPLING = [
    SamplingConfig(),
    SamplingConfig(temperature=0),
    SamplingConfig(temperature=0.7, top_k=20),
    SamplingConfig(top_p=0.8),
    SamplingConfig(temperature=1.5, min_p=0.05),
]


GREEDY = SAMPLING[1]


@pytest.fixture
def make_engine(make_gpt):
    def make(max_streams=4, gpt=None, interleave=True):
        return Engine(gpt or make_gpt(), 257, max_streams, interleave)

    return make


def submit(engine, prompt=b"abc", max_tokens=10, seed=1, **request):
    """Give a text to an engine or a worker."""
    text = Generation(Request((256, *prompt), max_tokens, seed=seed, prompt_start=1, **request), BYTES)
    engine.submit([text])
    return text


def turn_until_ended(engine, readers, limit=10_000):
    for turns in range(limit):
        if all(reader.finished for reader in readers):
            return turns
        engine.turn()
    raise AssertionError("they do not end")


def alone(engine, reader):
    """The same text from a forward pass over all of it: each token is drawn again, from the logits in its place."""
    request = reader.request
    with torch.no_grad():
        logits = engine.gpt(torch.tensor([[*request.ids, *reader.drawn]]))[0, len(request.ids) - 1 : -1, :257]
    generator = torch.Generator().manual_seed(request.seed)
    drawn = [sample_next_tokens(row[None], [request.sampling], [generator])[0] for row in logits]
    assert len(drawn) == request.max_tokens or drawn[-1] == 256
    return bytes(itertools.takewhile(lambda token: token < 256, drawn)).decode(errors="replace")


PARTS = {"decay": "head", "gate": "silu"}
BLOCK = {"name": "mlp", "conv": 4, "activation": "swiglu"}
FORGETS = {"position": "none", "block": BLOCK, "ngrams": [1, 2]}
MODELS = [
    {"attention": "log_space", "position": "log_recurrence"},
    {"attention": "softmax", "position": "learned"},
    {"attention": "strided", "position": "rotary"},
    {"attention": {"name": "log_space", "product": True, **PARTS}, **FORGETS},
    {"attention": {"name": "softmax", **PARTS}, **FORGETS},
]


@pytest.mark.parametrize(
    ("model", "interleave"), [(MODELS[0], False), *((model, i % 2 == 0) for i, model in enumerate(MODELS))], ids=str
)
def test_texts_that_come_and_go_are_what_each_would_be_alone(make_engine, make_gpt, model, interleave):
    engine = make_engine(gpt=make_gpt(**model), interleave=interleave)
    readers = []
    for i in range(12):  # more than there are places, of different lengths, at different times
        prompt = (b"some words and more " * (1 + 5 * (i % 4)))[: 7 + 13 * i]
        readers.append(submit(engine, prompt, max_tokens=5 + 7 * (i % 5), seed=i, sampling=SAMPLING[i % len(SAMPLING)]))
        engine.turn()
        engine.turn()
    turn_until_ended(engine, readers)
    for reader in readers:
        assert reader.text == alone(engine, reader)
    assert len({reader.text for reader in readers}) > 6


def test_all_streams_are_read_in_one_forward_pass(make_engine, monkeypatch):
    engine = make_engine(max_streams=16)
    shapes = []
    engine.gpt.register_forward_pre_hook(lambda gpt, inputs: shapes.append(tuple(inputs[0].shape)))
    readers = [submit(engine, b"x" * (i + 1), max_tokens=30, seed=i) for i in range(16)]
    turn_until_ended(engine, readers)
    assert (16, 1) in shapes
    assert sum(T == 1 and B > 1 for B, T in shapes) <= 16 + 30  # and not 16 times 30


def test_a_long_prompt_holds_up_neither_texts_nor_other_prompts(make_engine):
    engine = make_engine(max_streams=3)
    first = submit(engine, max_tokens=1000, sampling=GREEDY)
    engine.turn()
    long = submit(engine, b"l" * (PROMPT_CHUNK * 50), max_tokens=1)
    for _ in range(3):
        engine.turn()
    short = submit(engine, max_tokens=3, sampling=GREEDY)
    turns = turn_until_ended(engine, [short])
    assert turns <= 6  # its piece comes every other turn
    assert not long.finished
    assert first.n_tokens >= 3 + turns  # a token at every turn


@pytest.mark.parametrize("turns", [0, 1, 3])
def test_who_leaves_frees_the_place(make_engine, turns):
    """Cancelled while it waits, while its prompt is read, and while it is written."""
    engine = make_engine(max_streams=1)
    leaves = submit(engine, b"y" * (2 * PROMPT_CHUNK), max_tokens=500)
    for _ in range(turns):
        engine.turn()
    leaves.cancelled = True
    stays = submit(engine, max_tokens=3)
    turn_until_ended(engine, [stays], limit=8)
    assert stays.text == alone(engine, stays)
    assert not leaves.finished
    assert engine.n_admitted == 0


def not_finite(logits, rows):
    return logits.masked_fill(rows[:, None, None], torch.nan)


def raises(logits, rows):
    if rows.any():
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")
    return logits


@pytest.mark.parametrize("fail", [not_finite, raises])
def test_what_goes_wrong_with_one_text_is_its_end_alone(make_engine, make_gpt, fail):
    def spoil(gpt, inputs, outputs):
        logits, state = outputs
        return fail(logits, (inputs[0] == ord("!")).any(1)), state

    gpt = make_gpt()
    gpt.register_forward_hook(spoil)
    engine = make_engine(gpt=gpt)
    good = submit(engine, max_tokens=20, sampling=GREEDY)
    bad = submit(engine, b"ab!")
    turn_until_ended(engine, [good, bad])
    assert bad.error is not None
    assert good.text == alone(make_engine(), good)


def test_a_step_that_fails_ends_its_texts_and_the_engine_goes_on(make_engine, monkeypatch):
    engine = make_engine()
    text = submit(engine)
    engine.turn()
    with monkeypatch.context() as patch:
        patch.setattr("inference.engine.read_tokens", lambda *_: 1 / 0)
        engine.turn()
    assert isinstance(text.error, ZeroDivisionError)
    after = submit(engine, seed=9)
    turn_until_ended(engine, [after])
    assert after.text == alone(engine, after)


def test_probabilities_are_those_of_the_whole_text(make_engine, monkeypatch):
    engine = make_engine()
    monkeypatch.setattr("inference.engine.PROMPT_CHUNK", 7)  # the prompt's cross the borders of chunks
    prompt = "né 日本 text".encode()
    reader = submit(engine, prompt, max_tokens=40, seed=2, n_top=3, echo=True, sampling=SAMPLING[2])
    turn_until_ended(engine, [reader])
    ids = [token.id for token in reader.tokens]
    assert bytes(ids[: len(prompt)]) == prompt
    with torch.no_grad():
        logprobs = engine.gpt(torch.tensor([[256, *ids]]))[0, :-1].log_softmax(-1)
    for token, row in zip(reader.tokens, logprobs, strict=True):
        assert token.logprob == pytest.approx(row[token.id].item(), abs=1e-4)  # float32 of a sum over 257
        best = row.topk(3)
        for token_id, value in zip(best.indices.tolist(), best.values.tolist(), strict=True):
            assert token.top[token_id] == pytest.approx(value, abs=1e-4)
        assert token.top[token.id] == token.logprob
        assert len(token.top) in (3, 4)


def test_an_engine_that_stops_tells_everyone(make_engine):
    worker = Worker(make_engine(max_streams=2), max_queue=100)
    readers = [submit(worker, max_tokens=10**9) for _ in range(5)]
    worker.start()
    worker.stop()
    worker.join()
    assert not worker.is_alive()
    assert all(reader.error.code == "stopping" for reader in readers)
    with pytest.raises(ApiError, match="stopping"):
        submit(worker)
