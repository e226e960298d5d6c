"""Causal Longformer attention (Beltagy et al. 2020): a window and global tokens."""

from typing import Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import pad

from model.attention.base import SharedHeadSettings, Traits
from model.attention.cache import SparseCache
from model.attention.sparse import LARGEST, SparseAttention
from model.layers import FusedLinear
from model.ops.sparse_attention.attend import dense_attention
from model.ops.sparse_attention.patterns import longformer
from model.position import Positions, Rotation, last_positions


class LongformerConfig(SharedHeadSettings, defaults="model/attention/longformer"):
    """Attention to the last `window` keys and to the first `n_global` keys, the global tokens."""

    name: Literal["longformer"]
    # The global tokens are the first of a window, not of a document.
    traits: ClassVar[Traits] = Traits(state="bounded", documents=False)
    window: int = Field(ge=1, le=LARGEST)
    """Keys that a query attends to, including its own."""
    n_global: int = Field(ge=1, le=LARGEST)
    """Tokens at the beginning that all later tokens attend to as well."""

    def mechanism(self, n_embd: int, n_head: int, head_dim: int) -> "LongformerAttention":
        return LongformerAttention(self, n_embd, n_head, head_dim)


class LongformerState(NamedTuple):
    """What later tokens can attend to; its size is constant."""

    local: SparseCache
    """Keys and values of the window and of the global tokens, as all tokens attend to them."""
    k_global: Tensor
    """(B, n_kv_head, n_global, head_dim): global tokens' keys for attention among each other, zeros
    until they come."""
    v_global: Tensor
    """Their values, of the same shape."""


class LongformerAttention(SparseAttention):
    """Every token attends to a window and the global tokens by the projections q, k, v (section
    3.1, figure 2d).

    The first n_global tokens are global. They have projections q_g, k_g, v_g of their own ("linear
    projections for global attention"), which start equal to q, k, v. Their result by these replaces
    that by q, k, v. Because attention is causal, global tokens attend to each other only.
    """

    def __init__(self, settings: LongformerConfig, n_embd: int, n_head: int, head_dim: int) -> None:
        patterns = [longformer(settings.window, settings.n_global)]
        super().__init__(n_embd, n_head, head_dim, settings.n_kv_head, patterns)
        self.n_global = settings.n_global
        self.qkv_global = FusedLinear(n_embd, self.qkv.sizes)
        self.copy_weights()

    def copy_weights(self) -> None:
        self.qkv_global.load_state_dict(self.qkv.state_dict())

    def mix(
        self, x: Tensor, positions: Positions, state: Any, return_state: bool
    ) -> tuple[Tensor, Any]:
        if state is None:
            state = (None, None, None)
        local, k_global, v_global = state
        inputs = self.project(self.qkv(x), positions=positions)
        y, local_after = self.attend(inputs, local, return_state)
        lengths = local.lengths if local else (0,)
        if min(lengths) < self.n_global:
            y, k_global, v_global = self._replace_global(
                y, x, positions.rotation, k_global, v_global, lengths
            )
        if local_after is None or not return_state:
            return y, None
        return y, LongformerState(local_after, k_global, v_global)

    def _replace_global(
        self,
        y: Tensor,
        x: Tensor,
        rotation: Rotation | None,
        k_global: Tensor | None,
        v_global: Tensor | None,
        lengths: tuple[int, ...],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Replace results y (B, n_head, T, head_dim) of global tokens by those of q_g, k_g, v_g.

        Return y, and the keys and values of global tokens so far.
        """
        n = min(x.shape[1], self.n_global - min(lengths))  # tokens that are global in some row
        if rotation is not None:
            rotation = Rotation(rotation.cos[..., :n, :], rotation.sin[..., :n, :])
        q, k, v, *_ = self.project(self.qkv_global(x[:, :n]), positions=Positions(rotation))
        k_global = self._extended(k_global, k, lengths)
        v_global = self._extended(v_global, v, lengths)
        i = last_positions(tuple(length + n for length in lengths), n, x.device)  # (B or 1, n)
        j = torch.arange(self.n_global, device=x.device)
        mask = (j <= i.unsqueeze(2)).unsqueeze(1)  # (B or 1, 1, n, n_global)
        y_global = dense_attention(q, k_global, v_global, mask)
        is_global = (i < self.n_global)[:, None, :, None]
        y_first = y_global.where(is_global, y[:, :, :n])
        return torch.cat([y_first, y[:, :, n:]], dim=2), k_global, v_global

    def _extended(self, x: Tensor | None, new: Tensor, lengths: tuple[int, ...]) -> Tensor:
        """Write keys or values of more tokens into those of global tokens, x (B, n_kv_head,
        n_global, head_dim). Row b has lengths[b] earlier tokens."""
        if x is None:
            return pad(new, (0, 0, 0, self.n_global - new.shape[2]))
        x = x.clone()  # the earlier state must not change
        for row, start in enumerate(lengths):
            room = max(self.n_global - start, 0)
            x[row, :, start : start + new.shape[2]] = new[row, :, :room]
        return x

    def flops_per_token(self, seq_len: int) -> int:
        """Only global tokens use their projections, but the model counts them for every token:
        subtract the rest."""
        share = max(seq_len - self.n_global, 0) / seq_len  # of tokens that are not global
        unused = round(2 * self.qkv_global.weight.numel() * share)
        return super().flops_per_token(seq_len) - unused
