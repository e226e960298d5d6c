"""The kernels of the log recurrence against its definition: on a GPU, or in Triton's interpreter."""

from functools import partial

import numpy as np
import pytest
import simulated_gpu
import torch
from gradients import assert_all_close
from torch._subclasses.fake_tensor import FakeTensorMode

from model.ops.checks import Wrong
from model.ops.log_recurrence import BACKENDS, log_recurrence, naive_log_recurrence
from model.ops.log_recurrence import triton as kernels
from model.ops.log_recurrence.check import check

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(simulated_gpu.ASKED_FOR, reason="Triton's interpreter does not take its tensors"),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OTHERS = [torch.float16, torch.float32, torch.float64]
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


def inputs(T, D=3, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    log_p = -torch.rand(2, T, D, generator=generator, dtype=dtype) * 3
    h, state = (torch.randn(shape, generator=generator, dtype=dtype) * 3 for shape in ((2, T, D), (2, D)))
    return [x.to(DEVICE).requires_grad_() for x in (log_p, h, state)]


def results(recurrence, leaves):
    """s, the state after, and all gradients of a weighted sum of these."""
    outputs = recurrence(leaves[0], leaves[1], state=leaves[2], return_state=True)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=generator, dtype=x.dtype).to(DEVICE) for x in outputs]
    return [*outputs, *torch.autograd.grad(outputs, leaves, weights)]


@pytest.mark.parametrize(("T", "D"), [(1, 3), (31, 1), (32, 3), (33, 35), (63, 3), (64, 3), (65, 3), (1000, 3)])
def test_equal_the_definition_with_state_and_all_gradients(quick_scan, T, D):
    leaves = inputs(T, D)
    assert_all_close(results(by_kernel, leaves), results(naive_log_recurrence, leaves))


@pytest.mark.skipif(DEVICE != "cpu", reason="there is no interpreter to compare with")
def test_the_interpreter_scans_as_the_tests_do():
    leaves = inputs(2, 1)
    assert_all_close(results(by_kernel, leaves), results(naive_log_recurrence, leaves))


def test_a_token_that_keeps_nothing_forgets_all_before(quick_scan):
    leaves = inputs(70)
    with torch.no_grad():
        leaves[0][:, [0, 31, 32, 35, 69]] = -torch.inf
    found = results(by_kernel, leaves)
    assert_all_close(found, results(naive_log_recurrence, leaves))
    with torch.no_grad():
        leaves[1][:, :35] = 5.0
        assert torch.equal(by_kernel(leaves[0], leaves[1])[:, 35:], found[0][:, 35:])


def test_extreme_numbers(quick_scan):
    """Of terms up to e^3000 only one counts. Numbers of 3000 are rounded by 2.3e-13, and gradients by some of these."""
    leaves = inputs(40)
    with torch.no_grad():
        leaves[0][:, ::7] = -1e30
        leaves[1][:, ::5] *= 1e3
        leaves[1][:, 1::5] = -torch.inf
        leaves[2][:, 0] = -torch.inf
    assert_all_close(results(by_kernel, leaves), results(naive_log_recurrence, leaves), tolerance=1e-11)


def test_a_number_that_is_nan_is_never_lost(quick_scan):
    log_p, h, _ = (x.detach() for x in inputs(70))
    h[0, 3, 1] = torch.nan
    s = by_kernel(log_p, h)
    assert s[0, 3:, 1].isnan().all()
    assert s.isnan().sum() == 67


def test_pieces_with_the_state_carried_equal_one_call(quick_scan):
    log_p, h, state = (x.detach() for x in inputs(70))
    whole, last = by_kernel(log_p, h, state=state, return_state=True)
    pieces = []
    for p, x in zip(log_p.split(33, 1), h.split(33, 1), strict=True):
        s, state = by_kernel(p, x, state=state, return_state=True)
        pieces.append(s)
    assert_all_close([torch.cat(pieces, 1), state], [whole, last])


def test_take_views_of_any_strides(quick_scan):
    log_p, h, _ = (x.detach() for x in inputs(33, 4))
    wanted = by_kernel(log_p, h)
    p, x = torch.stack([log_p, h], 2).flatten(2).chunk(2, dim=-1)  # as the model has them
    assert p.stride() == (33 * 8, 8, 1)
    assert torch.equal(by_kernel(p, x), wanted)
    assert torch.equal(by_kernel(log_p.mT.contiguous().mT, h.mT.contiguous().mT), wanted)


def test_derivatives_that_are_not_there_are_refused(quick_scan):
    leaves = inputs(2)
    with pytest.raises(NotImplementedError, match="use naive_log_recurrence"):
        torch.autograd.grad(by_kernel(*leaves[:2]).sum(), leaves[:2], create_graph=True)
    with pytest.raises(NotImplementedError, match="use naive_log_recurrence"):
        torch.func.grad(lambda h: by_kernel(leaves[0].detach(), h).sum())(leaves[1].detach())


@pytest.mark.slow
def test_little_forgotten_in_many_tokens_keeps_float32s_digits(quick_scan):
    """Errors of 1,000 tokens do not add up: about 1e-7 times |s| < 10, and not 1,000 times as much."""
    generator = torch.Generator().manual_seed(0)
    log_p, h = -1e-5 * torch.rand(1, 1000, 2, generator=generator), torch.randn(1, 1000, 2, generator=generator)
    wanted = naive_log_recurrence(log_p.double(), h.double())
    found = by_kernel(log_p.to(DEVICE), h.to(DEVICE)).cpu()
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=8 * 10 * torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("dtype", [torch.bfloat16, *(pytest.param(x, marks=pytest.mark.slow) for x in OTHERS)], ids=str)
def test_pass_their_check(quick_scan, dtype):
    check(DEVICE, str(dtype).removeprefix("torch."))


def test_a_fault_does_not_pass_the_check(quick_scan, monkeypatch):
    def wrong(*arguments, **options):
        return [1.001 * x for x in naive_log_recurrence(*arguments, **options)]

    monkeypatch.setitem(BACKENDS, "triton", wrong)
    with pytest.raises(Wrong, match=r"^s is off by .* allowed \(1 tokens\)"):
        check(DEVICE, "float32")


@pytest.mark.slow
def test_keep_the_promises_that_torch_asks_of_an_operator(quick_scan):
    torch.library.opcheck(kernels._recur, inputs(1, 1))


def test_fakes_have_the_strides_and_types_of_results(quick_scan):
    log_p, h, state = (x.detach() for x in inputs(3, 2))
    arguments = [log_p.float(), h.mT.contiguous().mT, state]
    s = kernels._recur(*arguments)
    for operator, given in [(kernels._recur, arguments), (kernels._recur_backward, [s, *arguments, s])]:
        with FakeTensorMode() as mode:
            fakes = operator(*map(mode.from_tensor, given))
        found = operator(*given)
        for fake, real in zip(*((y,) if isinstance(y, torch.Tensor) else y for y in (fakes, found)), strict=True):
            assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)
