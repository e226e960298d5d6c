"""Projection attention against its definition by hand, as a module through its state, and through the fused kernels."""

import itertools
import math

import pytest
import torch
from gradients import assert_all_close, naive, with_gradients
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from model.attention.projection import ProjectionConfig
from model.ops.projection_attention import inner_keys, inner_queries, naive_projection_attention, padded_values

# Exponents of size up to 30, to some ten roundings of 1.1e-16 each, move weights by 1e-13 of themselves at most, and
# gradients, sums over at most 100 tokens of either sign, by some ten times that.
TOLERANCE = 1e-12


def build(dtype=torch.float64, n_head=4, head_dim=6, **settings):
    torch.manual_seed(0)
    attention = ProjectionConfig(name="projection", **settings).build(12, n_head, head_dim).to(dtype)
    if attention.log_sigma is not None:
        torch.nn.init.uniform_(attention.log_sigma, -0.5, 0.5)
    return attention


def tokens(T, dtype=torch.float64):
    return torch.randn(2, T, 12, generator=torch.Generator().manual_seed(T), dtype=dtype, requires_grad=True)


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def causal(T):
    return torch.ones(T, T, dtype=torch.bool).tril()


def attend(q, k, v, sigma):
    """As the module does."""
    k = inner_keys(k)
    y = scaled_dot_product_attention(inner_queries(q, sigma), k, padded_values(v), is_causal=True, scale=1.0)
    return y[..., : v.shape[-1]]


@pytest.mark.parametrize("T", [1, 2, 31])
def test_the_naive_form_is_the_definition(T):
    q, k, v, sigma = randn(2, 3, T, 5), randn(2, 3, T, 5, seed=1), randn(2, 3, T, 5, seed=2), torch.tensor([0.5, 1, 3])
    y = naive_projection_attention(q, k, v, sigma.double(), causal(T))
    for b, h, i in itertools.product(range(2), range(3), range(T)):
        weights = [
            math.exp(-(math.dist(q[b, h, i], k[b, h, j]) ** 2) / (2 * sigma[h].item() ** 2)) for j in range(i + 1)
        ]
        wanted = sum(w * v[b, h, j] for j, w in enumerate(weights)) / sum(weights)
        torch.testing.assert_close(y[b, h, i], wanted, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("sigma", [0.05, 0.3, 20.0])
def test_a_narrow_and_a_wide_sigma_give_the_definitions_numbers(sigma):
    attention, x = build(sigma=sigma), tokens(31)
    leaves = [x, *attention.parameters()]
    # Exponents are 1 / sigma^2 times as large as at sigma = 1, and so are what rounding moves them by and gradients.
    tolerance = TOLERANCE * max(1, sigma**-4)
    got, wanted = attention(x)[0], naive(attention, x)
    assert_all_close(with_gradients(got, leaves), with_gradients(wanted, leaves), tolerance)


def test_the_default_sigma_gives_inner_products_the_scale_of_softmax_attention():
    assert build(head_dim=64).sigma.pow(-2).tolist() == pytest.approx([64**-0.5] * 4, rel=1e-6)


@pytest.mark.parametrize(("values", "n_kv_head", "head_dim"), [("own", None, 6), ("keys", 2, 64)])
def test_the_fused_kernel_takes_it(values, n_kv_head, head_dim):
    """It runs when the form with T x T weights is forbidden."""
    attention = build(torch.float32, head_dim=head_dim, values=values, n_kv_head=n_kv_head)
    x = tokens(50, torch.float32)
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
        attention(x)[0].sum().backward()
    assert x.grad.isfinite().all()


U = 2.0**-8  # bfloat16 rounds by this much of a number at most


def test_bfloat16_does_not_round_the_norms_of_keys():
    """Exponents near -200, where bfloat16 has integers only: weights would be wrong by a factor of exp(1/2)."""
    k, v = randn(1, 1, 100, 8).mul(0.06).add(10).bfloat16(), randn(1, 1, 100, 8, seed=1).bfloat16()
    q, sigma = torch.zeros_like(k), torch.full((1,), 2.0).sqrt()
    wanted = naive_projection_attention(q.double(), k.double(), v.double(), sigma.double(), causal(100))
    error = (attend(q, k, v, sigma) - wanted).abs()
    assert error.max() <= 3 * U * v.abs().max()
