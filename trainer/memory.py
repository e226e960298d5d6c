"""Predicts the memory of a training step, part by part, without running it.

What a layer keeps for its backward pass is measured: a model of one layer of each kind processes a few tokens on this
machine's CPU. The partitioner of torch.compile keeps the same within a few percent.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from model.attention import AttentionConfig
from model.gpt import GPT, GPTConfig
from model.ops import linear_cross_entropy
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
    """Temporary: the logits of some tokens and the loss's intermediate results, or a layer's gradients."""

    @property
    def peak(self) -> int:
        """The maximum during a step."""
        return sum(self)


def step_memory(
    gpt: GPT, micro_batch: int, seq_len: int, runtime: Runtime, n_device: int = 1, fsdp: bool = False
) -> Memory:
    """The memory of a step with micro-batches of `micro_batch` sequences on each of n_device devices.

    With ddp on several devices, each holds the gradients twice, once in the buckets that are sent. With fsdp, devices
    share weights, gradients and optimizer, and each temporarily holds the embeddings and two whole blocks, with their
    gradients.

    Args:
        gpt: may be on the meta device.
        runtime: of the training; its device need not exist.
    """
    wide, narrow = runtime.param_dtype.itemsize, runtime.dtype.itemsize
    weights = gpt.n_params() * wide
    own, whole = weights, 0
    if fsdp:
        blocks = [sum(p.numel() for p in block.parameters()) * wide for block in gpt.blocks]
        own, whole = -(-weights // n_device), 2 * (weights - sum(blocks) + 2 * max(blocks))

    linear = [module for module in gpt.modules() if isinstance(module, nn.Linear)]
    linear = linear if gpt.config.tied else linear[:-1]  # without the output layer, whose logits come in parts
    V, D = gpt.embed.weight.shape
    tokens = micro_batch * seq_len
    of_weights = V * D * wide  # the loss computes the gradient of the output layer
    copy = 0
    if narrow < wide:
        of_weights += sum(layer.weight.numel() for layer in linear) * narrow
        copy = V * D * narrow

    at_once = min(tokens, max(1, linear_cross_entropy.CHUNK[runtime.device.type] // V))
    loss = 2 * at_once * V * wide + copy
    layer = tokens * (D * wide + max(layer.out_features for layer in linear) * narrow)  # gradients, input and product
    return Memory(
        weights=own,
        gradients=own if fsdp or n_device == 1 else 2 * own,
        optimizer=2 * own,
        activations=round(tokens * kept_per_token(gpt.config, seq_len, runtime.dtype)) + of_weights,
        working=whole + max(loss, layer),
    )


def kept_per_token(config: GPTConfig, seq_len: int, dtype: torch.dtype) -> float:
    """Bytes that a forward pass keeps for each token, from models with one layer of each kind."""

    def measured(*layers: AttentionConfig) -> float:
        small = {"n_layer": len(layers), "attention_pattern": list(layers), "n_vocab": 64, "pad_vocab": 1}
        shape = config.model_copy(update=small).model_dump_json()
        return _measured(shape, min(seq_len, _MEASURED_TOKENS), dtype)

    first, *others = [_without_kernel(layer) for layer in config.layers]
    one = measured(first)
    return one + sum(measured(first, layer) - one for layer in others)


def _without_kernel(layer: AttentionConfig) -> AttentionConfig:
    """The layer with a kernel that this machine has; all kernels except torch's math kernel keep the same tensors."""
    fused = getattr(layer, "kernel", "math") != "math"
    return layer.model_copy(update={"kernel": "auto"}) if fused else layer


@cache
def _measured(config_json: str, tokens: int, dtype: torch.dtype) -> float:
    """Bytes that each further token keeps in a model of this configuration on the CPU."""
    runtime = Runtime(torch.device("cpu"), dtype)
    with torch.random.fork_rng(devices=[]):
        gpt = GPT(GPTConfig.model_validate_json(config_json)).to(runtime.param_dtype)
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
    return sum(tensor.untyped_storage().nbytes() for address, tensor in kept.items() if address not in weights)
