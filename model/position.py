"""Position encodings. Log-space and softmax attention do not depend on the order of tokens by
themselves.

A position is a module with

    forward(x (B, T, n_embd), state=None, starts=None) -> (x, rotation or None, state)

Attention rotates its queries and keys by `rotation`. The state holds what the module needs of
earlier tokens, with an entry for each row of a batch, since rows may be at different positions.
`starts` is Positions.document_starts. If the size of the state is constant, `initial_state(B,
device)` returns the state of B texts before their first tokens, which None also stands for.
"""

from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from common.settings import Settings
from model.layers import Embedding, Linear
from model.ops.custom import accumulation_dtype
from model.ops.document_masks import document_positions
from model.ops.log_recurrence import log_recurrence


class Rotation(NamedTuple):
    """Angles of T positions for a head's feature pairs."""

    cos: Tensor
    """(T, head_dim / 2), or (B or 1, T, head_dim / 2); float32 or float64."""
    sin: Tensor
    """As cos."""


class Positions(NamedTuple):
    """Where tokens stand in their documents, for attention."""

    rotation: Rotation | None = None
    document_starts: Tensor | None = None
    """(B, T), bool: True at the first token of each document, which does not see earlier ones.
    Attention with a state needs `restarts`. None: all tokens are one document."""


NO_POSITIONS = Positions()


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate feature pairs (i, i + D / 2) of x (B, H, T, D) by their position's angles (Su et al.
    2021, eq. 34)."""
    a, b = x.chunk(2, dim=-1)
    cos = rotation.cos.to(x.dtype).unsqueeze(-3)  # (B or 1, 1, T, D / 2)
    sin = rotation.sin.to(x.dtype).unsqueeze(-3)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


def last_positions(lengths: tuple[int, ...], n: int, device: torch.device) -> Tensor:
    """Return the positions of the last n tokens of texts of these lengths: (B, n), or (1, n) if all
    lengths are equal.

    Positions before the first token, where there is no token, are negative.
    """
    if len(set(lengths)) == 1:
        lengths = lengths[:1]
    start = torch.tensor(lengths, device=device).unsqueeze(1) - n
    return start + torch.arange(n, device=device)


class LogRecurrencePosition(nn.Module):
    """x + s, where s_t = log(p_t exp(s_{t-1}) + exp(h_t)) and a linear layer computes p and h.
    State: s (B, n_embd)."""

    def __init__(self, n_embd: int) -> None:
        super().__init__()
        self.dense = Linear(n_embd, 2 * n_embd)

    def forward(
        self, x: Tensor, state: Tensor | None = None, starts: Tensor | None = None
    ) -> tuple[Tensor, None, Tensor]:
        p, h = self.dense(x).chunk(2, dim=-1)
        log_p = logsigmoid(p)
        if starts is not None:  # a document's first step is from s = 0
            is_first = starts.unsqueeze(-1)
            h = torch.logaddexp(log_p, h).where(is_first, h)
            log_p = log_p.masked_fill(is_first, -torch.inf)
        s, state = log_recurrence(log_p, h, state)
        return x + s, None, state

    def initial_state(self, B: int, device: torch.device) -> Tensor:
        weight = self.dense.weight
        return torch.zeros(B, weight.shape[1], dtype=accumulation_dtype(weight), device=device)


class LearnedPosition(nn.Module):
    """x + a learned vector for each position. State: tokens so far in each row."""

    def __init__(self, n_embd: int, max_len: int) -> None:
        super().__init__()
        self.max_len = max_len
        self.embed = Embedding(max_len, n_embd, std=0.02)

    def forward(
        self, x: Tensor, state: tuple[int, ...] | None = None, starts: Tensor | None = None
    ) -> tuple[Tensor, None, tuple[int, ...]]:
        """Raises ValueError if a text has more tokens than positions."""
        T = x.shape[1]
        if state is None:
            state = (0,) * len(x)
        lengths = tuple(n + T for n in state)
        longest = max(lengths)
        if longest > self.max_len:
            raise ValueError(
                f"{longest} tokens are more than the model's {self.max_len} learned positions: "
                "use a shorter sequence"
            )
        if starts is not None:
            embedded = self.embed(document_positions(starts))
        elif min(lengths) == longest and isinstance(self.embed, Embedding):  # not an adapter
            embedded = self.embed.weight[longest - T : longest]  # faster than by an index
        else:
            embedded = self.embed(last_positions(lengths, T, x.device))
        return x + embedded, None, lengths


class RotaryPosition(nn.Module):
    """Does not change x and returns the rotation of its positions.

    State: the position of each row's next token, int64 (B,), which starts again with each document.
    """

    def __init__(self, head_dim: int, base: float) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.base = base

    def forward(
        self, x: Tensor, state: Tensor | None = None, starts: Tensor | None = None
    ) -> tuple[Tensor, Rotation, Tensor]:
        dtype = accumulation_dtype(x)
        # With a state, positions grow without limit.
        wide = dtype if state is None else torch.float64
        if starts is None:
            position = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        else:
            position = document_positions(starts)
        if state is not None:
            before = state.unsqueeze(1)  # (B, 1)
            if starts is not None:
                before = before.where(starts.cumsum(1) == 0, 0)
            position = position + before
        pair = torch.arange(0, self.head_dim, 2, dtype=wide, device=x.device)
        speed = self.base ** (-pair / self.head_dim)
        angle = position.to(wide).unsqueeze(-1) * speed  # (B or 1, T, head_dim / 2)
        after = (position[:, -1] + 1).expand(len(x))
        return x, Rotation(angle.cos().to(dtype), angle.sin().to(dtype)), after

    def initial_state(self, B: int, device: torch.device) -> Tensor:
        return torch.zeros(B, dtype=torch.int64, device=device)


class NoPosition(nn.Module):
    """Does not change x."""

    def forward(
        self, x: Tensor, state: None = None, starts: Tensor | None = None
    ) -> tuple[Tensor, None, None]:
        return x, None, None

    def initial_state(self, B: int, device: torch.device) -> None:
        return None


class LogRecurrenceConfig(Settings):
    """The published model adds a log-space recurrence over the tokens. No limit of length."""

    name: Literal["log_recurrence"]

    def build(self, n_embd: int, head_dim: int) -> nn.Module:
        return LogRecurrencePosition(n_embd)


class LearnedConfig(Settings, defaults="model/position/learned"):
    """A learned vector for each position, as in GPT-2."""

    name: Literal["learned"]
    max_len: int = Field(ge=1, le=2**24)
    """Number of positions; no sequence can be longer."""

    def build(self, n_embd: int, head_dim: int) -> nn.Module:
        return LearnedPosition(n_embd, self.max_len)


class RotaryConfig(Settings, defaults="model/position/rotary"):
    """Queries and keys are rotated by angles that grow with the position (Su et al. 2021)."""

    name: Literal["rotary"]
    base: float = Field(gt=1, allow_inf_nan=False)
    """The slowest feature pair rotates once in about 2 pi x base tokens."""

    def build(self, n_embd: int, head_dim: int) -> nn.Module:
        return RotaryPosition(head_dim, self.base)


class NoPositionConfig(Settings):
    """No positions: attention sees a set of tokens, and only causality reveals their order."""

    name: Literal["none"]

    def build(self, n_embd: int, head_dim: int) -> nn.Module:
        return NoPosition()


PositionConfig = Annotated[
    LogRecurrenceConfig | LearnedConfig | RotaryConfig | NoPositionConfig,
    Field(discriminator="name"),
]
