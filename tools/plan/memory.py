"""What a training step keeps in memory, part by part, without running one.

What a layer keeps for its backward pass is counted from the sizes of its tensors, as autograd saves them; what the
partitioner of torch.compile keeps is the same but for a few per cent. Softmax and log-space attention are counted too.
The other mechanisms lay queries and keys out in ways of their own: a few sequences are sent through such a layer on
this machine's CPU, and what the third adds is taken for every other.
"""

from collections import Counter
from functools import cache
from typing import NamedTuple

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn

from model.attention import AttentionConfig
from model.attention.log_space import LogSpaceConfig
from model.attention.softmax import SoftmaxConfig
from model.gpt import GPT, GLUBlock, GPTConfig, MLPBlock
from model.ops import linear_cross_entropy
from model.ops.log_attention.chunked import BLOCK
from model.ops.log_attention.chunks import CHUNK
from model.position import LogRecurrencePosition, RotaryConfig, RotaryPosition

_TRIED_TOKENS = 2048  # of a sequence that is sent through a layer; longer ones are taken to keep more in proportion


class Numbers(NamedTuple):
    """Where a model runs, and in which numbers."""

    device: str
    """cpu or cuda."""
    dtype: torch.dtype
    """bfloat16 is autocast over float32 weights."""

    @property
    def wide(self) -> int:
        """Bytes of a weight, of a number in the residual stream, of a sum."""
        return max(4, self.dtype.itemsize)

    @property
    def narrow(self) -> int:
        """Bytes of a number that goes into a matrix product, or comes out of one."""
        return self.dtype.itemsize


class Memory(NamedTuple):
    """Bytes of each part of a training step, on one device."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    """What a micro-batch keeps for its backward pass, weights in the type of products among it."""
    working: int
    """What comes and goes: the logits of some tokens and what the loss makes of them, or a layer's gradients."""
    accumulated: bool
    """Whether a step has several micro-batches, so that the first one's gradients are there while the second runs."""

    @property
    def peak(self) -> int:
        """The most at any time of a step. Without accumulation, gradients come as activations go."""
        passing = self.activations + self.working
        most = self.gradients + passing if self.accumulated else max(self.gradients, passing)
        return self.weights + self.optimizer + most


def step_memory(
    gpt: GPT, micro_batch: int, seq_len: int, numbers: Numbers, accumulated: bool, n_device: int = 1, fsdp: bool = False
) -> Memory:
    """What a step over micro-batches of `micro_batch` sequences needs on each of n_device devices.

    Several have the gradients twice, with ddp: as they are, and in the pieces that are sent. With fsdp they share
    weights, gradients and optimizer, and each has the embeddings and two blocks whole for a while, gradients too.

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
    """Working memory of model/ops/linear_cross_entropy.py: logits, their logsumexp's, and those of the part before."""
    V, D = gpt.embed.weight.shape
    at_once = min(tokens, max(1, linear_cross_entropy.CHUNK[numbers.device] // V))
    following = min(at_once, tokens - at_once)
    copy = V * D * numbers.narrow if numbers.narrow < numbers.wide else 0
    return max(2 * at_once, at_once + 2 * following) * V * numbers.wide + copy


def _of_layer(gpt: GPT, tokens: int, numbers: Numbers) -> int:
    """Working memory of a layer's backward pass: gradients of what went in, and of its widest product."""
    widest = max(m.out_features for m in gpt.blocks.modules() if isinstance(m, nn.Linear))
    log_space = any(isinstance(layer, LogSpaceConfig) for layer in gpt.config.layers)
    blocks = 8 * BLOCK * numbers.wide if numbers.device == "cpu" and log_space else 0  # of chunked.py
    return tokens * (gpt.config.n_embd * numbers.wide + widest * numbers.narrow) + blocks


def kept_for_backward(gpt: GPT, micro_batch: int, seq_len: int, numbers: Numbers) -> int:
    """Bytes that a forward pass keeps, weights left out but not their copies in bfloat16."""
    config, D = gpt.config, gpt.config.n_embd
    ids_and_gradient = 2 * 8 + D * numbers.narrow  # which the loss has computed
    a_token = ids_and_gradient + _of_position(gpt.position, D, numbers) + _of_norm(D, numbers)
    a_token += sum(_of_block(block, D, numbers) for block in gpt.blocks)
    layers = Counter(layer.model_dump_json() for layer in config.layers)
    attention = sum(n * _of_attention(layer, config, micro_batch, seq_len, numbers) for layer, n in layers.items())
    of_weights = gpt.embed.weight.numel() * numbers.wide  # the gradient of the output layer
    if numbers.narrow < numbers.wide:
        of_weights += _copied_weights(gpt, numbers.narrow)
    return round(micro_batch * seq_len * a_token + attention) + of_weights


def _of_norm(D: int, numbers: Numbers) -> int:
    """Bytes a token: its input, and two numbers."""
    return (D + 2) * numbers.wide


def _of_position(position: nn.Module, D: int, numbers: Numbers) -> int:
    """Bytes a token."""
    if not isinstance(position, LogRecurrencePosition):
        return 0
    products = 3 + (numbers.device == "cpu")  # what goes into the linear layer, what comes out, logsigmoid's buffer
    sums = 2 if numbers.narrow == numbers.wide else 3  # log_p, the result; and h, where the product has fewer bits
    return D * (products * numbers.narrow + sums * numbers.wide)


def _of_block(block: nn.Module, D: int, numbers: Numbers) -> int:
    """Bytes a token of what stands around the attention, whose input and result count as its own."""
    if isinstance(block, GLUBlock):
        return _of_norm(D, numbers) + 2 * D * numbers.narrow  # before the gate
    assert isinstance(block, MLPBlock)
    return 2 * _of_norm(D, numbers) + (D + 2 * block.up.out_features) * numbers.narrow  # before and after gelu


def _of_attention(layer_json: str, config: GPTConfig, micro_batch: int, seq_len: int, numbers: Numbers) -> float:
    """Bytes of a layer's mechanism, its input and its result among them."""
    layer: AttentionConfig = TypeAdapter(AttentionConfig).validate_json(layer_json)
    H, D = config.n_head, config.head_features
    base = config.position.base if isinstance(config.position, RotaryConfig) else None
    rotary = base is not None
    if isinstance(layer, SoftmaxConfig) and layer.kernel != "math":
        n_kv = layer.n_kv_head or H
        turned = (2 * H + n_kv) * D * rotary  # q, k; and the result, which has then to be laid out anew
        a_token = (config.n_embd + (2 * H + 2 * n_kv) * D + turned) * numbers.narrow
        return micro_batch * seq_len * (a_token + 4 * H)  # and the logarithm of each row's sum
    if isinstance(layer, LogSpaceConfig):
        K, V = layer.query_dim(D), layer.d_val or D
        a_token = (config.n_embd + H * (2 * K + 2 * V + 2 * K * rotary)) * numbers.narrow
        return micro_batch * (seq_len * a_token + _of_log_sums(H, K, V, seq_len, numbers))
    tokens = min(seq_len, _TRIED_TOKENS)
    few = min(micro_batch, 2)  # one alone can need fewer copies; a third adds what every other adds
    kept, more = (_tried(layer_json, (config.n_embd, H, D), n, tokens, numbers.dtype, base) for n in (few, 3))
    return (kept + (micro_batch - few) * (more - kept)) * seq_len / tokens


def _of_log_sums(H: int, K: int, V: int, seq_len: int, numbers: Numbers) -> int:
    """Bytes a sequence of what log attention keeps beside q, k, v and its result."""
    chunks = -(-seq_len // CHUNK)
    if numbers.device == "cpu":  # chunked.py: the state before and after, and one a block; the result as it was summed
        states = 3 - (-chunks // max(1, BLOCK // (H * CHUNK * K)))
        result = seq_len * H * V * numbers.wide if numbers.narrow < numbers.wide else 0
        return states * H * K * (V + 1) * numbers.wide + result
    return (chunks + 1) * H * (K * V * numbers.narrow + (2 * K + V) * numbers.wide)  # triton.py: one a chunk


@cache
def _tried(
    layer_json: str, sizes: tuple[int, int, int], n: int, tokens: int, dtype: torch.dtype, base: float | None
) -> int:
    """Bytes that n sequences keep in a layer of attention on this machine's CPU, its result among them."""
    kept: dict[int, Tensor] = {}  # by address: while all are held, none is used twice

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.detach()
        return tensor

    weight_type = torch.promote_types(dtype, torch.float32)
    layer: AttentionConfig = TypeAdapter(AttentionConfig).validate_json(layer_json)
    attention = layer.build(*sizes).to(weight_type)
    x = torch.randn(n, tokens, sizes[0], dtype=weight_type, requires_grad=True)
    rotation = RotaryPosition(layer.query_dim(sizes[2]), base)(x)[1] if base else None
    autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), autocast:
        result, _ = attention(x * 1, rotation)
    keep(result)
    weights = {p.untyped_storage().data_ptr() for p in attention.parameters()}
    total = sum(t.untyped_storage().nbytes() for address, t in kept.items() if address not in weights)
    return total - (_copied_weights(attention, dtype.itemsize) if dtype.itemsize < weight_type.itemsize else 0)


def _copied_weights(module: nn.Module, n_bytes: int) -> int:
    """Bytes of the linear layers' weights in the type of products."""
    return sum(m.weight.numel() for m in module.modules() if isinstance(m, nn.Linear)) * n_bytes
