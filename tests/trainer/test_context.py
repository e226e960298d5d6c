"""Processes that share sequences compute what one process computes, and send as much for long ones."""

import json

import pytest
import ranks
from test_torchrun import assert_same_checkpoint, assert_same_steps

from runtime.checkpoint import find_newest

pytestmark = pytest.mark.usefixtures("restored_torch")

# Loss, gradients and bytes of a process, beside those of a single process that has the whole sequence.
SCRIPT = """
import json, sys
import torch
from common.settings import decode
from model.config import GPTConfig
from model.gpt import GPT
from trainer.long_sequences import share_sequences
from runtime.distributed import SequenceGroup, join_world

sent, send = [], SequenceGroup.send
SequenceGroup.send = lambda group, tensor, steps: (sent.append(tensor.nbytes), send(group, tensor, steps))

def measure(world, group, settings, T):
    torch.manual_seed(0)
    gpt = GPT(decode(GPTConfig, {"n_vocab": 64, "n_layer": 3, "n_head": 2, "n_embd": 32} | settings), eot_id=5).double()
    for p in gpt.parameters():  # none is 0, so that all have gradients
        p.data.add_(0.02 * torch.randn_like(p))
    ids, targets = torch.randint(8, (2, T)), torch.randint(64, (2, T))  # strings of 2 occur again
    whole = gpt.summed_loss(ids, targets)
    gradients = torch.autograd.grad(whole, list(gpt.parameters()))
    sent.clear()
    gpt.recompute = "block"
    ids, targets = (x.chunk(group.size, dim=1)[group.place] for x in (ids, targets))
    with share_sequences(gpt, group):
        loss = gpt.summed_loss(ids, targets)
    loss.backward()
    errors = [(world.sum(p.grad) - g).abs().max() / g.abs().max() for p, g in zip(gpt.parameters(), gradients)]
    errors.append((world.sum(loss.detach()) - whole.detach()).abs() / whole.detach())
    return torch.stack(errors).max().item(), sum(sent)

with join_world(torch.device("cpu")) as world:
    group, models = SequenceGroup(world, world.size), json.loads(sys.argv[1])
    found = {name: [measure(world, group, model, 4 * T) for T in (13, 67)] for name, model in models.items()}
    if world.is_main:
        print(json.dumps(found))
"""

MODELS = {
    "log_space with gates": ({"name": "log_space", "decay": "head", "product": True}, "none", "mlp"),
    "published": ({"name": "log_space"}, "log_recurrence", "glu"),
    "signed": ({"name": "log_space_signed", "decay": "head"}, "none", "mlp"),
    "linear": ({"name": "linear", "decay": "head", "gate": "silu"}, "rotary", "mlp"),
    "window": ({"name": "sliding_window", "window": 9}, "rotary", "mlp"),
}


@pytest.mark.slow
def test_gradients_are_those_of_the_whole_sequence():
    models = {}
    for name, (attention, position, block) in MODELS.items():
        models[name] = {"attention": attention, "position": {"name": position}, "block": {"name": block}}
        models[name] |= {"ngrams": [1, 2]} if "gates" in name else {}
        models[name]["block"] |= {"conv": 4} if block == "mlp" else {}
    results = ranks.run(4, "-c", SCRIPT, json.dumps(models))
    for name, (short, long) in json.loads(results[0].out.splitlines()[-1]).items():
        assert max(short[0], long[0]) < 1e-9, name
        assert short[1] == long[1] > 0, name


@pytest.mark.slow
def test_a_run_in_groups_is_the_run_of_one_process(train_in_processes):
    """Two groups of two processes; the run goes on in one process, and in one group of four."""
    whole = train_in_processes("whole", 1)
    shared = train_in_processes("shared", 4, "runtime.context_parallel=2")
    assert_same_steps(whole, shared, tolerance=1e-9)
    assert_same_checkpoint(find_newest(whole), find_newest(shared), tolerance=1e-9)
    for stop_at, processes, context in [(2, 2, 2), (4, 1, 1), (6, 4, 4)]:
        mixed = train_in_processes("mixed", processes, f"runtime.context_parallel={context}", f"stop_at={stop_at}")
    assert_same_steps(whole, mixed, tolerance=1e-9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("context_parallel=2 model/attention=softmax", "needs a state of one size, and that of softmax grows"),
        ("context_parallel=3", "runtime.context_parallel=3 does not divide seq_len=16: use a divisor"),
        ("context_parallel=2 runtime.strategy=fsdp", "does not work with runtime.strategy=fsdp: use ddp"),
        ("context_parallel=2 runtime.compile=true", "does not work with runtime.compile=true: use false"),
        ("context_parallel=2 runtime.sequence_chunk=8", "does not work with runtime.sequence_chunk=8: use null"),
        ("context_parallel=2", "does not divide 1 processes: start 2 or a multiple of it with torchrun"),
    ],
)
@pytest.mark.slow
def test_what_does_not_fit_is_refused(command, tiny_args, options, message):
    result = command("train", *tiny_args, *f"runtime.{options}".split())
    assert result.status == (1 if "1 processes" in message else 2)
    assert message in result.err
    assert result.err.count("\n") == 1
