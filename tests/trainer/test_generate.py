"""Sampling filters against brute force, and decoding with a passed state against the whole forward pass."""

import itertools

import pytest
import torch

from common.settings import decode
from model.generate import _PREFILL, generate, next_token_probabilities, prefill
from model.gpt import GPT, GPTConfig

COMBINATIONS = list(
    itertools.product(["log_space", "softmax"], ["glu", "mlp"], ["log_recurrence", "learned", "rotary", "none"])
)


def make_gpt(attention="log_space", block="glu", position="log_recurrence"):
    torch.manual_seed(0)
    raw = {"n_vocab": 50, "pad_vocab": 64, "n_layer": 2, "n_head": 2, "n_embd": 16}
    parts = {"attention": {"name": attention}, "block": {"name": block}, "position": {"name": position}}
    return GPT(decode(GPTConfig, raw | parts)).double().eval()


def brute_force(logits, temperature, top_k, top_p):
    """Probabilities of one row, by the definition."""
    weights = (logits.double() / temperature).exp()
    order = sorted(range(len(logits)), key=lambda i: -logits[i].item())
    kept = order[:top_k] if top_k else order
    if top_p:
        total, nucleus = sum(weights[i] for i in kept), []
        while not nucleus or sum(weights[i] for i in nucleus) < top_p * total:
            nucleus.append(kept[len(nucleus)])
        kept = nucleus
    result = torch.zeros(len(logits), dtype=torch.float64)
    result[kept] = weights[kept] / sum(weights[i] for i in kept)
    return result


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [None, 1, 5, 40, 1000])
@pytest.mark.parametrize("top_p", [None, 0.01, 0.5, 0.93, 1.0])
def test_filters_are_their_definition(temperature, top_k, top_p):
    logits = 3 * torch.randn(4, 40, generator=torch.Generator().manual_seed(0))
    probabilities = next_token_probabilities(logits, temperature, top_k, top_p)
    expected = torch.stack([brute_force(row, temperature, top_k, None if top_p == 1 else top_p) for row in logits])
    torch.testing.assert_close(probabilities.double(), expected, rtol=1e-5, atol=1e-7)  # float32 sums of 40
    assert ((probabilities > 0) == (expected > 1e-30)).all()


def test_temperature_0_takes_the_most_likely():
    logits = torch.tensor([[0.0, 3.0, 2.9], [5.0, -1.0, 4.0]])
    assert next_token_probabilities(logits, temperature=0, top_k=2, top_p=0.5).tolist() == [[0, 1, 0], [1, 0, 0]]


def test_top_k_keeps_exactly_k_of_equals():
    assert (next_token_probabilities(torch.zeros(1, 10), top_k=3) > 0).sum() == 3


@pytest.mark.parametrize(("attention", "block", "position"), COMBINATIONS)
def test_logits_from_a_passed_state_are_those_of_the_whole_text(attention, block, position):
    gpt = make_gpt(attention, block, position)
    ids = torch.randint(50, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        whole = gpt(ids)
        pieces, state = [], None
        for piece in ids.split([17, 1, 1, 20, 1], dim=1):
            logits, state = gpt(piece, state, return_state=True)
            pieces.append(logits)
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=0, atol=1e-11)


@pytest.mark.parametrize(("attention", "block", "position"), COMBINATIONS)
def test_greedy_decoding_is_greedy_on_the_whole_text(attention, block, position):
    gpt = make_gpt(attention, block, position)
    ids = torch.randint(50, (2, 5), generator=torch.Generator().manual_seed(1))
    decoded = torch.stack(list(itertools.islice(generate(gpt, ids, n_vocab=50, temperature=0), 12)), dim=1)
    for _ in range(12):
        with torch.no_grad():
            ids = torch.cat([ids, gpt(ids)[:, -1:, :50].argmax(-1)], dim=1)
    assert torch.equal(decoded, ids[:, 5:])


def test_a_prompt_longer_than_a_piece_is_read_as_one():
    gpt = make_gpt()
    ids = torch.randint(50, (1, 2 * _PREFILL + 3), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits, _ = prefill(gpt, ids)
        torch.testing.assert_close(logits, gpt(ids)[:, -1], rtol=0, atol=1e-10)


def size(state):
    """Numbers in a state, however nested."""
    if isinstance(state, torch.Tensor):
        return state.numel()
    return sum(map(size, state)) if isinstance(state, tuple) else 0


@pytest.mark.parametrize("position", ["log_recurrence", "rotary", "none"])
def test_a_log_space_models_state_does_not_grow(position):
    gpt = make_gpt(position=position)
    sizes = {size(prefill(gpt, torch.zeros(1, length, dtype=torch.long))[1]) for length in (1, 2, 65, 700)}
    assert len(sizes) == 1
    assert sizes != {0}


def test_padding_of_the_vocabulary_is_never_sampled():
    gpt = make_gpt()
    with torch.no_grad():
        gpt.embed.weight[50:] = 100 * gpt.norm.weight  # the padding's logits are the highest
    ids = torch.zeros(64, 1, dtype=torch.long)
    tokens = itertools.islice(generate(gpt, ids, n_vocab=50, temperature=5.0), 4)
    assert all((token < 50).all() for token in tokens)


def test_the_same_seed_gives_the_same_tokens_and_another_gives_others():
    gpt, ids = make_gpt(), torch.zeros(1, 1, dtype=torch.long)

    def sample(seed):
        tokens = generate(gpt, ids, n_vocab=50, generator=torch.Generator().manual_seed(seed))
        return [token.item() for token in itertools.islice(tokens, 20)]

    assert sample(1) == sample(1) != sample(2)


def test_tokens_come_as_often_as_their_probabilities():
    gpt = make_gpt()
    with torch.no_grad():
        expected = gpt(torch.zeros(1, 1, dtype=torch.long))[0, -1, :50].softmax(-1)
    n = 20_000
    tokens = generate(gpt, torch.zeros(n, 1, dtype=torch.long), n_vocab=50, generator=torch.Generator().manual_seed(0))
    counts = torch.bincount(next(tokens), minlength=50)
    chi2 = ((counts - n * expected) ** 2 / (n * expected)).sum().item()
    assert chi2 < 49 + 6 * (2 * 49) ** 0.5  # mean and six deviations of chi-squared with 49 degrees of freedom
