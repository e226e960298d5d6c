"""log_recurrence against its definition."""

import math

import pytest
import torch

from model.ops.log_recurrence import log_recurrence, naive_log_recurrence


def inputs(T, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    log_p = -torch.rand(2, T, 3, generator=generator, dtype=dtype) * 3
    h, state = (torch.randn(shape, generator=generator, dtype=dtype) * 3 for shape in ((2, T, 3), (2, 3)))
    return [x.requires_grad_() for x in (log_p, h, state)]


def results_and_gradients(recurrence, leaves):
    log_p, h, state = leaves
    s, last = recurrence(log_p, h, state=state, return_state=True)
    generator = torch.Generator().manual_seed(1)
    loss = sum((x * torch.randn(x.shape, generator=generator, dtype=x.dtype)).sum() for x in (s, last))
    return [s, last, *torch.autograd.grad(loss, leaves)]


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 2, 31, 32, 33, 63, 64, 65, 1000])
def test_equals_the_definition_with_state_and_all_gradients(T):
    leaves = inputs(T)
    got, wanted = (results_and_gradients(f, leaves) for f in (log_recurrence, naive_log_recurrence))
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 2, 33, 500])
def test_a_token_that_keeps_nothing_forgets_all_before(T):
    """log_p = -inf, at borders of chunks too: as the definition, and as if the text began there with s = -inf."""
    leaves = inputs(T)
    with torch.no_grad():
        leaves[0][:, [0, T // 2, 32 * (T // 33), T - 1]] = -torch.inf
    got, wanted = (results_and_gradients(f, leaves) for f in (log_recurrence, naive_log_recurrence))
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    log_p, h, _ = leaves
    half = T // 2
    fresh = log_recurrence(log_p[:, half:], h[:, half:], state=torch.full((2, 3), -torch.inf, dtype=torch.float64))
    torch.testing.assert_close(got[0][:, half:], fresh, rtol=0, atol=1e-13)


def test_numerical_gradients():
    leaves = inputs(5)
    assert torch.autograd.gradcheck(lambda p, h, s: log_recurrence(p, h, state=s, return_state=True), leaves)


def test_starts_from_zero():
    """s_0 = 0: the first token keeps p_1 exp(0)."""
    log_p, h, _ = inputs(1)
    torch.testing.assert_close(log_recurrence(log_p, h), torch.logaddexp(log_p, h))


@pytest.mark.gpu
def test_pieces_with_the_state_carried_equal_one_call():
    log_p, h, _ = (x.detach() for x in inputs(100))
    whole, last = log_recurrence(log_p, h, return_state=True)
    state, pieces = None, []
    for p, x in zip(log_p.split(17, 1), h.split(17, 1), strict=True):
        s, state = log_recurrence(p, x, state=state, return_state=True)
        pieces.append(s)
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=0, atol=1e-13)
    torch.testing.assert_close(state, last, rtol=0, atol=1e-13)


MILLION = 2**20


@pytest.fixture(scope="module")
def million():
    """A million tokens of two features, in numbers that float32 has, and the truth: float64, token after token.

    The second feature forgets next to nothing (p about 0.99995), so that errors can pile up over 20,000 tokens.
    """
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, MILLION, 2), (1, MILLION, 2), (1, 2), (1, MILLION, 2), (1, 2)]
    p, h, state, *weights = (torch.randn(shape, generator=generator) for shape in shapes)
    p[..., 1] += 10
    inputs = [torch.nn.functional.logsigmoid(p), h, state]
    features = [[x[..., i].flatten().tolist() for x in (*inputs, *weights)] for i in range(2)]
    of_features = [[torch.tensor(x, dtype=torch.float64) for x in sequential(*feature)] for feature in features]
    truth = [torch.stack(found, dim=-1).unsqueeze(0) for found in zip(*of_features, strict=True)]
    return inputs, weights, [x.squeeze(1) if x.shape[1] == 1 else x for x in truth]


def sequential(log_p, h, state, weights, weights_last):
    """s, the state after, and the gradients of log_p, h and state, of one feature, in Python's own numbers."""
    s = [state[0]]
    for p, x in zip(log_p, h, strict=True):
        kept = p + s[-1]
        s.append(max(kept, x) + math.log1p(math.exp(-abs(kept - x))))
    gradient, of_p, of_h = weights_last[0], [], []
    for t in reversed(range(len(h))):
        gradient += weights[t]
        of_h.append(gradient * math.exp(h[t] - s[t + 1]))
        gradient *= math.exp(log_p[t] + s[t] - s[t + 1])
        of_p.append(gradient)
    return s[1:], s[-1:], of_p[::-1], of_h[::-1], [gradient]


@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 1e-5), (torch.float64, 5e-11)])
@pytest.mark.slow
def test_a_million_tokens_with_state_and_all_gradients(million, dtype, within):
    """Gradients are relative to the largest. In float64 the truth itself rounds: 20,000 tokens x 2.2e-16 x |s| < 10."""
    inputs, weights, truth = million
    leaves = [x.to(dtype).requires_grad_() for x in inputs]
    outputs = log_recurrence(leaves[0], leaves[1], state=leaves[2], return_state=True)
    gradients = torch.autograd.grad(outputs, leaves, [x.to(dtype) for x in weights])
    largest = max(x.abs().max() for x in truth[2:])
    for got, wanted, scale in zip([*outputs, *gradients], truth, [1, 1, *[largest] * 3], strict=True):
        assert (got - wanted).abs().max() / scale <= within


def test_refuses_shapes_that_do_not_fit():
    with pytest.raises(ValueError, match=r"must both be \(B, T, D\)"):
        log_recurrence(torch.zeros(1, 2, 3), torch.zeros(1, 2, 4))
    with pytest.raises(ValueError, match=r"must be \(B, D\)"):
        log_recurrence(torch.zeros(1, 2, 3), torch.zeros(1, 2, 3), state=torch.zeros(1, 4))
