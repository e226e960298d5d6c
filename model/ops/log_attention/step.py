"""Log-space attention of a single token, for decoding: the definition without its scan over tokens."""

import torch
from torch import Tensor

from model.ops.log_attention.state import LogAttentionState, accumulation_dtype


def log_attention_step(
    q: Tensor, k: Tensor, log_v: Tensor, *, state: LogAttentionState, return_state: bool = False
) -> Tensor | tuple[Tensor, LogAttentionState]:
    """`log_attention` for q and k (B, H, 1, d_k) and log_v (B, H, 1, d_v), causal, without gradients."""
    dtype, acc = log_v.dtype, accumulation_dtype(q)
    q, k, log_v = q.mT.to(acc), k.mT.to(acc), log_v.to(acc)  # (B, H, d_k, 1) twice, (B, H, 1, d_v)
    log_s = torch.logaddexp(state.log_s, k + log_v)  # (B, H, d_k, d_v)
    log_z = torch.logaddexp(state.log_z, k.squeeze(-1))  # (B, H, d_k)
    log_y = (q + log_s).logsumexp(-2, keepdim=True) - (q + log_z.unsqueeze(-1)).logsumexp(-2, keepdim=True)
    log_y = log_y.to(dtype)  # (B, H, 1, d_v)
    return (log_y, LogAttentionState(log_s, log_z)) if return_state else log_y
