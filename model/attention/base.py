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
from model.ops.sparse_attention.masked_attention import masked_attention
from model.position import NO_POSITIONS, Positions, rotate

_GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "sigmoid": sigmoid,
}
# Tokens after which the first and the last head keep 1 / e, at the start of training.
_HORIZONS = (1.5, 500.0)


class Traits(NamedTuple):
    """What a mechanism can do."""

    state: Literal["grows", "bounded", "fixed"] = "grows"
    """Its size grows with the text, has a bound, or is the same from before the first token on."""
    rotary: bool = True
    """Whether rotary positions can be used."""
    documents: bool = True
    """Whether documents can be kept apart."""


class AttentionSettings(Settings, defaults="attention_parts"):
    """Base of the mechanisms' configurations, with the options that any mechanism can have."""

    traits: ClassVar[Traits] = Traits()
    qk_norm: bool
    """Whether queries and keys are divided by their root mean square, after their rotation: it
    keeps the length, so the result is that of the other order."""
    gate: Literal["none", "silu", "sigmoid"]
    """Function of a linear layer's output that multiplies the result before the last projection."""

    def mechanism(self, n_embd: int, n_head: int, head_dim: int) -> "Attention":
        """Create the module without its options."""
        raise NotImplementedError

    def build(self, n_embd: int, n_head: int, head_dim: int) -> "Attention":
        """Create the module."""
        attention = self.mechanism(n_embd, n_head, head_dim)
        attention.add_options(self)
        return attention

    def mismatch(self, n_head: int, head_dim: int) -> str | None:
        """Return one line that says why the mechanism does not fit the model; None: it does."""
        return None


class ForgettingSettings(AttentionSettings):
    """Settings of mechanisms that can forget earlier tokens."""

    decay: Literal["none", "head"]
    """What each token makes a head forget of earlier ones: nothing, or a share."""


class SharedHeadSettings(AttentionSettings):
    """Settings of mechanisms whose query heads can share key and value heads."""

    n_kv_head: int | None = Field(ge=1)
    """Key and value heads, a divisor of n_head; null: n_head; 1: one for all query heads."""

    def mismatch(self, n_head: int, head_dim: int) -> str | None:
        if self.n_kv_head is None or n_head % self.n_kv_head == 0:
            return None
        divisors = ", ".join(str(n) for n in range(1, n_head + 1) if n_head % n == 0)
        return f"n_kv_head={self.n_kv_head} does not divide n_head={n_head}: use one of {divisors}"


class AttentionInputs(NamedTuple):
    """What T tokens give to an attention mechanism."""

    q: Tensor
    """(B, n_head, T, features)."""
    k: Tensor
    """(B, heads, T, features), where heads divides n_head."""
    v: Tensor
    """(B, heads, T, features)."""
    log_f: Tensor | None
    """(B, n_head, T, 1): logarithm of the share that a head keeps of the tokens before each. None:
    all."""
    positions: Positions


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

    A mechanism implements `split`, `attend` and `naive_attend`, and `initial_state` if its state is
    fixed. Mechanisms with more projections override `mix`. All mechanisms have the same options.
    """

    restarts = False
    """Whether `attend` takes document_starts together with a state."""

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
        if isinstance(settings, ForgettingSettings) and settings.decay == "head":
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
            ValueError: documents start, there is a state, or one is wanted, and not `restarts`.
        """
        has_state = return_state or state is not None
        if has_state and positions.document_starts is not None and not self.restarts:
            raise ValueError(
                "document_starts cannot be used with a state: pass each document by itself"
            )
        y, state = self.mix(x, positions, state, return_state)
        y = y.transpose(1, 2).flatten(2)
        if self.gate is not None:
            y = y * self.gate_function(self.gate(x))
        return y, state if return_state else None

    def mix(
        self, x: Tensor, positions: Positions, state: Any, return_state: bool
    ) -> tuple[Tensor, Any]:
        """Project x (B, T, n_embd), and attend: results as `attend` returns them."""
        log_f = None if self.decay is None else self.decay(x)
        return self.attend(self.project(self.qkv(x), log_f, positions), state, return_state)

    def project(
        self, features: Tensor, log_f: Tensor | None = None, positions: Positions = NO_POSITIONS
    ) -> AttentionInputs:
        """Split features (B, T, n_qkv) into q, k and v. Rotate and normalise q and k."""
        q, k, *values = self.split(features)
        if positions.rotation is not None:
            q = rotate(q, positions.rotation)
            k = rotate(k, positions.rotation)
        if self.qk_norm is not None:
            q = self.qk_norm(q)
            k = self.qk_norm(k)
        return AttentionInputs(q, k, values[0] if values else k, log_f, positions)

    def split(self, features: Tensor) -> Sequence[Tensor]:
        """(B, T, n_qkv) -> q, k, v (B, heads, T, features); without v, keys are the values too."""
        raise NotImplementedError

    def attend(self, inputs: AttentionInputs, state: Any, return_state: bool) -> tuple[Tensor, Any]:
        """Return results (B, n_head, T, features), and the state if it is wanted."""
        raise NotImplementedError

    def naive_attend(self, inputs: AttentionInputs) -> Tensor:
        """Return results of a text from its beginning, from the equation in the source."""
        raise NotImplementedError

    def initial_state(self, B: int, device: torch.device) -> Any:
        """Return the state of B texts before their first tokens."""
        raise NotImplementedError

    def flops_per_token(self, seq_len: int) -> int:
        """Return the flops of the forward pass per token, without the projections."""
        raise NotImplementedError

    def mask(self, T: int) -> Tensor:
        """(1 or n_head, T, T): True where query i may attend to key j."""
        return torch.ones(1, T, T, dtype=torch.bool, device=self.qkv.weight.device).tril()


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

    def naive_attend(self, inputs: AttentionInputs) -> Tensor:
        q, k, v, log_f, _ = inputs
        return masked_attention(q, k, v, self.mask(q.shape[2]), log_f)

    def flops_per_token(self, seq_len: int) -> int:
        """Scores and their product with the values. On average a causal token attends to half of
        the sequence."""
        return 2 * self.n_head * seq_len * self.head_dim
