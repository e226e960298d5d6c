"""Cross-entropy of a linear layer's output without all logits in memory, which would be most of a step's memory.

The loss is a sum over tokens, so a token's gradient is known as soon as its logits are: softmax(logits), less 1 at the
target. The forward pass does this for some tokens at a time, and the backward pass only scales the result.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad

from model.ops.autocast import as_autocast
from model.ops.derivatives import refuse_second_order, refuse_transforms
from model.ops.kernels import choose_backend

_ITSELF, _OTHER = "summed_loss", "token_losses(...).sum()"
CHUNK = {"cpu": 2**24, "cuda": 2**27}  # logits at a time: a GPU needs enough work


def capped(logits: Tensor, cap: float | None) -> Tensor:
    """cap tanh(logits / cap), or the logits without a cap (Gemma 2, arXiv 2408.00118, section 2)."""
    return logits if cap is None else (logits / cap).tanh() * cap


def token_losses(x: Tensor, weight: Tensor, targets: Tensor, cap: float | None = None) -> Tensor:
    """Cross-entropy in nats of capped(x @ weight.T), (N,), float32 or float64; 0 for negative targets.

    Args:
        x: (N, D).
        weight: (V, D).
        targets: (N,), from 0 to V - 1.
    """
    losses = []
    for x_n, target in zip(*(tensor.split(_tokens(weight, "chunked")) for tensor in (x, targets)), strict=True):
        logits = x_n @ weight.T
        logits = capped(logits.to(torch.promote_types(logits.dtype, torch.float32)), cap)
        losses.append(cross_entropy(logits, target.clamp(min=-1), ignore_index=-1, reduction="none"))
    return torch.cat(losses)


def summed_loss(
    x: Tensor, weight: Tensor, targets: Tensor, cap: float | None = None, *, backend: str = "auto"
) -> Tensor:
    """Sum of `token_losses`. Gradients are computed in the forward pass, so there can be only one backward pass.

    Args:
        backend: "chunked", "triton" (a kernel, see docs/kernels.md), or "auto": "triton" on GPUs that support it.

    Raises:
        ValueError: the backend does not exist or is not supported here.
    """
    refuse_transforms(_ITSELF, _OTHER, x, weight)
    x, weight = as_autocast(x, weight)
    backend = choose_backend("the loss", __name__, backend, _FORMS, x)
    wanted = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    return _summed_loss(x, weight, targets, wanted, cap, backend)[0]


@torch.library.custom_op("log_gpt::summed_cross_entropy", mutates_args=())
def _summed_loss(
    x: Tensor, weight: Tensor, targets: Tensor, wanted: bool, cap: float | None, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss and, if wanted, the gradients of x and weight, else empty tensors; sums in float32 or float64."""
    n_vocab = len(weight)
    if backend == "triton":  # products of rows that are not aligned are slow on GPUs
        weight = pad(weight, (0, 0, 0, -n_vocab % 64))
    loss, g_x, g_weight = _empty_results(x, weight, wanted)
    loss.zero_()
    g_weight.zero_()
    size = _tokens(weight, backend)
    with torch.autocast(x.device.type, enabled=False):
        for n in range(0, len(x), size):
            part = slice(n, n + size)
            losses, g_logits = _FORMS[backend](x[part], weight, targets[part], n_vocab, wanted, cap)
            loss += losses.sum()
            if wanted:
                g_x[part] = g_logits @ weight
                _add_product(g_weight, g_logits.T, x[part])
            del g_logits  # before the next ones are allocated
    return loss, g_x, g_weight[:n_vocab]


def _by_torch(
    x: Tensor, weight: Tensor, targets: Tensor, n_vocab: int, wanted: bool, cap: float | None
) -> tuple[Tensor, Tensor]:
    """Losses of some tokens (n, 1) and, if wanted, the gradient of their logits (n, V) in the type of x."""
    target, seen = targets.clamp(min=0).unsqueeze(1), (targets >= 0).unsqueeze(1)
    logits = x @ weight.T
    logits = capped(logits.to(torch.promote_types(logits.dtype, torch.float32)), cap)  # (n, V)
    log_z = logits.logsumexp(1, keepdim=True)
    losses = (log_z - logits.gather(1, target)) * seen
    if not wanted:
        return losses, logits
    slope = None if cap is None else 1 - (logits / cap).square()
    g_logits = logits.sub_(log_z).exp_()
    g_logits.scatter_add_(1, target, torch.full_like(log_z, -1)).mul_(seen)
    if slope is not None:
        g_logits.mul_(slope)
    return losses, g_logits.to(x.dtype)


def _by_triton(
    x: Tensor, weight: Tensor, targets: Tensor, n_vocab: int, wanted: bool, cap: float | None
) -> tuple[Tensor, Tensor]:
    """As `_by_torch`, for a weight with more than n_vocab rows: the gradient of what is beyond them is 0."""
    from model.ops.linear_cross_entropy.triton import cross_entropy_  # importing triton is slow, and it may be missing

    logits = x @ weight.T  # (n, V)
    return cross_entropy_(logits, targets, n_vocab, wanted, cap), logits


_FORMS = {"chunked": _by_torch, "triton": _by_triton}


def _tokens(weight: Tensor, backend: str) -> int:
    """Tokens at a time. The torch form takes 8 bytes a logit, the kernel only the logit itself."""
    logits = CHUNK.get(weight.device.type, CHUNK["cuda"])
    if backend == "triton":
        logits *= 8 // weight.itemsize
    return max(1, logits // len(weight))


def _empty_results(x: Tensor, weight: Tensor, wanted: bool) -> tuple[Tensor, Tensor, Tensor]:
    acc = torch.promote_types(x.dtype, torch.float32)
    loss = x.new_empty((), dtype=acc)
    if not wanted:
        return loss, x.new_empty(0), loss.new_empty(0)
    return loss, torch.empty_like(x), torch.empty_like(weight, dtype=acc)


@_summed_loss.register_fake
def _(x: Tensor, weight: Tensor, targets: Tensor, wanted: bool, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_results(x, weight, wanted)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, g_x, g_weight = output
    ctx.dtype, ctx.used = inputs[1].dtype, False
    ctx.save_for_backward(g_x, g_weight)
    ctx.mark_non_differentiable(g_x, g_weight)


def _backward(ctx: Any, g: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    refuse_second_order(_ITSELF, _OTHER)
    if ctx.used:  # saved_tensors would only report a change in place
        raise RuntimeError("summed_loss allows a single backward pass: call it again for another")
    g_x, g_weight = ctx.saved_tensors
    if torch.compiler.is_compiling():
        return g_x * g, (g_weight * g).to(ctx.dtype), None, None, None, None
    ctx.used = True
    # In place: g_weight is as large as the weight.
    return g_x.mul_(g), g_weight.mul_(g).to(ctx.dtype), None, None, None, None


_summed_loss.register_autograd(_backward, setup_context=_save_for_backward)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, where a and b may have a lower precision than total."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b
