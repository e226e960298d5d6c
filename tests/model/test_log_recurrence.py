"""log_recurrence against its definition."""

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


@pytest.mark.parametrize("T", [1, 2, 31, 32, 33, 500])
def test_equals_the_definition_with_state_and_all_gradients(T):
    leaves = inputs(T)
    got, wanted = (results_and_gradients(f, leaves) for f in (log_recurrence, naive_log_recurrence))
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_numerical_gradients():
    leaves = inputs(5)
    assert torch.autograd.gradcheck(lambda p, h, s: log_recurrence(p, h, state=s, return_state=True), leaves)


def test_starts_from_zero():
    """s_0 = 0: the first token keeps p_1 exp(0)."""
    log_p, h, _ = inputs(1)
    torch.testing.assert_close(log_recurrence(log_p, h), torch.logaddexp(log_p, h))


def test_pieces_with_the_state_carried_equal_one_call():
    log_p, h, _ = (x.detach() for x in inputs(100))
    whole, last = log_recurrence(log_p, h, return_state=True)
    state, pieces = None, []
    for p, x in zip(log_p.split(17, 1), h.split(17, 1), strict=True):
        s, state = log_recurrence(p, x, state=state, return_state=True)
        pieces.append(s)
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=0, atol=1e-13)
    torch.testing.assert_close(state, last, rtol=0, atol=1e-13)


def test_float32_error_does_not_grow_with_the_length():
    """Each step forgets, so its own rounding is all there is: s is below 16, half an ulp of which is 4.8e-7."""
    log_p, h = (x.detach() for x in inputs(20_000)[:2])
    log_p, h = log_p.float(), h.float()
    truth = log_recurrence(log_p.double(), h.double())
    error = (log_recurrence(log_p, h).double() - truth).abs()
    assert error[:, -1000:].max() < 1e-5
    assert error[:, -1000:].max() < 4 * error[:, :1000].max()


def test_refuses_shapes_that_do_not_fit():
    with pytest.raises(ValueError, match=r"must both be \(B, T, D\)"):
        log_recurrence(torch.zeros(1, 2, 3), torch.zeros(1, 2, 4))
    with pytest.raises(ValueError, match=r"must be \(B, D\)"):
        log_recurrence(torch.zeros(1, 2, 3), torch.zeros(1, 2, 3), state=torch.zeros(1, 4))
