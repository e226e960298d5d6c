"""The predicted memory is what autograd saves, and what torch allocates."""

import itertools

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from common.settings import decode, variant_names
from model.attention import ATTENTION
from model.config import GPTConfig
from model.gpt import GPT
from model.ops import linear_cross_entropy
from model.ops.log_attention import chunked_attention
from runtime.device import Compute
from tools import step_memory as memory
from tools.step_memory import step_memory
from trainer.optim import AdamWConfig
from trainer.step import SummedLoss

B, T = 4, 512
MODELS = [
    *itertools.product(["log_space", "softmax"], ["glu", "mlp"], ["log_recurrence"]),
    ("softmax", "mlp", "learned"),
    *((name, "glu", "rotary" if cls.traits.rotary else "none") for cls in ATTENTION for name in variant_names(cls)),
]
DTYPES = [torch.float32, torch.bfloat16]


def config_of(attention="log_space", block="glu", position="log_recurrence", **changes):
    raw = {"n_vocab": 1000, "n_layer": 2, "n_head": 4, "n_embd": 96}
    raw |= {
        "attention": {"name": attention} if isinstance(attention, str) else attention,
        "block": {"name": block} if isinstance(block, str) else block,
        "position": {"name": position},
    }
    return decode(GPTConfig, raw | changes)


def on_meta(config):
    with torch.device("meta"):
        return GPT(config)


def loss_of(gpt, dtype, n=B):
    ids = torch.randint(gpt.config.n_vocab, (n, T))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        return SummedLoss(gpt)(ids, ids.clone())


def saved_bytes(gpt, dtype):
    """What autograd saves in a forward pass, each storage once, without the weights."""
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.detach()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss_of(gpt, dtype)
    weights = {p.untyped_storage().data_ptr() for p in gpt.parameters()}
    return sum(t.untyped_storage().nbytes() for address, t in kept.items() if address not in weights)


def compute(dtype, device="cpu"):
    return Compute(torch.device(device), dtype)


@pytest.mark.parametrize(
    ("attention", "block", "position", "dtype"), [(*model, DTYPES[i % 2]) for i, model in enumerate(MODELS)]
)
def test_activations_are_what_autograd_saves(attention, block, position, dtype):
    config = config_of(attention, block, position)
    predicted = step_memory(on_meta(config), B, T, compute(dtype)).activations
    # Left out are rotary angles, a few numbers a position for all sequences, and the like.
    assert predicted == pytest.approx(saved_bytes(GPT(config), dtype), rel=0.02)


@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_of_a_modern_model_are_what_autograd_saves(dtype):
    parts = {"norm": "rms", "bias": False, "tied": False, "logit_cap": 15.0}
    attention = {"name": "softmax", "qk_norm": True}
    config = config_of(attention, {"name": "mlp", "activation": "relu2"}, "rotary", **parts)
    predicted = step_memory(on_meta(config), B, T, compute(dtype)).activations
    assert predicted == pytest.approx(saved_bytes(GPT(config), dtype), rel=0.02)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_product_is_needed_to_measure_what_is_kept(monkeypatch, dtype):
    attention = {"name": "log_space", "decay": "head", "gate": "silu"}
    layers = {"attention_pattern": [attention, {"name": "softmax", "decay": "head"}]}
    config = config_of(attention, {"name": "mlp", "conv": 4}, "none", ngrams=[1, 2], **layers)
    without = memory.kept_per_token(config, 130, dtype)
    monkeypatch.setattr(memory, "PRODUCTS", [])
    memory._measured.cache_clear()
    assert memory.kept_per_token(config, 130, dtype) == without


def allocations(profiled):
    """What was allocated (positive) and freed, in order."""
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    return sorted(events, key=lambda event: event.start_ns())


def allocated_peak(gpt, dtype, accumulated=True):
    """The most that torch holds at any time of a whole step, the model and its optimizer included."""
    optimizer = AdamWConfig(name="adamw").build(gpt)
    if accumulated:
        for p in gpt.parameters():
            p.grad = torch.zeros_like(p)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        loss_of(gpt, dtype).backward()
        torch.nn.utils.clip_grad_norm_(gpt.parameters(), 1.0)
        optimizer.step()
    during = max(itertools.accumulate(event.nbytes() for event in allocations(profiled)))
    return during + sum(p.nbytes for p in gpt.parameters()) * (4 if accumulated else 3)


@pytest.mark.parametrize(
    ("attention", "block", "changes", "dtype", "accumulated"),
    [
        ("log_space", "glu", {}, torch.float32, True),
        ("softmax", "mlp", {"n_layer": 3}, torch.bfloat16, False),
        ("softmax", "glu", {"n_vocab": 9000}, torch.float32, True),  # the loss is most of it, in several parts
        ("softmax", "glu", {"n_vocab": 9000, "logit_cap": 15.0}, torch.float32, True),
        ("log_space", "mlp", {"n_vocab": 257, "n_embd": 128}, torch.bfloat16, False),  # and here a backward pass
    ],
)
@pytest.mark.slow
def test_the_peak_is_what_torch_allocates(attention, block, changes, dtype, accumulated, monkeypatch):
    monkeypatch.setitem(linear_cross_entropy.LOGITS, "cpu", 2**25)
    # Some MB for an operator at work, which count in small models only.
    monkeypatch.setattr(chunked_attention, "STEP", 2**16)
    config = config_of(attention, block, **changes)
    predicted = step_memory(on_meta(config), B, T, compute(dtype)).peak
    assert predicted == pytest.approx(allocated_peak(GPT(config), dtype, accumulated), rel=0.15)


def test_processes_share_or_send():
    gpt = on_meta(config_of(n_layer=6))
    cuda = compute(torch.bfloat16, "cuda")
    one, ddp = (step_memory(gpt, 1, T, cuda, n) for n in (1, 4))
    assert one == step_memory(gpt, 1, T, cuda, 4, accumulated=False)  # gradients are sent from where they are
    parts = step_memory(gpt, 1, T, cuda, 4, fsdp=True)
    at_once = step_memory(gpt, 1, T, cuda, 4, fsdp=True, accumulated=False)
    assert one.weights == one.gradients == gpt.n_params() * 4
    assert ddp == one._replace(gradients=2 * one.gradients)
    assert (4 * parts.weights, 4 * parts.optimizer) == pytest.approx((one.weights, one.optimizer), abs=16)
    assert parts.gradients == one.gradients + parts.weights  # whole until the last micro-batch
    assert at_once.gradients == parts.weights
    matrices = sum(m.weight.numel() for m in gpt.blocks.modules() if isinstance(m, torch.nn.Linear))
    assert parts.activations == at_once.activations == one.activations - 2 * matrices  # autocast has nothing to cast
