"""Cross-entropy and its gradient by a GPU kernel, in the memory of the logits.

A program reads the logits of a token twice: for their logsumexp and the loss, then for the
gradient, which overwrites them in their dtype. It skips tokens that are not counted. There is no
scatter, and no copy in float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from model.ops.custom import accumulation_dtype
from model.ops.triton_launch import launching

_BLOCK = 4096  # logits at a time
_NOTHING = tl.constexpr(float("-inf"))


def cross_entropy_(
    logits: Tensor, targets: Tensor, n_vocab: int, with_grad: bool, cap: float | None
) -> Tensor:
    """Cross-entropy in nats of each row of capped(logits[:, :n_vocab]), (N,), float32 or float64; 0
    if not counted.

    Args:
        logits: (N, V) with V >= n_vocab, contiguous. With gradients, their gradient replaces them.
            It is 0 from n_vocab on, and for targets that are not counted.
        targets: (N,), from 0 to n_vocab - 1; negative targets are not counted, and others give NaN.
    """
    losses = logits.new_empty(len(logits), dtype=accumulation_dtype(logits))
    n_columns = logits.shape[1]
    with launching(logits):
        cross_entropy_kernel[(len(logits),)](
            logits,
            targets.contiguous(),
            losses,
            n_vocab,
            n_columns,
            WITH_GRAD=with_grad,
            CAP=cap,
            ACC=tl.float64 if losses.dtype == torch.float64 else tl.float32,
            BLOCK=min(_BLOCK, triton.next_power_of_2(n_columns)),
            num_warps=8,
        )
    return losses


@triton.jit
def cross_entropy_kernel(
    logits,
    targets,
    losses,
    n_vocab,
    V,
    WITH_GRAD: tl.constexpr,
    CAP: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One token: reads its logits for the loss, and again for the gradient, which replaces them."""
    # This program's token. If it is not counted, its loss and its gradient are 0.
    n = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    row = logits + n * V
    target = tl.load(targets + n)
    if target < 0:
        tl.store(losses + n, 0.0)
        if WITH_GRAD:
            for start in range(0, V, BLOCK):
                tl.store(row + start + columns, tl.zeros([BLOCK], ACC), mask=start + columns < V)
    else:
        # log_z, the logsumexp: `total` is relative to exp(top), the largest logit so far.
        top = tl.full([], _NOTHING, ACC)
        total = tl.full([], 0.0, ACC)
        for start in range(0, V, BLOCK):
            z, _ = _capped(row, start + columns, n_vocab, V, CAP, ACC)
            higher = tl.maximum(top, tl.max(z, 0))
            base = tl.where(higher > _NOTHING, higher, 0.0)
            total = total * tl.exp(top - base) + tl.sum(tl.exp(z - base), 0)
            top = higher
        log_z = tl.where(top > _NOTHING, top, 0.0) + tl.log(total)
        # The loss is log_z less the logit of the target; NaN for a target that does not exist.
        at_target, _ = _capped(row, target, n_vocab, V, CAP, ACC)
        tl.store(losses + n, tl.where(target < n_vocab, log_z - at_target, float("nan")))
        tl.debug_barrier()  # all threads have read what any of them replaces
        # The gradient is softmax(logits), less 1 at the target, times the cap's slope.
        if WITH_GRAD:
            for start in range(0, V, BLOCK):
                column = start + columns
                z, slope = _capped(row, column, n_vocab, V, CAP, ACC)
                g = tl.exp(z - log_z)
                g = tl.where(column == target, g - 1.0, g) * slope
                tl.store(row + column, g, mask=column < V)


@triton.jit
def _capped(row, column, n_vocab, V, CAP: tl.constexpr, ACC: tl.constexpr):
    """Logits of a row with the cap, -inf from n_vocab on, and the cap's slope."""
    z = tl.load(row + column, mask=column < V, other=0.0).to(ACC)
    slope = 1.0
    if CAP is not None:
        share = tl.sigmoid(z * (2.0 / CAP))  # tanh(x) = 2 sigmoid(2 x) - 1
        z = (2.0 * share - 1.0) * CAP
        slope = 4.0 * share * (1.0 - share)
    return tl.where(column < n_vocab, z, _NOTHING), slope
