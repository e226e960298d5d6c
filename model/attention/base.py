"""What every attention mechanism is to the block around it."""

from typing import Any

from torch import Tensor, nn

from model.position import Rotation


class Attention(nn.Module):
    """Mixes tokens. It owns the projections to its queries, keys and values; the block projects its result back.

    A mechanism is built by its configuration's `build(n_embd, n_head, head_dim)`.
    """

    n_out: int
    """Features it returns, over all heads."""

    def forward(
        self, x: Tensor, rotation: Rotation | None = None, state: Any = None, return_state: bool = False
    ) -> tuple[Tensor, Any]:
        """(B, T, n_embd) -> (B, T, n_out), and with `return_state` what the tokens after these need of them.

        `rotation` turns queries and keys; `state` is what an earlier call returned for the tokens before.
        """
        raise NotImplementedError

    def flops_per_token(self, seq_len: int) -> int:
        """Floating-point operations of the mechanism in a forward pass, its projections left out."""
        raise NotImplementedError
