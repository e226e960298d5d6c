"""How a model knows the order of its tokens. Log attention and softmax attention do not see it by themselves.

A position is a module with

    forward(x (B, T, n_embd), state=None) -> (x, rotation or None, state)

`rotation` is for attention to turn its queries and keys by; the state is what it must remember of earlier tokens, a
value of which each row of a batch has its own: rows may be at different positions.
"""

from typing import Annotated, Literal, NamedTuple, get_args

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from common.settings import Settings
from model.ops.log_recurrence import log_recurrence


class Rotation(NamedTuple):
    """Angles of T positions for a head's feature pairs."""

    cos: Tensor
    """(T, head_dim / 2), or (B, T, head_dim / 2) where rows are at different positions; float32 or float64."""
    sin: Tensor
    """The same."""


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Turn feature pairs (i, i + D / 2) of x (B, H, T, D) by their position's angles (Su et al. 2021, eq. 34)."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = (angle.to(x.dtype).unsqueeze(-3) for angle in rotation)  # (1, T, D / 2) or (B, 1, T, D / 2)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class LogRecurrenceConfig(Settings):
    """The published model's: a log-space recurrence over the tokens, added to them. No limit of length."""

    name: Literal["log_recurrence"]

    def build(self, n_embd: int, query_dim: int) -> nn.Module:
        """The module for this configuration."""
        return LogRecurrencePosition(n_embd)


class LearnedConfig(Settings):
    """GPT-2's: one learned vector for each position."""

    name: Literal["learned"]
    max_len: int = Field(1024, ge=1)
    """Positions there are; no sequence can be longer."""

    def build(self, n_embd: int, query_dim: int) -> nn.Module:
        """The module for this configuration."""
        return LearnedPosition(n_embd, self.max_len)


class RotaryConfig(Settings):
    """Queries and keys are turned by angles that grow with the position (Su et al. 2021)."""

    name: Literal["rotary"]
    base: float = Field(10000.0, gt=1)
    """The slowest feature pair turns once in about 2 pi x base tokens."""

    def build(self, n_embd: int, query_dim: int) -> nn.Module:
        """The module for this configuration."""
        return RotaryPosition(query_dim, self.base)


class NoPositionConfig(Settings):
    """Tokens are seen as a set, but for what causality itself tells."""

    name: Literal["none"]

    def build(self, n_embd: int, query_dim: int) -> nn.Module:
        """The module for this configuration."""
        return NoPosition()


PositionConfig = Annotated[
    LogRecurrenceConfig | LearnedConfig | RotaryConfig | NoPositionConfig, Field(discriminator="name")
]
POSITIONS = get_args(get_args(PositionConfig)[0])


def _positions(before: tuple[int, ...], T: int, device: torch.device) -> Tensor:
    """Positions of T tokens after so many in each row: (T,), or (B, T) where rows differ."""
    if len(set(before)) == 1:
        return torch.arange(before[0], before[0] + T, device=device)
    return torch.tensor(before, device=device).unsqueeze(1) + torch.arange(T, device=device)


class LogRecurrencePosition(nn.Module):
    """x + s, where s_t = log(p_t exp(s_{t-1}) + exp(h_t)) and one linear layer gives p and h. State: s (B, n_embd)."""

    def __init__(self, n_embd: int) -> None:
        super().__init__()
        self.dense = nn.Linear(n_embd, 2 * n_embd)

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, None, Tensor]:
        """(B, T, n_embd) -> the same."""
        p, h = self.dense(x).chunk(2, dim=-1)
        s, state = log_recurrence(logsigmoid(p), h, state=state, return_state=True)
        return x + s, None, state


class LearnedPosition(nn.Module):
    """x + one learned vector a position. State: tokens seen so far, for each row."""

    def __init__(self, n_embd: int, max_len: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(max_len, n_embd)
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, x: Tensor, state: tuple[int, ...] | None = None) -> tuple[Tensor, None, tuple[int, ...]]:
        """(B, T, n_embd) -> the same.

        Raises:
            ValueError: a sequence, with what came before it, is longer than the positions there are.
        """
        B, T, _ = x.shape
        before = state or (0,) * B
        end, limit = max(before) + T, self.embed.num_embeddings
        if end > limit:
            raise ValueError(
                f"{end} tokens are more than the model's {limit} learned positions: use a shorter sequence"
            )
        rows = slice(end - T, end) if len(set(before)) == 1 else _positions(before, T, x.device)
        return x + self.embed.weight[rows], None, tuple(n + T for n in before)


class RotaryPosition(nn.Module):
    """Leaves x alone and returns the rotation of its positions. State: tokens seen so far, for each row."""

    def __init__(self, query_dim: int, base: float) -> None:
        super().__init__()
        self.query_dim, self.base = query_dim, base

    def forward(self, x: Tensor, state: tuple[int, ...] | None = None) -> tuple[Tensor, Rotation, tuple[int, ...]]:
        """(B, T, n_embd) -> the same."""
        B, T, _ = x.shape
        before = state or (0,) * B
        dtype = torch.promote_types(x.dtype, torch.float32)
        pair = torch.arange(0, self.query_dim, 2, dtype=dtype, device=x.device)
        position = _positions(before, T, x.device).to(dtype)
        angle = position.unsqueeze(-1) * self.base ** (-pair / self.query_dim)  # (T, D / 2) or (B, T, D / 2)
        return x, Rotation(angle.cos(), angle.sin()), tuple(n + T for n in before)


class NoPosition(nn.Module):
    """Leaves x alone."""

    def forward(self, x: Tensor, state: None = None) -> tuple[Tensor, None, None]:
        """(B, T, n_embd) -> the same."""
        return x, None, None
