"""Log-space attention of a single token, for decoding: the definition without its scan over tokens."""

from torch import Tensor

from model.ops.log_attention.state import LogAttentionState, accumulation_dtype, add_states


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
    dtype, acc = log_v.dtype, accumulation_dtype(q)
    q, k, log_v = q.mT.to(acc), k.mT.to(acc), log_v.to(acc)  # (B, H, d_k, 1) twice, (B, H, 1, d_v)
    token = LogAttentionState(k + log_v, k.squeeze(-1))
    log_s, log_z = add_states(state, token, None if log_f is None else log_f.squeeze(2).to(acc))
    log_y = (q + log_s).logsumexp(-2, keepdim=True) - (q + log_z.unsqueeze(-1)).logsumexp(-2, keepdim=True)
    log_y = log_y.to(dtype)  # (B, H, 1, d_v)
    return (log_y, LogAttentionState(log_s, log_z)) if return_state else log_y
