"""Predicts the memory of a training step, part by part, without running it.

The bytes that a layer keeps for its backward pass are counted from the sizes of its tensors, as autograd saves them;
the partitioner of torch.compile keeps the same within a few percent. Softmax and log-space attention are counted too.
For the other mechanisms, a few sequences are sent through one layer on this machine's CPU: every further sequence is
assumed to add as much as the third one.
"""

from collections import Counter
from functools import cache
from typing import NamedTuple

import torch
from pydantic import TypeAdapter
from torch import nn

from model.attention import AttentionConfig
from model.attention.log_space import LogSpaceConfig
from model.attention.softmax import SoftmaxConfig
from model.gpt import GPT, GLUBlock, GPTConfig, MLPBlock
from model.ops import linear_cross_entropy
from model.ops.log_attention.chunks import BLOCK, CHUNK
from model.position import LogRecurrencePosition, RotaryConfig, RotaryPosition
from trainer.micro_batch import saved_for_backward

_TRIED_TOKENS = 2048  # longest sequence sent through a layer; longer ones keep more in proportion


class Numbers(NamedTuple):
    """Device and dtype of a run."""

    device: str
    """cpu or cuda."""
    dtype: torch.dtype
    """bfloat16 is autocast with float32 weights."""

    @property
    def wide(self) -> int:
        """Bytes per number of weights, residual stream and sums."""
        return max(4, self.dtype.itemsize)

    @property
    def narrow(self) -> int:
        """Bytes per number of inputs and results of matrix products."""
        return self.dtype.itemsize


class Memory(NamedTuple):
    """Bytes of each part of a training step, on one device."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    """Kept by a micro-batch for its backward pass, including copies of weights in the dtype of products."""
    working: int
    """Temporary: the logits of some tokens and the loss's intermediate results, or a layer's gradients."""
    accumulated: bool
    """Whether a step has several micro-batches, so that gradients exist while the second one runs."""

    @property
    def peak(self) -> int:
        """The maximum during a step. Without accumulation, gradients replace activations one by one."""
        passing = self.activations + self.working
        most = self.gradients + passing if self.accumulated else max(self.gradients, passing)
        return self.weights + self.optimizer + most


def step_memory(
    gpt: GPT, micro_batch: int, seq_len: int, numbers: Numbers, accumulated: bool, n_device: int = 1, fsdp: bool = False
) -> Memory:
    """The memory of a step with micro-batches of `micro_batch` sequences on each of n_device devices.

    With ddp on several devices, each holds the gradients twice, once in the buckets that are sent. With fsdp, devices
    share weights, gradients and optimizer, and each temporarily holds the embeddings and two whole blocks, with their
    gradients.

    Args:
        gpt: may be on the meta device.
    """
    weights = gpt.n_params() * numbers.wide
    own, whole = weights, 0
    if fsdp:
        blocks = [sum(p.numel() for p in block.parameters()) * numbers.wide for block in gpt.blocks]
        own, whole = -(-weights // n_device), 2 * (weights - sum(blocks) + 2 * max(blocks))
    tokens = micro_batch * seq_len
    return Memory(
        weights=own,
        gradients=own if fsdp or n_device == 1 else 2 * own,
        optimizer=2 * own,
        activations=kept_for_backward(gpt, micro_batch, seq_len, numbers),
        working=whole + max(_of_loss(gpt, tokens, numbers), _of_layer(gpt, tokens, numbers)),
        accumulated=accumulated,
    )


def _of_loss(gpt: GPT, tokens: int, numbers: Numbers) -> int:
    """Working memory of model/ops/linear_cross_entropy.py: logits of one part, and of the part before."""
    V, D = gpt.embed.weight.shape
    at_once = min(tokens, max(1, linear_cross_entropy.CHUNK[numbers.device] // V))
    following = min(at_once, tokens - at_once)
    copy = V * D * numbers.narrow if numbers.narrow < numbers.wide else 0
    return max(2 * at_once, at_once + 2 * following) * V * numbers.wide + copy


def _of_layer(gpt: GPT, tokens: int, numbers: Numbers) -> int:
    """Working memory of a layer's backward pass: gradients of its input and of its widest product."""
    widest = max(m.out_features for m in gpt.blocks.modules() if isinstance(m, nn.Linear))
    log_space = any(isinstance(layer, LogSpaceConfig) for layer in gpt.config.layers)
    blocks = 8 * BLOCK * numbers.wide if numbers.device == "cpu" and log_space else 0  # of chunked.py
    return tokens * (gpt.config.n_embd * numbers.wide + widest * numbers.narrow) + blocks


def kept_for_backward(gpt: GPT, micro_batch: int, seq_len: int, numbers: Numbers) -> int:
    """Bytes that a forward pass keeps, without weights but with their copies in bfloat16."""
    config, D = gpt.config, gpt.config.n_embd
    ids_and_gradient = 2 * 8 + D * numbers.narrow  # computed by the loss
    a_token = ids_and_gradient + _of_position(gpt.position, D, numbers) + _of_norm(D, numbers)
    a_token += sum(_of_block(block, D, numbers) for block in gpt.blocks)
    layers = Counter(layer.model_dump_json() for layer in config.layers)
    attention = sum(n * _of_attention(layer, config, micro_batch, seq_len, numbers) for layer, n in layers.items())
    of_weights = gpt.embed.weight.numel() * numbers.wide  # the gradient of the output layer
    if numbers.narrow < numbers.wide:
        of_weights += _copied_weights(gpt, numbers.narrow)
    return round(micro_batch * seq_len * a_token + attention) + of_weights


def _of_norm(D: int, numbers: Numbers) -> int:
    """Bytes per token: the input, and two statistics."""
    return (D + 2) * numbers.wide


def _of_position(position: nn.Module, D: int, numbers: Numbers) -> int:
    """Bytes per token."""
    if not isinstance(position, LogRecurrencePosition):
        return 0
    products = 3 + (numbers.device == "cpu")  # input and result of the linear layer, logsigmoid's buffer
    sums = 2 if numbers.narrow == numbers.wide else 3  # log_p and the result; h too if products have fewer bits
    return D * (products * numbers.narrow + sums * numbers.wide)


def _of_block(block: nn.Module, D: int, numbers: Numbers) -> int:
    """Bytes per token of a block without its attention, whose input and result count as the attention's."""
    if isinstance(block, GLUBlock):
        return _of_norm(D, numbers) + 2 * D * numbers.narrow  # before the gate
    assert isinstance(block, MLPBlock)
    return 2 * _of_norm(D, numbers) + (D + 2 * block.up.out_features) * numbers.narrow  # before and after gelu


def _of_attention(layer_json: str, config: GPTConfig, micro_batch: int, seq_len: int, numbers: Numbers) -> float:
    """Bytes of a layer's attention, including its input and its result."""
    layer: AttentionConfig = TypeAdapter(AttentionConfig).validate_json(layer_json)
    H, D = config.n_head, config.head_features
    base = config.position.base if isinstance(config.position, RotaryConfig) else None
    rotary = base is not None
    if isinstance(layer, SoftmaxConfig) and layer.kernel != "math":
        n_kv = layer.n_kv_head or H
        turned = (2 * H + n_kv) * D * rotary  # q, k; and the result, which then needs a new layout
        a_token = (config.n_embd + (2 * H + 2 * n_kv) * D + turned) * numbers.narrow
        return micro_batch * seq_len * (a_token + 4 * H)  # and the logarithm of each row's sum
    if isinstance(layer, LogSpaceConfig):
        K, V = layer.query_dim(D), layer.d_val or D
        a_token = (config.n_embd + H * (2 * K + 2 * V + 2 * K * rotary)) * numbers.narrow
        return micro_batch * (seq_len * a_token + _of_log_sums(H, K, V, seq_len, numbers))
    tokens = min(seq_len, _TRIED_TOKENS)
    few = min(micro_batch, 2)  # one sequence can need fewer copies; the third adds as much as every further one
    kept, more = (_tried(layer_json, (config.n_embd, H, D), n, tokens, numbers.dtype, base) for n in (few, 3))
    return (kept + (micro_batch - few) * (more - kept)) * seq_len / tokens


def _of_log_sums(H: int, K: int, V: int, seq_len: int, numbers: Numbers) -> int:
    """Bytes per sequence that log attention keeps besides q, k, v and its result."""
    chunks = -(-seq_len // CHUNK)
    if numbers.device == "cpu":  # chunked.py: states before and after, and one per block; the unrounded result
        states = 3 - (-chunks // max(1, BLOCK // (H * CHUNK * K)))
        result = seq_len * H * V * numbers.wide if numbers.narrow < numbers.wide else 0
        return states * H * K * (V + 1) * numbers.wide + result
    return (chunks + 1) * H * (K * V * numbers.narrow + (2 * K + V) * numbers.wide)  # triton.py: one state per chunk


@cache
def _tried(
    layer_json: str, sizes: tuple[int, int, int], n: int, tokens: int, dtype: torch.dtype, base: float | None
) -> int:
    """Bytes that n sequences keep in a layer of attention on this machine's CPU, including its result."""
    weight_type = torch.promote_types(dtype, torch.float32)
    layer: AttentionConfig = TypeAdapter(AttentionConfig).validate_json(layer_json)
    attention = layer.build(*sizes).to(weight_type)
    x = torch.randn(n, tokens, sizes[0], dtype=weight_type, requires_grad=True)
    rotation = RotaryPosition(layer.query_dim(sizes[2]), base)(x)[1] if base else None
    autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16)
    # square() keeps the result of the attention for its own backward pass, as the block's next layer does
    total = saved_for_backward(lambda: attention(x * 1, rotation)[0].square(), autocast, attention)
    return total - (_copied_weights(attention, dtype.itemsize) if dtype.itemsize < weight_type.itemsize else 0)


def _copied_weights(module: nn.Module, n_bytes: int) -> int:
    """Bytes of the linear layers' weights in the dtype of products."""
    return sum(m.weight.numel() for m in module.modules() if isinstance(m, nn.Linear)) * n_bytes
