"""log_attention at and beyond the bounds of its logarithms, with masked keys, resets, infinity and NaN."""

import itertools

import pytest
import torch
from gradients import FAST_SLOW, FORMS

from model.ops.log_attention import LOG_SPACE, log_attention


def normal(T=200, d=16, seed=0):
    """q, k and v (1, 2, T, d)."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, 2, T, d, generator=generator) for _ in range(3)]


def gates(T=200, resets=(100,)):
    log_f = -0.1 * torch.rand(1, 2, T, 1, generator=torch.Generator().manual_seed(1))
    log_f[:, :, list(resets)] = -torch.inf
    return log_f


def with_gradients(attend, inputs, scale=1.0):
    """The result and the gradients of all inputs, given a gradient of `scale` or its negative."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    y = attend(*leaves)
    signs = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).sign()
    return [y.detach(), *torch.autograd.grad(y, leaves, scale * signs.to(y.dtype))]


def assert_right(inputs, backend="chunked", scale=1.0, form=LOG_SPACE):
    """Compare with the definition in float64, each number relative to the largest of its kind.

    A gradient of q is a difference of two sums, of which three digits may cancel; float32 has seven. Kernels compute
    exp(45) as 2^(45 log2 e), whose exponent is rounded to 4e-6.
    """
    tolerance = 1e-5 if backend == "chunked" else 1e-4
    if inputs[0].dtype == torch.bfloat16:
        tolerance = 0.1  # gates err by up to 0.06: <M, its gradient>, both of bfloat16, cancels
    size = scale if form.log else scale * inputs[2].abs().max().item()  # terms of gradients that may cancel
    attend, definition = (
        lambda *x, name=name: log_attention(*x, form=form, backend=name) for name in (backend, "naive")
    )
    found = with_gradients(attend, inputs, scale)
    truth = with_gradients(definition, [x.double() for x in inputs], scale)
    for name, a, b in zip(("y", "g_q", "g_k", "g_v", "g_f"), found, truth, strict=False):
        assert a.isfinite().all(), name
        error, largest = (a - b).abs().max().item(), b.abs().max().item()
        assert error <= max(tolerance, 2e-3 if name == "g_q" else 0) * max(largest, size), (
            f"{name}: {error / scale:.1e} of {largest / scale:.1e}"
        )


def blocks(T, d, bound, length, generator):
    """+bound or -bound, constant over `length` tokens of a feature."""
    signs = torch.randint(0, 2, (1, 2, -(-T // length), d), generator=generator) * 2.0 - 1
    return (bound * signs).repeat_interleave(length, 2)[:, :, :T]


GATES = {
    "none": lambda x: None,
    "steep": lambda x: -60 * x,
    "resets": lambda x: torch.where(x < 0.02, -torch.inf, -0.01 * x),
    "some of -200": lambda x: torch.where(x < 0.1, -200.0, 0.0),
}


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("scale", [1.0, 1e4, 65536.0, 1e6])  # 65,536: what gradients of float16 are multiplied by
@pytest.mark.parametrize(
    ("backend", "T", "d", "dtype"),
    [
        ("chunked", 700, 64, torch.float32),
        *(pytest.param("triton", 150, 16, dtype, marks=pytest.mark.slow) for dtype in (torch.float32, torch.bfloat16)),
    ],
)
def test_inputs_at_and_beyond_the_bounds_give_the_definitions_numbers(backend, T, d, dtype, kind, scale):
    generator = torch.Generator().manual_seed(0)
    all_lengths = itertools.product([1, 7, 33, 64, 100], repeat=2)
    every = 12 if d == 16 else 6
    for form, lengths in zip(
        itertools.cycle(FORMS.values()), itertools.islice(all_lengths, 0, 25, every), strict=False
    ):
        q, log_v = (blocks(T, d, bound, lengths[0], generator) for bound in (80, 30))
        inputs = [q, blocks(T, d, 60, lengths[1], generator), log_v]
        inputs = [x.to(dtype) for x in inputs]
        log_f = GATES[kind](torch.rand(1, 2, T, 1, generator=generator))
        assert_right(inputs if log_f is None else [*inputs, log_f], backend, scale, form)


def masked(x, share, seed=3):
    return x.masked_fill(torch.rand(x.shape, generator=torch.Generator().manual_seed(seed)) < share, -torch.inf)


q, k, v = normal()
CASES = {
    "ties of all features": [torch.zeros_like(q), k, v],
    "a feature far above all": [q.index_add(3, torch.tensor([3]), torch.full((1, 2, 200, 1), 1e4)), k, v],
    "masked features of keys": [q, masked(k, 0.3), v],
    "masked features, gates, resets": [q, masked(k, 0.3), v, gates(resets=(100, 101, 150))],
    "resets everywhere": [q, k, v, gates(resets=range(200))],
    "infinite numbers": [q, k.masked_fill(k > 2, torch.inf), masked(v, 0.3)],
    "huge numbers": [1e30 * q, 1e30 * k, 1e30 * v],
}


@pytest.mark.parametrize("backend", FAST_SLOW)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("scale", [1e-6, 1e4])
def test_hostile_inputs_give_the_definitions_numbers(case, backend, scale):
    inputs = CASES[case]
    if case == "infinite numbers":  # they count as the bound; the definition has no derivative there
        inputs = [x.clamp(-1e30, 1e30) for x in inputs]
        assert torch.equal(log_attention(*inputs, backend=backend), log_attention(*CASES[case], backend=backend))
    assert_right(inputs, backend, scale)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("backend", ["naive", *FAST_SLOW])
def test_a_reset_hides_earlier_tokens_and_no_token_changes_an_earlier_one_by_a_bit(backend, form):
    inputs = [*normal(130), gates(130, resets=(70,)), torch.ones(1, 2, 16, 17)]
    hidden, later = ([x.clone() for x in inputs] for _ in range(2))
    for x in hidden:
        x[:, :, :70] *= 20
    for x in later[:3]:
        x[:, :, 100:] += 3
    later[3][:, :, 100:] *= 1000
    y, y_hidden, y_later = (
        log_attention(*x, state=state, form=FORMS[form], backend=backend) for *x, state in (inputs, hidden, later)
    )
    assert torch.equal(y[:, :, 70:], y_hidden[:, :, 70:])
    assert torch.equal(y[:, :, :100], y_later[:, :, :100])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("backend", FAST_SLOW)
def test_a_text_whose_first_keys_are_masked_begins_after_them(backend, form):
    """Queries that see no key have no result, and no gradient."""
    inputs = normal(130)
    inputs[1][:, :, :70] = -torch.inf
    attend = lambda *x: log_attention(*x, form=FORMS[form], backend=backend)[:, :, -60:]  # noqa: E731
    whole = with_gradients(attend, inputs)
    alone = with_gradients(attend, [x[:, :, 70:] for x in inputs])
    assert log_attention(*inputs, form=FORMS[form], backend=backend)[:, :, :70].isnan().all()
    for a, b in zip(whole, alone, strict=True):
        torch.testing.assert_close(a[:, :, -60:], b, rtol=1e-5, atol=1e-5)
    assert all((g[:, :, :70] == 0).all() for g in whole[1:])


@pytest.mark.parametrize("backend", FAST_SLOW)
@pytest.mark.parametrize("which", range(4))
def test_nan_reaches_every_query_that_sees_it_and_no_earlier_chunk(backend, which):
    inputs = [*normal(130), gates(130)]
    inputs[which][0, 1, 70, -1] = torch.nan
    y = log_attention(*inputs, backend=backend)
    seen = slice(70, 71 if which == 0 else 100)  # there is a reset
    columns = slice(-1, None) if which == 2 else slice(None)
    assert y[0, 1, seen, columns].isnan().all()
    assert y[:, :, :64].isfinite().all()
    assert y[0, 0].isfinite().all()
