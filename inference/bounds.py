"""How many queries, keys and values of log-space attention are beyond the operator's bounds."""

from collections import Counter
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor, nn

from data.loader import EvalBatches
from model.attention.log_space import LogSpaceAttention
from model.gpt import GPT
from model.ops.custom import accumulation_dtype
from model.ops.log_attention.naive_attention import KEY, QUERY, VALUE
from runtime.device import Compute

_TOKENS = 4096
"""Most tokens that are read, of all windows and of one."""


@torch.no_grad()
def find_shares_beyond_bounds(
    gpt: GPT, windows: EvalBatches, compute: Compute
) -> dict[str, float] | None:
    """Return the share of the elements of q, k and log_v that count as the bounds instead, over all
    layers with log-space attention, in the first windows.

    Without such layers it is None. Without logarithms of values, there is no share of log_v.
    """
    rows = windows.rows(0, max(1, _TOKENS // windows.seq_len))
    token_ids = torch.from_numpy(rows[0][:, :_TOKENS]).to(gpt.device)
    n_beyond = Counter[str]()
    n_elements = Counter[str]()

    def count(attention: LogSpaceAttention, qkv: nn.Module, inputs: object, output: Tensor) -> None:
        features = output.to(accumulation_dtype(output))
        q, k, v, *_ = attention.project(features)  # log-space attention is never rotated
        beyond = {
            "q": q - q.amax(-1, keepdim=True) < QUERY[0],
            "k": (k.clamp(*KEY) != k) & (k > -torch.inf),  # keys of -inf are masks
        }
        if attention.form.log:
            beyond["log_v"] = v.clamp(*VALUE) != v
        for name, is_beyond in beyond.items():
            n_beyond[name] += int(is_beyond.sum())
            n_elements[name] += is_beyond.numel()

    with ExitStack() as hooks, compute.autocast():
        for module in gpt.modules():
            if isinstance(module, LogSpaceAttention):
                hooks.enter_context(module.qkv.register_forward_hook(partial(count, module)))
        gpt.features(token_ids)
    return {name: n_beyond[name] / n for name, n in n_elements.items()} or None
