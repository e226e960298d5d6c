"""Residual blocks: what stands around the attention of one layer."""

from typing import Annotated, Any, Literal, get_args

from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import gelu

from common.settings import Settings
from model.attention.base import Attention
from model.ops.gated_linear import gated_linear
from model.position import Rotation


class GLUConfig(Settings):
    """The published residual layer: attention, then a gated linear unit; no separate MLP."""

    name: Literal["glu"]

    def build(self, n_embd: int, n_layer: int, attention: Attention) -> "GLUBlock":
        """The module for this configuration."""
        return GLUBlock(n_embd, attention)


class MLPConfig(Settings):
    """GPT-2's block: attention and an MLP, each with its own residual."""

    name: Literal["mlp"]
    expansion: int = Field(4, ge=1)
    """Hidden features of the MLP, as a multiple of n_embd."""

    def build(self, n_embd: int, n_layer: int, attention: Attention) -> "MLPBlock":
        """The module for this configuration."""
        return MLPBlock(n_embd, n_layer, attention, self.expansion)


BlockConfig = Annotated[GLUConfig | MLPConfig, Field(discriminator="name")]
BLOCKS = get_args(get_args(BlockConfig)[0])


class GLUBlock(nn.Module):
    """x + Linear(GLU(Linear(attention(LayerNorm(x))))), with torch's default initialisation, as published."""

    def __init__(self, n_embd: int, attention: Attention) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(n_embd)
        self.attention = attention
        self.gate = nn.Linear(attention.n_out, 2 * n_embd)
        self.proj = nn.Linear(n_embd, n_embd, bias=False)

    def forward(
        self, x: Tensor, rotation: Rotation | None, state: Any = None, return_state: bool = False
    ) -> tuple[Tensor, Any]:
        """(B, T, n_embd) -> the same, and the attention's state."""
        a, state = self.attention(self.norm(x), rotation, state, return_state)
        return x + gated_linear(self.gate(a), self.proj.weight), state


class MLPBlock(nn.Module):
    """Pre-norm GPT-2 (Radford et al. 2019), with its initialisation.

    Weights start from N(0, 1 / (3 n_embd)), which is GPT-2's 0.02 at 768 features; what is added to the residual
    stream is scaled down by sqrt(2 n_layer); biases start at 0.
    """

    def __init__(self, n_embd: int, n_layer: int, attention: Attention, expansion: int) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(n_embd)
        self.attention = attention
        self.proj = nn.Linear(attention.n_out, n_embd)
        self.norm_mlp = nn.LayerNorm(n_embd)
        self.up = nn.Linear(n_embd, expansion * n_embd)
        self.down = nn.Linear(expansion * n_embd, n_embd)

        std = (3 * n_embd) ** -0.5
        for module in self.modules():
            if isinstance(module, nn.Linear):
                residual = module is self.proj or module is self.down
                nn.init.normal_(module.weight, std=std / (2 * n_layer) ** 0.5 if residual else std)
                nn.init.zeros_(module.bias)

    def forward(
        self, x: Tensor, rotation: Rotation | None, state: Any = None, return_state: bool = False
    ) -> tuple[Tensor, Any]:
        """(B, T, n_embd) -> the same, and the attention's state."""
        a, state = self.attention(self.norm_attention(x), rotation, state, return_state)
        x = x + self.proj(a)
        return x + self.down(gelu(self.up(self.norm_mlp(x)), approximate="tanh")), state
