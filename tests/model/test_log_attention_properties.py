"""Properties that log_attention must have for any input, tested on many."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.ops.log_attention import fallback, log_attention

BACKENDS = ["naive", "chunked", pytest.param("triton", marks=pytest.mark.slow)]  # by its interpreter
FORMS = [(name, causal) for name in ("naive", "chunked") for causal in (True, False)]
FORMS += [pytest.param("triton", True, marks=pytest.mark.slow)]


@st.composite
def inputs(draw, dtype=torch.float64):
    """q, k, log_v of random sizes, scales and numbers."""
    T, d_k, d_v = draw(st.integers(1, 130)), draw(st.integers(1, 8)), draw(st.integers(1, 8))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    scales = [draw(st.sampled_from([0.1, 1.0, 10.0])) for _ in range(3)]
    shapes = [(1, 1, T, d_k), (1, 1, T, d_k), (1, 1, T, d_v)]
    return [torch.randn(s, generator=generator, dtype=dtype) * x for s, x in zip(shapes, scales, strict=True)]


# Logarithms here are below 100, and each result is a difference of sums of at most 131 terms in float64.
CLOSE = {"rtol": 0, "atol": 1e-10}
many = settings(max_examples=8, deadline=None, derandomize=True)


@pytest.mark.parametrize(("backend", "causal"), FORMS)
@many
@given(inputs(), st.floats(-50, 50))
def test_a_constant_added_to_q_changes_nothing_and_to_log_v_shifts_the_result(backend, causal, x, constant):
    q, k, log_v = x
    log_y = log_attention(q, k, log_v, causal=causal, backend=backend)
    torch.testing.assert_close(log_attention(q + constant, k, log_v, causal=causal, backend=backend), log_y, **CLOSE)
    shifted = log_attention(q, k, log_v + constant, causal=causal, backend=backend)
    torch.testing.assert_close(shifted, log_y + constant, **CLOSE)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@many
@given(st.data())
def test_a_token_changes_no_bit_of_what_came_before_it(backend, dtype, data):
    x = data.draw(inputs(dtype))
    t = data.draw(st.integers(0, x[0].shape[2] - 1))
    changed = [y.clone() for y in x]
    for y in changed:
        y[:, :, t:] += data.draw(st.floats(-20, 20))
    tiles = fallback.forward_tiles
    before = log_attention(*x, backend=backend)[:, :, :t]
    after = log_attention(*changed, backend=backend)[:, :, :t]
    if fallback.forward_tiles == tiles:
        assert torch.equal(before, after)
    else:  # a later token drove the chunk into the fallback: the same numbers, by another way
        torch.testing.assert_close(before, after, rtol=2e-6, atol=2e-5)


@pytest.mark.parametrize("backend", ["naive", "chunked"])  # those that need not be causal
@many
@given(inputs(), st.integers(0, 2**32))
def test_the_order_of_the_keys_does_not_matter_where_all_are_seen(backend, x, seed):
    q, k, log_v = x
    order = torch.randperm(k.shape[2], generator=torch.Generator().manual_seed(seed))
    log_y = log_attention(q, k, log_v, causal=False, backend=backend)
    permuted = log_attention(q, k[:, :, order], log_v[:, :, order], causal=False, backend=backend)
    torch.testing.assert_close(permuted, log_y, **CLOSE)


@pytest.mark.parametrize("backend", ["naive", "chunked"])  # triton: test_log_attention_range.py, test_torch.py
@many
@given(inputs(torch.float32))
def test_twice_the_same_call_gives_the_same_bits(backend, x):
    leaves = [y.requires_grad_() for y in x]
    results = []
    for _ in range(2):
        log_y = log_attention(*leaves, backend=backend)
        results.append([log_y, *torch.autograd.grad(log_y.sum(), leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
