"""Sliding windows (Beltagy et al. 2020), dilated or not, which can differ by head."""

from typing import Any, ClassVar, Literal

import torch
from pydantic import ValidationInfo, field_validator

from model.attention.base import GroupedSettings
from model.attention.cache import SparseCache
from model.attention.sparse import SparseAttention
from model.ops.sparse_attention.patterns import window


class SlidingWindowConfig(GroupedSettings, defaults="model/attention/sliding_window"):
    """The last `window` keys, including the query's own; with dilation, every (dilation + 1)-th key."""

    name: Literal["sliding_window"]
    constant_state: ClassVar[bool] = True
    window: int | tuple[int, ...]
    """Keys that a query attends to; a list gives one number for each head."""
    dilation: int | tuple[int | None, ...] | None
    """Keys skipped between two keys of the window; null: none; a list gives one item for each head."""

    @field_validator("window", "dilation", mode="before")
    @classmethod
    def _in_range(cls, value: Any, info: ValidationInfo) -> Any:
        most, null = {"window": (2**20, ""), "dilation": (2**16, ", null")}[str(info.field_name)]
        for given in value if isinstance(value, list | tuple) else [value]:
            if not (type(given) is int and 1 <= given <= most) and not (null and given is None):
                raise ValueError(f"{given} is out of range: use 1 to {most:,}{null}, or a list of one for each head")
        return value

    def check(self, n_head: int, head_dim: int) -> None:
        super().check(n_head, head_dim)
        for name in ("window", "dilation"):
            value = getattr(self, name)
            if isinstance(value, tuple) and len(value) != n_head:
                raise ValueError(
                    f"{name} lists {len(value)} for n_head={n_head}: give one for each head, or one number"
                )

    def mechanism(self, n_embd: int, n_head: int, head_dim: int) -> "SlidingWindowAttention":
        self.check(n_head, head_dim)
        windows = self.window if isinstance(self.window, tuple) else (self.window,) * n_head
        dilations = self.dilation if isinstance(self.dilation, tuple) else (self.dilation,) * n_head
        patterns = [window(size, gap or 0) for size, gap in zip(windows, dilations, strict=True)]
        return SlidingWindowAttention(n_embd, n_head, head_dim, self.n_kv_head, patterns)


class SlidingWindowAttention(SparseAttention):
    """Causal attention in windows; its state is the windows' keys and values."""

    by_distance = True

    def empty(self, B: int, device: torch.device) -> tuple[SparseCache, ...]:
        dtype = self.qkv.weight.dtype
        return tuple(
            SparseCache.empty(B, len(group.kv_heads), self.head_dim, group.patterns, dtype, device)
            for group in self.groups
        )
