"""The interface of attention mechanisms, and the projections that most of them share."""

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, rms_norm, sigmoid, silu

from common.settings import Settings
from model.layers import FusedLinear, Linear
from model.ops.causal_conv import causal_conv, init_conv, no_inputs
from model.ops.log_attention.chunks import CHUNK
from model.ops.sparse_attention.naive import masked_attention
from model.position import NO_POSITIONS, Positions, Rotation, rotate

_EPS = 1e-6  # of RMS norms: the type's own would be large in bfloat16
_GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "none": torch.positive,
    "silu": silu,
    "sigmoid": sigmoid,
}
_SPANS = (
    1.5,
    500.0,
)  # tokens after which the first and the last head keep 1 / e, at the start of training


class AttentionSettings(Settings, defaults="attention_parts"):
    """Base of the mechanisms' configurations, with the parts that any mechanism can have."""

    constant_state: ClassVar[bool] = False
    """Whether the state has one size, whatever the number of tokens."""
    suits_rotary: ClassVar[bool] = True
    """Whether rotary positions can be used with it."""
    conv: Literal[0, 4]
    """Width of a causal convolution over each feature of queries, keys and values; 0: none."""
    qk_norm: bool
    """Whether queries and keys are divided by their root mean square, with a learned factor for each feature."""
    gate: Literal["none", "silu", "sigmoid"]
    """Function of a linear layer's output by which the result is multiplied, before it is projected back."""

    mechanism: ClassVar[Callable[..., "Attention"]]
    """(self, n_embd, n_head, head_dim) -> the module without its optional parts."""

    def build(self, n_embd: int, n_head: int, head_dim: int) -> "Attention":
        """Create the module."""
        attention = self.mechanism(n_embd, n_head, head_dim)
        attention.add_parts(self)
        return attention

    def check(self, n_head: int, head_dim: int) -> None:
        """Raise a ValueError of one line if the mechanism does not fit heads of these sizes."""

    def check_documents(self) -> None:
        """Raise a ValueError of one line if the mechanism cannot keep documents apart."""


class GroupedSettings(AttentionSettings):
    """Settings of mechanisms whose query heads can share key and value heads."""

    n_kv_head: int | None = Field(ge=1)
    """Key and value heads, a divisor of n_head; null: n_head, one for each query head; 1: one for all."""

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
    """(B, n_head, T, 1): logarithm of the share that a head keeps at a token; -inf: nothing. None: all."""
    document_starts: Tensor | None = None
    """That of Positions, for mechanisms without `resets`."""


class Decay(nn.Module):
    """Gates of tokens x (B, T, n_embd): log_f = log sigmoid(bias + linear(x)), (B, n_head, T, 1) (Lin et al. 2025)."""

    def __init__(self, n_embd: int, n_head: int) -> None:
        super().__init__()
        self.to_gates = Linear(n_embd, n_head, bias=False)
        self.bias = nn.Parameter(torch.empty(n_head))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Spread the heads' spans."""
        first, last = map(math.log, _SPANS)
        spans = torch.linspace(first, last, len(self.bias)).exp()
        self.bias.copy_(torch.logit((-1 / spans).exp()))

    def forward(self, x: Tensor) -> Tensor:
        return logsigmoid(self.bias + self.to_gates(x)).mT.unsqueeze(-1)


class Attention(nn.Module):
    """Mixes tokens. Owns the projections to queries, keys and values; the block projects the result back.

    A mechanism implements `split`, `attend` and `naive_attend`. Mechanisms that rotate more than queries and keys
    override `mix` or `join`. The optional parts are the same for all mechanisms.
    """

    split: Callable[[Tensor], Sequence[Tensor]]
    """(B, T, n_qkv) -> q, k, v (B, heads, T, features); without v, keys are the values too."""
    attend: Callable[[Tensor, Tensor, Tensor, Forgetting, Any, bool], tuple[Tensor, Any]]
    """(q, k, v, forgetting, state, return_state) -> results (B, n_head, T, features), and the state if it is wanted."""
    naive_attend: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
    """(q, k, v, log_f) -> results of a text from its beginning, from the equation in the source."""
    empty: Callable[[int, torch.device], Any]
    """(B, device) -> what `attend` takes as the state of B texts before their first tokens, if it has one size."""
    flops_per_token: Callable[[int], int]
    """seq_len -> floating-point operations of the forward pass per token, without the projections."""
    resets = False
    """Whether log_f = -inf makes a token the first of a document."""
    by_distance = False
    """Whether `attend` takes document_starts together with a state, because what a token sees depends on distances."""

    def __init__(
        self, n_embd: int, n_head: int, n_out: int, parts: Sequence[int], n_group: int = 1
    ) -> None:
        """Create the projection.

        Args:
            n_out: features returned for all heads.
            parts: features of queries, keys and values, which follow each other in each of `n_group` equal groups.
        """
        super().__init__()
        self.n_head, self.n_out = n_head, n_out
        self.qkv = FusedLinear(n_embd, parts, n_group)

    def add_parts(self, settings: AttentionSettings) -> None:
        """Create the optional parts, which come after those of the mechanism."""
        n_embd, n_qkv, decay = (
            self.qkv.in_features,
            self.qkv.out_features,
            getattr(settings, "decay", "none"),
        )
        self.conv = nn.Parameter(torch.empty(settings.conv * n_qkv)) if settings.conv else None
        query_dim = self.qkv.parts[0] * self.qkv.n_group // self.n_head
        scales = (
            nn.Parameter(torch.empty(query_dim)) if settings.qk_norm else None for _ in range(2)
        )
        self.q_scale, self.k_scale = scales
        self.gate = Linear(n_embd, self.n_out) if settings.gate != "none" else None
        self.gate_function = _GATES[settings.gate]
        self.decay = Decay(n_embd, self.n_head) if decay != "none" else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw initial values of the module's own parameters."""
        if self.conv is not None:
            init_conv(self.conv, self.qkv.out_features)
        for scale in (self.q_scale, self.k_scale):
            if scale is not None:
                nn.init.ones_(scale)

    def copy_weights(self) -> None:
        """Make weights equal that start as copies of others; called whenever weights have been drawn."""

    def forward(
        self,
        x: Tensor,
        positions: Positions = NO_POSITIONS,
        state: Any = None,
        return_state: bool = False,
    ) -> tuple[Tensor, Any]:
        """(B, T, n_embd) -> (B, T, n_out), and with `return_state` the state for the tokens that follow, else None.

        `state` is what an earlier call returned for the tokens before these. A state is a value: the call does not
        change it, and model/state.py batches the rows of several states.

        Raises:
            ValueError: documents start, and there is a state, or one is wanted, and the mechanism cannot do that.
        """
        starts, has_state = positions.document_starts, return_state or state is not None
        if starts is not None and has_state and not (self.resets or self.by_distance):
            raise ValueError(
                "document_starts cannot be used with a state: pass each document by itself"
            )
        seen, state = state if self.conv is not None and state is not None else (None, state)
        features, seen = self.features(x, seen, starts)
        y, state = self.mix(x, features, positions, state, return_state)
        y = y if self.gate is None else y * self.gate_function(self.gate(x))
        if not return_state:
            return y, None
        return y, state if self.conv is None else (seen, state)

    def initial_state(self, B: int, device: torch.device) -> Any:
        """The state of B texts before their first tokens, of the size that it always has."""
        if self.conv is None:
            return self.empty(B, device)
        return no_inputs(self.conv, B, self.qkv.out_features), self.empty(B, device)

    def features(
        self, x: Tensor, seen: Tensor | None = None, starts: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """(B, T, n_embd) -> queries, keys and values (B, T, n_qkv), and what the convolution needs for later tokens."""
        return causal_conv(self.qkv(x), self.conv, seen, starts)

    def mix(
        self, x: Tensor, features: Tensor, positions: Positions, state: Any, return_state: bool
    ) -> tuple[Tensor, Any]:
        """Attend with queries, keys and values `features` (B, T, n_qkv) of tokens x: (B, T, n_out), and the state."""
        forgetting = self.forgetting(x, positions.document_starts)
        y, state = self.attend(
            *self.project(features, positions.rotation), forgetting, state, return_state
        )
        return self.join(y, positions.rotation), state

    def forgetting(self, x: Tensor, starts: Tensor | None = None) -> Forgetting:
        """What tokens x (B, T, n_embd) forget; mechanisms that reset forget everything where a document starts."""
        log_f = None if self.decay is None else self.decay(x)
        if starts is None or not self.resets:
            return Forgetting(log_f, starts)
        log_f = x.new_zeros(len(x), self.n_head, x.shape[1], 1) if log_f is None else log_f
        return Forgetting(log_f.masked_fill(starts[:, None, :, None], -torch.inf))

    def project(self, features: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T, n_qkv) -> q, k, v (B, heads, T, features), with q and k normalised and rotated."""
        q, k, *own = self.split(features)
        if self.q_scale is not None and self.k_scale is not None:
            q, k = (_rms_norm(x, scale) for x, scale in ((q, self.q_scale), (k, self.k_scale)))
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        return q, k, own[0] if own else k

    def join(self, y: Tensor, rotation: Rotation | None) -> Tensor:
        """(B, n_head, T, features) -> (B, T, n_out)."""
        return y.transpose(1, 2).flatten(2)

    def mask(self, T: int) -> Tensor:
        """(1 or n_head, T, T): True where query i may attend to key j."""
        return torch.ones(1, T, T, dtype=torch.bool, device=self.qkv.weight.device).tril()

    def chunked_flops(self, seq_len: int, d_key: int, d_val: int) -> int:
        """flops_per_token in chunks of C: C x C scores, their product with the values, the state read and written."""
        C = min(CHUNK, seq_len)
        return 2 * self.n_head * (C * d_key + C * d_val + 2 * d_key * d_val)


class MultiHeadAttention(Attention):
    """Attention with n_head query heads over n_kv_head key and value heads, all of `head_dim` features.

    With n_kv_head = n_head this is multi-head attention (Vaswani et al. 2017), with 1 multi-query (Shazeer 2019), and
    in between grouped-query: query head h uses key and value head h // (n_head / n_kv_head) (Ainslie et al. 2023).
    """

    def __init__(
        self,
        n_embd: int,
        n_head: int,
        head_dim: int,
        n_kv_head: int | None = None,
        own_values: bool = True,
    ) -> None:
        """`own_values=False`: keys are the values too."""
        n_kv_head = n_kv_head or n_head
        heads = [n_head, n_kv_head, n_kv_head] if own_values else [n_head, n_kv_head]
        super().__init__(n_embd, n_head, n_head * head_dim, [n * head_dim for n in heads])
        self.n_kv_head, self.head_dim, self.own_values, self._heads = (
            n_kv_head,
            head_dim,
            own_values,
            heads,
        )

    def split(self, features: Tensor) -> Sequence[Tensor]:
        """(B, T, n_qkv) -> q (B, n_head, T, head_dim), k and v (B, n_kv_head, T, head_dim)."""
        parts = features.unflatten(2, (-1, self.head_dim)).split(self._heads, dim=2)
        return [part.transpose(1, 2) for part in parts]

    def repeated(self, x: Tensor) -> Tensor:
        """(B, n_kv_head, T, D) -> (B, n_head, T, D): the key or value head of each query head."""
        return x.repeat_interleave(self.n_head // self.n_kv_head, dim=1)

    def naive_attend(self, q: Tensor, k: Tensor, v: Tensor, log_f: Tensor | None) -> Tensor:
        return masked_attention(q, k, v, self.mask(q.shape[2]), log_f)

    def flops_per_token(self, seq_len: int) -> int:
        """Scores and their product with the values. On average a causal token attends to half of the sequence."""
        return 2 * self.n_head * seq_len * self.head_dim


def _rms_norm(x: Tensor, scale: Tensor) -> Tensor:
    """x (..., D) divided by its root mean square and multiplied by `scale`, in the type of x also under autocast."""
    return (rms_norm(x, x.shape[-1:], eps=_EPS) * scale).to(x.dtype)
