"""The interface of attention mechanisms, and the projections that most of them share."""

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, sigmoid, silu

from common.settings import Settings
from model.layers import FusedLinear, Linear, RMSNorm
from model.ops.custom import CHUNK
from model.ops.sparse_attention.masked_attention import masked_attention
from model.position import NO_POSITIONS, Positions, Rotation, rotate

_GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "sigmoid": sigmoid,
}
# Tokens after which the first and the last head keep 1 / e, at the start of training.
_HORIZONS = (1.5, 500.0)


class AttentionSettings(Settings, defaults="attention_parts"):
    """Base of the mechanisms' configurations, with the options that any mechanism can have."""

    constant_state: ClassVar[bool] = False
    """Whether the state has one size, whatever the number of tokens."""
    has_empty_state: ClassVar[bool] = True
    """Whether a state of constant size has that size before the first token, too."""
    suits_rotary: ClassVar[bool] = True
    """Whether rotary positions can be used with it."""
    qk_norm: bool
    """Whether queries and keys are divided by their root mean square, after their rotation: it
    keeps the length, so the result is that of the other order."""
    gate: Literal["none", "silu", "sigmoid"]
    """Function of a linear layer's output that multiplies the result before the last projection."""

    mechanism: ClassVar[Callable[..., "Attention"]]
    """(self, n_embd, n_head, head_dim) -> the module without its options."""

    @property
    def forgets(self) -> bool:
        """Whether the module has gates that forget earlier tokens."""
        return False

    def build(self, n_embd: int, n_head: int, head_dim: int) -> "Attention":
        """Create the module."""
        attention = self.mechanism(n_embd, n_head, head_dim)
        attention.add_options(self)
        return attention

    def check(self, n_head: int, head_dim: int) -> None:
        """Raise a ValueError of one line if the mechanism does not fit the model."""

    def check_documents(self) -> None:
        """Raise a ValueError of one line if the mechanism cannot keep documents apart."""


class ForgettingSettings(AttentionSettings):
    """Settings of mechanisms that can forget earlier tokens."""

    decay: Literal["none", "head"]
    """What each token makes a head forget of earlier ones: nothing, or a share."""

    @property
    def forgets(self) -> bool:
        return self.decay != "none"


class SharedHeadSettings(AttentionSettings):
    """Settings of mechanisms whose query heads can share key and value heads."""

    n_kv_head: int | None = Field(ge=1)
    """Key and value heads, a divisor of n_head; null: n_head; 1: one for all query heads."""

    def check(self, n_head: int, head_dim: int) -> None:
        """Raise ValueError if the query heads cannot share their key and value heads evenly."""
        if self.n_kv_head is not None and n_head % self.n_kv_head:
            divisors = ", ".join(str(n) for n in range(1, n_head + 1) if n_head % n == 0)
            raise ValueError(
                f"n_kv_head={self.n_kv_head} does not divide n_head={n_head}: use one of {divisors}"
            )


class Forgetting(NamedTuple):
    """What a token no longer sees of the tokens before it."""

    log_f: Tensor | None = None
    """(B, n_head, T, 1): logarithm of the share that a head keeps at a token; -inf: nothing. None:
    all."""
    document_starts: Tensor | None = None
    """(B, T), bool: where documents start; None if `log_f` already encodes it."""


class Decay(nn.Module):
    """Gates of tokens x (B, T, n_embd): log_f = log sigmoid(bias + linear(x)), (B, n_head, T, 1)
    (Lin et al. 2025)."""

    def __init__(self, n_embd: int, n_head: int) -> None:
        super().__init__()
        self.to_gates = Linear(n_embd, n_head, bias=False)
        self.bias = nn.Parameter(torch.empty(n_head))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Spread the heads' horizons."""
        if self.bias.is_meta:
            return
        first, last = _HORIZONS
        horizons = torch.linspace(math.log(first), math.log(last), len(self.bias)).exp()
        self.bias.copy_(torch.logit((-1 / horizons).exp()))

    def forward(self, x: Tensor) -> Tensor:
        return logsigmoid(self.bias + self.to_gates(x)).mT.unsqueeze(-1)


class Attention(nn.Module):
    """Mixes tokens. Owns the projections to queries, keys and values; the block projects the result
    back.

    A mechanism implements `split`, `attend` and `naive_attend`. Mechanisms with more projections
    override `mix`, and those that rotate results `join`. All mechanisms have the same options.
    """

    split: Callable[[Tensor], Sequence[Tensor]]
    """(B, T, n_qkv) -> q, k, v (B, heads, T, features); without v, keys are the values too."""
    attend: Callable[[Tensor, Tensor, Tensor, Forgetting, Any, bool], tuple[Tensor, Any]]
    """(q, k, v, forgetting, state, return_state) -> results (B, n_head, T, features), and the state
    if it is wanted."""
    naive_attend: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
    """(q, k, v, log_f) -> results of a text from its beginning, from the equation in the source."""
    initial_state: Callable[[int, torch.device], Any]
    """(B, device) -> the state of B texts before their first tokens, if it has one size."""
    flops_per_token: Callable[[int], int]
    """seq_len -> flops of the forward pass per token, without the projections."""
    resets = False
    """Whether log_f = -inf makes a token the first of a document."""
    by_distance = False
    """Whether `attend` takes document_starts together with a state, because what a token sees
    depends on distances."""

    def __init__(
        self, n_embd: int, n_head: int, n_out: int, sizes: Sequence[int], n_repeat: int = 1
    ) -> None:
        """Create the projection.

        Args:
            n_out: features returned for all heads.
            sizes: features of queries, keys and values, which follow each other `n_repeat` times.
        """
        super().__init__()
        self.n_head = n_head
        self.n_out = n_out
        self.qkv = FusedLinear(n_embd, sizes, n_repeat)
        self.qk_norm: RMSNorm | None = None
        self.gate: Linear | None = None
        self.decay: Decay | None = None

    def add_options(self, settings: AttentionSettings) -> None:
        """Create the modules of options, which come after those of the mechanism."""
        n_embd = self.qkv.in_features
        if settings.qk_norm:
            self.qk_norm = RMSNorm()
        if settings.gate != "none":
            self.gate = Linear(n_embd, self.n_out)
            self.gate_function = _GATES[settings.gate]
        if settings.forgets:
            self.decay = Decay(n_embd, self.n_head)

    def copy_weights(self) -> None:
        """Copy weights that start as copies; called whenever weights have been drawn."""

    def forward(
        self,
        x: Tensor,
        positions: Positions = NO_POSITIONS,
        state: Any = None,
        return_state: bool = False,
    ) -> tuple[Tensor, Any]:
        """(B, T, n_embd) -> (B, T, n_out), and with `return_state` the state for the tokens that
        follow, else None.

        `state` is what an earlier call returned for the tokens before these. A state is a value:
        the call does not change it, and model/state_trees.py batches the rows of several states.

        Raises:
            ValueError: documents start, and there is a state, or one is wanted, and the mechanism
                cannot do that.
        """
        starts = positions.document_starts
        has_state = return_state or state is not None
        restarts = self.resets or self.by_distance
        if starts is not None and has_state and not restarts:
            raise ValueError(
                "document_starts cannot be used with a state: pass each document by itself"
            )
        y, state = self.mix(x, positions, state, return_state)
        if self.gate is not None:
            y = y * self.gate_function(self.gate(x))
        return y, state if return_state else None

    def mix(
        self, x: Tensor, positions: Positions, state: Any, return_state: bool
    ) -> tuple[Tensor, Any]:
        """Attend among tokens x (B, T, n_embd): (B, T, n_out), and the state."""
        forgetting = self.forgetting(x, positions.document_starts)
        q, k, v = self.project(self.qkv(x), positions.rotation)
        y, state = self.attend(q, k, v, forgetting, state, return_state)
        return self.join(y, positions.rotation), state

    def forgetting(self, x: Tensor, starts: Tensor | None = None) -> Forgetting:
        """What tokens x (B, T, n_embd) forget; mechanisms that reset forget everything where a
        document starts."""
        log_f = None if self.decay is None else self.decay(x)
        if starts is None or not self.resets:
            return Forgetting(log_f, starts)
        if log_f is None:
            log_f = x.new_zeros(len(x), self.n_head, x.shape[1], 1)
        return Forgetting(log_f.masked_fill(starts[:, None, :, None], -torch.inf))

    def project(self, features: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T, n_qkv) -> q, k, v (B, heads, T, features), with q and k rotated
        and normalised."""
        q, k, *values = self.split(features)
        if rotation is not None:
            q = rotate(q, rotation)
            k = rotate(k, rotation)
        if self.qk_norm is not None:
            q = self.qk_norm(q)
            k = self.qk_norm(k)
        return q, k, values[0] if values else k

    def join(self, y: Tensor, rotation: Rotation | None) -> Tensor:
        """(B, n_head, T, features) -> (B, T, n_out)."""
        return y.transpose(1, 2).flatten(2)

    def mask(self, T: int) -> Tensor:
        """(1 or n_head, T, T): True where query i may attend to key j."""
        return torch.ones(1, T, T, dtype=torch.bool, device=self.qkv.weight.device).tril()

    def chunked_flops(self, seq_len: int, d_key: int, d_val: int) -> int:
        """flops_per_token in chunks of C: C x C scores, their product with the values, the state
        read and written."""
        C = min(CHUNK, seq_len)
        return 2 * self.n_head * (C * d_key + C * d_val + 2 * d_key * d_val)


class MultiHeadAttention(Attention):
    """Attention with n_head query heads over n_kv_head key and value heads, all of `head_dim`
    features.

    With n_kv_head = n_head this is multi-head attention (Vaswani et al. 2017), with 1 multi-query
    (Shazeer 2019), and in between grouped-query: query head h uses key and value head h // (n_head
    / n_kv_head) (Ainslie et al. 2023).
    """

    def __init__(
        self,
        n_embd: int,
        n_head: int,
        head_dim: int,
        n_kv_head: int | None = None,
        has_values: bool = True,
    ) -> None:
        """`has_values=False`: keys are the values too."""
        n_kv_head = n_kv_head or n_head
        n_heads = [n_head, n_kv_head]
        if has_values:
            n_heads.append(n_kv_head)
        super().__init__(n_embd, n_head, n_head * head_dim, [n * head_dim for n in n_heads])
        self.n_kv_head = n_kv_head
        self.head_dim = head_dim
        self.has_values = has_values
        self._n_heads = n_heads

    def split(self, features: Tensor) -> Sequence[Tensor]:
        """(B, T, n_qkv) -> q (B, n_head, T, head_dim), k and v (B, n_kv_head, T, head_dim)."""
        heads = features.unflatten(2, (-1, self.head_dim)).transpose(1, 2)
        return heads.split(self._n_heads, dim=1)

    def naive_attend(self, q: Tensor, k: Tensor, v: Tensor, log_f: Tensor | None) -> Tensor:
        return masked_attention(q, k, v, self.mask(q.shape[2]), log_f)

    def flops_per_token(self, seq_len: int) -> int:
        """Scores and their product with the values. On average a causal token attends to half of
        the sequence."""
        return 2 * self.n_head * seq_len * self.head_dim
