"""The architecture: the settings of blocks, and GPTConfig."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from torch import nn

from common.config_files import group_values
from common.numbers import ceil_div
from common.settings import Settings, variant_names
from model.attention import ATTENTION, AttentionConfig
from model.attention.base import AttentionSettings
from model.layers import RMSNorm
from model.position import PositionConfig


class GLUConfig(Settings):
    """The published residual layer: attention, then a gated linear unit; no separate MLP."""

    name: Literal["glu"]


class MLPConfig(Settings, defaults="model/block/mlp"):
    """GPT-2's block: attention and an MLP, each with its own residual connection."""

    name: Literal["mlp"]
    expansion: int = Field(ge=1, le=2**24)
    """Hidden features of the MLP, as a multiple of n_embd. swiglu has two thirds as many, and so
    the same number of parameters."""
    activation: Literal["gelu", "swiglu", "relu2"]
    """gelu: GPT-2's, by tanh; swiglu: silu(a) b for two halves of the features (Shazeer 2020);
    relu2: relu(x)^2 (So et al. 2021)."""
    conv: Literal[0, 4]
    """Width of causal convolutions over each feature that attention and MLP read; 0: none.

    They are the Canon layers A and C of Allen-Zhu 2025."""


BlockConfig = Annotated[GLUConfig | MLPConfig, Field(discriminator="name")]


class GPTConfig(Settings):
    """The architecture. Attention, block and position can be combined freely, except log-space and
    rotary.

    Sizes have bounds far above any practical use, so that a model of an untrusted configuration can
    be created on the meta device in seconds, and no tensor has more elements than torch can count.
    """

    n_vocab: int = Field(ge=1, le=2**24)
    """Number of token ids, which are 0 to n_vocab - 1."""
    pad_vocab: int = Field(1, ge=1, le=2**16)
    """The number of rows of the embedding is rounded up to a multiple of this: 64 aligns matrix
    products on GPUs."""
    n_layer: int = Field(ge=1, le=1024)
    """Residual blocks."""
    n_head: int = Field(ge=1, le=2**12)
    """Query heads of a block."""
    head_dim: int | None = Field(None, ge=1, le=2**16)
    """Features of a head; null: n_embd / n_head."""
    n_embd: int = Field(ge=1, le=2**17)
    """Features of a token in the residual stream."""
    attention: AttentionConfig
    """Attention used by every layer, unless attention_pattern is set."""
    attention_pattern: list[AttentionConfig] | None = Field(None, min_length=1)
    """Attention of each layer, repeated: with [log_space, softmax] layers alternate. An item is a
    mechanism with its settings, or the name of a file in configs/model/attention. The name of the
    mechanism in `attention` stands for `attention` with its settings."""
    block: BlockConfig
    position: PositionConfig
    ngrams: list[Annotated[int, Field(ge=1, le=64)]] = Field([], max_length=8)
    """Lengths of strings in ascending order: every token sees what followed the last n tokens the
    last time they occurred in the text, for the longest n that did. The state has one size. []:
    none."""
    norm: Literal["layer", "rms"] = "layer"
    """Norms of blocks and before the output layer: LayerNorm, or RMSNorm without weights."""
    bias: bool = True
    """Whether linear layers and layer norms have biases."""
    tied: bool = True
    """Whether the output layer shares the embedding's weights."""
    logit_cap: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Logits x become cap tanh(x / cap); null: no cap."""

    @model_validator(mode="before")
    @classmethod
    def _names_in_the_pattern(cls, raw: Any) -> Any:
        """Replace names in the pattern by settings."""
        pattern = raw.get("attention_pattern") if isinstance(raw, dict) else None
        if not isinstance(pattern, list | tuple):
            return raw
        attention = raw.get("attention")
        if isinstance(attention, AttentionSettings):
            attention = attention.model_dump()
        default_name = attention.get("name") if isinstance(attention, dict) else None

        def settings(item: Any) -> Any:
            if not isinstance(item, str):
                return item
            if item == default_name:
                return attention
            return group_values("model/attention", item) or {"name": item}

        return {**raw, "attention_pattern": [settings(item) for item in pattern]}

    @model_validator(mode="after")
    def _sizes_fit(self) -> "GPTConfig":
        if self.head_dim is None and self.n_embd % self.n_head:
            raise ValueError(
                f"n_embd={self.n_embd} is not divisible by n_head={self.n_head}: "
                "set head_dim, or an n_head that divides n_embd"
            )
        ascending = sorted(set(self.ngrams))
        if self.ngrams != ascending:
            raise ValueError(f"ngrams={self.ngrams} are not in ascending order: use {ascending}")
        n_items = len(self.attention_pattern or [])
        if n_items > self.n_layer:
            raise ValueError(
                f"attention_pattern has {n_items} items for n_layer={self.n_layer}: "
                "use at most one for each layer"
            )
        return self

    @model_validator(mode="after")
    def _layers_fit(self) -> "GPTConfig":
        is_rotary = self.position.name == "rotary"
        for key, layer in self._layers_by_key().items():
            mismatch = layer.mismatch(self.n_head, self.head_features)
            if is_rotary and not layer.traits.rotary:
                mismatch = (
                    f"rotary positions do not help {layer.name}: "
                    "use position log_recurrence, learned or none"
                )
            elif is_rotary and self.head_features % 2:
                mismatch = (
                    "rotary positions turn pairs of features: "
                    f"use an even number, not {self.head_features}"
                )
            if mismatch is not None:
                raise ValueError(f"{key}: {mismatch}")
        return self

    def check_documents(self) -> None:
        """Raise ValueError if the attention of a layer cannot keep documents apart."""
        for key, layer in self._layers_by_key().items():
            if not layer.traits.documents:
                raise ValueError(
                    f"{key}: {layer.name}'s global tokens are the first of a window, not of a "
                    "document: use another attention with data.document_reset=true or "
                    "data.loss=answers"
                )

    def check_constant_state(self, setting: str, from_empty: bool = False) -> None:
        """Raise ValueError if the state grows with the text, and so does not fit `setting`.

        Args:
            from_empty: whether the state must have its size before the first token, too.
        """
        if self.max_len is not None:
            raise ValueError(
                f"position: {setting} needs more than {self.max_len} learned positions: use others"
            )
        allowed = ("fixed",) if from_empty else ("bounded", "fixed")
        for key, layer in self._layers_by_key().items():
            if layer.traits.state not in allowed:
                fitting = [kind for kind in ATTENTION if kind.traits.state in allowed]
                names = ", ".join(name for kind in fitting for name in variant_names(kind))
                raise ValueError(
                    f"{key}: {setting} needs a state of one size, and that of {layer.name} grows: "
                    f"use {names}"
                )

    @property
    def has_constant_state(self) -> bool:
        """Whether the state has one size, whatever the number of tokens."""
        return self.max_len is None and all(x.traits.state != "grows" for x in self.layers)

    def _layers_by_key(self) -> dict[str, AttentionConfig]:
        if not self.attention_pattern:
            return {"attention": self.attention}
        return {f"attention_pattern.{i}": layer for i, layer in enumerate(self.attention_pattern)}

    @property
    def n_vocab_padded(self) -> int:
        """Rows of the embedding, with padding."""
        return ceil_div(self.n_vocab, self.pad_vocab) * self.pad_vocab

    def new_norm(self) -> nn.Module:
        """Create a norm of n_embd features."""
        return nn.LayerNorm(self.n_embd) if self.norm == "layer" else RMSNorm()

    @property
    def head_features(self) -> int:
        """head_dim, or its default."""
        return self.head_dim or self.n_embd // self.n_head

    @property
    def max_len(self) -> int | None:
        """Maximum number of tokens in a text; None: no limit."""
        return self.position.max_len if self.position.name == "learned" else None

    @property
    def layers(self) -> list[AttentionConfig]:
        """The attention of each layer."""
        pattern = self.attention_pattern or [self.attention]
        return [pattern[i % len(pattern)] for i in range(self.n_layer)]
