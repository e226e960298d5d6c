"""Attention mechanisms, one file each: its configuration, its module, its state.

A mechanism is a module built by its configuration's `build(n_embd, n_head, head_dim)`. It owns the projections to its
queries, keys and values, and has

    forward(x (B, T, n_embd), rotation=None, state=None, return_state=False) -> (y (B, T, n_out), state or None)
    n_out                      features it returns, over all heads; the block projects them back to n_embd
    flops_per_token(seq_len)   multiply-adds x 2 of the mechanism itself in a forward pass, projections left out

State is a value: what the mechanism needs of earlier tokens, returned where `return_state` asks for it.
"""

from typing import Annotated

from pydantic import Field

from model.attention.log_space import LogSpaceConfig
from model.attention.softmax import SoftmaxConfig

ATTENTION = (LogSpaceConfig, SoftmaxConfig)
AttentionConfig = Annotated[LogSpaceConfig | SoftmaxConfig, Field(discriminator="name")]
