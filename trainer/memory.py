"""Predicts the memory of a training step, part by part, without running it.

What a layer keeps for its backward pass is measured: a model of one layer of each kind processes a few tokens on this
machine's CPU. The partitioner of torch.compile keeps the same within a few percent.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from model.attention import AttentionConfig
from model.attention.longformer import LongformerConfig
from model.gpt import GPT, GPTConfig
from model.layers import Recompute
from model.ops import linear_cross_entropy
from model.state import state_bytes
from trainer.config import TrainConfig
from trainer.runtime import Runtime

_MEASURED_TOKENS = 512
"""Longest sequence that is measured; longer ones keep more in proportion."""


class Memory(NamedTuple):
    """Bytes of each part of a training step, on one device."""

    weights: int
    gradients: int
    """Counted as if they always existed, because they exist from the second micro-batch on."""
    optimizer: int
    activations: int
    """Kept by a micro-batch for its backward pass, including copies of weights in the dtype of products."""
    working: int
    """Temporary: either the logits of some tokens with the loss's intermediate results, or a layer's gradients with
    the activations that a block recomputes."""

    @property
    def peak(self) -> int:
        """The maximum during a step."""
        return sum(self)


def step_memory(
    gpt: GPT,
    micro_batch: int,
    seq_len: int,
    runtime: Runtime,
    n_device: int = 1,
    fsdp: bool = False,
    recompute: Recompute = "none",
    accumulated: bool = True,
    means: float = 2.0,
) -> Memory:
    """The memory of a step with micro-batches of `micro_batch` sequences on each of n_device devices.

    With ddp on several devices, gradients are views of the buckets that are sent; only between the first micro-batch of
    a step and the last, each device holds them twice. With fsdp, devices share weights and optimizer, and each
    temporarily holds the embeddings and two whole blocks, the matrices of which are in the dtype of products. It holds
    whole gradients from the first micro-batch of a step to the last.

    Args:
        gpt: may be on the meta device.
        runtime: of the training; its device need not exist.
        accumulated: whether a step has several micro-batches; matters for several devices only.
        means: numbers of the optimizer's state, and of averaged weights, for each parameter.
    """
    wide, narrow = runtime.param_dtype.itemsize, runtime.dtype.itemsize
    weights = gpt.n_params() * wide
    linear, in_blocks = _linear(gpt), [_linear(block) for block in gpt.blocks]
    linear = (
        linear if gpt.config.tied else linear[:-1]
    )  # without the output layer, whose logits come in parts
    autocast = sum(layer.weight.numel() for layer in linear)
    own, gradients, whole = weights, 2 * weights if n_device > 1 and accumulated else weights, 0
    if fsdp:
        autocast -= sum(layer.weight.numel() for layers in in_blocks for layer in layers)
        blocks = [sum(p.numel() for p in block.parameters()) for block in gpt.blocks]
        root, block = weights - sum(blocks) * wide, max(blocks)
        own = -(-weights // n_device)
        gradients = weights + own if accumulated else own
        whole = (
            root + 2 * block * narrow + (block * wide if accumulated else root + 2 * block * wide)
        )

    pieces = -(-seq_len // (runtime.sequence_chunk or seq_len))
    states = micro_batch * pieces * _state_bytes(gpt, narrow) if pieces > 1 else 0
    seq_len = min(seq_len, runtime.sequence_chunk or seq_len)
    V, D = gpt.embed.weight.shape
    tokens = micro_batch * seq_len
    of_weights = V * D * wide  # the loss computes the gradient of the output layer
    copy = 0
    if narrow < wide:
        of_weights += autocast * narrow
        copy = V * D * narrow

    most = linear_cross_entropy.CHUNK[runtime.device.type] // narrow
    logits = V * min(tokens, max(1, most // V))
    in_float32 = 3 * min(logits, most // linear_cross_entropy.ROW_CHUNKS[runtime.device.type]) * wide
    loss = (
        logits * narrow + copy + max(copy, in_float32)
    )  # the weight, and its gradient, in the type of products
    layer: float = (
        D * wide + max(part.out_features for part in linear) * narrow
    )  # gradients, input and product
    outside, kept = kept_per_token(gpt.config, seq_len, runtime.dtype)
    if recompute != "none":
        layer += max(kept)
        products = [sum(part.out_features for part in layers) * narrow for layers in in_blocks]
        kept = [D * wide + (size if recompute == "selective" else 0) for size in products]
    return Memory(
        weights=own,
        gradients=gradients,
        optimizer=round(means * own),
        activations=round(tokens * (outside + sum(kept))) + of_weights + states,
        working=whole + max(loss, round(tokens * layer)),
    )


def memory_of(
    gpt: GPT, config: TrainConfig, runtime: Runtime, n_device: int, micro_batch: int
) -> Memory:
    """The memory of a run's step: see step_memory."""
    fsdp, accumulated = config.runtime.strategy == "fsdp", micro_batch < config.share_of(n_device)
    size, how = (
        (micro_batch, config.seq_len // config.runtime.context_parallel),
        config.runtime.recompute,
    )
    return step_memory(gpt, *size, runtime, n_device, fsdp, how, accumulated, config.means(gpt))


def _state_bytes(gpt: GPT, of_keys: int) -> int:
    """Bytes of a text's state, which is kept before each piece; a number of a cached key has `of_keys`."""
    grown = sum(  # after its first tokens
        2
        * (layer.window + 2 * layer.n_global)
        * block.attention.n_kv_head
        * gpt.config.head_features
        for layer, block in zip(gpt.config.layers, gpt.blocks, strict=True)
        if isinstance(layer, LongformerConfig)
    )
    return state_bytes(gpt.initial_state(1)) + grown * of_keys


def _linear(module: nn.Module) -> list[nn.Linear]:
    return [part for part in module.modules() if isinstance(part, nn.Linear)]


def kept_per_token(
    config: GPTConfig, seq_len: int, dtype: torch.dtype
) -> tuple[float, list[float]]:
    """Bytes that a forward pass keeps for each token outside of blocks, and in each block, its input included.

    They are measured in models with one layer of each kind.
    """

    def measured(*layers: AttentionConfig, recompute: Recompute = "none") -> float:
        small = {
            "n_layer": len(layers),
            "attention_pattern": list(layers),
            "n_vocab": 64,
            "pad_vocab": 1,
        }
        shape = config.model_copy(update=small).model_dump_json()
        return _measured(shape, min(seq_len, _MEASURED_TOKENS), dtype, recompute)

    first, *others = [_without_kernel(layer) for layer in config.layers]
    one = measured(first)
    of_input = config.n_embd * Runtime(torch.device("cpu"), dtype).param_dtype.itemsize
    outside = measured(first, recompute="block") - of_input
    return outside, [one - outside, *(measured(first, layer) - one for layer in others)]


def _without_kernel(layer: AttentionConfig) -> AttentionConfig:
    """The layer with a kernel that this machine has; all kernels except torch's math kernel keep the same tensors."""
    fused = getattr(layer, "kernel", "math") != "math"
    return layer.model_copy(update={"kernel": "auto"}) if fused else layer


@cache
def _measured(config_json: str, tokens: int, dtype: torch.dtype, recompute: Recompute) -> float:
    """Bytes that each further token keeps in a model of this configuration on the CPU."""
    runtime = Runtime(torch.device("cpu"), dtype)
    with torch.random.fork_rng(devices=[]):
        gpt = GPT(GPTConfig.model_validate_json(config_json)).to(runtime.param_dtype)
    gpt.recompute = recompute
    # A single sequence can need fewer copies; the third adds as much as every further one.
    two, three = (_kept(gpt, torch.zeros(n, tokens, dtype=torch.int64), runtime) for n in (2, 3))
    return (three - two) / tokens


def _kept(gpt: GPT, ids: Tensor, runtime: Runtime) -> int:
    """Bytes that a forward pass keeps for its backward pass, without the weights. Counts each storage once."""
    kept: dict[int, Tensor] = {}  # by address: no address is reused while all tensors are held

    def keep(tensor: Tensor) -> Tensor:
        tensor = tensor.detach()  # without the graph, which would hold itself
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), runtime.autocast():
        gpt.summed_loss(ids, ids)
    weights = {p.untyped_storage().data_ptr() for p in gpt.parameters()}
    return sum(
        tensor.untyped_storage().nbytes()
        for address, tensor in kept.items()
        if address not in weights
    )
