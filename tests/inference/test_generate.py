"""Sampling filters against their definitions with exact numbers; tokens as often as their probabilities."""

import itertools
from decimal import Decimal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from texts import BYTES, drawn_without_engine, gpt_of

from common.settings import decode
from inference.engine import generate
from inference.generation import Request
from inference.sampling import SamplingConfig, sample_next_tokens, weigh_tokens


def exact(logits, sampling, looser):
    """Probabilities by the definitions with 28 decimal digits, descending; top_p and min_p are loosened by a factor."""
    looser = Decimal(looser)
    weights = sorted(((x - max(logits)) / Decimal(sampling.temperature) for x in logits), reverse=True)
    weights = [x.exp() for x in weights[: sampling.top_k]]
    if sampling.top_p not in (None, 1):
        nucleus = Decimal(sampling.top_p) * looser * sum(weights)
        weights = [w for i, w in enumerate(weights) if i == 0 or sum(weights[:i]) < nucleus]
    if sampling.min_p is not None:
        weights = [w for w in weights if w >= Decimal(sampling.min_p) / looser * weights[0]]
    return [float(w / sum(weights)) for w in weights] + [0.0] * (len(logits) - len(weights))


def probabilities_of(logits, sampling):
    """The probabilities (V,) of a row of logits (V,), float64."""
    (ids,), (weights,) = weigh_tokens(logits.unsqueeze(0), sampling)
    probabilities = torch.zeros(logits.shape, dtype=torch.float64)
    probabilities[ids] = weights / weights.sum().double()
    return probabilities


# Of float32 the numbers that arithmetic goes wrong with: zeros, the least, the largest, and values that are met twice.
ODD = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 1e38, 3.4e38, -3.4e38]) | st.floats(
    width=32, allow_nan=False, allow_infinity=False
)
LOGITS = st.lists(ODD, min_size=1, max_size=8) | st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=8)
LEAST = 5e-324  # of Python's numbers
SETTINGS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, LEAST, 1e-40, 1e-30, 1.7976931348623157e308]) | st.floats(0.1, 3),
        "top_k": st.none() | st.integers(1, 9) | st.just(2**63 - 1),
        "top_p": st.none() | st.sampled_from([LEAST, 1.0]) | st.floats(0.1, 1),
        "min_p": st.none() | st.sampled_from([0.0, 1.0]) | st.floats(0.001, 0.5),
    }
)


@settings(max_examples=200, deadline=None)
@given(LOGITS, SETTINGS)
@pytest.mark.slow
def test_no_setting_that_is_accepted_gives_anything_but_its_definition(logits, raw):
    sampling = decode(SamplingConfig, raw)
    probabilities = probabilities_of(torch.tensor(logits), sampling).tolist()
    exactly = [*map(Decimal, torch.tensor(logits).tolist())]
    assert all(0 <= p <= 1 for p in probabilities)  # not so of NaN
    assert sum(probabilities) == pytest.approx(1, abs=1e-6)
    assert probabilities[sample_next_tokens(torch.tensor([logits]), [sampling], [None])[0]] > 0
    largest = max(map(abs, exactly))
    # float64 rounds logits, and after their division by the temperature it has nothing between 0 and 5e-324
    rounding = largest / 2**50 + Decimal("5e-324") * Decimal(sampling.temperature)
    likeliest = max(p for p, x in zip(probabilities, exactly, strict=True) if x >= max(exactly) - rounding)
    assert likeliest == max(probabilities), "a token that is as likely as any stays, but for rounding"
    if sampling.temperature == 0:
        assert sorted(probabilities)[-1] == 1
        return
    # Exponents have a few roundings of the largest logit; where these or a filter's edge decide, nothing is exact.
    wanted, loose, tight = (exact(exactly, sampling, looser) for looser in ("1", "1.000001", "0.999999"))
    if largest / 2**50 / Decimal(sampling.temperature) < Decimal("1e-7") and loose == tight:
        assert sorted(probabilities, reverse=True) == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan, 1e39])
@given(LOGITS, SETTINGS)
@settings(max_examples=20, deadline=None)
def test_no_setting_hides_that_the_logits_are_not_finite(bad, logits, raw):
    rows = torch.tensor([[*logits, 0.0], [*logits, bad]], dtype=torch.float64)
    good, refused = sample_next_tokens(rows, [decode(SamplingConfig, raw)] * 2, [None, None])
    assert 0 <= good < len(rows[0])
    assert refused == -1


def test_of_equals_exactly_as_many_as_may_and_a_nucleus_takes_the_first():
    assert (probabilities_of(torch.zeros(10), SamplingConfig(top_k=3)) > 0).sum() == 3
    logits = torch.tensor([1.0, 2.0, 1.0, 1.0, 1.0])
    kept = probabilities_of(logits, SamplingConfig(top_p=0.7)) > 0  # 0.40 of the second token, 0.15 of each other
    assert kept.tolist() == [True, True, True, False, False]


def test_a_token_depends_on_its_own_row_alone():
    """Rows of many settings, some with many equal logits, drawn together, in another order, and one by one."""
    settings = itertools.product([0.0, 0.3, 2.5], [None, 1, 40, 1000], [None, 0.01, 0.93], [None, 0.03])
    samplings = [SamplingConfig(temperature=t, top_k=k, top_p=p, min_p=m) for t, k, p, m in settings] * 2
    logits = 3 * torch.randn(len(samplings), 300, generator=torch.Generator().manual_seed(0))
    logits[::3] = logits[::3].round()
    logits[::7] = 1.0

    def drawn(rows):
        generators = [torch.Generator().manual_seed(row) for row in rows]
        return sample_next_tokens(logits[rows], [samplings[row] for row in rows], generators)

    rows = list(range(len(samplings)))
    together = drawn(rows)
    assert together == drawn(rows[::-1])[::-1]
    assert together == [token for row in rows for token in drawn([row])]
    assert len(set(together)) > 30


def test_padding_of_the_vocabulary_is_never_sampled():
    gpt = gpt_of(n_vocab=50, pad_vocab=64)
    with torch.no_grad():
        gpt.embed.weight[50:] = 100 * gpt.norm.weight  # the padding's logits are the highest
    ids = torch.zeros(64, 1, dtype=torch.long)
    assert (drawn_without_engine(gpt, ids, 4, 50, SamplingConfig(temperature=5)) < 50).all()


def test_tokens_come_as_often_as_their_probabilities():
    logits = torch.randn(50, generator=torch.Generator().manual_seed(0))
    expected = logits.softmax(-1)
    n = 4_000
    shared = torch.Generator().manual_seed(0)
    tokens = sample_next_tokens(logits.expand(n, -1), [SamplingConfig()] * n, [shared] * n)
    counts = torch.bincount(torch.tensor(tokens), minlength=50)
    chi2 = ((counts - n * expected) ** 2 / (n * expected)).sum().item()
    assert chi2 < 49 + 6 * (2 * 49) ** 0.5  # mean and six deviations of chi-squared with 49 degrees of freedom


def test_a_text_from_python_is_that_of_its_tokens():
    gpt = gpt_of()
    prompt = tuple(b"def main(")
    sampling = SamplingConfig(top_k=40)
    (ids,) = drawn_without_engine(gpt, [torch.tensor(prompt)], 20, BYTES.n_vocab, sampling, seed=3).tolist()
    texts = list(generate(gpt, BYTES, Request(prompt, max_tokens=20, sampling=sampling, seed=3)))
    assert len(texts) > 1
    text = bytes(itertools.takewhile(lambda token_id: token_id < 256, ids)).decode(errors="replace")
    assert "".join(texts) == text
