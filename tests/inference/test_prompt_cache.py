"""The cache of prompts: it finds the longest beginning, keeps its bounds, and changes no bit of any text."""

import random

import pytest
import torch
from texts import BYTES, Recorded, gpt_of, random_ids

from inference.engine import PROMPT_CHUNK, Engine, PromptCache
from inference.generation import Request


def text_after(ids):
    """A value that tells which tokens it stands for; 8 bytes."""
    return (torch.tensor([hash(tuple(ids)) % 2**40], dtype=torch.int64),)


def test_it_finds_the_longest_beginning_that_was_used_last():
    """Against a list of everything, in the order of use, at random."""
    rng = random.Random(0)
    cache = PromptCache(5, 1000)
    model = []
    for _ in range(600):
        ids = tuple(rng.choices(range(2), k=rng.randrange(1, 6)))
        if rng.random() < 0.5:
            cache.add(ids, text_after(ids))
            model = [*(other for other in model if other != ids), ids][-5:]
        else:
            found = max((other for other in model if ids[: len(other)] == other), key=len, default=())
            n_found, prefix = cache.find_longest(ids)
            assert n_found == len(found)
            if found:
                assert prefix == text_after(found)
                model = [*(other for other in model if other != found), found]
    assert len(cache) == 5


def test_its_bytes_are_bounded():
    cache = PromptCache(100, 8 * 3)
    for i in range(10):
        cache.add((i,), text_after((i,)))
        assert cache.n_bytes == 8 * len(cache) <= 8 * 3
    assert [cache.find_longest((i,))[0] for i in range(10)] == [0] * 7 + [1] * 3
    cache.add((1, 2), (torch.zeros(1, 4, dtype=torch.int64),))  # larger than all that it may keep
    assert len(cache) == 3


def written(engine, *ids_of_texts, **request):
    """The texts after these ids, written together."""
    texts = [Recorded(Request(ids, max_tokens=3, seed=1, **request), BYTES) for ids in ids_of_texts]
    engine.submit(texts)
    while not all(text.finished for text in texts):
        engine.turn()
    assert [text.error for text in texts] == [None] * len(texts)
    return texts


def ids_of(n, seed=0):
    return (256, *random_ids(n - 1, seed))


@pytest.mark.parametrize(
    ("attention", "position", "eot_id", "interleave"),
    [
        ("log_space", "log_recurrence", 256, False),
        ("softmax", "rotary", 256, True),
        ("strided", "learned", None, False),
    ],
)
def test_texts_have_the_same_bits_with_it(attention, position, eot_id, interleave):
    """A conversation of growing prompts, another text, the same again, and one that ends with a whole piece."""
    gpt = gpt_of(eot_id, attention=attention, position=position)
    first = ids_of(400)
    longer = first + ids_of(250, 1)
    prompts = [first, longer, ids_of(300, 2), longer, first[:PROMPT_CHUNK], first[:100]]
    cached = Engine(gpt, 257, 2, interleave, cache=PromptCache(20, 10**8))
    reused = []
    for prompt in prompts:
        (text,) = written(cached, prompt)
        (plain,) = written(Engine(gpt, 257, 2, interleave), prompt)
        assert text.drawn == plain.drawn
        assert all(map(torch.equal, text.logits, plain.logits))
        reused.append(text.n_cached)
    assert reused == [0, PROMPT_CHUNK, 0, 2 * PROMPT_CHUNK, PROMPT_CHUNK, 0]


def test_a_prompt_whose_probabilities_are_asked_for_is_read_whole():
    engine = Engine(gpt_of(), 257, 2, cache=PromptCache(20, 10**8))
    ids = ids_of(600)
    written(engine, ids)
    (text,) = written(engine, ids, n_top=1, echo=True)
    assert text.n_cached == 0
    assert len(text.tokens) == len(ids) + text.n_tokens


def test_a_cached_text_stays_what_it_is():
    """Two texts go on from it at once, and then a third."""
    gpt = gpt_of(attention="softmax", position="rotary")
    engine = Engine(gpt, 257, 4, cache=PromptCache(20, 10**8))
    ids = ids_of(300)
    (first,) = written(engine, ids)
    written(engine, (*ids, 1), (*ids, 2))
    (again,) = written(engine, ids)
    assert again.n_cached == PROMPT_CHUNK
    assert all(map(torch.equal, again.logits, first.logits))
