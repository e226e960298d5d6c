"""The position recurrence by its definition: one token after the other."""

import torch
from torch import Tensor


def naive_log_recurrence(
    log_p: Tensor, h: Tensor, *, state: Tensor | None = None, return_state: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """s_t = log(p_t exp(s_{t-1}) + exp(h_t)), s_0 = 0. Arguments and result are those of `log_recurrence`."""
    dtype, acc = h.dtype, torch.promote_types(h.dtype, torch.float32)
    s = torch.zeros_like(h[:, 0], dtype=acc) if state is None else state.to(acc)
    steps = []
    for log_p_t, h_t in zip(log_p.to(acc).unbind(1), h.to(acc).unbind(1), strict=True):
        s = torch.logaddexp(log_p_t + s, h_t)
        steps.append(s)
    out = torch.stack(steps, dim=1).to(dtype)
    return (out, s) if return_state else out
