"""Residual blocks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, glu, silu

from common.numbers import ceil_div
from model.attention.base import Attention
from model.config import GPTConfig, MLPConfig
from model.layers import FusedLinear, Linear, Recompute, gated_linear, recomputing
from model.ops.causal_conv import causal_conv, init_conv, no_inputs
from model.position import NO_POSITIONS, Positions


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


class Block(nn.Module):
    """A residual block: attention, and what computes with its result."""

    attention: Attention

    def residual(
        self, x: Tensor, state: Any, positions: Positions, return_state: bool
    ) -> tuple[Tensor, Any]:
        """Compute `forward`, keeping all activations for the backward pass."""
        raise NotImplementedError

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

    def __init__(self, config: GPTConfig, attention: Attention) -> None:
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

    def __init__(self, config: GPTConfig, attention: Attention) -> None:
        super().__init__()
        settings = config.block
        n_embd = config.n_embd
        assert isinstance(settings, MLPConfig)
        # swiglu has two matrices up. With two thirds of the features, parameters are as many.
        n_hidden = settings.expansion * n_embd
        n_matrices = 1
        if settings.activation == "swiglu":
            n_hidden = ceil_div(n_hidden, 12) * 8
            n_matrices = 2
        # The layers, in the order of a forward pass.
        self.norm_attention = config.new_norm()
        self.attention = attention
        self.proj = Linear(attention.n_out, n_embd)
        self.norm_mlp = config.new_norm()
        self.up = FusedLinear(n_embd, [n_hidden] * n_matrices)
        self.down = Linear(n_hidden, n_embd)
        self.activation = _ACTIVATIONS[settings.activation]
        # Convolutions before attention and MLP, of one weight for each feature and token.
        self.conv_attention: nn.Parameter | None = None
        self.conv_mlp: nn.Parameter | None = None
        if settings.conv:
            self.conv_attention = nn.Parameter(torch.empty(settings.conv * n_embd))
            self.conv_mlp = nn.Parameter(torch.empty(settings.conv * n_embd))
        # Standard deviations of initial weights.
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


BLOCKS: dict[str, type[GLUBlock | MLPBlock]] = {"glu": GLUBlock, "mlp": MLPBlock}
