"""signed_log_attention against the plain definition, in ordinary numbers and float64."""

import pytest
import torch
from gradients import tiles

from model.ops.log_attention import signed_log_attention


def inputs(T=100, S=None, seed=0):
    """q, k and values v of either sign, some of them zero."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, 3, T, 5), (2, 3, S or T, 5), (2, 3, S or T, 7)]
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    v[:, :, ::9, 2] = 0
    return q, k, v


def definition(q, k, v, causal):
    """softmax(log(exp(q) exp(k)^T)) v: no logarithm of a value anywhere."""
    weights = q.exp() @ k.exp().mT
    weights = weights.tril() if causal else weights
    return (weights / weights.sum(-1, keepdim=True)) @ v


def attend(q, k, v, **options):
    log_abs_y, sign_y, *state = signed_log_attention(q, k, v.abs().log(), v.sign(), **options)
    return sign_y * log_abs_y.exp(), *state


@pytest.mark.parametrize(
    ("backend", "T", "S", "causal"),
    [
        *((name, T, T, True) for name in ("naive", "chunked") for T in (1, 65)),
        pytest.param("triton", 65, 65, True, marks=pytest.mark.slow),
        *((name, 7, 70, False) for name in ("naive", "chunked")),
    ],
)
def test_signed_log_attention_equals_the_definition_and_its_gradients(backend, T, S, causal):
    q, k, v = (x.requires_grad_() for x in inputs(T, S))
    (y,) = attend(q, k, v, causal=causal, backend=backend)
    wanted = definition(q, k, v, causal)
    torch.testing.assert_close(y, wanted, rtol=0, atol=1e-12)
    if backend != "naive":  # whose gradient is NaN at values of zero
        weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        nonzero = v.detach() != 0  # the logarithm of a value has no gradient at 0
        for a, b in zip(
            *(torch.autograd.grad(x, (q, k, v), weights, retain_graph=True) for x in (y, wanted)), strict=True
        ):
            a, b = (x[nonzero] if x.shape == v.shape else x for x in (a, b))
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_exact_cancellation_is_a_zero_with_a_finite_gradient():
    q = torch.zeros(1, 1, 2, 3, dtype=torch.float64, requires_grad=True)
    k = torch.zeros(1, 1, 2, 3, dtype=torch.float64, requires_grad=True)
    log_abs_v = torch.full((1, 1, 2, 1), 0.5, dtype=torch.float64, requires_grad=True)
    sign_v = torch.tensor([1.0, -1.0], dtype=torch.float64).view(1, 1, 2, 1)
    log_abs_y, sign_y = signed_log_attention(q, k, log_abs_v, sign_v, backend="chunked")
    assert log_abs_y[0, 0, 1, 0] == -torch.inf
    assert sign_y.flatten().tolist() == [1, 0]
    gradients = torch.autograd.grad(log_abs_y.masked_fill(sign_y == 0, 0).sum(), (q, k, log_abs_v))
    assert all(x.isfinite().all() for x in gradients)


def test_sums_of_nothing_are_certain():
    """The first token's value has one sign, so half of its sums are empty; this must not trigger the fallback."""
    before = tiles()
    q, k, v = (x.float().requires_grad_() for x in inputs(130))
    attend(q, k, v)[0].sum().backward()
    assert tiles() == before


def test_shapes_that_do_not_fit_are_refused():
    q, k, v = inputs(3)
    with pytest.raises(ValueError, match="must have the same shape"):
        signed_log_attention(q, k, v, v[..., :1])
