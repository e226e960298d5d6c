"""Reading prompts: in chunks that change no bit, with progress, and within memory."""

import itertools
from dataclasses import replace

import pytest
import torch
from texts import BYTES, Recorded, gpt_of, random_ids

from common.settings import UserError
from inference.engine import Engine, stream
from inference.prefill import CHUNK, Request, prefill
from inference.sampling import SamplingConfig
from model.attention.cache import _Buffer

KINDS = {
    "log_space": {},
    "softmax": {"attention": {"name": "softmax"}},
    "fixed": {"attention": {"name": "fixed"}},
    "ngrams": {"ngrams": [1, 2]},
}


def continued(gpt, request):
    """What the model draws next, and from which logits."""
    request = replace(request, max_tokens=5, sampling=SamplingConfig(repetition_penalty=1.1), seed=3)
    generation, engine = Recorded(request, BYTES), Engine(gpt, 257, 1)
    engine.submit([generation])
    assert "".join(stream(engine, generation)) == generation.text
    return generation.drawn, torch.stack(generation.logits)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_first", [300, 255, 100])
def test_a_text_read_in_two_goes_has_the_bits_of_one(kind, n_first):
    """255 tokens and <|endoftext|> are a whole chunk; of 100, none is read."""
    gpt, ids = gpt_of(**KINDS[kind]), (256, *random_ids(520))
    first = prefill(gpt, BYTES, Request(ids[: n_first + 1]))
    assert (first.n_before // CHUNK, len(first.ids)) == divmod(n_first + 1, CHUNK)
    drawn, logits = continued(gpt, prefill(gpt, BYTES, replace(first, ids=(*first.ids, *ids[n_first + 1 :]))))
    expected, expected_logits = continued(gpt, Request(ids))
    assert drawn == expected
    assert torch.equal(logits, expected_logits)


def test_a_gpu_reads_a_prompt_in_larger_chunks(monkeypatch):
    gpt = gpt_of().to("meta")  # any device but the CPU
    sizes = []
    monkeypatch.setattr("inference.prefill.read", lambda _, ids, *rest: (sizes.append(ids.shape[1]), None))
    left = prefill(gpt, BYTES, Request(random_ids(3 * 2048 + 300)))
    assert (sizes, len(left.ids)) == ([2048] * 3, 300)


def test_what_does_not_fit_into_memory_is_refused_with_numbers(monkeypatch):
    monkeypatch.setattr("inference.engine.available_memory", lambda: 10**6)
    for kind in KINDS:
        engine = Engine(gpt_of(**KINDS[kind]), 257, 1)
        if kind in ("log_space", "ngrams"):
            engine.check(Request((), 10**9))
            continue
        engine.check(Request((), 100))
        message = r"a text of 1,000,000 tokens does not fit .* [\d,]+ bytes, .* 1,000,000 bytes"
        with pytest.raises(UserError, match=message):
            engine.check(Request((), 10**6 + 1))


def test_a_cache_that_grows_takes_what_is_said(monkeypatch):
    """Buffers that exist at once have at most three times the bytes of the keys and values, and at least as many."""
    gpt, sizes = gpt_of(attention={"name": "softmax"}, n_layer=1, position={"name": "none"}), []
    init = _Buffer.__init__

    def counted(self, k, v, columns):
        init(self, k, v, columns)
        sizes.append(self.k.nbytes + self.v.nbytes)

    monkeypatch.setattr(_Buffer, "__init__", counted)
    n_read = prefill(gpt, BYTES, Request((256, *random_ids(5000)))).n_before
    needed = n_read * 2 * 2 * 8 * 4
    assert needed <= max(map(sum, itertools.pairwise(sizes))) <= 3.1 * needed
    monkeypatch.setattr("inference.engine.available_memory", lambda: 3 * needed - 1)
    engine = Engine(gpt, 257, 1)
    engine.check(Request((), n_read))  # the last is not read
    with pytest.raises(UserError, match=f"{needed:,} bytes"):
        engine.check(Request((), n_read + 1))
