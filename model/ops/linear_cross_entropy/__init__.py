"""Cross-entropy of a linear layer's output without all logits in memory, which would be most of a
step's memory.

The loss is a sum over tokens, so a token's gradient is known as soon as its logits are:
softmax(logits), less 1 at the target. The forward pass does this for some tokens at a time, and the
backward pass only scales the result.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad

from model.ops.custom import (
    accumulation_dtype,
    as_autocast,
    operator,
    refuse_second_order,
    refuse_transforms,
)
from model.ops.kernels import choose_backend

# The operator, and the form that has all derivatives.
_NAMES = "summed_loss", "token_losses(...).sum()"
LOGITS = {"cpu": 2**27, "cuda": 2**30}  # bytes of logits at a time: a GPU needs enough work
# Plain torch converts such a chunk to float32 in this many steps: each fits into a CPU's cache.
N_ROW_STEPS = {"cpu": 128, "cuda": 16}


def capped(logits: Tensor, cap: float | None) -> Tensor:
    """cap tanh(logits / cap), or the logits without a cap (Gemma 2, arXiv 2408.00118)."""
    return logits if cap is None else (logits / cap).tanh() * cap


def token_losses(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    cap: float | None = None,
    n_vocab: int | None = None,
) -> Tensor:
    """Cross-entropy in nats of capped(x @ weight.T), (N,), float32 or float64; 0 for negative
    targets.

    Args:
        x: (N, D).
        weight: (V, D).
        targets: (N,), from 0 to V - 1.
        n_vocab: later rows of the weight have no logits; None: all have.
    """
    size = _tokens(weight, 2)
    losses = []
    for x_n, target in zip(x.split(size), targets.clamp(min=-1).split(size), strict=True):
        logits = (x_n @ weight.T)[:, :n_vocab]
        logits = capped(logits.to(accumulation_dtype(logits)), cap)
        losses.append(cross_entropy(logits, target, ignore_index=-1, reduction="none"))
    return torch.cat(losses)


def summed_loss(
    x: Tensor, weight: Tensor, targets: Tensor, cap: float | None = None, *, backend: str = "auto"
) -> Tensor:
    """Sum of `token_losses`. Gradients are computed in the forward pass, so there can be only one
    backward pass.

    Args:
        backend: "chunked", "triton" (a kernel), or "auto": "triton" on GPUs that support it.

    Raises:
        ValueError: the backend does not exist or does not run here.
    """
    refuse_transforms(*_NAMES, x, weight)
    (x,) = as_autocast(x)
    backend = choose_backend("the loss", backend, [*_FORMS], x)
    needs_gradients = x.requires_grad or weight.requires_grad
    with_grad = torch.is_grad_enabled() and needs_gradients
    return _summed_loss(x, weight, targets, with_grad, cap, backend)[0]


@operator("summed_cross_entropy")
def _summed_loss(
    x: Tensor, weight: Tensor, targets: Tensor, with_grad: bool, cap: float | None, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss and, if wanted, the gradients of x and weight, else empty tensors.

    Products are in the type of x, and sums in float32 or float64.
    """
    n_vocab = len(weight)
    weight = weight.to(x.dtype)
    if backend == "triton":  # products of rows that are not aligned are slow on GPUs
        weight = pad(weight, (0, 0, 0, -n_vocab % 64))
    loss, g_x, g_weight = _empty_results(x, weight, targets, with_grad)
    loss.zero_()
    g_weight.zero_()
    # Some tokens at a time: logits, their losses, and from these gradients those of x and weight.
    size = _tokens(weight)
    with torch.autocast(x.device.type, enabled=False):
        for n in range(0, max(1, len(x)), size):
            chunk = slice(n, n + size)
            logits = x[chunk] @ weight.T
            loss += _FORMS[backend](logits, targets[chunk], n_vocab, with_grad, cap).sum()
            if with_grad:
                g_x[chunk] = logits @ weight
                if g_weight.dtype == x.dtype:
                    g_weight.addmm_(logits.T, x[chunk])
                else:
                    g_weight += logits.T @ x[chunk]
            del logits  # before the next ones are allocated
    return loss, g_x, g_weight[:n_vocab]


def _by_torch(
    logits: Tensor, targets: Tensor, n_vocab: int, with_grad: bool, cap: float | None
) -> Tensor:
    """Losses of some tokens, (n,); if wanted, the gradient of their logits (n, V) replaces these,
    as in the kernel.

    Some rows at a time: see N_ROW_STEPS.
    """
    acc = accumulation_dtype(logits)
    # logits.T has V rows, as the weight has.
    size = _tokens(logits.T, N_ROW_STEPS.get(logits.device.type, N_ROW_STEPS["cuda"]))
    losses = []
    for rows, row_targets in zip(logits.split(size), targets.split(size), strict=True):
        target = row_targets.clamp(min=0).unsqueeze(1)
        is_counted = (row_targets >= 0).unsqueeze(1)
        z = capped(rows.to(acc), cap)
        log_p = z.log_softmax(1)
        losses.append(-(log_p.gather(1, target) * is_counted).squeeze(1))
        if with_grad:
            g = log_p.exp_().scatter_add_(1, target, -torch.ones_like(target, dtype=acc))
            if cap is not None:
                g *= 1 - z.div_(cap).square_()
            torch.mul(g, is_counted, out=rows)
    return torch.cat(losses)


def _by_triton(
    logits: Tensor, targets: Tensor, n_vocab: int, with_grad: bool, cap: float | None
) -> Tensor:
    """As `_by_torch`, for logits of n_vocab columns or more: gradients of the rest are 0."""
    # Importing triton is slow, and it may be missing.
    from model.ops.linear_cross_entropy.triton_cross_entropy import cross_entropy_

    return cross_entropy_(logits, targets, n_vocab, with_grad, cap)


_FORMS = {"chunked": _by_torch, "triton": _by_triton}


def _tokens(weight: Tensor, n_chunks: int = 1) -> int:
    """Tokens of a chunk, or of an n-th of one, for a weight of (V, D)."""
    n_bytes = LOGITS.get(weight.device.type, LOGITS["cuda"])
    return max(1, n_bytes // (n_chunks * len(weight) * weight.itemsize))


def _empty_results(
    x: Tensor, weight: Tensor, targets: Tensor, with_grad: bool, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    acc = accumulation_dtype(x)
    loss = x.new_empty((), dtype=acc)
    if not with_grad:
        return loss, x.new_empty(0), loss.new_empty(0)
    return loss, torch.empty_like(x), torch.empty_like(weight, dtype=acc)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, g_x, g_weight = output
    ctx.dtype = inputs[1].dtype
    ctx.used = False
    ctx.save_for_backward(g_x, g_weight)
    ctx.mark_non_differentiable(g_x, g_weight)


def _backward(ctx: Any, g: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    refuse_second_order(*_NAMES)
    if ctx.used:  # saved_tensors would only report a change in place
        raise RuntimeError("summed_loss allows a single backward pass: call it again for another")
    g_x, g_weight = ctx.saved_tensors
    if torch.compiler.is_compiling():
        g_x = g_x * g
        g_weight = g_weight * g
    else:
        ctx.used = True
        # In place: g_weight is as large as the weight.
        g_x.mul_(g)
        g_weight.mul_(g)
    return g_x, g_weight.to(ctx.dtype), None, None, None, None


torch.library.register_fake(_summed_loss, _empty_results)
torch.library.register_autograd(_summed_loss, _backward, setup_context=_save_for_backward)
