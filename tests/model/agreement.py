"""Kernels against their definitions: how their numbers are compared, and the cases of each operator.

Each function of an operator compares in all its cases. An AssertionError names what is wrong.
"""

import itertools
from functools import partial

import torch
from torch.nn.functional import logsigmoid

from model.ops.linear_cross_entropy import summed_loss, token_losses
from model.ops.log_attention import LOG_SPACE, log_attention
from model.ops.log_recurrence import log_recurrence, naive_log_recurrence
from model.ops.sparse_attention import attend
from model.ops.sparse_attention.masked_attention import naive_sparse_attention
from model.ops.sparse_attention.patterns import CAUSAL, longformer, strided, window

# Largest error of an output, relative to its largest value. 16 bits: five roundings. 32 bits: exponentials of sums
# of up to 500, with three roundings each. 64 bits: twice as many, as the definition rounds too.
TOLERANCES = {torch.bfloat16: 0.02, torch.float16: 0.02 / 8, torch.float32: 1e-4, torch.float64: 1e-4 * 2**-28}


def outputs(operator, leaves):
    """Results by name, and gradients of the leaves for fixed gradients of the results."""
    leaves = {name: x.detach().requires_grad_() for name, x in leaves.items()}
    results = operator(**leaves)
    generator = torch.Generator().manual_seed(1)
    given = [torch.randn(y.shape, generator=generator).bfloat16().to(y) for y in results.values()]  # in every type
    gradients = torch.autograd.grad(list(results.values()), list(leaves.values()), given)
    named = {f"the gradient of {name}": x for name, x in zip(leaves, gradients, strict=True)}
    return {name: y.detach() for name, y in results.items()} | named


def compare(case, operator, definition, leaves):
    """Compare results and gradients with those of the definition in float64 on the CPU, and two runs bit for bit.

    Each is judged by its own largest value. Both functions map tensors by name to results by name.
    """
    tolerance = TOLERANCES[next(iter(leaves.values())).dtype]
    truths = outputs(definition, {name: x.detach().double().cpu() for name, x in leaves.items()})
    found, again = outputs(operator, leaves), outputs(operator, leaves)
    with torch.no_grad():  # often another kernel, which saves nothing
        results = operator(**leaves)
    for name, truth in truths.items():
        for x in (found[name], results.get(name, found[name])):
            error, largest = (x.double().cpu() - truth).abs().max().item(), truth.abs().max().item()
            assert error <= tolerance * largest, f"{name} is off by {error:.1e}, its largest is {largest:.1e} ({case})"
        assert torch.equal(found[name], again[name]), f"{name} has other bits in a second run ({case})"


def compare_log_attention(device, dtypes, sizes, lengths=(130, 144), form=LOG_SPACE):
    """With and without a state, near 0 and far from it.

    Args:
        dtypes: of q, k, log_v and, with gates, log_f.
        sizes: their last dimensions.
        lengths: numbers of tokens: two chunks and a part of a third. Triton compiles other code for multiples of 16.
    """
    # At 80, most inputs are beyond the bounds, and some gradients beyond float16.
    deviations = (1,) if dtypes[0] == torch.float16 else (1, 80)
    # A GPU compiles kernels for each length and for a state, in minutes: so one length has a state, the other has none.
    for (T, has_state), deviation in itertools.product(((lengths[-1], False), (lengths[0], True)), deviations):
        leaves = _log_attention_leaves(device, dtypes, sizes, T, has_state, deviation)
        case = f"{'a state' if has_state else 'no state'}, deviation {deviation}, {T} tokens"
        kernels, definition = (partial(_log_attention, backend, form=form) for backend in ("triton", "naive"))
        compare(case, kernels, definition, leaves)


def _log_attention_leaves(device, dtypes, sizes, T, has_state, deviation):
    """As in a model, all but gates are slices of a projection, in which the heads of a token follow each other."""
    generator = torch.Generator().manual_seed(0)
    projection = (deviation * torch.randn(2, T, 2, sum(sizes), generator=generator)).to(device)
    leaves = {}
    for i, (name, dtype) in enumerate(zip(("q", "k", "log_v", "log_f"), dtypes, strict=False)):
        leaves[name] = projection.to(dtype).split(list(sizes), dim=-1)[i].transpose(1, 2)
    if len(dtypes) == 4:  # a chunk's gates add up to about -2.6, or -200
        leaves["log_f"] = -0.05 * leaves["log_f"].abs()
    if has_state:
        d_k, _, d_v = sizes[:3]
        leaves["state"] = torch.randn(2, 2, d_k, d_v + 1, generator=generator).exp().to(device)
    return leaves


def _log_attention(backend, /, form=LOG_SPACE, **inputs):
    """The state after the tokens is wanted if one is given."""
    y, state = log_attention(**inputs, form=form, return_state=True, backend=backend)
    return {"y": y, "the state": state} if "state" in inputs else {"y": y}


def recurrence(device, dtype):
    """One token, and blocks of tokens and features, whole and not; h is a half of a wider tensor, as in the model."""
    for B, T, D in ((2, 1, 1), (1, 65, 35), (2, 64, 48)):
        generator = torch.Generator().manual_seed(T)
        log_p, h = torch.rand(B, T, 2 * D, generator=generator).to(device, dtype).chunk(2, dim=-1)
        leaves = {"log_p": log_p.neg(), "h": h, "state": h[:, 0].to(torch.promote_types(h.dtype, torch.float32)) - 1}
        leaves["log_p"][:, T // 2] = -torch.inf
        kernels = partial(_recurrence, partial(log_recurrence, backend="triton"))
        compare(f"{T} tokens", kernels, partial(_recurrence, naive_log_recurrence), leaves)


def _recurrence(form, **leaves):
    return dict(zip(("s", "the state"), form(**leaves), strict=True))


def loss(device, dtype):
    """Vocabularies of less than a block, of one and a part, and of three; with and without a cap."""
    for N, n_vocab, cap in ((1, 1, None), (3, 257, 2.0), (4, 4196, None), (2, 12288, 30.0)):
        generator = torch.Generator().manual_seed(n_vocab)
        x, weight = (torch.randn(n, 16, generator=generator).to(device, dtype) for n in (N, n_vocab))
        targets = torch.randint(n_vocab, (N,), generator=generator)
        targets[1:2] = -1
        kernel = partial(_loss, partial(summed_loss, backend="triton"), targets, cap)
        definition = partial(_loss, token_losses, targets, cap)
        compare(f"{N} x {n_vocab} logits, {cap=}", kernel, definition, {"x": x, "weight": weight})


def _loss(form, targets, cap, /, x, weight):
    return {"the loss": form(x, weight, targets.to(x.device), cap).sum()}


PATTERNS = {
    "window": window(40),
    "dilated window": window(40, dilation=1),
    "strided": strided(48),
    "longformer": longformer(40, 5),
    "all keys of a document": CAUSAL,
    "dilated window in documents": window(40, dilation=1),
}


def flex(device, dtype, head_dim, T=300, forgets=False):
    """FlexAttention for each kind of pattern, and in documents. 300 tokens are two blocks and a part of a third.

    Args:
        forgets: gates in place of patterns, one head of short and one of long spans.
    """
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(2, T, 3, 2, head_dim, generator=generator).to(device, dtype)
    leaves = dict(zip(("q", "k", "v"), features.permute(2, 0, 3, 1, 4), strict=True))  # as views of a projection
    starts = torch.zeros(2, T, dtype=torch.bool)
    starts[0, [5, T // 2]] = starts[1, T - 1] = True
    cases = PATTERNS
    if forgets:
        gates = torch.randn(2, T, 2, generator=generator) + torch.tensor([0.0, 5.0])
        leaves["log_f"] = logsigmoid(gates).to(device).mT.unsqueeze(-1)
        cases = {"gates": CAUSAL, "gates in documents": CAUSAL}
    else:  # for few tokens, inductor may take another kernel
        short = {name: x[:, :, :100] for name, x in leaves.items()}
        _flex("window, 100 tokens", PATTERNS["window"], None, short)
    for name, pattern in cases.items():
        _flex(name, pattern, starts if "document" in name else None, leaves)


def _flex(case, pattern, starts, leaves):
    def by(form, **inputs):
        return {"y": form(starts=None if starts is None else starts.to(inputs["q"].device), **inputs)}

    fast = partial(by, attend._by_flex_attention, pattern=pattern)
    compare(case, fast, partial(by, naive_sparse_attention, patterns=[pattern]), leaves)
