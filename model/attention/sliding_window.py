"""Sliding windows, dilated or not (Beltagy et al. 2020), each head's its own."""

from typing import Literal

from pydantic import field_validator
from torch import Tensor

from model.attention.cache import RingCache
from model.attention.sparse import SparseAttention, SparseConfig
from model.ops.sparse_attention import window

_LARGEST = {"window": 2**20, "dilation": 2**16}


class SlidingWindowConfig(SparseConfig):
    """The last `window` keys, the query's own among them, or with gaps: every (dilation + 1)-th."""

    name: Literal["sliding_window"]
    window: int | tuple[int, ...] = 256
    """Keys that a query sees; a list has one for each head."""
    dilation: int | tuple[int, ...] = 0
    """Keys left out between two that are seen; a list has one for each head."""

    @field_validator("window", "dilation")
    @classmethod
    def _in_range(cls, value: int | tuple[int, ...], info: object) -> int | tuple[int, ...]:
        name = str(getattr(info, "field_name", ""))
        least, most = int(name == "window"), _LARGEST[name]
        for given in _each(value):
            if not least <= given <= most:
                raise ValueError(
                    f"{name}={given} is out of range: use {least} to {most:,}, or a list of one for each head"
                )
        return value

    def check(self, n_embd: int, n_head: int, head_dim: int) -> None:
        """Raise ValueError where these do not go together."""
        super().check(n_embd, n_head, head_dim)
        for name in ("window", "dilation"):
            value = getattr(self, name)
            if isinstance(value, tuple) and len(value) != n_head:
                raise ValueError(
                    f"{name} lists {len(value)} for n_head={n_head}: give one for each head, or one number"
                )

    def build(self, n_embd: int, n_head: int, head_dim: int) -> "SlidingWindowAttention":
        """The module for this configuration."""
        self.check(n_embd, n_head, head_dim)
        windows, dilations = (
            list(value) if isinstance(value, tuple) else [value] * n_head for value in (self.window, self.dilation)
        )
        return SlidingWindowAttention(n_embd, n_head, head_dim, self.n_kv_head, windows, dilations)


def _each(value: int | tuple[int, ...]) -> tuple[int, ...]:
    return value if isinstance(value, tuple) else (value,)


class SlidingWindowAttention(SparseAttention):
    """Causal attention to a window; its state is a ring of the keys and values that the widest head may still see."""

    def __init__(
        self,
        n_embd: int,
        n_head: int,
        head_dim: int,
        n_kv_head: int | None,
        windows: list[int],
        dilations: list[int],
    ) -> None:
        """`windows` and `dilations`: one for each head."""
        super().__init__(n_embd, n_head, head_dim, n_kv_head, [*map(window, windows, dilations)])
        self.span = max((w - 1) * (d + 1) + 1 for w, d in zip(windows, dilations, strict=True))

    def _cache(self, k: Tensor, v: Tensor) -> RingCache:
        return RingCache.of(k, v, self.span)
