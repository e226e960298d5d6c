"""Predicts the memory of a training step without running it.

What a layer keeps for its backward pass is measured: a model of one layer of each kind processes a
few tokens on this machine's CPU. Compiled there, the flagship keeps about 14 % less, and the
published model 8 % more.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from common.numbers import ceil_div
from model.attention import AttentionConfig
from model.config import GPTConfig
from model.gpt import GPT
from model.layers import PRODUCTS, Recompute
from model.ops import linear_cross_entropy
from runtime.device import Compute
from trainer.config import TrainConfig
from trainer.optim import block_matrices

_MEASURED_TOKENS = 512
"""Longest sequence that is measured; longer ones keep more in proportion."""


class Memory(NamedTuple):
    """Bytes that a training step needs on one device, by purpose."""

    weights: int
    gradients: int
    """Counted as if they always existed, because they exist from the second micro-batch on."""
    optimizer: int
    activations: int
    """Kept by a micro-batch for its backward pass, including copies of weights in the dtype of
    products."""
    working: int
    """Temporary: either the logits of some tokens with the loss's intermediate results, or a
    layer's gradients with the activations that a block recomputes."""

    @property
    def peak(self) -> int:
        """The maximum during a step."""
        return sum(self)


def step_memory(
    gpt: GPT,
    micro_batch: int,
    seq_len: int,
    compute: Compute,
    n_device: int = 1,
    fsdp: bool = False,
    recompute: Recompute = "none",
    accumulated: bool = True,
    means: float = 2.0,
) -> Memory:
    """The memory of a step with micro-batches of `micro_batch` sequences on each of n devices.

    With ddp on several devices, gradients are views of the buckets that are sent. A device holds
    them twice only between the first micro-batch of a step and the last. With fsdp, devices share
    weights and optimizer. Each temporarily holds the embeddings and two whole blocks, with matrices
    in the dtype of products. It holds whole gradients from the first micro-batch of a step to the
    last.

    Args:
        gpt: may be on the meta device.
        compute: of the training; its device need not exist.
        accumulated: whether a step has several micro-batches; matters for several devices only.
        means: numbers of the optimizer's state for each parameter.
    """
    wide = compute.param_dtype.itemsize
    narrow = compute.dtype.itemsize
    seq_len = min(seq_len, compute.sequence_chunk or seq_len)
    n_tokens = micro_batch * seq_len
    weights, gradients, gathered = _held_weights(gpt, compute, n_device, fsdp, accumulated)

    linear = _linear(gpt)
    if not gpt.config.tied:
        linear = linear[:-1]  # without the output layer, whose logits come in chunks
    V, D = gpt.embed.weight.shape
    kept_weights = V * D * wide  # the loss computes the gradient of the output layer
    if narrow < wide:
        # Copied in the dtype of products; fsdp gathers blocks in it.
        copied = set(linear) - set(_linear(gpt.blocks)) if fsdp else linear
        kept_weights += sum(layer.weight.numel() for layer in copied) * narrow

    # The gradients of a layer's input and of its product.
    working_per_token: float = D * wide + max(layer.out_features for layer in linear) * narrow
    outside, in_blocks = kept_per_token(gpt.config, seq_len, compute.dtype)
    if recompute != "none":
        working_per_token += max(in_blocks)
        in_blocks = [float(D * wide) for _ in in_blocks]
    if recompute == "selective":
        for number, block in enumerate(gpt.blocks):
            in_blocks[number] += sum(layer.out_features for layer in _linear(block)) * narrow
    loss_bytes = _loss_bytes(V, D, n_tokens, compute)
    return Memory(
        weights=weights,
        gradients=gradients,
        optimizer=round(means * weights),
        activations=round(n_tokens * (outside + sum(in_blocks))) + kept_weights,
        working=gathered + max(loss_bytes, round(n_tokens * working_per_token)),
    )


def _held_weights(
    gpt: GPT, compute: Compute, n_device: int, fsdp: bool, accumulated: bool
) -> tuple[int, int, int]:
    """Bytes of a device's weights, of its gradients, and of what fsdp gathers for some time."""
    wide = compute.param_dtype.itemsize
    weights = gpt.n_params() * wide
    if not fsdp:
        is_twice = n_device > 1 and accumulated
        return weights, 2 * weights if is_twice else weights, 0
    block_params = [sum(p.numel() for p in block.parameters()) for block in gpt.blocks]
    largest_block = max(block_params)
    root = weights - sum(block_params) * wide
    shard = ceil_div(weights, n_device)
    gathered = root + 2 * largest_block * compute.dtype.itemsize
    if accumulated:
        return shard, shard + weights, gathered + largest_block * wide
    return shard, shard, gathered + root + 2 * largest_block * wide


def _loss_bytes(V: int, D: int, n_tokens: int, compute: Compute) -> int:
    """The logits of some tokens, with the loss's intermediate results."""
    wide = compute.param_dtype.itemsize
    narrow = compute.dtype.itemsize
    weight_copy = V * D * narrow if narrow < wide else 0
    most_logits = linear_cross_entropy.LOGITS[compute.device.type] // narrow
    logits = V * min(n_tokens, max(1, most_logits // V))
    most_in_float32 = most_logits // linear_cross_entropy.N_ROW_STEPS[compute.device.type]
    in_float32 = 3 * min(logits, most_in_float32) * wide
    # The weight, and its gradient, in the type of products.
    return logits * narrow + weight_copy + max(weight_copy, in_float32)


def memory_of(
    gpt: GPT, config: TrainConfig, compute: Compute, n_device: int, micro_batch: int
) -> Memory:
    """The memory of a run's step: see step_memory."""
    return step_memory(
        gpt,
        micro_batch,
        config.seq_len // config.runtime.context_parallel,
        compute,
        n_device,
        fsdp=config.runtime.strategy == "fsdp",
        recompute=config.runtime.recompute,
        accumulated=micro_batch < config.share_of(n_device),
        means=means_per_parameter(gpt, config),
    )


def means_per_parameter(gpt: GPT, config: TrainConfig) -> float:
    """Numbers of the optimizer's state for each parameter: two, or one of Muon's matrices."""
    n_weights = 0
    if config.optim.name == "muon":
        n_weights = sum(layer.weight.numel() for layer in block_matrices(gpt))
    return 2.0 - n_weights / gpt.n_params()


def _linear(module: nn.Module) -> list[nn.Linear]:
    return [layer for layer in module.modules() if isinstance(layer, nn.Linear)]


def kept_per_token(
    config: GPTConfig, seq_len: int, dtype: torch.dtype
) -> tuple[float, list[float]]:
    """Bytes that a forward pass keeps for each token outside of blocks, and in each block.

    The input of a block belongs to it. Both are measured in models with one layer of each kind.
    """

    def measured(*layers: AttentionConfig, recompute: Recompute = "none") -> float:
        sizes = {"n_layer": len(layers), "n_vocab": 64, "pad_vocab": 1}
        small = config.model_copy(update={**sizes, "attention_pattern": list(layers)})
        n_tokens = min(seq_len, _MEASURED_TOKENS)
        return _measured(small.model_dump_json(), n_tokens, dtype, recompute)

    layers = config.layers
    first = measured(layers[0])
    input_bytes = config.n_embd * Compute(torch.device("cpu"), dtype).param_dtype.itemsize
    outside = measured(layers[0], recompute="block") - input_bytes
    in_blocks = [first - outside]
    for layer in layers[1:]:
        in_blocks.append(measured(layers[0], layer) - first)
    return outside, in_blocks


@cache
def _measured(config_json: str, n_tokens: int, dtype: torch.dtype, recompute: Recompute) -> float:
    """Bytes that each further token keeps in a model of this configuration on the CPU."""
    compute = Compute(torch.device("cpu"), dtype)
    with torch.random.fork_rng(devices=[]):
        gpt = GPT(GPTConfig.model_validate_json(config_json)).to(compute.param_dtype)
    gpt.recompute = recompute
    # A single sequence can need fewer copies; the third adds as much as every further one.
    kept_of_two = _kept(gpt, torch.zeros(2, n_tokens, dtype=torch.int64), compute)
    kept_of_three = _kept(gpt, torch.zeros(3, n_tokens, dtype=torch.int64), compute)
    return (kept_of_three - kept_of_two) / n_tokens


class _NoProducts(TorchDispatchMode):
    """Gives zeros in place of products, which take long in bfloat16 on many CPUs.

    What autograd keeps depends on shapes, not on values.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in PRODUCTS:
            *_, left, right = args
            return left.new_zeros(left.shape[0], right.shape[1])
        return func(*args, **(kwargs or {}))


def _kept(gpt: GPT, ids: Tensor, compute: Compute) -> int:
    """Bytes that a forward pass keeps for its backward pass, without the weights."""
    # Each storage once, by address: no address is reused while all tensors are held.
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        tensor = tensor.detach()  # without the graph, which would hold itself
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with hooks, compute.autocast(), _NoProducts():
        gpt.summed_loss(ids, ids)
    weights = {p.untyped_storage().data_ptr() for p in gpt.parameters()}
    return sum(
        tensor.untyped_storage().nbytes()
        for address, tensor in kept.items()
        if address not in weights
    )
