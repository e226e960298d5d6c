"""What every attention mechanism is to the block around it."""

from typing import Any

from torch import Tensor, nn

from model.position import Rotation


class Attention(nn.Module):
    """Mixes tokens. It owns the projections to its queries, keys and values; the block projects its result back.

    A mechanism is built by its configuration's `build(n_embd, n_head, head_dim)`. If the configuration also has
    `check(n_embd, n_head, head_dim)`, which raises a ValueError of one line where these do not go together, that is
    called when a model's configuration is made.
    """

    n_out: int
    """Features it returns, over all heads."""

    def forward(
        self, x: Tensor, rotation: Rotation | None = None, state: Any = None, return_state: bool = False
    ) -> tuple[Tensor, Any]:
        """(B, T, n_embd) -> (B, T, n_out), and with `return_state` what the tokens after these need of them.

        `rotation` turns queries and keys; `state` is what an earlier call returned for the tokens before. A state is a
        value: the call leaves it as it was, and model/state.py puts rows of several into one.
        """
        raise NotImplementedError

    def naive(self, x: Tensor, rotation: Rotation | None = None) -> Tensor:
        """What `forward` must equal for a text from its beginning, straight from the source's equation."""
        raise NotImplementedError

    def flops_per_token(self, seq_len: int) -> int:
        """Floating-point operations of the mechanism in a forward pass, its projections left out."""
        raise NotImplementedError


def check_kv_heads(n_head: int, n_kv_head: int | None) -> None:
    """Raise ValueError where the query heads cannot share their key and value heads evenly."""
    if n_kv_head is not None and n_head % n_kv_head:
        divisors = [n for n in range(1, n_head + 1) if n_head % n == 0]
        raise ValueError(
            f"n_kv_head={n_kv_head} does not divide n_head={n_head}: use one of {', '.join(map(str, divisors))}"
        )
