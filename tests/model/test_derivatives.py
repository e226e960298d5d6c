"""Derivatives of every operator equal the definition's or raise an error of one line; they are never silently zero."""

import re

import pytest
import torch
from gradients import naive
from torch.autograd import forward_ad
from torch.func import grad, vmap
from torch.nn.functional import cross_entropy, glu, linear, scaled_dot_product_attention

from model.attention.log_space import LogSpaceConfig
from model.layers import gated_linear
from model.ops.causal_conv import causal_conv
from model.ops.linear_cross_entropy import summed_loss, token_losses
from model.ops.log_attention import LINEAR, LOG_SPACE, SIGNED, log_attention, naive_log_attention
from model.ops.log_recurrence import log_recurrence, naive_log_recurrence
from model.ops.projection_attention import inner_keys, inner_queries, naive_projection_attention, padded_values
from model.ops.sparse_attention.attend import sparse_attention
from model.ops.sparse_attention.masked_attention import naive_sparse_attention
from model.ops.sparse_attention.patterns import window

T = 6
TARGETS = torch.tensor([4, 0, -1, 2, 2, 1])
CAUSAL = torch.ones(T, T, dtype=torch.bool).tril()
SIGMA = torch.tensor([0.7, 1.3], dtype=torch.float64)
HEADS = [(2, 2, T, 3)] * 3
PATTERN = [window(3)]
STARTS = torch.tensor([[False, False, True, False, False, True], [False] * T])


def naive_causal_conv(x, weight, seen, starts):
    """Token by token, with a document's number for each: the tokens of `seen` are of the first."""
    rows, inputs = weight.view(-1, x.shape[2]), torch.cat([seen, x], dim=1)
    number = torch.cat([torch.zeros(seen.shape[:2]), starts.cumsum(1)], dim=1)
    outputs = []
    for t in range(len(rows) - 1, inputs.shape[1]):
        last = slice(t - len(rows) + 1, t + 1)
        mine = (number[:, last] == number[:, t : t + 1]).unsqueeze(-1)
        outputs.append((inputs[:, last] * mine * rows).sum(1))
    return torch.stack(outputs, dim=1)


def all_losses(x, weight):
    return cross_entropy(x @ weight.T, TARGETS, ignore_index=-1, reduction="none")


def projected(q, k, v):
    q, k, values = inner_queries(q, SIGMA), inner_keys(k), padded_values(v)
    return scaled_dot_product_attention(q, k, values, is_causal=True, scale=1.0)[..., : v.shape[-1]]


# The operator, its definition, and the shapes of its inputs.
OPERATORS = {
    "summed_loss": (lambda *a: summed_loss(*a, TARGETS), lambda *a: all_losses(*a).sum(), [(T, 3), (5, 3)]),
    "token_losses": (lambda *a: token_losses(*a, TARGETS), all_losses, [(T, 3), (5, 3)]),
    "gated_linear": (gated_linear, lambda x, weight: linear(glu(x), weight), [(2, T, 6), (4, 3)]),
    "causal_conv": (
        lambda x, weight, seen: causal_conv(x, weight, seen, STARTS)[0],
        lambda x, weight, seen: naive_causal_conv(x, weight, seen, STARTS),
        [(2, T, 3), (12,), (2, 3, 3)],
    ),
    **{
        f"log_attention {name}": (
            lambda *a, form=form, backend=backend: log_attention(*a, form=form, backend=backend),
            lambda *a, form=form: naive_log_attention(*a, form=form),
            HEADS,
        )
        for name, form, backend in [
            ("chunked", LOG_SPACE, "chunked"),
            ("triton", LOG_SPACE, "triton"),
            ("signed", SIGNED, "chunked"),
            ("linear", LINEAR, "chunked"),
        ]
    },
    "log_recurrence": (
        lambda x, h, s: log_recurrence(-x.exp(), h, s)[0],
        lambda x, h, s: naive_log_recurrence(-x.exp(), h, s)[0],
        [(2, T, 3), (2, T, 3), (2, 3)],
    ),
    "sparse_attention": (
        lambda *a: sparse_attention(*a, PATTERN),
        lambda *a: naive_sparse_attention(*a, PATTERN),
        HEADS,
    ),
    "projection_attention": (projected, lambda *a: naive_projection_attention(*a, SIGMA, CAUSAL), HEADS),
}
REFUSALS = {  # the other operators refuse nothing
    "summed_loss": r"summed_loss .* use token_losses\(\.\.\.\)\.sum\(\)",
    **{
        f"log_attention {name}": "log_attention .* use backend='naive'"
        for name in ("chunked", "triton", "signed", "linear")
    },
    "log_recurrence": "log_recurrence .* use naive_log_recurrence",
    "gated_linear": "forward mode AD|vmap support",  # these are torch's words
    "projection_attention": "forward AD|is not implemented",
}


@pytest.fixture(params=OPERATORS)
def name(request):
    return request.param


def by_forward_mode(f, inputs, tangents):
    with forward_ad.dual_level():
        y = f(*map(forward_ad.make_dual, inputs, tangents))
        return forward_ad.unpack_dual(y).tangent


def by_grad_in_vmap(f, inputs, tangents):
    return vmap(grad(lambda x: f(x, *inputs[1:]).sin().sum()))(torch.stack(inputs[:1]))


def twice(f, inputs, tangents):
    """Gradients of a loss that contains gradients: silently wrong if these have no graph."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    loss = f(*leaves).sin().sum()
    penalty = sum(g.square().sum() for g in torch.autograd.grad(loss, leaves, create_graph=True))
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss + penalty, leaves)])


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize(
    "derivative",
    [by_forward_mode, by_grad_in_vmap, twice],
    ids=lambda f: f.__name__,
)
def test_derivatives_are_the_definitions_or_refused(name, derivative):
    operator, definition, shapes = OPERATORS[name]
    generator = torch.Generator().manual_seed(0)
    inputs, tangents = ([torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes] for _ in range(2))
    wanted = derivative(definition, inputs, tangents)
    assert wanted.abs().max() > 1e-3
    got, refusal = None, ""
    try:
        got = derivative(operator, inputs, tangents)
    except RuntimeError as error:  # torch's, or NotImplementedError
        refusal = str(error)
    if refusal:
        assert name in REFUSALS
        assert re.search(REFUSALS[name], refusal)
    else:
        assert got is not None, "no derivative, which is zero without a word"
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


def test_a_log_space_layer_names_the_operator_that_has_no_second_derivatives():
    layer, x = LogSpaceConfig(name="log_space").build(8, 2, 4), torch.randn(1, 5, 8, requires_grad=True)
    with pytest.raises(NotImplementedError, match=r"log_attention has no second derivatives \(create_graph=True\)"):
        torch.autograd.grad(layer(x)[0].sum(), x, create_graph=True)
    (g,) = torch.autograd.grad(naive(layer, x).sum(), x, create_graph=True)
    assert torch.autograd.grad(g.square().sum(), x)[0].any()
