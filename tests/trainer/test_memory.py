"""The predicted memory is what autograd saves, what torch allocates, and what a process takes."""

import gc
import itertools

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from common.settings import decode, variant_names
from model.attention import ATTENTION
from model.gpt import GPT, GPTConfig
from model.ops import linear_cross_entropy
from model.ops.log_attention import chunks
from runtime.device import Runtime
from trainer.memory import step_memory
from trainer.optim import AdamWConfig
from trainer.step import SummedLoss

B, T = 4, 512
MODELS = [
    *itertools.product(["log_space", "softmax"], ["glu", "mlp"], ["log_recurrence"]),
    ("softmax", "mlp", "learned"),
    *((name, "glu", "rotary" if cls.suits_rotary else "none") for cls in ATTENTION for name in variant_names(cls)),
]
DTYPES = [torch.float32, torch.bfloat16]


def config_of(attention="log_space", block="glu", position="log_recurrence", **changes):
    raw = {"n_vocab": 1000, "n_layer": 2, "n_head": 4, "n_embd": 96}
    raw |= {
        "attention": {"name": attention} if isinstance(attention, str) else attention,
        "block": {"name": block},
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


def runtime(dtype, device="cpu"):
    return Runtime(torch.device(device), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("attention", "block", "position"), MODELS)
def test_activations_are_what_autograd_saves(attention, block, position, dtype):
    config = config_of(attention, block, position)
    predicted = step_memory(on_meta(config), B, T, runtime(dtype)).activations
    # Left out are rotary angles, a few numbers a position for all sequences, and the like.
    assert predicted == pytest.approx(saved_bytes(GPT(config), dtype), rel=0.02)


@pytest.mark.parametrize(
    ("attention", "block", "dtype", "recompute"),
    [
        (*model, DTYPES[j], how)
        for i, model in enumerate([("log_space", "glu"), ("softmax", "mlp"), ("log_space_signed", "mlp")])
        for j, how in [(i % 2, "block"), (1 - i % 2, "selective")]  # has all pairs
    ],
)
def test_what_is_computed_again_is_not_kept(attention, block, dtype, recompute):
    """Of each further layer, the predicted bytes are those that torch holds more between forward and backward pass."""
    predicted, held = [], []
    for n_layer in (1, 2):
        config = config_of(attention, block, "none", n_layer=n_layer)
        tokens, of_weights = (
            step_memory(on_meta(config), *size, runtime(dtype), recompute=recompute).activations
            for size in ((B, T), (0, T))
        )
        predicted.append(tokens - of_weights)
        gpt = GPT(config)
        gpt.recompute = recompute
        gc.disable()  # blocks that compute again refer to themselves
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            loss = loss_of(gpt, dtype)
        gc.enable()
        held.append(sum(event.nbytes() for event in allocations(profiled)))
        del loss
    assert predicted[1] - predicted[0] == pytest.approx(held[1] - held[0], rel=0.02)


def test_layers_that_take_turns_and_shared_heads_are_counted_each_as_it_is():
    pattern = ["log_space", {"name": "softmax", "n_kv_head": 2}, "linear"]
    config = config_of(attention_pattern=pattern, n_layer=4, pad_vocab=64, head_dim=16, ngrams=[1, 2, 4])
    predicted = step_memory(on_meta(config), B, T, runtime(torch.float32)).activations
    assert predicted == pytest.approx(saved_bytes(GPT(config), torch.float32), rel=0.02)


def test_longer_sequences_and_larger_micro_batches_keep_in_proportion():
    gpt = on_meta(config_of())
    short, long, more = (
        step_memory(gpt, *size, runtime(torch.float32)).activations for size in ((2, T), (2, 4 * T), (8, T))
    )
    of_weights = gpt.embed.weight.numel() * 4
    assert long == more
    assert long - of_weights == pytest.approx(4 * (short - of_weights))


def test_a_kernel_that_this_machine_lacks_keeps_the_same():
    own, asked = (
        step_memory(on_meta(config_of(attention={"name": "softmax", "kernel": kernel})), B, T, runtime(torch.bfloat16))
        for kernel in ("auto", "cudnn")
    )
    assert own == asked


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


@pytest.mark.parametrize(("dtype", "accumulated"), [(torch.float32, True), (torch.bfloat16, False)], ids=str)
@pytest.mark.parametrize(
    ("attention", "block", "changes"),
    [
        ("log_space", "glu", {}),
        ("softmax", "mlp", {"n_layer": 3}),
        ("softmax", "glu", {"n_vocab": 9000}),  # the loss is most of it, in several parts
        ("log_space", "mlp", {"n_vocab": 257, "n_embd": 128}),  # and here a layer's backward pass
    ],
)
def test_the_peak_is_what_torch_allocates(attention, block, changes, dtype, accumulated, monkeypatch):
    monkeypatch.setitem(linear_cross_entropy.CHUNK, "cpu", 2**25)
    monkeypatch.setattr(chunks, "STEP", 2**16)  # some MB for an operator at work, which count in small models only
    config = config_of(attention, block, **changes)
    predicted = step_memory(on_meta(config), B, T, runtime(dtype)).peak
    assert predicted == pytest.approx(allocated_peak(GPT(config), dtype, accumulated), rel=0.15)


@pytest.mark.parametrize("recompute", ["block", "selective"])
def test_the_peak_falls_as_predicted(recompute):
    config = config_of("log_space", "mlp", n_layer=6)
    plain, predicted = (
        step_memory(on_meta(config), B, T, runtime(torch.float32), recompute=how).peak for how in ("none", recompute)
    )
    gpt = GPT(config)
    gpt.recompute = recompute
    allocated = allocated_peak(gpt, torch.float32)
    assert predicted == pytest.approx(allocated, rel=0.15)
    assert allocated < 0.8 * plain


def test_processes_share_or_send():
    gpt = on_meta(config_of(n_layer=6))
    cuda = runtime(torch.bfloat16, "cuda")
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
