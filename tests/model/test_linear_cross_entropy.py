"""Losses and their gradients without all logits, against torch's own cross-entropy of all logits.

The kernel runs on a GPU, or in Triton's interpreter.
"""

import contextlib
from functools import partial

import agreement
import pytest
import torch
from gradients import INTERPRETED, assert_all_close
from made_on import suspended
from test_log_attention import allocations
from torch.nn.functional import cross_entropy

from model.ops import linear_cross_entropy
from model.ops.linear_cross_entropy import summed_loss, token_losses

OTHERS = [
    *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in (torch.float16, torch.float32)),
    pytest.param(torch.float64, marks=[INTERPRETED, pytest.mark.slow]),
]
by_kernel = partial(summed_loss, backend="triton")
on_both = pytest.mark.parametrize(
    "loss_of", [summed_loss, pytest.param(by_kernel, marks=pytest.mark.gpu)], ids=["torch", "kernel"]
)


def inputs(N=20, D=6, V=11, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, D, generator=generator, dtype=dtype).requires_grad_() for n in (N, V))
    targets = torch.randint(V, (N,), generator=generator)
    targets[::7] = -1  # not to be counted
    return x, weight, targets


def truth(x, weight, targets, cap=None):
    logits = x @ weight.T
    return cross_entropy(
        logits if cap is None else cap * (logits / cap).tanh(), targets, ignore_index=-1, reduction="none"
    )


@pytest.fixture
def at_once(monkeypatch, device):
    """Sets how many float64 logits are computed at a time."""
    return lambda logits: monkeypatch.setitem(linear_cross_entropy.LOGITS, device.type, 8 * logits)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("loss_of", "N", "V", "logits"),
    [
        *((summed_loss, 70, 11, 11 * tokens) for tokens in (1, 3, 70, 1000)),
        # Vocabularies below, at and beyond a multiple of 64, and beyond a block; the last part is not full.
        *(
            pytest.param(by_kernel, N, V, tokens * (V + -V % 64), marks=INTERPRETED)
            for N, V, tokens in [(20, 11, 1), (20, 64, 6), (1, 1, 5), (5, 300, 3), (3, 4160, 9)]
        ),
    ],
)
@pytest.mark.parametrize("cap", [None, 2.0])
def test_the_loss_equals_the_definition_with_gradients(at_once, loss_of, N, V, logits, cap):
    at_once(logits)
    x, weight, targets = inputs(N, V=V)
    targets[-1] = V - 1
    loss, wanted = loss_of(x, weight, targets, cap), truth(x, weight, targets, cap).sum()
    torch.testing.assert_close(loss, wanted, rtol=1e-13, atol=1e-13)
    gradients = [torch.autograd.grad(3 * y, (x, weight)) for y in (loss, wanted)]
    assert_all_close(*gradients)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 3, 70, 1000])
@pytest.mark.parametrize("cap", [None, 2.0])
def test_losses_of_tokens_equal_the_definition_with_gradients_for_any_weights(at_once, tokens, cap):
    at_once(2 * 11 * tokens)
    x, weight, targets = inputs(70)
    weights = torch.randn(70, dtype=torch.float64)
    losses, wanted = token_losses(x, weight, targets, cap), truth(x, weight, targets, cap)
    torch.testing.assert_close(losses, wanted, rtol=1e-13, atol=1e-13)
    gradients = [torch.autograd.grad(y @ weights, (x, weight)) for y in (losses, wanted)]
    assert_all_close(*gradients)


@on_both
def test_only_one_gradient_may_be_wanted(loss_of):
    x, weight, targets = inputs(dtype=torch.float32)
    loss = loss_of(x, weight.detach(), targets)
    with torch.no_grad():
        assert torch.equal(loss_of(x, weight, targets), loss)
    got, wanted = (torch.autograd.grad(y, x)[0] for y in (loss, truth(x, weight, targets).sum()))
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)  # sums of 11 numbers of about 1


@on_both
@pytest.mark.parametrize("N", [0, 20])
def test_nothing_counted_is_zero(loss_of, N):
    x, weight, targets = inputs(dtype=torch.float32)
    loss = loss_of(x[:N], weight, torch.full_like(targets, -100)[:N])
    assert loss == 0
    assert all((g == 0).all() for g in torch.autograd.grad(loss, (x, weight)))


@pytest.mark.parametrize("hooks", [False, True])
def test_going_back_twice_is_refused_rather_than_wrong(hooks):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t) if hooks else contextlib.nullcontext():
        loss = summed_loss(*inputs())
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a single backward pass"):
        loss.backward()


@pytest.mark.gpu
def test_a_token_that_is_not_counted_cannot_spoil_the_others():
    x, weight, targets = inputs(dtype=torch.float32)
    with torch.no_grad():
        x[0] = torch.nan
    assert targets[0] < 0
    assert torch.equal(by_kernel(x, weight, targets), by_kernel(x.nan_to_num(), weight, targets))


@pytest.mark.gpu
def test_logits_may_have_any_size():
    """An infinite weight of another token gives infinity or NaN, a token that is sure a loss of 0."""
    x, weight = torch.eye(3).mul(1e4), torch.eye(3)
    right, wrong = torch.tensor([0, 1, 2]), torch.tensor([1, 2, 0])
    assert by_kernel(x, weight, right) == 0
    assert by_kernel(x, weight, wrong) == 3e4
    assert not by_kernel(x, weight.masked_fill(weight == 1, torch.inf), wrong).isfinite()
    torch.testing.assert_close(by_kernel(x, weight, wrong, cap=50.0), truth(x, weight, wrong, cap=50.0).sum())


@on_both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_losses_of_short_types_are_summed_in_float32(at_once, loss_of, dtype):
    at_once(11)
    x, weight, targets = (t.detach().to(dtype) if t.is_floating_point() else t for t in inputs())
    x.requires_grad_()
    loss = loss_of(x, weight, targets)
    assert loss.dtype == torch.float32
    # A logit of size up to 16 is rounded once, relative to 1; 17 of them are added.
    wanted = truth(x.double(), weight.double(), targets).sum()
    torch.testing.assert_close(loss.double(), wanted, rtol=0, atol=17 * 16 * torch.finfo(dtype).eps)
    assert torch.autograd.grad(loss, x)[0].dtype == dtype


def test_under_autocast_the_loss_is_computed_in_its_type(at_once):
    at_once(11)
    x, weight, targets = inputs(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = summed_loss(x, weight, targets)
    short = summed_loss(x.bfloat16(), weight.bfloat16(), targets)
    assert loss == short
    (g_x, g_weight), (short_g_x, short_g_weight) = (torch.autograd.grad(y, (x, weight)) for y in (loss, short))
    assert torch.equal(g_x, short_g_x)
    assert g_weight.dtype == torch.float32  # it is not rounded to the type of the products
    assert torch.equal(g_weight.bfloat16(), short_g_weight.bfloat16())


def test_the_loss_holds_no_more_than_some_logits(at_once):
    x, weight, targets = inputs(N=400, V=1100)
    at_once(1100 * 20)  # as if the vocabulary were large
    largest, _ = allocations(lambda: torch.autograd.grad(summed_loss(x, weight, targets), (x, weight)))
    assert largest <= 1100 * 20 * 8


@pytest.mark.gpu
@pytest.mark.usefixtures("restored_torch")
def test_every_element_of_a_result_is_written():
    torch.use_deterministic_algorithms(True)  # empty memory is now filled with NaN
    x, weight, targets = inputs(dtype=torch.float32)
    loss = by_kernel(x, weight, targets)
    assert all(y.isfinite().all() for y in (loss, *torch.autograd.grad(loss, (x, weight))))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, *OTHERS], ids=str)
def test_the_kernel_agrees_with_the_definition(device, dtype):
    agreement.loss(device, dtype)


@pytest.mark.gpu
@pytest.mark.slow
def test_the_kernel_compiles_without_a_graph_break():
    x, weight, targets = inputs(dtype=torch.float32)
    compiled = torch.compile(by_kernel, fullgraph=True, backend="aot_eager")
    with suspended():
        results = [f(x, weight, targets, 2.0) for f in (by_kernel, compiled)]
        gradients = [torch.autograd.grad(loss, (x, weight)) for loss in results]
    assert torch.equal(*results)
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize(
    ("cap", "backend"),
    [(None, "chunked"), (3.0, "chunked"), pytest.param(3.0, "triton", marks=pytest.mark.slow)],
)
def test_the_loss_keeps_the_promises_that_torch_asks_of_an_operator(cap, backend):
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")  # the fourth goes back twice
    torch.library.opcheck(linear_cross_entropy._summed_loss, (*inputs(), True, cap, backend), test_utils=checks)
