"""Cross-entropy and its gradient by a GPU kernel, in the memory of the logits: docs/kernels.md explains its design."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import cross_entropy

_BLOCK = 4096  # logits at a time
_NOTHING = tl.constexpr(float("-inf"))


def cross_entropy_(logits: Tensor, targets: Tensor, n_vocab: int, wanted: bool, cap: float | None) -> Tensor:
    """Cross-entropy in nats of each row of capped(logits[:, :n_vocab]), (N,), float32 or float64; 0 if not counted.

    Args:
        logits: (N, V) with V >= n_vocab, contiguous. If wanted, their gradient replaces them, which is 0 from n_vocab
            on, and for targets that are not counted.
        targets: (N,), from 0 to n_vocab - 1; negative targets are not counted, and others give NaN.
    """
    losses = logits.new_empty(len(logits), dtype=torch.promote_types(logits.dtype, torch.float32))
    wide, block = losses.dtype == torch.float64, min(_BLOCK, triton.next_power_of_2(logits.shape[1]))
    with torch.cuda.device_of(logits):  # kernels are launched on the current device
        cross_entropy_kernel[(len(logits),)](
            *(logits, targets.contiguous(), losses, n_vocab, logits.shape[1]),
            **{"WANTED": wanted, "CAP": cap, "ACC": tl.float64 if wide else tl.float32, "BLOCK": block, "num_warps": 8},
        )
    return losses


@triton.jit
def cross_entropy_kernel(
    logits,
    targets,
    losses,
    n_vocab,
    V,
    WANTED: tl.constexpr,
    CAP: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One token: reads its logits for the loss, and again for the gradient, which replaces them."""
    n, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    row, target = logits + n * V, tl.load(targets + n)
    if target < 0:
        tl.store(losses + n, 0.0)
        if WANTED:
            for start in range(0, V, BLOCK):
                tl.store(row + start + columns, tl.zeros([BLOCK], ACC), mask=start + columns < V)
    else:
        top, total = tl.full([], _NOTHING, ACC), tl.full([], 0.0, ACC)
        for start in range(0, V, BLOCK):
            z, _ = _capped(row, start + columns, n_vocab, V, CAP, ACC)
            higher = tl.maximum(top, tl.max(z, 0))
            base = tl.where(higher > _NOTHING, higher, 0.0)
            total = total * tl.exp(top - base) + tl.sum(tl.exp(z - base), 0)
            top = higher
        log_z = tl.where(top > _NOTHING, top, 0.0) + tl.log(total)
        at_target, _ = _capped(row, target, n_vocab, V, CAP, ACC)
        tl.store(losses + n, tl.where(target < n_vocab, log_z - at_target, float("nan")))
        tl.debug_barrier()  # all threads have read what any of them replaces
        if WANTED:
            for start in range(0, V, BLOCK):
                column = start + columns
                z, slope = _capped(row, column, n_vocab, V, CAP, ACC)
                g = tl.exp(z - log_z)
                tl.store(row + column, tl.where(column == target, g - 1.0, g) * slope, mask=column < V)


@triton.jit
def _capped(row, column, n_vocab, V, CAP: tl.constexpr, ACC: tl.constexpr):
    """Logits with the cap, -inf from n_vocab on, and the slope of the cap."""
    z = tl.load(row + column, mask=column < V, other=0.0).to(ACC)
    slope = 1.0
    if CAP is not None:
        rest = 2.0 / (1.0 + tl.exp(tl.abs(z) * (2.0 / CAP)))  # 1 - tanh(|z| / CAP), to its last digits
        z = tl.where(z < 0.0, rest - 1.0, 1.0 - rest) * CAP
        slope = rest * (2.0 - rest)
    return tl.where(column < n_vocab, z, _NOTHING), slope


def check(device: str, dtype: str) -> None:
    """Compare the kernel with the definition in float64, and two runs with each other, at a few shapes.

    Raises:
        AssertionError: says what differs.
    """
    _check(device, getattr(torch, dtype))


def _check(device: str, dtype: torch.dtype) -> None:
    eps, acc = torch.finfo(dtype).eps, torch.promote_types(dtype, torch.float32)
    for N, n_vocab, cap in [(1, 1, None), (3, 257, 2.0), (4, _BLOCK + 100, None), (2, 3 * _BLOCK, 30.0)]:
        generator = torch.Generator().manual_seed(n_vocab)
        logits = torch.randn(N, n_vocab + -n_vocab % 64, generator=generator, dtype=torch.float64).mul_(8).to(dtype)
        targets = torch.randint(n_vocab, (N,), generator=generator)
        targets[1:2] = -1
        logits, targets = logits.to(device), targets.to(device)
        z = logits[:, :n_vocab].double().requires_grad_()
        y = z if cap is None else cap * (z / cap).tanh()
        wanted = cross_entropy(y, targets, ignore_index=-1, reduction="none")
        (g_wanted,) = torch.autograd.grad(wanted.sum(), z)
        runs = [(cross_entropy_(found := logits.clone(), targets, n_vocab, True, cap), found) for _ in range(2)]
        (losses, g), again = runs
        what = f"loss kernel, {N} x {n_vocab} logits in {dtype}, {cap=}: "
        assert all(torch.equal(a, b) for a, b in zip((losses, g), again, strict=True)), what + "two runs differ"
        assert torch.equal(losses, cross_entropy_(logits.clone(), targets, n_vocab, False, cap)), what + "without grad"
        # A rounded exponent changes its exponential by as much, relative to itself.
        error = 16 * torch.finfo(acc).eps * (1 + 2 * y.abs().max())
        assert (losses - wanted).abs().max() <= error, what + f"losses are off by {(losses - wanted).abs().max()}"
        shares = y.softmax(1) * (targets >= 0).unsqueeze(1)
        allowed = error * shares + (eps + error) * g_wanted.abs() + torch.finfo(dtype).smallest_normal * eps
        assert ((g[:, :n_vocab] - g_wanted).abs() <= allowed).all(), what + "the gradient is wrong"
        assert (g[:, n_vocab:] == 0).all(), what + "the gradient of padding is not 0"
