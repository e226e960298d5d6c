"""Log attention by the GPU kernels of gpu_kernels.py."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.numbers import ceil_div
from model.ops.custom import CHUNK, operator, refuse_transforms
from model.ops.log_attention import gpu_kernels
from model.ops.log_attention.chunked_attention import NAMES, register_backward
from model.ops.log_attention.gpu_kernels import Constants, States, SumGrads, Tokens
from model.ops.log_attention.naive_attention import Form, Inputs
from model.ops.triton_launch import launching


def triton_log_attention(
    q: Tensor,
    k: Tensor,
    log_v: Tensor,
    log_f: Tensor | None,
    *,
    form: Form,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    """Causal `log_attention` and the state after it, for tensors with any strides.

    The memory layout of y is (B, T, H, d_v).

    Operands of products are bfloat16 if q and k are. For float16 they are tf32, which has the range
    of bfloat16 and the digits of float16; for float32, three products of tf32. Sums are float32.
    """
    refuse_transforms(*NAMES, q, k, log_v, log_f, state)
    y, after, *_ = _attend(q, k, log_v, log_f, state.float().contiguous(), *form)
    return y, after


@operator("log_attention_triton")
def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_f: Tensor | None,
    state: Tensor,
    exp: bool,
    log: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return y, the state after the tokens and, for the backward pass, the states before each chunk
    and what the gates of each chunk keep."""
    P = _constants(q, k, v, log_f, Form(exp, log))
    results = _empty_results(q, k, v, log_f, state)
    y, after, M, z, decays = results
    before = States(M, z)
    x = _inputs(q, k, v, log_f)
    grid = decays.numel(), ceil_div(P.D_V, P.BV)
    size = q.shape[1:3]
    with launching(q):
        gpu_kernels.states[grid](x, before, decays, *size, P=P, **_options(P))
        _scan(before, decays, state, after, False, P)
        gpu_kernels.outputs[grid](x, before, _tokens(y), *size, P=P, **_options(P))
    return results


def _empty_results(
    q: Tensor, k: Tensor, v: Tensor, log_f: Tensor | None, state: Tensor, *_: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    B, H, T, d_k = q.shape
    d_v = v.shape[3]
    N = ceil_div(T, _chunk(q, k))
    M_type = torch.bfloat16 if _is_narrow(q, k) else torch.float32
    return (
        _empty_like(v),
        torch.empty_like(state),
        q.new_empty(B * H, N, d_k, d_v, dtype=M_type),
        state.new_empty(B * H, N, d_k),
        state.new_empty(B * H, N),
    )


@operator("log_attention_triton_backward")
def _attend_backward(
    g_y: Tensor,
    g_after: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_f: Tensor | None,
    M: Tensor,
    z: Tensor,
    decays: Tensor,
    exp: bool,
    log: bool,
) -> list[Tensor]:
    """Return the gradients of q, k, v, log_f (empty without gates) and the state."""
    P = _constants(q, k, v, log_f, Form(exp, log))
    before = States(M, z)
    D = States(torch.empty_like(M), torch.empty_like(z))
    g_sums = M.new_empty(*M.shape[:2], P.C, P.D_V)
    g_of = SumGrads(g_sums, *z.new_empty(2, *z.shape[:2], P.C))
    gradients = _empty_gradients(g_y, g_after, q, k, v, log_f)
    g_q, g_k, g_v, g_f, g_state = gradients
    x = _inputs(q, k, v, log_f)
    g_x = _inputs(g_q, g_k, g_v, None if log_f is None else g_f)
    grid = (decays.numel(),)
    size = q.shape[1:3]
    options = {"BLOCKS": ceil_div(P.D_V, P.BV), "P": P, **_options(P)}
    with launching(q):
        gpu_kernels.query_grads[grid](x, _tokens(g_y), before, g_x.q, g_of, D, *size, **options)
        _scan(D, decays, g_after.contiguous(), g_state, True, P)
        gpu_kernels.key_grads[grid](x, before, g_of, D, g_x, *size, **options)
    return gradients


def _empty_gradients(
    g_y: Tensor, g_after: Tensor, q: Tensor, k: Tensor, v: Tensor, log_f: Tensor | None, *_: Any
) -> list[Tensor]:
    """Allocate gradients. An empty tensor stands for None, which an operator cannot return."""
    g_f = q.new_empty(0) if log_f is None else _empty_like(log_f)
    g_state = g_after.new_empty(g_after.shape)
    return [_empty_like(q), _empty_like(k), _empty_like(v), g_f, g_state]


torch.library.register_fake(_attend, _empty_results)
torch.library.register_fake(_attend_backward, _empty_gradients)
register_backward(_attend, _attend_backward)


def _scan(
    x: States, decays: Tensor, first: Tensor, last: Tensor, reverse: bool, P: Constants
) -> None:
    heads, N = decays.shape
    block = 1024 if heads >= 128 else 256  # few heads need more programs
    grid = heads, ceil_div(P.D_K * P.D_V, block) + 1
    options = {"REVERSE": reverse, "BLOCK": block, "P": P, "num_warps": 4}
    gpu_kernels.scan[grid](x, decays, first, last, N, **options)


def _empty_like(x: Tensor) -> Tensor:
    """Allocate a tensor (B, H, T, D) with the memory layout (B, T, H, D)."""
    B, H, T, D = x.shape
    return x.new_empty(B, T, H, D).transpose(1, 2)


def _inputs(q: Tensor, k: Tensor, v: Tensor, log_f: Tensor | None) -> Inputs:
    """Without gates, q stands for them, because Triton 3.6 takes no None within a tuple."""
    return Inputs(_tokens(q), _tokens(k), _tokens(v), _tokens(q if log_f is None else log_f))


def _tokens(x: Tensor) -> Tokens:
    x = x if x.stride(-1) == 1 else x.contiguous()
    return Tokens(x, x.stride()[:3])


def _is_narrow(q: Tensor, k: Tensor) -> bool:
    return q.dtype == k.dtype == torch.bfloat16


def _chunk(q: Tensor, k: Tensor) -> int:
    """Tokens of a chunk: fewer for wide types, which need more registers and shared memory."""
    return CHUNK if _is_narrow(q, k) else CHUNK // 2


def _constants(q: Tensor, k: Tensor, v: Tensor, log_f: Tensor | None, form: Form) -> Constants:
    d_k = q.shape[3]
    d_v = v.shape[3]
    is_narrow = _is_narrow(q, k)
    columns = 64 if is_narrow or d_k <= 64 else 32
    return Constants(
        EXP=form.exp,
        LOG=form.log,
        GATED=log_f is not None,
        D_K=d_k,
        D_V=d_v,
        BK=max(16, triton.next_power_of_2(d_k)),
        BV=max(16, triton.next_power_of_2(min(d_v, columns))),
        C=_chunk(q, k),
        OPERAND=tl.bfloat16 if is_narrow else tl.float32,
        PRECISION="tf32" if q.dtype == k.dtype == torch.float16 else "tf32x3",
    )


def _options(P: Constants) -> dict[str, int]:
    """Launch options. Without maxnreg, ptxas gives some kernels of 8 warps 32 registers, and spills
    the rest."""
    if P.BK <= 64:
        return {"num_warps": 4, "num_stages": 1}
    return {"num_warps": 8, "num_stages": 1, "maxnreg": 255}
