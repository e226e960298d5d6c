"""Log-space attention by the paper's definition: short and slow. All other implementations must
agree with it.

For decoding, there is a step of a single token, without the scan over tokens.
"""

import torch
from torch import Tensor

from model.ops.custom import accumulation_dtype
from model.ops.log_attention.state import LogAttentionState, empty_state


def naive_log_attention(
    q: Tensor,
    k: Tensor,
    log_v: Tensor,
    log_f: Tensor | None = None,
    *,
    causal: bool = True,
    state: LogAttentionState | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, LogAttentionState]:
    """Heinsen 2024 (arXiv 2404.05843), eqs. 4-6, with all T x d_k x d_v latent sums in memory.

    With gates the sums are computed token by token. Arguments and result are those of
    `log_attention`.
    """
    dtype = log_v.dtype
    acc = accumulation_dtype(q)
    q = q.to(acc)
    k = k.to(acc)
    log_v = log_v.to(acc)
    if state is None:
        state = empty_state(q, log_v)

    kv = k.unsqueeze(-1) + log_v.unsqueeze(-2)
    kv = torch.cat([state.log_s.unsqueeze(2), kv], dim=2)  # (B, H, 1 + S, d_k, d_v)
    k = torch.cat([state.log_z.unsqueeze(2), k], dim=2)  # (B, H, 1 + S, d_k)
    if log_f is not None:
        log_s = _forgetting_sums(kv, log_f.to(acc).unsqueeze(-1))
        log_z = _forgetting_sums(k, log_f.to(acc))
    elif causal:  # one sum for each query
        log_s = kv.logcumsumexp(dim=2)[:, :, 1:]  # (B, H, T, d_k, d_v)
        log_z = k.logcumsumexp(dim=2)[:, :, 1:]  # (B, H, T, d_k)
    else:  # one sum for all queries
        log_s = kv.logsumexp(dim=2, keepdim=True)
        log_z = k.logsumexp(dim=2, keepdim=True)

    log_sum = (q.unsqueeze(-1) + log_s).logsumexp(dim=-2)
    log_norm = (q + log_z).logsumexp(dim=-1, keepdim=True)
    log_y = (log_sum - log_norm).to(dtype)  # (B, H, T, d_v)
    if not return_state:
        return log_y
    return log_y, LogAttentionState(log_s[:, :, -1], log_z[:, :, -1])


def _forgetting_sums(terms: Tensor, log_f: Tensor) -> Tensor:
    """Logarithms of s_t = exp(log_f_t) s_(t - 1) + term_t, (B, H, T, ...), from s_0 and T terms (B,
    H, 1 + T, ...)."""
    sums = [terms[:, :, 0]]
    for term, log_f_t in zip(terms[:, :, 1:].unbind(2), log_f.unbind(2), strict=True):
        sums.append(torch.stack([sums[-1] + log_f_t, term]).logsumexp(0))
    return torch.stack(sums[1:], 2)


def log_attention_step(
    q: Tensor,
    k: Tensor,
    log_v: Tensor,
    log_f: Tensor | None = None,
    *,
    state: LogAttentionState,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, LogAttentionState]:
    """`log_attention` of a single token, causal and without gradients."""
    acc = accumulation_dtype(q)
    q = q.mT.to(acc)  # (B, H, d_k, 1)
    k = k.mT.to(acc)  # (B, H, d_k, 1)
    log_s, log_z = state
    if log_f is not None:
        log_f = log_f.to(acc)  # (B, H, 1, 1)
        log_s = log_s + log_f
        log_z = log_z + log_f.squeeze(2)
    log_s = torch.logaddexp(log_s, k + log_v.to(acc))
    log_z = torch.logaddexp(log_z, k.squeeze(-1))
    log_sum = (q + log_s).logsumexp(-2, keepdim=True)
    log_norm = (q + log_z.unsqueeze(-1)).logsumexp(-2, keepdim=True)
    log_y = (log_sum - log_norm).to(log_v.dtype)  # (B, H, 1, d_v)
    return (log_y, LogAttentionState(log_s, log_z)) if return_state else log_y
