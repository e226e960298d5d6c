"""The memory that a plan foresees is what autograd saves, what torch allocates, and what a process takes."""

import itertools

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from common.settings import decode
from model.gpt import GPT, GPTConfig
from tools.plan.memory import Numbers, kept_for_backward, step_memory
from trainer.optim import AdamWConfig
from trainer.step import SummedLoss

B, T = 4, 512
COUNTED = [
    *itertools.product(["log_space", "softmax"], ["glu", "mlp"], ["log_recurrence"]),
    ("log_space", "glu", "rotary"),
    ("softmax", "glu", "rotary"),
    ("softmax", "mlp", "learned"),
]
MEASURED = ["fixed", "linear", "log_space_signed", "longformer", "projection", "sliding_window", "strided"]
DTYPES = [torch.float32, torch.bfloat16]


def config_of(attention="log_space", block="glu", position="log_recurrence", **changes):
    raw = {"n_vocab": 1000, "n_layer": 2, "n_head": 4, "n_embd": 96}
    raw |= {"attention": {"name": attention}, "block": {"name": block}, "position": {"name": position}}
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("attention", "block", "position"), COUNTED)
def test_activations_are_what_autograd_saves(attention, block, position, dtype):
    config = config_of(attention, block, position)
    foreseen = kept_for_backward(on_meta(config), B, T, Numbers("cpu", dtype))
    # Left out are rotary angles, a few numbers a position for all sequences, and the like.
    assert foreseen == pytest.approx(saved_bytes(GPT(config), dtype), rel=0.02)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("attention", MEASURED)
def test_activations_of_other_mechanisms_follow_from_one_layers(attention, dtype):
    config = config_of(attention, position="rotary")
    foreseen = kept_for_backward(on_meta(config), B, T, Numbers("cpu", dtype))
    assert foreseen == pytest.approx(saved_bytes(GPT(config), dtype), rel=0.02)


def test_layers_that_take_turns_and_shared_heads_are_counted_each_as_it_is():
    pattern = ["log_space", {"name": "softmax", "n_kv_head": 2}, "linear"]
    config = config_of(attention_pattern=pattern, n_layer=4, pad_vocab=64, head_dim=16)
    foreseen = kept_for_backward(on_meta(config), B, T, Numbers("cpu", torch.float32))
    assert foreseen == pytest.approx(saved_bytes(GPT(config), torch.float32), rel=0.02)


def allocated_peak(gpt, dtype, accumulated):
    """The most that torch holds at any time of a whole step, the model and its optimizer included."""
    optimizer = AdamWConfig(name="adamw").build(gpt)
    if accumulated:
        for p in gpt.parameters():
            p.grad = torch.zeros_like(p)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        loss_of(gpt, dtype).backward()
        torch.nn.utils.clip_grad_norm_(gpt.parameters(), 1.0)
        optimizer.step()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    during = max(itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))
    return during + sum(p.nbytes for p in gpt.parameters()) * (4 if accumulated else 3)


@pytest.mark.parametrize("accumulated", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("attention", "block", "changes"),
    [
        ("log_space", "glu", {}),
        ("softmax", "mlp", {"n_layer": 3}),
        ("softmax", "glu", {"n_vocab": 9000}),  # the loss is most of it, in several parts
        ("log_space", "mlp", {"n_vocab": 257, "n_embd": 128}),  # and here a layer's backward pass
    ],
)
def test_the_peak_is_what_torch_allocates(attention, block, changes, dtype, accumulated):
    config = config_of(attention, block, **changes)
    foreseen = step_memory(on_meta(config), B, T, Numbers("cpu", dtype), accumulated).peak
    assert foreseen == pytest.approx(allocated_peak(GPT(config), dtype, accumulated), rel=0.15)


CHILD = """
import os, sys
import torch
from trainer.optim import AdamWConfig
from tests.tools.test_memory import Numbers, config_of, loss_of, step_memory, GPT
torch.set_num_threads(1)
def resident(which):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(which)) * 1024
loss_of(GPT(config_of(*sys.argv[1:])), torch.float32, 1).backward()  # what libraries take for themselves
before = resident("VmRSS")
gpt = GPT(config_of(*sys.argv[1:], n_layer=4, n_embd=128))
optimizer = AdamWConfig(name="adamw").build(gpt)
for _ in range(2):
    loss_of(gpt, torch.float32, 4).backward()
optimizer.step()
print(step_memory(gpt, 4, 512, Numbers("cpu", torch.float32), True).peak / (resident("VmHWM") - before))
"""


@pytest.mark.parametrize("model", [("log_space", "glu"), ("softmax", "mlp")], ids="-".join)
@pytest.mark.slow
def test_the_peak_is_what_a_process_takes(model, run_process, monkeypatch):
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(2**20))  # what is freed goes back to the system
    (child,) = run_process(["-c", CHILD, *model])
    assert child.status == 0, child.err
    assert float(child.out.split()[-1]) == pytest.approx(1, rel=0.15)


def test_processes_share_or_send():
    gpt = on_meta(config_of(n_layer=6))
    numbers = Numbers("cuda", torch.bfloat16)
    one, ddp = (step_memory(gpt, 1, T, numbers, False, n) for n in (1, 4))
    fsdp = step_memory(gpt, 1, T, numbers, False, 4, fsdp=True)
    assert one.weights == one.gradients == gpt.n_params() * 4
    assert ddp == one._replace(gradients=2 * one.gradients)
    assert [4 * part for part in fsdp[:3]] == pytest.approx(one[:3], abs=16)
    assert fsdp.activations == one.activations


def test_triton_kernels_keep_a_state_for_each_chunk(monkeypatch):
    """The sizes are those of model/ops/log_attention/triton.py, of which this test runs the part that allocates."""
    triton = pytest.importorskip("model.ops.log_attention.triton", reason="triton is not installed")
    config = config_of(n_layer=1, n_embd=128, position="none")
    with torch.device("meta"):
        q, k, v = torch.empty(3, 1, 4, T, 32, dtype=torch.bfloat16).unbind()
        states = sum(x.nbytes for x in triton._empty_results(q, k, v, None, True, False, True)[3:])
    cuda, cpu = (kept_for_backward(on_meta(config), 1, T, Numbers(name, torch.bfloat16)) for name in ("cuda", "cpu"))
    blocks = -(-8 // max(1, 2**17 // (4 * 64 * 32)))
    states_on_cpu, result = (blocks + 3) * 4 * 32 * 33 * 4, T * 128 * 4
    assert cuda - states == pytest.approx(cpu - states_on_cpu - result, rel=0.02)
