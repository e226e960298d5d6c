"""Reading prompts: in chunks that change no bit, with progress, and within memory."""

from dataclasses import replace

import pytest
import torch
from texts import BYTES, Recorded, gpt_of, random_ids

from inference.engine import Engine, stream
from inference.prefill import CHUNK, Request, prefill
from inference.sampling import SamplingConfig

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
