"""Linear attention against its definition, written out token by token, and as a module through its state."""

import pytest
import torch
from gradients import assert_all_close, with_gradients

from model.attention.linear import LinearConfig
from model.ops.linear_attention import linear_attention, naive_linear_attention
from model.ops.log_attention.chunks import CHUNK

# Means over at most 200 values, of weights that are sums of products of 5 positive numbers: nothing cancels, and each
# is exact to some 200 roundings of 1.1e-16; gradients of size about 1 likewise.
TOLERANCE = 1e-12


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


@pytest.mark.gpu
@pytest.mark.parametrize("pieces", [[1] * 100, [99, 1], [1, 99], [64, 36], [37, 26, 37]], ids=str)
def test_pieces_through_the_state_equal_the_whole_with_all_gradients(pieces):
    leaves = inputs(100)
    state, rows = None, []
    for part in zip(*(x.split(pieces, dim=2) for x in leaves), strict=True):
        y, state = linear_attention(*part, state=state)
        rows.append(y)
    whole, last = linear_attention(*leaves)
    assert_all_close(with_gradients(torch.cat(rows, 2), leaves), with_gradients(whole, leaves))
    assert_all_close(state, last)


def test_gradients_flow_through_the_state():
    leaves = inputs(70)
    state = linear_attention(*leaves)[1]
    wanted = [x.detach().requires_grad_() for x in leaves]
    f_k = torch.nn.functional.elu(wanted[1]) + 1
    by_definition = f_k.mT @ wanted[2], f_k.sum(2)  # (B, H, d, d_v), (B, H, d)
    for got, want in zip(state, by_definition, strict=True):
        torch.testing.assert_close(got, want, rtol=TOLERANCE, atol=TOLERANCE)
        some = torch.autograd.grad(got.square().sum(), leaves, retain_graph=True, allow_unused=True)
        same = torch.autograd.grad(want.square().sum(), wanted, retain_graph=True, allow_unused=True)
        assert_all_close([x for x in some if x is not None], [x for x in same if x is not None], 1e-10)


def test_a_state_is_a_value_of_constant_size():
    leaves = inputs(70)
    with torch.no_grad():
        state = linear_attention(*leaves)[1]
        before = [x.clone() for x in state]
        first = linear_attention(*inputs(9), state=state)
        again = linear_attention(*inputs(9), state=state)
        assert all(torch.equal(x, y) for x, y in zip(before, state, strict=True))
        assert torch.equal(first[0], again[0])
        sizes = {sum(x.untyped_storage().nbytes() for x in linear_attention(*inputs(T))[1]) for T in (1, 2, 64, 1000)}
    assert sizes == {2 * 3 * (5 * 7 + 5) * 8}


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


@pytest.mark.parametrize(("dtype", "unit"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_half_precision_rounds_inputs_and_result_alone(dtype, unit):
    leaves = [x.detach().to(dtype) for x in inputs(200)]
    y, state = linear_attention(*leaves)
    assert y.dtype == dtype
    assert all(x.dtype == torch.float32 for x in state)
    wanted = naive_linear_attention(*(x.double() for x in leaves))
    # Of the inputs as they are, the result is rounded once, by `unit` of its size; and there are float32's sums.
    assert ((y - wanted).abs() <= 1.01 * unit * wanted.abs() + 1e-5).all()


def test_autocast_does_not_reach_the_sums():
    leaves = [x.detach().float() for x in inputs(100)]
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = linear_attention(*leaves)
    assert torch.equal(y, linear_attention(*leaves)[0])


def module(dtype=torch.float64):
    torch.manual_seed(0)
    return LinearConfig(name="linear").build(12, 3, 4).to(dtype)


def test_bfloat16_autocast_rounds_the_projection_and_the_result_alone():
    attention = module(torch.float32)
    x = torch.randn(2, 100, 12, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = attention(x)
        q, k, v = attention.project(attention.qkv(x), None)
    assert y.dtype == q.dtype == torch.bfloat16
    wanted = naive_linear_attention(q.double(), k.double(), v.double()).transpose(1, 2).flatten(2)
    assert ((y - wanted).abs() <= 1.01 * 2**-8 * wanted.abs() + 1e-5).all()


@pytest.mark.parametrize("decay", ["none", "head"])
def test_flops_are_those_of_the_products(decay):
    d, C = 4, CHUNK
    attention = LinearConfig(name="linear", decay=decay).build(12, 3, d)
    assert attention.flops_per_token(1000) == attention.flops_per_token(C) == 2 * 3 * (2 * C * d + 2 * d * d)


@pytest.mark.parametrize("change", [lambda q, k, v: (q, k[..., :-1], v), lambda q, k, v: (q, k, v[:, :, 1:])])
def test_shapes_that_do_not_fit_are_refused(change):
    with pytest.raises(ValueError, match=r"^q \(2, 3, 5, 5\), k .* do not match \(B, H, T, d\)"):
        linear_attention(*change(*inputs(5)))
