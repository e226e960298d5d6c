"""The GPT: token embeddings, n-grams, positions, residual blocks, and the embeddings again as
output layer.

The file reads in order: blocks, GPTConfig, GPT. Attention mechanisms are in model/attention,
positions in model/position.py, and the memory of n-grams in model/ngrams.py.
"""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, cast

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn.functional import gelu, glu, silu

from common.config_files import group_values
from common.numbers import ceil_div
from common.settings import Settings, variant_names
from model.attention import ATTENTION, AttentionConfig
from model.attention.base import Attention, AttentionSettings
from model.layers import (
    Embedding,
    FusedLinear,
    Linear,
    Recompute,
    RMSNorm,
    gated_linear,
    recomputing,
)
from model.ngrams import NGramMemory
from model.ops.causal_conv import causal_conv, init_conv, no_inputs
from model.ops.linear_cross_entropy import capped, summed_loss, token_losses
from model.ops.ngrams import NGramState
from model.position import NO_POSITIONS, PositionConfig, Positions
from model.state import cat_states, select_rows


def _swiglu(x: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return silu(a) * b


def _relu2(x: Tensor) -> Tensor:
    return x.relu().square()


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": partial(gelu, approximate="tanh"),
    "swiglu": _swiglu,
    "relu2": _relu2,
}


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


class Block(nn.Module):
    """A residual block: attention, and what computes with its result."""

    attention: Attention
    residual: Callable[[Tensor, Any, Positions, bool], tuple[Tensor, Any]]
    """Computes `forward`, keeping all activations for the backward pass."""

    def forward(
        self,
        x: Tensor,
        state: Any = None,
        positions: Positions = NO_POSITIONS,
        recompute: Recompute = "none",
        return_state: bool = False,
    ) -> tuple[Tensor, Any]:
        """(B, T, n_embd) -> (B, T, n_embd), and the state."""
        return recomputing(recompute, self.residual)(x, state, positions, return_state)

    def initial_state(self, B: int, device: torch.device) -> Any:
        """The state of B texts before their first tokens, if it has one size."""
        return self.attention.initial_state(B, device)


class GLUBlock(Block):
    """x + Linear(GLU(Linear(attention(norm(x))))): the published residual layer, with torch's
    initial values."""

    def __init__(self, config: "GPTConfig", attention: Attention) -> None:
        super().__init__()
        self.norm = config.new_norm()
        self.attention = attention
        self.gate = FusedLinear(attention.n_out, [config.n_embd] * 2)
        self.proj = Linear(config.n_embd, config.n_embd, bias=False)

    def residual(
        self, x: Tensor, state: Any, positions: Positions, return_state: bool
    ) -> tuple[Tensor, Any]:
        y, state = self.attention(self.norm(x), positions, state, return_state)
        h = self.gate(y)
        if isinstance(self.proj, Linear):
            return x + gated_linear(h, self.proj.weight), state
        return x + self.proj(glu(h)), state  # an adapter replaces the layer


class MLPBlock(Block):
    """GPT-2's pre-norm block (Radford et al. 2019) with its initial values.

    Weights of all linear layers are drawn from N(0, 1 / (3 n_embd)), which is GPT-2's 0.02 at 768
    features. Weights of projections back to the residual stream are divided by sqrt(2 n_layer).
    Biases start at 0.
    """

    def __init__(self, config: "GPTConfig", attention: Attention) -> None:
        super().__init__()
        settings = config.block
        n_embd = config.n_embd
        assert isinstance(settings, MLPConfig)
        n_hidden = settings.expansion * n_embd
        n_matrices = 1
        if settings.activation == "swiglu":
            n_hidden = ceil_div(n_hidden, 12) * 8
            n_matrices = 2
        self.norm_attention = config.new_norm()
        self.attention = attention
        self.proj = Linear(attention.n_out, n_embd)
        self.norm_mlp = config.new_norm()
        self.up = FusedLinear(n_embd, [n_hidden] * n_matrices)
        self.down = Linear(n_hidden, n_embd)
        self.activation = _ACTIVATIONS[settings.activation]
        self.conv_attention: nn.Parameter | None = None
        self.conv_mlp: nn.Parameter | None = None
        if settings.conv:
            self.conv_attention = nn.Parameter(torch.empty(settings.conv * n_embd))
            self.conv_mlp = nn.Parameter(torch.empty(settings.conv * n_embd))

        std = (3 * n_embd) ** -0.5
        for module in self.modules():
            if isinstance(module, Linear):
                module.std = std
        std_to_residual = std / (2 * config.n_layer) ** 0.5
        self.proj.std = std_to_residual
        self.down.std = std_to_residual

    def reset_parameters(self) -> None:
        """Draw initial values of the convolutions."""
        for weight in (self.conv_attention, self.conv_mlp):
            if weight is not None:
                init_conv(weight, self.proj.out_features)

    def residual(
        self, x: Tensor, state: Any, positions: Positions, return_state: bool
    ) -> tuple[Tensor, Any]:
        """Compute `forward`. With convolutions, the state has their last inputs, too."""
        has_conv = self.conv_mlp is not None
        starts = positions.document_starts
        attention_inputs = None
        mlp_inputs = None
        if has_conv and state is not None:
            state, attention_inputs, mlp_inputs = state
        h = self.norm_attention(x)
        h, attention_inputs = causal_conv(h, self.conv_attention, attention_inputs, starts)
        y, state = self.attention(h, positions, state, return_state)
        x = x + self.proj(y)
        h, mlp_inputs = causal_conv(self.norm_mlp(x), self.conv_mlp, mlp_inputs, starts)
        x = x + self.down(self.activation(self.up(h)))
        if has_conv and return_state:
            state = (state, attention_inputs, mlp_inputs)
        return x, state

    def initial_state(self, B: int, device: torch.device) -> Any:
        state = super().initial_state(B, device)
        if self.conv_attention is None or self.conv_mlp is None:
            return state
        n_embd = self.proj.out_features
        attention_inputs = no_inputs(self.conv_attention, B, n_embd)
        return state, attention_inputs, no_inputs(self.conv_mlp, B, n_embd)


_BLOCKS: dict[str, type[GLUBlock | MLPBlock]] = {"glu": GLUBlock, "mlp": MLPBlock}


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
        self._check_layers(self._check_attention)
        return self

    def _check_attention(self, layer: AttentionConfig) -> None:
        """Raise ValueError if a layer's mechanism does not fit the other settings."""
        layer.check(self.n_head, self.head_features)
        if self.position.name != "rotary":
            return
        if not layer.suits_rotary:
            raise ValueError(
                f"rotary positions do not help {layer.name}: "
                "use position log_recurrence, learned or none"
            )
        if self.head_features % 2:
            raise ValueError(
                "rotary positions turn pairs of features: "
                f"use an even number, not {self.head_features}"
            )

    def check_documents(self) -> None:
        """Raise ValueError if the attention of a layer cannot keep documents apart."""
        self._check_layers(lambda layer: layer.check_documents())

    def check_constant_state(self, setting: str, from_empty: bool = False) -> None:
        """Raise ValueError if the state grows with the text, and so does not fit `setting`.

        Args:
            from_empty: whether the state must have its size before the first token, too:
                `initial_state` is needed.
        """
        if self.max_len is not None:
            raise ValueError(
                f"position: {setting} needs more than {self.max_len} learned positions: use others"
            )
        names: list[str] = []
        for mechanism in ATTENTION:
            lacks_state = from_empty and not mechanism.has_empty_state
            if mechanism.constant_state and not lacks_state:
                names += variant_names(mechanism)

        def check(layer: AttentionConfig) -> None:
            if layer.name not in names:
                raise ValueError(
                    f"{setting} needs a state of one size, and that of {layer.name} grows: "
                    f"use {', '.join(names)}"
                )

        self._check_layers(check)

    def _check_layers(self, check: Callable[[AttentionConfig], None]) -> None:
        layers = {"attention": self.attention}
        if self.attention_pattern:
            layers = {f"attention_pattern.{i}": x for i, x in enumerate(self.attention_pattern)}
        for key, layer in layers.items():
            try:
                check(layer)
            except ValueError as error:
                raise ValueError(f"{key}: {error}") from None

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


class GPTState(NamedTuple):
    """What a model remembers of the tokens so far: pass it together with the next tokens."""

    position: Any
    layers: tuple[Any, ...]
    ngrams: NGramState | None = None


def call_layer(module: nn.Module, *args: Any, **options: Any) -> Any:
    """Call a module: (module, x, state, ...) -> (x, ..., state)."""
    return module(*args, **options)


class GPT(nn.Module):
    """A GPT language model. `state_dict()` holds only parameters; state is passed and returned."""

    def __init__(self, config: GPTConfig, eot_id: int | None = None) -> None:
        """Create the model.

        Args:
            eot_id: the token that starts a document. Its tokens do not see earlier documents. None:
                all tokens see each other.

        Raises:
            ValueError: attention cannot keep documents apart.
        """
        super().__init__()
        if eot_id is not None:
            config.check_documents()
        self.config = config
        self.eot_id = eot_id
        constant_layers = all(layer.constant_state for layer in config.layers)
        self.constant_state = constant_layers and config.max_len is None
        """Whether the state has one size, whatever the number of tokens."""
        self.recompute: Recompute = "none"
        """What a backward pass computes again instead of keeping it: of blocks, and of reading the
        n-grams' memory."""
        device = torch.get_default_device()
        with torch.device("meta"):
            self.embed = Embedding(config.n_vocab_padded, config.n_embd)
            self.position: Any = config.position.build(config.n_embd, config.head_features)
            if config.ngrams:
                self.ngrams = NGramMemory(config.ngrams, config.n_embd)
            self.blocks: Any = nn.ModuleList()
            for layer in config.layers:
                attention = layer.build(config.n_embd, config.n_head, config.head_features)
                self.blocks.append(_BLOCKS[config.block.name](config, attention))
            self.norm = config.new_norm()
            if not config.tied:
                self.output = Linear(config.n_embd, config.n_vocab_padded, bias=False)
            if not config.bias:
                for module in self.modules():
                    if isinstance(module, nn.Linear | nn.LayerNorm):
                        module.register_parameter("bias", None)
        if device.type != "meta":
            self.to_empty(device=device)
            self.init_weights()

    @torch.no_grad()
    def init_weights(
        self, shard_like: Callable[[Tensor, Tensor], Tensor] = lambda whole, parameter: whole
    ) -> None:
        """Draw the weights with torch's generator of the CPU, in the order of `state_dict()`.

        Args:
            shard_like: (a whole weight, its parameter) -> what this process holds of it, if
                parameters are sharded.
        """
        for module in self.modules():
            parameters = dict(module.named_parameters(recurse=False))
            if not parameters:
                continue
            # Each module draws its own parameters, whole and on the CPU.
            whole = {}
            for name, parameter in parameters.items():
                whole[name] = nn.Parameter(torch.empty(parameter.shape, device="cpu"))
            module._parameters.update(whole)
            cast(Any, module).reset_parameters()
            module._parameters.update(parameters)
            for name, parameter in parameters.items():
                parameter.copy_(shard_like(whole[name], parameter))
        for block in self.blocks:
            block.attention.copy_weights()

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.embed.weight.device

    @property
    def output_weight(self) -> Tensor:
        """(n_vocab_padded, n_embd)."""
        return self.embed.weight if self.config.tied else self.output.weight

    def forward(
        self, token_ids: Tensor, state: GPTState | None = None, return_state: bool = False
    ) -> Tensor | tuple[Tensor, GPTState]:
        """(B, T) ids -> (B, T, n_vocab) logits, or (logits, state) with `return_state`.

        `state` is what an earlier call returned for the tokens before these, None at the start of a
        text.
        """
        x, state = self.features(token_ids, state, return_state)
        logits = self.logits(x)
        return (logits, state) if return_state else logits

    def logits(self, x: Tensor) -> Tensor:
        """Output layer: (..., n_embd) -> (..., n_vocab). Padding rows have no logits."""
        logits = x @ self.embed.weight.T if self.config.tied else self.output(x)
        return capped(logits[..., : self.config.n_vocab], self.config.logit_cap)

    def features(
        self,
        token_ids: Tensor,
        state: GPTState | None = None,
        return_state: bool = False,
        call_layer: Callable[..., Any] = call_layer,
    ) -> tuple[Tensor, GPTState]:
        """Return the output layer's input, (B, T, n_embd), and the state.

        Without `return_state` the returned state is incomplete.

        Args:
            token_ids, state, return_state: those of `forward`.
            call_layer: calls a module with a state; context parallelism receives and sends the
                state around the call.

        Raises:
            ValueError: T = 0.
        """
        if token_ids.shape[1] == 0:
            raise ValueError(
                f"token_ids of shape {tuple(token_ids.shape)} contain no tokens: pass at least one"
            )
        starts = None
        if self.eot_id is not None:
            starts = token_ids == self.eot_id
            has_state = state is not None or return_state
            if has_state and not self.constant_state:
                return self._by_documents(token_ids, starts, state)
        return self._features(token_ids, starts, state, return_state, call_layer)

    def _features(
        self,
        token_ids: Tensor,
        starts: Tensor | None,
        state: GPTState | None,
        return_state: bool,
        call_layer: Callable[..., Any] = call_layer,
    ) -> tuple[Tensor, GPTState]:
        if state is None:
            state = GPTState(None, (None,) * len(self.blocks))
        position, layers, ngrams = state
        x = self.embed(token_ids)  # (B, T, n_embd)
        if self.config.ngrams:
            embed = self.embed.weight
            x, ngrams = call_layer(self.ngrams, x, ngrams, starts, token_ids, embed, self.recompute)
            if not return_state:
                ngrams = None  # its memory would be held until the loss is computed
        x, rotation, position = call_layer(self.position, x, position, starts)
        positions = Positions(rotation, starts)
        states = []
        for block, layer_state in zip(self.blocks, layers, strict=True):
            x, layer_state = call_layer(
                block, x, layer_state, positions, self.recompute, return_state=return_state
            )
            states.append(layer_state)
        return self.norm(x), GPTState(position, tuple(states), ngrams)

    def _by_documents(
        self, token_ids: Tensor, starts: Tensor, state: GPTState | None
    ) -> tuple[Tensor, GPTState]:
        """Compute `features` with a state that grows.

        Rows are computed together if documents start nowhere, or only at the first token of all.
        Otherwise each document of each row is computed by itself.
        """
        starts = starts.cpu()
        if not starts.any():
            return self._features(token_ids, None, state, True)
        no_earlier_tokens = state is None or bool(starts[:, 0].all())
        if no_earlier_tokens and not starts[:, 1:].any():
            return self._features(token_ids, None, None, True)
        outputs = []
        states = []
        for b, row in enumerate(token_ids.split(1)):
            row_state = None if state is None else select_rows(state, [b])
            rest, *documents = row.tensor_split(starts[b].nonzero().flatten(), dim=1)
            if rest.shape[1]:  # of the document that the state has read
                x, row_state = self._features(rest, None, row_state, True)
                outputs.append(x)
            for document in documents:
                x, row_state = self._features(document, None, None, True)
                outputs.append(x)
            states.append(row_state)
        x = torch.cat(outputs, dim=1).view(*token_ids.shape, -1)
        return x, cat_states(states)

    def token_losses(
        self,
        token_ids: Tensor,
        targets: Tensor,
        state: GPTState | None = None,
        return_state: bool = False,
    ) -> Any:
        """Cross-entropy of each target in nats, (B, T), float32 or float64; 0 for negative targets.

        With `return_state` also the state: as `forward`.
        """
        x, state = self.features(token_ids, state, return_state)
        config = self.config
        losses = token_losses(
            x.flatten(0, 1), self.output_weight, targets.flatten(), config.logit_cap, config.n_vocab
        )
        losses = losses.view_as(targets)
        return (losses, state) if return_state else losses

    def summed_loss(
        self,
        token_ids: Tensor,
        targets: Tensor | None,
        state: GPTState | None = None,
        return_state: bool = False,
        call_layer: Callable[..., Any] = call_layer,
    ) -> Any:
        """The loss to train: the sum of `token_losses`, computed with less memory.

        Here padding rows have logits, as in the published code.

        Without targets the loss is None, and only the state is computed. `call_layer` is that of
        `features`.
        """
        x, state = self.features(token_ids, state, return_state, call_layer)
        if targets is None:
            return None, state
        loss = summed_loss(
            x.flatten(0, 1), self.output_weight, targets.flatten(), self.config.logit_cap
        )
        return (loss, state) if return_state else loss

    def loss(self, token_ids: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats over the targets that are not negative."""
        summed: Tensor = self.summed_loss(token_ids, targets)
        return summed / (targets >= 0).sum()

    def n_params(self) -> int:
        """Number of parameters, without counting shared ones twice."""
        return sum(p.numel() for p in self.parameters())

    def size(self, n_vocab: int) -> str:
        """The number of parameters in words, and their number without rows that pad the vocabulary.

        Args:
            n_vocab: ids from here on are padding.
        """
        n_params = self.n_params()
        n_matrices = 1 if self.config.tied else 2
        padding = (self.config.n_vocab_padded - n_vocab) * self.config.n_embd * n_matrices
        if not padding:
            return f"{n_params:,} parameters"
        without = f"{n_params - padding:,} without the rows that pad the vocabulary"
        return f"{n_params:,} parameters ({without})"

    def flops_per_token(self, seq_len: int) -> int:
        """Floating-point operations of one token's forward and backward pass, as MFU counts them.

        2 + 4 for every weight in a matrix product, and three times the operations of the
        attention's forward pass. An embedding lookup counts as none, and so does what a backward
        pass computes again (Chowdhery et al. 2022, arXiv 2204.02311, appendix B): log attention's
        executes 1.5 times the operations that are counted for it.
        """
        n_weights = 0
        attention = 0
        for module in self.modules():
            if isinstance(module, nn.Linear):
                n_weights += module.weight.numel()
            elif isinstance(module, Attention):
                attention += module.flops_per_token(seq_len)
        if self.config.tied:
            n_weights += self.embed.weight.numel()
        return 6 * n_weights + 3 * attention
