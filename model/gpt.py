"""The GPT: token embeddings, position, residual blocks, and the embeddings again as output layer."""

import math
from typing import Any, NamedTuple

from pydantic import Field, model_validator
from torch import Tensor, nn

from common.settings import Settings
from model.attention import AttentionConfig
from model.attention.base import Attention
from model.layers import BlockConfig
from model.ops.linear_cross_entropy import summed_loss, token_losses
from model.position import PositionConfig

_LARGEST_SIZE = 2**24


class GPTConfig(Settings):
    """The architecture. Attention, block and position are chosen apart from each other.

    Sizes have bounds far above any use, such that a model of a stranger's configuration can be laid out on the meta
    device: in seconds, and with no tensor of more elements than torch can count.
    """

    n_vocab: int = Field(ge=1, le=_LARGEST_SIZE)
    """Token ids there are, 0 to n_vocab - 1."""
    pad_vocab: int = Field(1, ge=1, le=2**16)
    """The embedding gets the next multiple of this many rows: 64 keeps matrix products aligned on GPUs."""
    n_layer: int = Field(ge=1, le=1024)
    """Residual blocks."""
    n_head: int = Field(ge=1, le=2**12)
    """Attention heads of a block."""
    head_dim: int | None = Field(None, ge=1, le=2**16)
    """Features of a head; null: n_embd / n_head."""
    n_embd: int = Field(ge=1, le=2**17)
    """Features of a token in the residual stream."""
    attention: AttentionConfig
    """Of every layer, but for attention_pattern."""
    attention_pattern: list[AttentionConfig] | None = Field(None, min_length=1)
    """Of the layers, over and over: [log_space, softmax] takes turns. An item is a name, which stands for `attention`
    if that has this name and else for the mechanism's defaults, or a mechanism with its settings; null: `attention`."""
    block: BlockConfig
    position: PositionConfig

    @model_validator(mode="before")
    @classmethod
    def _names_in_the_pattern(cls, raw: Any) -> Any:
        """A pattern's bare names become settings."""
        pattern = raw.get("attention_pattern") if isinstance(raw, dict) else None
        if not isinstance(pattern, list | tuple):
            return raw
        attention = raw.get("attention")
        own = attention.get("name") if isinstance(attention, dict) else getattr(attention, "name", None)
        named = [(attention if item == own else {"name": item}) if isinstance(item, str) else item for item in pattern]
        return {**raw, "attention_pattern": named}

    @model_validator(mode="after")
    def _sizes_fit(self) -> "GPTConfig":
        pattern = {f"attention_pattern.{i}": item for i, item in enumerate(self.attention_pattern or [])}
        parts = {"attention": self.attention, **pattern, "block": self.block, "position": self.position}
        for part, settings in parts.items():
            for name, value in settings:
                for number in value if isinstance(value, list | tuple) else [value]:
                    if isinstance(number, int) and number > _LARGEST_SIZE:
                        raise ValueError(f"{part}.{name} is too large: use at most {_LARGEST_SIZE:,}")
                    if isinstance(number, float) and not math.isfinite(number):
                        raise ValueError(f"{part}.{name}={number} is not a finite number")
        if self.head_dim is None and self.n_embd % self.n_head:
            heads = [n for n in range(1, self.n_embd + 1) if self.n_embd % n == 0]
            close = sorted(heads, key=lambda n: abs(n - self.n_head))[:2]
            raise ValueError(
                f"n_embd={self.n_embd} is not divisible by n_head={self.n_head}: "
                f"set head_dim, or n_head to a divisor such as {' or '.join(map(str, sorted(close)))}"
            )
        if len(pattern) > self.n_layer:
            raise ValueError(
                f"attention_pattern has {len(pattern)} items for n_layer={self.n_layer}: leave out what has no layer"
            )
        for part, layer in (pattern or {"attention": self.attention}).items():
            try:
                self._check_attention(layer)
            except ValueError as error:
                raise ValueError(f"{part}: {error}") from None
        return self

    def _check_attention(self, layer: AttentionConfig) -> None:
        """Raise ValueError where a layer's mechanism does not go with the rest."""
        if hasattr(layer, "check"):
            layer.check(self.n_embd, self.n_head, self.head_features)
        n_global = getattr(layer, "n_global", 0)
        if self.max_len is not None and n_global > self.max_len:
            raise ValueError(
                f"n_global={n_global} is more than the model's {self.max_len} positions: use at most {self.max_len}"
            )
        query_dim = layer.query_dim(self.head_features)
        if self.position.name != "rotary":
            return
        if query_dim % 2:
            raise ValueError(f"rotary positions turn pairs of features: {query_dim} a head is odd, use an even number")
        if query_dim != self.query_dim:
            raise ValueError(
                f"rotary positions turn the queries of all layers alike: {layer.name} has {query_dim} features a head "
                f"and {self.layers[0].name} {self.query_dim}, use the same"
            )

    @property
    def n_vocab_padded(self) -> int:
        """Rows of the embedding, and logits of a token."""
        return -(-self.n_vocab // self.pad_vocab) * self.pad_vocab

    @property
    def head_features(self) -> int:
        """head_dim, or what it defaults to."""
        return self.head_dim or self.n_embd // self.n_head

    @property
    def max_len(self) -> int | None:
        """Most tokens a text can have; None: no limit."""
        return self.position.max_len if self.position.name == "learned" else None

    @property
    def layers(self) -> list[AttentionConfig]:
        """Each layer's attention."""
        pattern = self.attention_pattern or [self.attention]
        return [pattern[i % len(pattern)] for i in range(self.n_layer)]

    @property
    def query_dim(self) -> int:
        """Features of a head's queries, which are those of the first layer where a position needs them."""
        return self.layers[0].query_dim(self.head_features)


class GPTState(NamedTuple):
    """All that a model remembers of the tokens it has seen: pass it back in with the tokens that follow."""

    position: Any
    layers: tuple[Any, ...]


class GPT(nn.Module):
    """A GPT language model. `state_dict()` holds nothing but parameters; state is passed and returned."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.n_vocab_padded, config.n_embd)
        bound = config.n_embd**-0.5
        nn.init.uniform_(self.embed.weight, -bound, bound)
        self.position = config.position.build(config.n_embd, config.query_dim)
        self.blocks = nn.ModuleList(
            config.block.build(
                config.n_embd,
                config.n_layer,
                attention.build(config.n_embd, config.n_head, config.head_features),
            )
            for attention in config.layers
        )
        self.norm = nn.LayerNorm(config.n_embd)

    def forward(
        self, token_ids: Tensor, state: GPTState | None = None, return_state: bool = False
    ) -> Tensor | tuple[Tensor, GPTState]:
        """(B, T) ids -> (B, T, n_vocab_padded) logits, or (logits, state) with `return_state`.

        `state` is what an earlier call returned for the tokens before these; None at the start of a text.
        """
        x, state = self.features(token_ids, state, return_state)
        logits = x @ self.embed.weight.T
        return (logits, state) if return_state else logits

    def features(
        self, token_ids: Tensor, state: GPTState | None = None, return_state: bool = False
    ) -> tuple[Tensor, GPTState]:
        """What the output layer sees, (B, T, n_embd), and with `return_state` the state after it, as for `forward`.

        Raises:
            ValueError: T = 0.
        """
        if token_ids.shape[1] == 0:
            raise ValueError(f"token_ids of shape {tuple(token_ids.shape)} have no tokens: give one at least")
        position, layers = state or (None, (None,) * len(self.blocks))
        x, rotation, position = self.position(self.embed(token_ids), position)  # (B, T, n_embd)
        after = []
        for block, layer in zip(self.blocks, layers, strict=True):
            x, layer = block(x, rotation, layer, return_state)
            after.append(layer)
        return self.norm(x), GPTState(position, tuple(after))

    def token_losses(self, token_ids: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy of each target in nats, (B, T), float32 or float64; 0 where the target is negative."""
        x, _ = self.features(token_ids)
        return token_losses(x.flatten(0, 1), self.embed.weight, targets.flatten()).view_as(targets)

    def summed_loss(self, token_ids: Tensor, targets: Tensor) -> Tensor:
        """The sum of `token_losses`, in less memory."""
        x, _ = self.features(token_ids)
        return summed_loss(x.flatten(0, 1), self.embed.weight, targets.flatten())

    def loss(self, token_ids: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats over the targets that are not negative."""
        return self.summed_loss(token_ids, targets) / (targets >= 0).sum()

    def n_params(self) -> int:
        """Parameters, each counted once."""
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self, seq_len: int) -> int:
        """Floating-point operations of one token's forward and backward pass: 2 + 4 for every weight it meets in a
        matrix product, and three times the attention's own. Looking up a row of a table costs none.
        """
        weights = self.embed.weight.numel() + sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))
        attention = sum(m.flops_per_token(seq_len) for m in self.modules() if isinstance(m, Attention))
        return 6 * weights + 3 * attention
