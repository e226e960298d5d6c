"""log_recurrence against its definition. Its kernels run on a GPU, or in Triton's interpreter."""

from functools import partial

import agreement
import pytest
import torch
from gradients import INTERPRETED, assert_all_close

from model.ops.log_recurrence import _recur, log_recurrence, naive_log_recurrence

OTHERS = [
    *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in (torch.float16, torch.float32)),
    pytest.param(torch.float64, marks=[INTERPRETED, pytest.mark.slow]),
]
by_kernel = partial(log_recurrence, backend="triton")


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


AUTO = pytest.param(log_recurrence, id="auto")
KERNELS = pytest.param(by_kernel, id="triton", marks=INTERPRETED)
each_form = pytest.mark.parametrize("recurrence", [AUTO, KERNELS])


@pytest.mark.gpu
@pytest.mark.parametrize(("T", "D"), [(1, 3), (2, 1), (33, 3)])
@each_form
def test_the_recurrence_equals_the_definition_with_state_and_all_gradients(recurrence, T, D):
    leaves = inputs(T, D)
    assert_all_close(results(recurrence, leaves), results(naive_log_recurrence, leaves))


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 33])
@each_form
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


@each_form
def test_the_recurrence_starts_from_zero(recurrence):
    """s_0 = 0: the first token keeps p_1 exp(0)."""
    log_p, h, _ = inputs(1)
    torch.testing.assert_close(recurrence(log_p, h)[0], torch.logaddexp(log_p, h))


@pytest.mark.gpu
def test_a_number_that_is_nan_is_never_lost():
    log_p, h, _ = (x.detach() for x in inputs(70, dtype=torch.float32))
    h[0, 3, 1] = torch.nan
    s, _ = by_kernel(log_p, h)
    assert s[0, 3:, 1].isnan().all()
    assert s.isnan().sum() == 67


@pytest.mark.gpu
@pytest.mark.parametrize("size", [17, 33])
@each_form
def test_pieces_with_the_state_carried_equal_one_call(recurrence, size):
    log_p, h, state = (x.detach() for x in inputs(40, D=1))
    whole, last = recurrence(log_p, h, state)
    pieces = []
    for p, x in zip(log_p.split(size, 1), h.split(size, 1), strict=True):
        s, state = recurrence(p, x, state)
        pieces.append(s)
    torch.testing.assert_close([torch.cat(pieces, 1), state], [whole, last], rtol=0, atol=1e-13)


@pytest.mark.gpu
def test_kernels_take_views_of_any_strides():
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
def test_little_forgotten_in_many_tokens_keeps_float32s_digits(recur, T):
    """Errors of the tokens do not add up: about 1e-7 times |s| < 10, and not T times as much."""
    leaves = inputs(T, 2, torch.float32)
    with torch.no_grad():
        leaves[0].mul_(1e-5)
    truths = [x.detach().double().requires_grad_() for x in leaves]
    for found, wanted in zip(results(recur, leaves), results(naive_log_recurrence, truths), strict=True):
        assert (found - wanted).abs().max() <= 8 * 10 * torch.finfo(torch.float32).eps * wanted.abs().max().clamp(min=1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, *OTHERS], ids=str)
def test_kernels_agree_with_the_definition(device, dtype):
    agreement.recurrence(device, dtype)


@pytest.mark.slow
def test_kernels_keep_the_promises_that_torch_asks_of_an_operator():
    torch.library.opcheck(_recur, (*inputs(1, 1), "triton"))
