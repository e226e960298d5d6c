"""Sliding windows, dilated or not (Beltagy et al. 2020), each head's its own."""

from typing import Any, Literal

from pydantic import ValidationInfo, field_validator

from model.attention.sparse import SparseAttention, SparseConfig
from model.ops.sparse_attention import window


class SlidingWindowConfig(SparseConfig):
    """The last `window` keys, the query's own among them, or with gaps: every (dilation + 1)-th."""

    name: Literal["sliding_window"]
    window: int | tuple[int, ...] = 256
    """Keys that a query sees; a list has one for each head."""
    dilation: int | tuple[int | None, ...] | None = None
    """Keys left out between two that are seen, 1 or more; null: none are; a list has one for each head."""

    @field_validator("window", "dilation", mode="before")
    @classmethod
    def _in_range(cls, value: Any, info: ValidationInfo) -> Any:
        most, null = {"window": (2**20, ""), "dilation": (2**16, ", null")}[str(info.field_name)]
        for given in value if isinstance(value, list | tuple) else [value]:
            if not (type(given) is int and 1 <= given <= most) and not (null and given is None):
                raise ValueError(f"{given} is out of range: use 1 to {most:,}{null}, or a list of one for each head")
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
        windows = self.window if isinstance(self.window, tuple) else (self.window,) * n_head
        dilations = self.dilation if isinstance(self.dilation, tuple) else (self.dilation,) * n_head
        patterns = [window(size, gap or 0) for size, gap in zip(windows, dilations, strict=True)]
        return SlidingWindowAttention(n_embd, n_head, head_dim, self.n_kv_head, patterns)


class SlidingWindowAttention(SparseAttention):
    """Causal attention to a window; its state is the keys and values that the widest head may still see."""
