"""The kernel of the loss against torch's cross-entropy of all logits: on a GPU, or in Triton's interpreter."""

from functools import partial

import pytest
import simulated_gpu
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import cross_entropy

from model.ops import linear_cross_entropy
from model.ops.checks import Wrong
from model.ops.linear_cross_entropy import summed_loss
from model.ops.linear_cross_entropy import triton as kernel
from model.ops.linear_cross_entropy.check import check

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(simulated_gpu.ASKED_FOR, reason="Triton's interpreter does not take its tensors"),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OTHERS = [torch.float16, torch.float32, torch.float64]
by_kernel = partial(summed_loss, backend="triton")


def inputs(N=20, D=6, V=11, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, D, generator=generator, dtype=dtype).to(DEVICE).requires_grad_() for n in (N, V))
    targets = torch.randint(V, (N,), generator=generator)
    targets[::7] = -1  # not to be counted
    return x, weight, targets.to(DEVICE)


def truth(x, weight, targets, cap=None):
    logits = x @ weight.T
    return cross_entropy(
        logits if cap is None else cap * (logits / cap).tanh(), targets, ignore_index=-1, reduction="sum"
    )


@pytest.fixture
def at_once(monkeypatch):
    """Sets how many float64 logits are computed at a time."""
    return lambda logits: monkeypatch.setitem(linear_cross_entropy.CHUNK, DEVICE, 8 * logits)


@pytest.mark.parametrize(("N", "V", "tokens"), [(20, 11, 1), (20, 64, 6), (1, 1, 5), (5, 300, 3), (3, 4160, 9)])
@pytest.mark.parametrize("cap", [None, 2.0])
def test_equals_the_definition_with_gradients(at_once, N, V, tokens, cap):
    """For vocabularies below, at and beyond a multiple of 64, and beyond a block; the last part is not full."""
    at_once(tokens * (V + -V % 64))
    x, weight, targets = inputs(N, V=V)
    targets[-1] = V - 1
    loss, wanted = by_kernel(x, weight, targets, cap), truth(x, weight, targets, cap)
    torch.testing.assert_close(loss, wanted, rtol=1e-13, atol=1e-13)
    gradients = [torch.autograd.grad(3 * y, (x, weight)) for y in (loss, wanted)]
    for got, right in zip(*gradients, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-12, atol=1e-12)


def test_targets_may_be_a_column_of_a_table():
    x, weight, targets = inputs()
    table = torch.stack([targets, targets.new_zeros(len(targets))], 1)
    assert torch.equal(by_kernel(x, weight, table[:, 0]), by_kernel(x, weight, targets))


def test_only_one_gradient_may_be_wanted():
    x, weight, targets = inputs()
    loss = by_kernel(x, weight.detach(), targets)
    with torch.no_grad():
        assert torch.equal(by_kernel(x, weight, targets), loss)
    got, wanted = (torch.autograd.grad(y, x)[0] for y in (loss, truth(x, weight, targets)))
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def test_nothing_counted_is_zero():
    x, weight, targets = inputs()
    loss = by_kernel(x, weight, torch.full_like(targets, -100))
    assert loss == 0
    assert all((g == 0).all() for g in torch.autograd.grad(loss, (x, weight)))


def test_a_token_that_is_not_counted_cannot_spoil_the_others():
    x, weight, targets = inputs()
    with torch.no_grad():
        x[0] = torch.nan
    assert targets[0] < 0
    assert torch.equal(by_kernel(x, weight, targets), by_kernel(x.nan_to_num(), weight, targets))


@pytest.mark.parametrize("spoil", ["nan", "target"])
def test_what_cannot_be_computed_is_nan(spoil):
    x, weight, targets = inputs()
    with torch.no_grad():
        (x if spoil == "nan" else targets)[3] = torch.nan if spoil == "nan" else 11
    assert by_kernel(x, weight, targets).isnan()


def test_logits_of_any_size():
    """An infinite weight of another token gives infinity or NaN, a token that is sure a loss of 0."""
    x, weight = torch.eye(3, device=DEVICE).mul(1e4), torch.eye(3, device=DEVICE)
    right, wrong = torch.tensor([0, 1, 2], device=DEVICE), torch.tensor([1, 2, 0], device=DEVICE)
    assert by_kernel(x, weight, right) == 0
    assert by_kernel(x, weight, wrong) == 3e4
    assert not by_kernel(x, weight.masked_fill(weight == 1, torch.inf), wrong).isfinite()
    torch.testing.assert_close(by_kernel(x, weight, wrong, cap=50.0), truth(x, weight, wrong, cap=50.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_losses_of_short_types_are_summed_in_float32(dtype):
    x, weight, targets = (t.detach().to(dtype) if t.is_floating_point() else t for t in inputs())
    x.requires_grad_()
    loss = by_kernel(x, weight, targets)
    assert loss.dtype == torch.float32
    # A logit of size up to 16 is rounded once, relative to 1; 17 of them are added.
    wanted = truth(x.double(), weight.double(), targets)
    torch.testing.assert_close(loss.double(), wanted, rtol=0, atol=17 * 16 * torch.finfo(dtype).eps)
    assert torch.autograd.grad(loss, x)[0].dtype == dtype


def test_every_element_of_a_result_is_written():
    torch.use_deterministic_algorithms(True)  # empty memory is now filled with NaN
    try:
        x, weight, targets = inputs()
        loss = by_kernel(x, weight, targets)
        assert all(y.isfinite().all() for y in (loss, *torch.autograd.grad(loss, (x, weight))))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, *(pytest.param(x, marks=pytest.mark.slow) for x in OTHERS)], ids=str)
def test_passes_its_check(dtype):
    check(DEVICE, str(dtype).removeprefix("torch."))


@pytest.mark.parametrize(
    ("losses", "gradient", "message"),
    [(1e-3, 0.0, "the loss is off by"), (0.0, 1e-4, "the gradient of x is off by")],
)
def test_a_fault_does_not_pass_the_check(monkeypatch, losses, gradient, message):
    right = kernel.cross_entropy_

    def wrong(logits, targets, n_vocab, wanted, cap):
        found = right(logits, targets, n_vocab, wanted, cap) + losses
        logits[0, :1] += gradient
        return found

    monkeypatch.setattr(kernel, "cross_entropy_", wrong)
    with pytest.raises(Wrong, match=rf"^{message} .* allowed \(1 x 1 logits, cap=None\)"):
        check(DEVICE, "float32")


@pytest.mark.slow
def test_compiles_without_a_graph_break():
    x, weight, targets = inputs()
    compiled = torch.compile(by_kernel, fullgraph=True, backend="aot_eager")
    results = [f(x, weight, targets, 2.0) for f in (by_kernel, compiled)]
    gradients = [torch.autograd.grad(loss, (x, weight)) for loss in results]
    assert torch.equal(*results)
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_fakes_have_the_strides_of_results():
    arguments = [*(x.detach() for x in inputs()), True, None, "triton"]
    with FakeTensorMode() as mode:
        fakes = linear_cross_entropy._summed_loss(*map(mode.from_tensor, arguments[:3]), *arguments[3:])
    for fake, real in zip(fakes, linear_cross_entropy._summed_loss(*arguments), strict=True):
        assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


@pytest.mark.slow
def test_keeps_the_promises_that_torch_asks_of_an_operator():
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")  # the fourth goes back twice
    torch.library.opcheck(linear_cross_entropy._summed_loss, (*inputs(), True, 3.0, "triton"), test_utils=checks)
