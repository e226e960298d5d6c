"""log_recurrence against its definition. Its kernels run on a GPU, or in Triton's interpreter."""

from functools import partial

import agreement
import numpy as np
import pytest
import torch
from gradients import INTERPRETED, assert_all_close
from torch._subclasses.fake_tensor import FakeTensorMode

from model.ops.log_recurrence import _recur, log_recurrence, naive_log_recurrence

OTHERS = [
    *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in (torch.float16, torch.float32)),
    pytest.param(torch.float64, marks=[INTERPRETED, pytest.mark.slow]),
]
by_kernel = partial(log_recurrence, backend="triton")


@pytest.fixture
def quick_scan(monkeypatch):
    """Makes the interpreter scan whole tensors, and not number by number, each of which takes it milliseconds."""
    from triton.runtime.interpreter import ScanOps

    def scan(self, inputs):
        columns, types = [np.moveaxis(x.handle.data, self.axis, 0) for x in inputs], [x.dtype for x in inputs]
        step = 1
        while step < len(columns[0]):  # each row is joined with the one `step` before it
            earlier, own = (
                [self.to_tensor(np.roll(x, shift, 0), y) for x, y in zip(columns, types, strict=True)]
                for shift in (step, 0)
            )
            joined = self.combine_fn.fn(*earlier, *own)
            columns = [np.concatenate([x[:step], y.handle.data[step:]]) for x, y in zip(columns, joined, strict=True)]
            step *= 2
        return [self.to_tensor(np.moveaxis(x, 0, self.axis), y) for x, y in zip(columns, types, strict=True)]

    monkeypatch.setattr(ScanOps, "generic_scan", scan)


@pytest.fixture(params=["auto", pytest.param("triton", marks=INTERPRETED)])
def recurrence(request):
    """log_recurrence as models call it, and by its kernels."""
    if request.param == "triton":
        request.getfixturevalue("quick_scan")
    return partial(log_recurrence, backend=request.param)


def inputs(T, D=3, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    log_p = -torch.rand(2, T, D, generator=generator, dtype=dtype) * 3
    h, state = (torch.randn(shape, generator=generator, dtype=dtype) * 3 for shape in ((2, T, D), (2, D)))
    return [x.requires_grad_() for x in (log_p, h, state)]


def results(recurrence, leaves):
    """s, the state after, and all gradients of a weighted sum of these."""
    outputs = recurrence(*leaves)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in outputs]
    return [*outputs, *torch.autograd.grad(outputs, leaves, weights)]


@pytest.mark.gpu
@pytest.mark.parametrize(("T", "D"), [(1, 3), (2, 1), (32, 3), (33, 35), (64, 3), (200, 3)])
def test_the_recurrence_equals_the_definition_with_state_and_all_gradients(recurrence, T, D):
    leaves = inputs(T, D)
    assert_all_close(results(recurrence, leaves), results(naive_log_recurrence, leaves))


def test_the_interpreter_scans_as_the_tests_do():
    leaves = inputs(2, 1)
    assert_all_close(results(by_kernel, leaves), results(naive_log_recurrence, leaves))


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 2, 33, 70])
def test_a_token_that_keeps_nothing_forgets_all_before(recurrence, T):
    """log_p = -inf, at borders of chunks too: as the definition, and as if the text began there with s = -inf."""
    leaves = inputs(T)
    half = T // 2
    with torch.no_grad():
        leaves[0][:, [t for t in (0, 31, 32, half, 32 * (T // 33), T - 1) if t < T]] = -torch.inf
    found = results(recurrence, leaves)
    assert_all_close(found, results(naive_log_recurrence, leaves))
    log_p, h, _ = leaves
    fresh, _ = recurrence(log_p[:, half:], h[:, half:], torch.full((2, 3), -torch.inf, dtype=torch.float64))
    torch.testing.assert_close(found[0][:, half:], fresh, rtol=0, atol=1e-13)


def test_the_recurrence_starts_from_zero(recurrence):
    """s_0 = 0: the first token keeps p_1 exp(0)."""
    log_p, h, _ = inputs(1)
    torch.testing.assert_close(recurrence(log_p, h)[0], torch.logaddexp(log_p, h))


def test_extreme_numbers_give_the_definitions_results(quick_scan):
    """Of terms up to e^3000 only one counts. Numbers of 3000 are rounded by 2.3e-13, and gradients by some of these."""
    leaves = inputs(40)
    with torch.no_grad():
        leaves[0][:, ::7] = -1e30
        leaves[1][:, ::5] *= 1e3
        leaves[1][:, 1::5] = -torch.inf
        leaves[2][:, 0] = -torch.inf
    assert_all_close(results(by_kernel, leaves), results(naive_log_recurrence, leaves), tolerance=1e-11)


@pytest.mark.gpu
def test_a_number_that_is_nan_is_never_lost(quick_scan):
    log_p, h, _ = (x.detach() for x in inputs(70, dtype=torch.float32))
    h[0, 3, 1] = torch.nan
    s, _ = by_kernel(log_p, h)
    assert s[0, 3:, 1].isnan().all()
    assert s.isnan().sum() == 67


@pytest.mark.gpu
@pytest.mark.parametrize("size", [17, 33])
def test_pieces_with_the_state_carried_equal_one_call(recurrence, size):
    log_p, h, state = (x.detach() for x in inputs(100))
    whole, last = recurrence(log_p, h, state)
    pieces = []
    for p, x in zip(log_p.split(size, 1), h.split(size, 1), strict=True):
        s, state = recurrence(p, x, state)
        pieces.append(s)
    torch.testing.assert_close([torch.cat(pieces, 1), state], [whole, last], rtol=0, atol=1e-13)


@pytest.mark.gpu
def test_kernels_take_views_of_any_strides(quick_scan):
    log_p, h, _ = (x.detach() for x in inputs(33, 4, torch.float32))
    wanted, _ = by_kernel(log_p, h)
    p, x = torch.stack([log_p, h], 2).flatten(2).chunk(2, dim=-1)  # as the model has them
    assert p.stride() == (33 * 8, 8, 1)
    assert torch.equal(by_kernel(p, x)[0], wanted)
    assert torch.equal(by_kernel(log_p.mT.contiguous().mT, h.mT.contiguous().mT)[0], wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recur", "T"), [(log_recurrence, 2**14), pytest.param(by_kernel, 1000, marks=pytest.mark.gpu)]
)
def test_little_forgotten_in_many_tokens_keeps_float32s_digits(quick_scan, recur, T):
    """Errors of the tokens do not add up: about 1e-7 times |s| < 10, and not T times as much."""
    leaves = inputs(T, 2, torch.float32)
    with torch.no_grad():
        leaves[0].mul_(1e-5)
    truths = [x.detach().double().requires_grad_() for x in leaves]
    for found, wanted in zip(results(recur, leaves), results(naive_log_recurrence, truths), strict=True):
        assert (found - wanted).abs().max() <= 8 * 10 * torch.finfo(torch.float32).eps * wanted.abs().max().clamp(min=1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, *OTHERS], ids=str)
def test_kernels_agree_with_the_definition(quick_scan, device, dtype):
    agreement.recurrence(device, dtype)


@pytest.mark.slow
def test_kernels_keep_the_promises_that_torch_asks_of_an_operator(quick_scan):
    torch.library.opcheck(_recur, (*inputs(1, 1), "triton"))


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"must be \(B, T, D\), \(B, T, D\)"):
        log_recurrence(torch.zeros(1, 2, 3), torch.zeros(1, 2, 4))
    with pytest.raises(ValueError, match=r"of the state, \(B, D\)"):
        log_recurrence(torch.zeros(1, 2, 3), torch.zeros(1, 2, 3), torch.zeros(1, 4))


def test_keeping_more_than_all_is_refused():
    log_p, h, state = inputs(5)
    with pytest.raises(ValueError, match=r"log_p has a maximum of 0.5: it must be at most 0"):
        log_recurrence(log_p.where(log_p < log_p.max(), 0.5), h, state)
    assert log_recurrence(log_p * torch.nan, h)[0].isnan().all()  # training says at which step


def test_a_batch_of_calls_and_a_fake_one_need_no_values():
    log_p, h, _ = (x.detach() for x in inputs(5))
    each = [
        torch.stack(x) for x in zip(*(log_recurrence(log_p[i : i + 1], h[i : i + 1]) for i in range(2)), strict=True)
    ]
    torch.testing.assert_close([*torch.vmap(log_recurrence)(log_p.unsqueeze(1), h.unsqueeze(1))], each)
    with FakeTensorMode() as mode:
        assert log_recurrence(mode.from_tensor(log_p), mode.from_tensor(h))[0].shape == h.shape
