"""The interface of attention mechanisms, and the projections that most of them share."""

from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from common.settings import Settings
from model.position import Rotation, rotate


class AttentionSettings(Settings):
    """Base of the mechanisms' configurations."""

    def build(self, n_embd: int, n_head: int, head_dim: int) -> "Attention":
        """Create the module."""
        raise NotImplementedError

    def check(self, n_embd: int, n_head: int, head_dim: int) -> None:
        """Raise a ValueError of one line if the mechanism does not fit a model of these sizes."""

    def query_dim(self, head_dim: int) -> int:
        """Return the number of features in a head's queries, which rotary positions rotate in pairs."""
        return head_dim


class GroupedSettings(AttentionSettings):
    """Settings of mechanisms whose query heads can share key and value heads."""

    n_kv_head: int | None = Field(ge=1)
    """Key and value heads, a divisor of n_head; null: n_head, one for each query head; 1: one for all."""

    def check(self, n_embd: int, n_head: int, head_dim: int) -> None:
        """Raise ValueError if the query heads cannot share their key and value heads evenly."""
        if self.n_kv_head is not None and n_head % self.n_kv_head:
            divisors = [n for n in range(1, n_head + 1) if n_head % n == 0]
            raise ValueError(
                f"n_kv_head={self.n_kv_head} does not divide n_head={n_head}: "
                f"use one of {', '.join(map(str, divisors))}"
            )


class Attention(nn.Module):
    """Mixes tokens. Owns the projections to queries, keys and values; the block projects the result back.

    A mechanism implements `project`, `attend` and `naive_attend`. Where queries and keys are not rotated alone, it
    overrides `forward` and `naive` or `join`.
    """

    def __init__(self, n_embd: int, n_head: int, n_out: int, n_qkv: int) -> None:
        """Args: `n_out`, features returned for all heads; `n_qkv`, features of all queries, keys and values."""
        super().__init__()
        self.n_head, self.n_out = n_head, n_out
        self.qkv = nn.Linear(n_embd, n_qkv)

    def forward(
        self, x: Tensor, rotation: Rotation | None = None, state: Any = None, return_state: bool = False
    ) -> tuple[Tensor, Any]:
        """(B, T, n_embd) -> (B, T, n_out), and with `return_state` the state for the tokens that follow, else None.

        `rotation` rotates queries and keys. `state` is what an earlier call returned for the tokens before these. A
        state is a value: the call does not change it, and model/state.py batches the rows of several states.
        """
        y, after = self.attend(*self.project(x, rotation), state, return_state)
        return self.join(y, rotation), after if return_state else None

    def naive(self, x: Tensor, rotation: Rotation | None = None) -> Tensor:
        """Compute `forward` from the equation in the source, for a text from its beginning."""
        return self.join(self.naive_attend(*self.project(x, rotation)), rotation)

    def project(self, x: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T, n_embd) -> q, k, v (B, heads, T, features), with q and k rotated."""
        raise NotImplementedError

    def attend(self, q: Tensor, k: Tensor, v: Tensor, state: Any, return_state: bool) -> tuple[Tensor, Any]:
        """Return the heads' results (B, n_head, T, features) and, if `return_state`, the state."""
        raise NotImplementedError

    def naive_attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Compute `attend` from the equation in the source."""
        raise NotImplementedError

    def join(self, y: Tensor, rotation: Rotation | None) -> Tensor:
        """(B, n_head, T, features) -> (B, T, n_out)."""
        return y.transpose(1, 2).flatten(2)

    def mask(self, T: int) -> Tensor:
        """(1 or n_head, T, T): True where query i may attend to key j."""
        return torch.ones(1, T, T, dtype=torch.bool, device=self.qkv.weight.device).tril()

    def flops_per_token(self, seq_len: int) -> int:
        """Floating-point operations of the forward pass per token, without the projections."""
        raise NotImplementedError


class MultiHeadAttention(Attention):
    """Attention with n_head query heads over n_kv_head key and value heads, all of `head_dim` features.

    With n_kv_head = n_head this is multi-head attention (Vaswani et al. 2017), with 1 multi-query (Shazeer 2019), and
    in between grouped-query: query head h uses key and value head h // (n_head / n_kv_head) (Ainslie et al. 2023).
    """

    def __init__(
        self, n_embd: int, n_head: int, head_dim: int, n_kv_head: int | None = None, own_values: bool = True
    ) -> None:
        """`own_values=False`: keys are the values too."""
        n_kv_head = n_kv_head or n_head
        heads = [n_head, n_kv_head, n_kv_head] if own_values else [n_head, n_kv_head]
        super().__init__(n_embd, n_head, n_head * head_dim, sum(heads) * head_dim)
        self.n_kv_head, self.head_dim, self.own_values, self._heads = n_kv_head, head_dim, own_values, heads

    def project(
        self, x: Tensor, rotation: Rotation | None, qkv: nn.Linear | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T, n_embd) -> q (B, n_head, T, head_dim), k and v (B, n_kv_head, T, head_dim), with q and k rotated."""
        parts = (qkv or self.qkv)(x).unflatten(2, (-1, self.head_dim)).split(self._heads, dim=2)
        q, k, *v = (part.transpose(1, 2) for part in parts)
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        return q, k, v[0] if v else k

    @property
    def grouped(self) -> bool:
        """Whether query heads share key and value heads."""
        return self.n_kv_head < self.n_head

    def flops_per_token(self, seq_len: int) -> int:
        """Scores and their product with the values. On average a causal token attends to half of the sequence."""
        return 2 * self.n_head * seq_len * self.head_dim


def chunked_flops(n_head: int, C: int, d_key: int, d_val: int) -> int:
    """Per token of a chunk of C: C x C scores, their product with the values, the state read and written."""
    return 2 * n_head * (C * d_key + C * d_val + 2 * d_key * d_val)
