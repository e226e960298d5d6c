"""Attention with gates: long texts, wrong input.

Gates beside the definition are in test_log_attention.py, and resets in test_log_attention_extremes.py.
"""

import math

import pytest
import torch

from model.attention.log_space import LogSpaceConfig
from model.attention.softmax import SoftmaxConfig
from model.ops.custom import as_autocast
from model.ops.log_attention import log_attention
from model.ops.sparse_attention import attend
from model.ops.sparse_attention.masked_attention import masked_attention
from model.ops.sparse_attention.patterns import CAUSAL, document_pattern_mask
from model.position import Positions


def inputs(T, dtype=torch.float64, d_k=5, d_v=7, H=3):
    """q, k, log_v and gates log_f (2, H, T, 1), leaves that require gradients."""
    generator = torch.Generator().manual_seed(T)
    q, k, log_v, z = (torch.randn(2, H, T, d, generator=generator, dtype=dtype) for d in (d_k, d_k, d_v, 1))
    return [x.requires_grad_() for x in (q, k, log_v, torch.nn.functional.logsigmoid(z + 1))]


def test_the_gradient_of_gates_does_not_lose_digits_in_a_long_text():
    """float32 against float64: if the error grew with the text, the first gradients would be thousands of units off."""
    leaves = inputs(65_536, torch.float32, d_k=4, d_v=4, H=1)
    g = torch.randn(2, 1, 65_536, 4, generator=torch.Generator().manual_seed(1))
    (found,) = torch.autograd.grad(log_attention(*leaves), leaves[3], g)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    (wanted,) = torch.autograd.grad(log_attention(*exact), exact[3], g.double())
    # Sums over a chunk of numbers of about 1, which cancel: some tens of units in the last place of a few.
    assert (found - wanted).abs().max() < 100 * torch.finfo(torch.float32).eps * wanted.abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["chunked", "triton"])
def test_large_gates_do_not_round_small_ones_away(backend):
    """Errors are some roundings of numbers of about 1, whatever the gates of a chunk add up to."""
    leaves = [x.detach().float() for x in inputs(70, H=1)]
    leaves[3] *= 1e-3
    for n, gate in enumerate([-1e4, -127, -50, -8, -torch.inf]):
        leaves[3][:, :, 5 + n :: 13] = gate
    found, exact = ([x.to(t).requires_grad_() for x in leaves] for t in (torch.float32, torch.float64))
    results = [log_attention(*found, backend=backend), log_attention(*exact, backend="naive")]
    gradients = [torch.autograd.grad(y.sum(), x) for y, x in zip(results, (found, exact), strict=True)]
    for a, b in zip([results[0], *gradients[0]], [results[1], *gradients[1]], strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=4e-6)


@pytest.mark.parametrize(
    ("log_f", "causal", "message"),
    [
        (torch.full((2, 3, 9, 1), 0.5), True, r"log_f has a maximum of 0.5: it must be at most 0"),
        (torch.zeros(2, 3, 9, 1), False, r"causal attention has S = T, and log_f needs it"),
    ],
)
def test_gates_that_do_not_fit_are_refused_in_one_line(log_f, causal, message):
    q, k, log_v, _ = inputs(9)
    with pytest.raises(ValueError, match=message) as error:
        log_attention(q, k, log_v, log_f.double(), causal=causal)
    assert "\n" not in str(error.value)


def by_flex(q, k, v, log_f, starts):
    return attend._by_flex_attention(*as_autocast(q, k, v), CAUSAL, starts, log_f=log_f)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("T", [1, 140])
@pytest.mark.slow
def test_flex_attention_forgets_as_the_definition_does(eager_flex, monkeypatch, T):
    torch.manual_seed(0)
    monkeypatch.setattr("model.attention.softmax.forgetting_attention", by_flex)
    module = SoftmaxConfig(name="softmax", decay="head", n_kv_head=2).build(32, 4, 8).double()
    starts = torch.rand(2, T) < 0.05
    x, g = torch.randn(2, 2, T, 32, dtype=torch.float64)
    found, _ = module(x, Positions(document_starts=starts))
    mask = document_pattern_mask([CAUSAL], starts)
    q, k, v, log_f, _ = module.project(module.qkv(x), module.decay(x))
    wanted = masked_attention(q, k, v, mask, log_f).transpose(1, 2).flatten(2)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    parameters = list(module.parameters())
    for a, b in zip(*(torch.autograd.grad(y, parameters, g) for y in (found, wanted)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_a_product_weighs_tokens_by_two_similarities():
    torch.manual_seed(0)
    module = LogSpaceConfig(name="log_space", d_key=6, d_val=5, product=True).build(12, 2, 4).double()
    x = torch.randn(2, 30, 12, dtype=torch.float64)
    q, k, log_v = module.split(module.qkv(x))
    halves = ((q[..., :3], k[..., :3]), (q[..., 3:], k[..., 3:]))
    weights = math.prod(a.exp() @ b.exp().mT for a, b in halves).tril()
    wanted = (weights @ log_v.exp() / weights.sum(-1, keepdim=True)).log().transpose(1, 2).flatten(2)
    torch.testing.assert_close(module(x)[0], wanted, rtol=1e-12, atol=1e-12)
