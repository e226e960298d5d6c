"""Linear attention (Katharopoulos et al. 2020): weights are products of positive features."""

from typing import Literal

from torch import Tensor, nn

from common.settings import Settings
from model.attention.base import Attention
from model.ops.linear_attention import CHUNK, LinearAttentionState, linear_attention, naive_linear_attention
from model.position import Rotation, rotate


class LinearConfig(Settings):
    """Similarity phi(q)^T phi(k) with phi(x) = elu(x) + 1, in time that is linear in the length."""

    name: Literal["linear"]

    def build(self, n_embd: int, n_head: int, head_dim: int) -> "LinearAttention":
        """The module for this configuration."""
        return LinearAttention(n_embd, n_head, head_dim)

    def query_dim(self, head_dim: int) -> int:
        """Features of a head's queries, which a rotary position turns in pairs."""
        return head_dim


class LinearAttention(Attention):
    """Causal multi-head linear attention; its state is a sum over the tokens so far.

    A rotation turns queries and keys before phi: weights stay positive and add up to 1, which they do not where
    phi's result is turned (Su et al. 2021, eq. 19).
    """

    def __init__(self, n_embd: int, n_head: int, head_dim: int) -> None:
        super().__init__()
        self.n_head, self.head_dim = n_head, head_dim
        self.n_out = n_head * head_dim
        self.qkv = nn.Linear(n_embd, 3 * self.n_out)

    def forward(
        self,
        x: Tensor,
        rotation: Rotation | None = None,
        state: LinearAttentionState | None = None,
        return_state: bool = False,
    ) -> tuple[Tensor, LinearAttentionState | None]:
        """(B, T, n_embd) -> (B, T, n_head * head_dim)."""
        y, after = linear_attention(*self.project(x, rotation), state=state)  # (B, H, T, D)
        return y.transpose(1, 2).flatten(2), after if return_state else None

    def naive(self, x: Tensor, rotation: Rotation | None = None) -> Tensor:
        """What `forward` must equal, by the definition: T x T weights."""
        return naive_linear_attention(*self.project(x, rotation)).transpose(1, 2).flatten(2)

    def project(self, x: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v (B, H, T, D)."""
        q, k, v = self.qkv(x).unflatten(2, (3, self.n_head, self.head_dim)).permute(2, 0, 3, 1, 4)
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        return q, k, v

    def flops_per_token(self, seq_len: int) -> int:
        """Per chunk of C tokens: C x C scores, their product with the values, the state read and written."""
        C = min(CHUNK, seq_len)
        return 2 * self.n_head * (2 * C * self.head_dim + 2 * self.head_dim**2)
