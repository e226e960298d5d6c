"""Converts config.json and weights between our GPT and Hugging Face's GPT2LMHeadModel, in both
directions.

Both have layer norms with epsilon 1e-5, biases everywhere, an output layer tied to the embeddings,
and attention scores scaled by 1 / sqrt(n_embd / n_head).
"""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from torch import Tensor

from common.settings import Settings, decode
from model.config import GPTConfig

# What our names of parameters have -> what GPT-2's have in its place, one after another.
_NAMES = {
    ".attention.qkv.": ".attn.c_attn.",
    ".proj.": ".attn.c_proj.",
    ".up.": ".mlp.c_fc.",
    ".down.": ".mlp.c_proj.",
    ".norm_attention.": ".ln_1.",
    ".norm_mlp.": ".ln_2.",
    "blocks.": "h.",
    "norm.": "ln_f.",
    "position.embed.": "wpe.",
    "embed.": "wte.",
}
_SIZES = {"n_vocab": "vocab_size", "n_layer": "n_layer", "n_head": "n_head", "n_embd": "n_embd"}
_TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
PREFIX = "transformer."
"""Prefix of all weight names in current files. Files from 2019 lack it."""


def name_in_gpt2(ours: str) -> str:
    """Return GPT-2's name of one of our parameters, without PREFIX: blocks.3.up.bias ->
    h.3.mlp.c_fc.bias."""
    for before, after in _NAMES.items():
        ours = ours.replace(before, after)
    return ours


def transpose_weight(name: str, weight: Tensor) -> Tensor:
    """Convert a weight with GPT-2's name `name` to or from our layout: GPT-2's "Conv1D" weights are
    (in, out)."""
    return weight.T if name.endswith(_TRANSPOSED) else weight


def is_gpt2(config: GPTConfig) -> bool:
    """Whether GPT2LMHeadModel has this architecture: its config.json describes the model."""
    if config.block.name != "mlp" or config.position.name != "learned":
        return False
    if config.n_head * config.head_features != config.n_embd:
        return False
    described = read_gpt2_config(gpt2_config(config))
    softmax = described.attention
    same = softmax, softmax.model_copy(update={"n_kv_head": config.n_head})
    others = {"attention", "attention_pattern", "head_dim", "pad_vocab"}
    is_same = config.model_dump(exclude=others) == described.model_dump(exclude=others)
    return is_same and all(layer in same for layer in config.layers)


class _GPT2Config(Settings):
    """The fields of GPT-2's config.json that its logits depend on, with the defaults of
    transformers."""

    model_config = ConfigDict(extra="ignore", strict=True)

    model_type: Literal["gpt2"]
    vocab_size: int = Field(50257, ge=2)
    n_positions: int = Field(1024, ge=1)
    n_embd: int = Field(768, ge=1)
    n_layer: int = 12
    n_head: int = 12
    n_inner: Annotated[int, Field(ge=1)] | None = None
    activation_function: Literal["gelu_new", "gelu_pytorch_tanh"] = "gelu_new"
    layer_norm_epsilon: float = Field(1e-5, ge=1e-5, le=1e-5)
    scale_attn_weights: Literal[True] = True
    scale_attn_by_inverse_layer_idx: Literal[False] = False
    add_cross_attention: Literal[False] = False
    tie_word_embeddings: Literal[True] = True


def read_gpt2_config(raw: Any) -> GPTConfig:
    """Return our configuration of the model that a config.json describes.

    Raises:
        UserError: the model is not a GPT2LMHeadModel, or differs from GPT-2 in more than its sizes.
    """
    gpt2 = decode(_GPT2Config, raw)
    expansion = (gpt2.n_inner or 4 * gpt2.n_embd) // gpt2.n_embd
    parts = {
        "attention": {"name": "softmax"},
        "block": {"name": "mlp", "expansion": expansion},
        "position": {"name": "learned", "max_len": gpt2.n_positions},
    }
    sizes = {ours: getattr(gpt2, name) for ours, name in _SIZES.items()}
    return decode(GPTConfig, parts | sizes)


def gpt2_config(config: GPTConfig) -> dict[str, Any]:
    """Return the config.json of a GPT2LMHeadModel of this size. Its block is mlp, and positions are
    learned."""
    assert config.block.name == "mlp"
    assert config.position.name == "learned"
    raw = {
        "model_type": "gpt2",
        "n_positions": config.position.max_len,
        "n_inner": config.block.expansion * config.n_embd,
        **{name: getattr(config, ours) for ours, name in _SIZES.items()},
    }
    return {
        "architectures": ["GPT2LMHeadModel"],
        **decode(_GPT2Config, raw).model_dump(),
        # Our models train without dropout.
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }
