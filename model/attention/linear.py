"""Linear attention (Katharopoulos et al. 2020): weights are products of positive features."""

from typing import ClassVar, Literal

from model.attention.base import ForgettingSettings, MultiHeadAttention, Traits
from model.attention.log_space import FeatureAttention
from model.ops.log_attention import LINEAR


class LinearConfig(ForgettingSettings, defaults="model/attention/linear"):
    """Similarity phi(q)^T phi(k) with phi(x) = elu(x) + 1, in linear time."""

    name: Literal["linear"]
    traits: ClassVar[Traits] = Traits(state="fixed")

    def mechanism(self, n_embd: int, n_head: int, head_dim: int) -> "LinearAttention":
        return LinearAttention(n_embd, n_head, head_dim)


class LinearAttention(FeatureAttention, MultiHeadAttention):
    """Causal multi-head linear attention.

    Queries and keys are rotated before phi, so that weights stay positive and add up to 1. They do
    not if phi's result is rotated (Su et al. 2021, eq. 19).
    """

    form = LINEAR

    def __init__(self, n_embd: int, n_head: int, head_dim: int) -> None:
        super().__init__(n_embd, n_head, head_dim)
        self.state_features = head_dim
        self.d_val = head_dim
