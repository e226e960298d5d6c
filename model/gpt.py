"""The GPT: token embeddings, n-grams, positions, residual blocks, and the embeddings again as output layer.

The file reads in order: blocks, GPTConfig, GPT. Attention mechanisms are in model/attention, positions in
model/position.py, and the memory of n-grams in model/ngrams.py.
"""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, cast

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn.functional import gelu, glu, silu

from common.config_files import group_values
from common.settings import Settings, variant_names
from model.attention import ATTENTION, AttentionConfig
from model.attention.base import Attention
from model.layers import Embedding, FusedLinear, Linear, Recompute, gated_linear, recomputing
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
    """Hidden features of the MLP, as a multiple of n_embd; swiglu has two thirds of them, and as many parameters."""
    activation: Literal["gelu", "swiglu", "relu2"]
    """gelu: GPT-2's, by tanh; swiglu: silu(a) b for two halves of the features (Shazeer 2020); relu2: relu(x)^2."""
    zero_init: bool
    """Whether both projections back to the residual stream start at 0, so that the block starts as the identity."""
    conv: Literal[0, 4]
    """Width of causal convolutions over each feature that attention and MLP read; 0: none.

    They are the Canon layers A and C of Allen-Zhu 2025; attention.conv is B."""


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
    """x + Linear(GLU(Linear(attention(LayerNorm(x))))): the published residual layer, with torch's initial values."""

    def __init__(self, config: "GPTConfig", attention: Attention) -> None:
        super().__init__()
        self.norm = config.new_norm()
        self.attention = attention
        self.gate = FusedLinear(attention.n_out, [config.n_embd] * 2)
        self.proj = Linear(config.n_embd, config.n_embd, bias=False)

    def residual(
        self, x: Tensor, state: Any, positions: Positions, return_state: bool
    ) -> tuple[Tensor, Any]:
        a, state = self.attention(self.norm(x), positions, state, return_state)
        h, own = self.gate(a), isinstance(self.proj, Linear)  # else an adapter replaces it
        return x + (gated_linear(h, self.proj.weight) if own else self.proj(glu(h))), state


class MLPBlock(Block):
    """GPT-2's pre-norm block (Radford et al. 2019) with its initial values.

    Weights of all linear layers are drawn from N(0, 1 / (3 n_embd)), which is GPT-2's 0.02 at 768 features. Weights of
    projections back to the residual stream are divided by sqrt(2 n_layer), or 0 with `zero_init`. Biases start at 0.
    """

    def __init__(self, config: "GPTConfig", attention: Attention) -> None:
        super().__init__()
        settings, n_embd = config.block, config.n_embd
        assert isinstance(settings, MLPConfig)
        swiglu = settings.activation == "swiglu"
        hidden = (
            -(-settings.expansion * n_embd // 12) * 8 if swiglu else settings.expansion * n_embd
        )
        self.norm_attention = config.new_norm()
        self.attention = attention
        self.proj = Linear(attention.n_out, n_embd)
        self.norm_mlp = config.new_norm()
        self.up = FusedLinear(n_embd, [hidden] * (2 if swiglu else 1))
        self.down = Linear(hidden, n_embd)
        self.activation = _ACTIVATIONS[settings.activation]
        convs = (
            nn.Parameter(torch.empty(settings.conv * n_embd)) if settings.conv else None
            for _ in range(2)
        )
        self.conv_attention, self.conv_mlp = convs

        std = (3 * n_embd) ** -0.5
        for module in self.modules():
            if isinstance(module, Linear):
                module.std = std
        self.proj.std = self.down.std = (
            0.0 if settings.zero_init else std / (2 * config.n_layer) ** 0.5
        )

    def reset_parameters(self) -> None:
        """Draw initial values of the convolutions."""
        for weight in (self.conv_attention, self.conv_mlp):
            if weight is not None:
                init_conv(weight, self.proj.out_features)

    def residual(
        self, x: Tensor, state: Any, positions: Positions, return_state: bool
    ) -> tuple[Tensor, Any]:
        """Compute `forward`. With convolutions, the state has the inputs that they still need, too."""
        has_conv, starts = self.conv_mlp is not None, positions.document_starts
        state, seen_attention, seen_mlp = (
            state if has_conv and state is not None else (state, None, None)
        )
        h, seen_attention = causal_conv(
            self.norm_attention(x), self.conv_attention, seen_attention, starts
        )
        a, state = self.attention(h, positions, state, return_state)
        x = x + self.proj(a)
        h, seen_mlp = causal_conv(self.norm_mlp(x), self.conv_mlp, seen_mlp, starts)
        x = x + self.down(self.activation(self.up(h)))
        return x, (state, seen_attention, seen_mlp) if has_conv and return_state else state

    def initial_state(self, B: int, device: torch.device) -> Any:
        state, convs = super().initial_state(B, device), (self.conv_attention, self.conv_mlp)
        seen = [
            no_inputs(weight, B, self.proj.out_features) for weight in convs if weight is not None
        ]
        return (state, *seen) if seen else state


_BLOCKS: dict[str, type[GLUBlock | MLPBlock]] = {"glu": GLUBlock, "mlp": MLPBlock}


class GPTConfig(Settings):
    """The architecture. Attention, block and position can be combined freely, except log-space and rotary.

    Sizes have bounds far above any practical use, so that a model of an untrusted configuration can be created on the
    meta device in seconds, and no tensor has more elements than torch can count.
    """

    n_vocab: int = Field(ge=1, le=2**24)
    """Number of token ids, which are 0 to n_vocab - 1."""
    pad_vocab: int = Field(1, ge=1, le=2**16)
    """The number of rows of the embedding is rounded up to a multiple of this: 64 aligns matrix products on GPUs."""
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
    """Attention of each layer, repeated: with [log_space, softmax] layers alternate. An item is a mechanism with its
    settings, or the name of a file in configs/model/attention. The name of the mechanism in `attention` stands for
    `attention` with its settings."""
    block: BlockConfig
    position: PositionConfig
    ngrams: list[Annotated[int, Field(ge=1, le=64)]] = Field([], max_length=8)
    """Lengths of strings in ascending order: every token sees what followed the last n tokens the last time they
    occurred in the text, for the longest n that did. The state has one size. []: none."""
    norm: Literal["layer", "rms"] = "layer"
    """Norms of blocks and of the output layer's input: LayerNorm, or RMSNorm (Zhang and Sennrich 2019)."""
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
        own = (
            attention.get("name")
            if isinstance(attention, dict)
            else getattr(attention, "name", None)
        )

        def settings(item: Any) -> Any:
            if not isinstance(item, str):
                return item
            return (
                attention
                if item == own
                else group_values("model/attention", item) or {"name": item}
            )

        return {**raw, "attention_pattern": [settings(item) for item in pattern]}

    @model_validator(mode="after")
    def _sizes_fit(self) -> "GPTConfig":
        if self.head_dim is None and self.n_embd % self.n_head:
            what = f"n_embd={self.n_embd} is not divisible by n_head={self.n_head}"
            raise ValueError(f"{what}: set head_dim, or an n_head that divides n_embd")
        if sorted(set(self.ngrams)) != self.ngrams:
            raise ValueError(
                f"ngrams={self.ngrams} are not in ascending order: use {sorted(set(self.ngrams))}"
            )
        if (n_items := len(self.attention_pattern or [])) > self.n_layer:
            what = f"attention_pattern has {n_items} items for n_layer={self.n_layer}"
            raise ValueError(f"{what}: use at most one for each layer")
        self._check_layers(self._check_attention)
        return self

    def _check_attention(self, layer: AttentionConfig) -> None:
        """Raise ValueError if a layer's mechanism does not fit the other settings."""
        layer.check(self.n_head, self.head_features)
        n_global, most, rotary = (
            getattr(layer, "n_global", 0),
            self.max_len,
            self.position.name == "rotary",
        )
        if most is not None and n_global > most:
            raise ValueError(
                f"n_global={n_global} is more than the model's {most} positions: use at most {most}"
            )
        if rotary and not layer.suits_rotary:
            raise ValueError(
                f"rotary positions do not help {layer.name}: use position log_recurrence, learned or none"
            )
        if rotary and self.head_features % 2:
            raise ValueError(
                f"rotary positions turn pairs of features: use an even number, not {self.head_features}"
            )

    def check_documents(self) -> None:
        """Raise ValueError if the attention of a layer cannot keep documents apart."""
        self._check_layers(lambda layer: layer.check_documents())

    def check_constant_state(self, setting: str, from_empty: bool = False) -> None:
        """Raise ValueError if the state grows with the text, and so does not fit `setting`.

        Args:
            from_empty: whether the state must have its size before the first token, too: `initial_state` is needed.
        """
        if self.max_len is not None:
            raise ValueError(
                f"position: {setting} needs more than {self.max_len} learned positions: use others"
            )
        able = [
            cls
            for cls in ATTENTION
            if cls.constant_state and not (from_empty and "n_global" in cls.model_fields)
        ]
        names = [name for cls in able for name in variant_names(cls)]

        def check(layer: AttentionConfig) -> None:
            if layer.name not in names:
                what = f"{setting} needs a state of one size, and that of {layer.name} grows"
                raise ValueError(f"{what}: use {', '.join(names)}")

        self._check_layers(check)

    def _check_layers(self, check: Callable[[AttentionConfig], None]) -> None:
        pattern = {
            f"attention_pattern.{i}": item for i, item in enumerate(self.attention_pattern or [])
        }
        for part, layer in (pattern or {"attention": self.attention}).items():
            try:
                check(layer)
            except ValueError as error:
                raise ValueError(f"{part}: {error}") from None

    @property
    def n_vocab_padded(self) -> int:
        """Rows of the embedding, which is also the number of logits."""
        return -(-self.n_vocab // self.pad_vocab) * self.pad_vocab

    def new_norm(self) -> nn.Module:
        """Create a norm of n_embd features."""
        return (
            nn.LayerNorm(self.n_embd) if self.norm == "layer" else nn.RMSNorm(self.n_embd, eps=1e-6)
        )

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


def _call(module: nn.Module, *args: Any, **options: Any) -> Any:
    return module(*args, **options)


class GPT(nn.Module):
    """A GPT language model. `state_dict()` holds only parameters; state is passed and returned."""

    def __init__(self, config: GPTConfig, eot_id: int | None = None) -> None:
        """Create the model.

        Args:
            eot_id: the token that starts a document. Its tokens do not see earlier documents. None: all tokens see
                each other.

        Raises:
            ValueError: attention cannot keep documents apart.
        """
        super().__init__()
        if eot_id is not None:
            config.check_documents()
        self.config, self.eot_id = config, eot_id
        self.constant_state = config.max_len is None and all(
            layer.constant_state for layer in config.layers
        )
        """Whether the state has one size, whatever the number of tokens."""
        self.recompute: Recompute = "none"
        """What a backward pass computes again instead of keeping it: of blocks, and of reading the n-grams' memory."""
        self.call: Callable[..., Any] = _call
        """Calls a module: (module, x, state, ...) -> (x, ..., state). Context parallel sends states around it."""
        device = torch.get_default_device()
        with torch.device("meta"):
            self.embed = Embedding(config.n_vocab_padded, config.n_embd)
            self.position: Any = config.position.build(config.n_embd, config.head_features)
            if config.ngrams:
                self.ngrams = NGramMemory(config.ngrams, config.n_embd)
            self.blocks: Any = nn.ModuleList(
                _BLOCKS[config.block.name](
                    config, layer.build(config.n_embd, config.n_head, config.head_features)
                )
                for layer in config.layers
            )
            self.norm = config.new_norm()
            if not config.tied:
                self.output = Linear(config.n_embd, config.n_vocab_padded, bias=False)
        if device.type != "meta":
            self.to_empty(device=device)
            self.init_weights()

    @torch.no_grad()
    def init_weights(
        self, shard_like: Callable[[Tensor, Tensor], Tensor] = lambda whole, parameter: whole
    ) -> None:
        """Draw the weights with torch's generator of the CPU, in the order of `state_dict()`.

        Args:
            shard_like: (a whole weight, its parameter) -> what this process holds of it, if parameters are sharded.
        """
        for module in self.modules():
            held = {name: p for name, p in module._parameters.items() if p is not None}
            if held:  # each module draws its own parameters, whole and on the CPU
                whole = {
                    name: nn.Parameter(torch.empty(p.shape, device="cpu"))
                    for name, p in held.items()
                }
                module._parameters.update(whole)
                cast(Any, module).reset_parameters()
                module._parameters.update(held)
                for name, p in held.items():
                    p.copy_(shard_like(whole[name], p))
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

        `state` is what an earlier call returned for the tokens before these, None at the start of a text.
        """
        x, state = self.features(token_ids, state, return_state)
        logits = self.logits(x)
        return (logits, state) if return_state else logits

    def logits(self, x: Tensor) -> Tensor:
        """Output layer: (..., n_embd) -> (..., n_vocab). Padding rows have no logits here, but losses include them."""
        logits = x @ self.embed.weight.T if self.config.tied else self.output(x)
        return capped(logits[..., : self.config.n_vocab], self.config.logit_cap)

    def features(
        self, token_ids: Tensor, state: GPTState | None = None, return_state: bool = False
    ) -> tuple[Tensor, GPTState]:
        """Return the output layer's input, (B, T, n_embd), and the state. Arguments are those of `forward`.

        Without `return_state` the returned state is incomplete.

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
            if (state is not None or return_state) and not self.constant_state:
                return self._by_documents(token_ids, starts, state)
        return self._features(token_ids, starts, state, return_state)

    def _features(
        self, token_ids: Tensor, starts: Tensor | None, state: GPTState | None, return_state: bool
    ) -> tuple[Tensor, GPTState]:
        position, layers, ngrams = state or GPTState(None, (None,) * len(self.blocks))
        x = self.embed(token_ids)  # (B, T, n_embd)
        if self.config.ngrams:
            x, ngrams = self.call(
                self.ngrams, x, ngrams, starts, token_ids, self.embed.weight, self.recompute
            )
            ngrams = (
                ngrams if return_state else None
            )  # else its memory would be held until the loss is computed
        x, rotation, position = self.call(self.position, x, position, starts)
        positions, after = Positions(rotation, starts), []
        for block, layer in zip(self.blocks, layers, strict=True):
            x, layer = self.call(
                block, x, layer, positions, self.recompute, return_state=return_state
            )
            after.append(layer)
        return self.norm(x), GPTState(position, tuple(after), ngrams)

    def _by_documents(
        self, token_ids: Tensor, starts: Tensor, state: GPTState | None
    ) -> tuple[Tensor, GPTState]:
        """Compute `features` with a state that grows: each document of each row by itself, where they start apart."""
        starts = starts.cpu()
        if not starts[:, 1:].any() and (state is None or starts[:, 0].all() or not starts.any()):
            return self._features(token_ids, None, None if starts.any() else state, True)
        outputs, states = [], []
        for b, row in enumerate(token_ids.split(1)):
            one = None if state is None else select_rows(state, [b])
            for n, document in enumerate(row.tensor_split(starts[b].nonzero().flatten(), dim=1)):
                one = None if n else one
                if document.shape[1]:
                    x, one = self._features(document, None, one, True)
                    outputs.append(x)
            states.append(one)
        return torch.cat(outputs, dim=1).view(len(token_ids), token_ids.shape[1], -1), cat_states(
            states
        )

    def initial_state(self, B: int) -> GPTState:
        """The state of B texts before their first tokens, for models with `constant_state`; None means the same."""
        device = self.device
        layers = tuple(block.initial_state(B, device) for block in self.blocks)
        ngrams = self.ngrams.initial_state(B, device) if self.config.ngrams else None
        return GPTState(self.position.initial_state(B, device), layers, ngrams)

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
        cap = self.config.logit_cap
        losses = token_losses(x.flatten(0, 1), self.output_weight, targets.flatten(), cap).view_as(
            targets
        )
        return (losses, state) if return_state else losses

    def summed_loss(
        self,
        token_ids: Tensor,
        targets: Tensor | None,
        state: GPTState | None = None,
        return_state: bool = False,
    ) -> Any:
        """Sum of `token_losses`, computed with less memory. Without targets, None: for the state alone."""
        x, state = self.features(token_ids, state, return_state)
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
        """The number of parameters in words, also without the rows of ids from n_vocab on."""
        padding = (
            (self.config.n_vocab_padded - n_vocab)
            * self.config.n_embd
            * (1 if self.config.tied else 2)
        )
        without = (
            f" ({self.n_params() - padding:,} without the rows that pad the vocabulary)"
            if padding
            else ""
        )
        return f"{self.n_params():,} parameters{without}"

    def flops_per_token(self, seq_len: int) -> int:
        """Floating-point operations of one token's forward and backward pass, as MFU counts them.

        2 + 4 for every weight in a matrix product, and three times the operations of the attention's forward pass.
        An embedding lookup counts as none, and so does what a backward pass computes again (Chowdhery et al. 2022,
        arXiv 2204.02311, appendix B): log attention's executes 1.5 times the operations that are counted for it.
        """
        weights = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))
        weights += self.embed.weight.numel() if self.config.tied else 0
        attention = sum(
            m.flops_per_token(seq_len) for m in self.modules() if isinstance(m, Attention)
        )
        return 6 * weights + 3 * attention
