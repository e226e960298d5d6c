"""Losses and their gradients without all logits, against torch's own cross-entropy of all logits."""

import contextlib

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile

from model.ops import linear_cross_entropy
from model.ops.linear_cross_entropy import summed_loss, token_losses


def inputs(N=70, D=6, V=11, dtype=torch.float64):
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


@pytest.fixture(params=[1, 3, 70, 1000], autouse=True)
def tokens_at_a_time(request, monkeypatch):
    monkeypatch.setitem(linear_cross_entropy.CHUNK, "cpu", 11 * 8 * request.param)


@pytest.mark.gpu
@pytest.mark.parametrize("cap", [None, 2.0])
def test_equals_the_definition_with_gradients(cap):
    x, weight, targets = inputs()
    wanted = truth(x, weight, targets, cap)
    torch.testing.assert_close(token_losses(x, weight, targets, cap), wanted, rtol=1e-13, atol=1e-13)
    loss = summed_loss(x, weight, targets, cap)
    torch.testing.assert_close(loss, wanted.sum(), rtol=1e-13, atol=1e-13)
    gradients = [torch.autograd.grad(3 * y, (x, weight)) for y in (loss, wanted.sum())]
    for got, right in zip(*gradients, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-12, atol=1e-12)


@pytest.mark.gpu
def test_gradients_of_token_losses_are_for_any_weights():
    x, weight, targets = inputs()
    weights = torch.randn(70, dtype=torch.float64)
    results = [torch.autograd.grad((f(x, weight, targets) * weights).sum(), (x, weight)) for f in (token_losses, truth)]
    for got, right in zip(*results, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-12, atol=1e-12)


def test_only_one_gradient_may_be_wanted():
    x, weight, targets = inputs()
    (got,) = torch.autograd.grad(summed_loss(x, weight.detach(), targets), x)
    (wanted,) = torch.autograd.grad(truth(x, weight, targets).sum(), x)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        assert not summed_loss(x, weight, targets).requires_grad


def test_nothing_counted_is_zero():
    x, weight, targets = inputs()
    loss = summed_loss(x, weight, torch.full_like(targets, -1))
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
def test_any_negative_target_is_not_counted():
    x, weight, targets = inputs()
    others = torch.where(targets < 0, -100, targets)
    assert torch.equal(token_losses(x, weight, others), token_losses(x, weight, targets))
    assert torch.equal(summed_loss(x, weight, others), summed_loss(x, weight, targets))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_losses_of_short_types_are_summed_in_float32(dtype):
    x, weight, targets = (t.detach().to(dtype) if t.is_floating_point() else t for t in inputs())
    x.requires_grad_()
    loss = summed_loss(x, weight, targets)
    assert loss.dtype == torch.float32
    # A logit of size up to 16 is rounded once, relative to 1; 60 of them are added.
    wanted = truth(x.double(), weight.double(), targets).sum()
    torch.testing.assert_close(loss.double(), wanted, rtol=0, atol=60 * 16 * torch.finfo(dtype).eps)
    assert torch.autograd.grad(loss, x)[0].dtype == dtype


def test_under_autocast_it_is_computed_in_its_type():
    x, weight, targets = inputs(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = summed_loss(x, weight, targets)
    short = summed_loss(x.bfloat16(), weight.bfloat16(), targets)
    assert loss == short
    (g_x, g_weight), (short_g_x, short_g_weight) = (torch.autograd.grad(y, (x, weight)) for y in (loss, short))
    assert torch.equal(g_x, short_g_x)
    assert g_weight.dtype == torch.float32  # it is not rounded to the type of the products
    assert torch.equal(g_weight.bfloat16(), short_g_weight.bfloat16())


def test_no_tokens_are_a_loss_of_zero():
    x, weight, targets = inputs()
    loss = summed_loss(x[:0], weight, targets[:0])
    assert loss == 0
    assert all((g == 0).all() for g in torch.autograd.grad(loss, (x, weight)))


def test_holds_no_more_than_some_logits(tokens_at_a_time):
    x, weight, targets = inputs(N=4000, V=1100)
    linear_cross_entropy.CHUNK["cpu"] = 1100 * 100 * 8  # as if the vocabulary were large
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        torch.autograd.grad(summed_loss(x, weight, targets), (x, weight))
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    assert max(event.nbytes() for event in events) <= 1100 * 100 * 8


@pytest.mark.parametrize("cap", [None, 3.0])
def test_keeps_the_promises_that_torch_asks_of_an_operator(cap):
    x, weight, targets = inputs()
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")  # the fourth goes back twice
    torch.library.opcheck(
        linear_cross_entropy._summed_loss, (x, weight, targets, True, cap, "chunked"), test_utils=checks
    )
