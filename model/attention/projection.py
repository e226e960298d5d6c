"""Projection attention (Sanger 2025): weights decrease with the squared distance."""

import math
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from model.attention.base import AttentionInputs, MultiHeadAttention, SharedHeadSettings
from model.attention.cache import KVCache, attend_to_all
from model.ops.custom import accumulation_dtype
from model.ops.projection_attention import (
    inner_keys,
    inner_queries,
    naive_projection_attention,
    padded_values,
)
from model.ops.sparse_attention.attend import repeated
from model.position import Rotation, rotate


class ProjectionConfig(SharedHeadSettings, defaults="model/attention/projection"):
    """Weights proportional to exp(-||q - k||^2 / (2 sigma^2)), by torch's fused kernels."""

    name: Literal["projection"]
    values: Literal["keys", "own"]
    """keys: the keys are also the values, which saves a projection and half of the cache; own:
    values are projected."""
    sigma: float | None = Field(ge=1e-6, le=1e6)
    """Distance at which a weight is exp(-1/2); null: head_dim^(1/4), which corresponds to softmax
    attention's scale 1 / sqrt(head_dim), because q and k are not normalised here. The paper's 0.01
    is for rows of norm 1."""
    learned: bool
    """Whether each head learns its own sigma, starting from `sigma`."""

    def mechanism(self, n_embd: int, n_head: int, head_dim: int) -> "ProjectionAttention":
        return ProjectionAttention(self, n_embd, n_head, head_dim)


class ProjectionAttention(MultiHeadAttention):
    """Causal multi-head attention by distance; its state is a cache of keys and values.

    If keys are also the values, a rotation applies to them, and the result is rotated back by its
    query's angles, so that it depends on the distance between tokens and not on their positions.
    """

    def __init__(self, settings: ProjectionConfig, n_embd: int, n_head: int, head_dim: int) -> None:
        has_values = settings.values == "own"
        super().__init__(n_embd, n_head, head_dim, settings.n_kv_head, has_values)
        self.first_sigma = head_dim**0.25 if settings.sigma is None else settings.sigma
        self.log_sigma = nn.Parameter(torch.empty(n_head)) if settings.learned else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start from the sigma of the settings."""
        if self.log_sigma is not None:
            nn.init.constant_(self.log_sigma, math.log(self.first_sigma))

    @property
    def sigma(self) -> Tensor:
        """(n_head,)."""
        if self.log_sigma is not None:
            return self.log_sigma.exp()
        weight = self.qkv.weight
        return weight.new_full((self.n_head,), self.first_sigma, dtype=accumulation_dtype(weight))

    def attend(
        self, inputs: AttentionInputs, state: Any, return_state: bool
    ) -> tuple[Tensor, KVCache | None]:
        q = inner_queries(inputs.q, self.sigma)  # (B, H, T, D')
        k = inner_keys(inputs.k)  # (B, H_kv, T, D')
        v = padded_values(inputs.v) if self.has_values else k[..., :0]  # keys are cached once
        y, after = attend_to_all(inputs._replace(q=q, k=k, v=v), state, return_state, scale=1.0)
        return self._rotate_back(y[..., : self.head_dim], inputs.positions.rotation), after

    def naive_attend(self, inputs: AttentionInputs) -> Tensor:
        q, k, v, _, positions = inputs
        k = repeated(k, self.n_head)
        v = repeated(v, self.n_head)
        y = naive_projection_attention(q, k, v, self.sigma, self.mask(q.shape[2]))
        return self._rotate_back(y, positions.rotation)

    def _rotate_back(self, y: Tensor, rotation: Rotation | None) -> Tensor:
        """Undo the rotation of keys that are the values."""
        if rotation is None or self.has_values:
            return y
        return rotate(y, Rotation(rotation.cos, -rotation.sin))
