"""Linear attention against its definition, written out token by token, and as a module through its state.

Weights are sums of products of 5 positive numbers: nothing cancels, and means over some 200 values, or gradients of
size about 1, are exact to some 200 roundings of 1.1e-16.
"""

import pytest
import torch
from gradients import assert_all_close, with_gradients

from model.attention.linear import LinearConfig
from model.ops.custom import CHUNK
from model.ops.linear_attention import linear_attention, naive_linear_attention


def inputs(T, d=5, d_v=7, dtype=torch.float64, scale=1.0):
    generator = torch.Generator().manual_seed(T)
    shapes = [(2, 3, T, d), (2, 3, T, d), (2, 3, T, d_v)]
    return [(scale * torch.randn(shape, generator=generator, dtype=dtype)).requires_grad_() for shape in shapes]


def by_hand(q, k, v):
    """Sums over j <= i of sim(q_i, k_j) v_j, one pair of tokens at a time."""
    phi = lambda x: torch.where(x > 0, x + 1, x.exp())  # noqa: E731
    rows = []
    for i in range(q.shape[2]):
        weights = [(phi(q[:, :, i]) * phi(k[:, :, j])).sum(-1, keepdim=True) for j in range(i + 1)]
        rows.append(sum(w * v[:, :, j] for j, w in enumerate(weights)) / sum(weights))
    return torch.stack(rows, dim=2)


@pytest.mark.parametrize("T", [1, 2, 31])
def test_the_naive_form_is_the_definition(T):
    leaves = inputs(T)
    got = with_gradients(naive_linear_attention(*leaves), leaves)
    assert_all_close(got, with_gradients(by_hand(*leaves), leaves))


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 2, 31, CHUNK - 1, CHUNK, CHUNK + 1, 100, 3 * CHUNK, 1000])
def test_chunks_equal_the_naive_form_with_all_gradients(T):
    leaves = inputs(T)
    got = with_gradients(linear_attention(*leaves)[0], leaves)
    assert_all_close(got, with_gradients(naive_linear_attention(*leaves), leaves))


def test_memory_is_linear_in_the_length():
    """Autograd keeps twice as much for twice the tokens: there are no T x T scores."""

    def kept(T):
        storages = {}
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: storages.update({x.data_ptr(): x}) or x, lambda x: x)
        with hooks:
            linear_attention(*inputs(T))
        return sum(x.untyped_storage().nbytes() for x in storages.values())

    assert kept(4096) / kept(2048) == pytest.approx(2, rel=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_small_features_are_exact(dtype):
    """exp(-30) is lost in elu(x) + 1 in float32. Here it is the weight of every key, and y is still their mean."""
    q, k, v = inputs(100, dtype=dtype)
    y, _ = linear_attention(q, torch.full_like(k, -30), v)
    means = v.cumsum(2) / torch.arange(1, 101, dtype=dtype).unsqueeze(-1)
    # At most 100 additions, one product and one division, each exact to eps / 2, of values of size at most 5.
    torch.testing.assert_close(y, means, rtol=0, atol=100 * 5 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("T", [1, 70])
def test_features_beyond_the_range_are_no_weight_and_no_nan(T):
    leaves = inputs(T, dtype=torch.float32)
    y, _ = linear_attention(leaves[0], leaves[1] - 1000, leaves[2])
    assert (y == 0).all()
    assert all(x.isfinite().all() for x in with_gradients(y, leaves))


def test_autocast_does_not_reach_the_sums():
    leaves = [x.detach().float() for x in inputs(100)]
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = linear_attention(*leaves)
    assert torch.equal(y, linear_attention(*leaves)[0])


@pytest.mark.parametrize("decay", ["none", "head"])
def test_flops_are_those_of_the_products(decay):
    d, C = 4, CHUNK
    attention = LinearConfig(name="linear", decay=decay).build(12, 3, d)
    assert attention.flops_per_token(1000) == attention.flops_per_token(C) == 2 * 3 * (2 * C * d + 2 * d * d)


@pytest.mark.parametrize("change", [lambda q, k, v: (q, k[..., :-1], v), lambda q, k, v: (q, k, v[:, :, 1:])])
def test_shapes_that_do_not_fit_are_refused(change):
    with pytest.raises(ValueError, match=r"^q \(2, 3, 5, 5\), k .* do not match \(B, H, T, d\)"):
        linear_attention(*change(*inputs(5)))
