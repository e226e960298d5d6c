"""Training, saving and evaluation with fsdp give the results of ddp, where every process has the whole model."""

import pytest
import ranks
import torch
from printed import assert_one_line
from test_torchrun import assert_same_checkpoint, assert_same_steps

from common.settings import UserError
from runtime.checkpoint import find_newest
from runtime.distributed import World

pytestmark = pytest.mark.usefixtures("restored_torch")


@pytest.mark.slow
@pytest.mark.parametrize("option", ["optim=adamw", "optim=muon"])
def test_a_run_goes_from_whole_to_shared_and_back(train_in_processes, option):
    """Same losses, norms, evaluations, files and tensors in checkpoints; of 257 rows each process has its part."""
    options = option, "optim.transfer={n_embd:8,n_layer:1}"
    whole = train_in_processes("whole", 2, "runtime.strategy=ddp", *options)
    for stop_at, processes, strategy in [(2, 2, "ddp"), (4, 2, "fsdp"), (5, 1, "fsdp"), (6, 2, "fsdp")]:
        mixed = train_in_processes("mixed", processes, f"runtime.strategy={strategy}", f"stop_at={stop_at}", *options)
        assert find_newest(mixed).name == f"step-{stop_at:08}"
    assert_same_steps(whole, mixed, tolerance=1e-9)
    assert_same_checkpoint(find_newest(whole), find_newest(mixed), tolerance=1e-9)
    files = [sorted(path.name for path in find_newest(run).iterdir()) for run in (whole, mixed)]
    assert files[0] == files[1]


ONE_AT_A_TIME = """
import runpy, weakref
from runtime.checkpoint import Saver
from runtime.distributed import World

unshard, save, gathered, saves = World.unshard, Saver.save, [], []

def counting(world, tensor):
    assert all(tensor() is None for tensor in gathered), "another one is there"
    whole = unshard(world, tensor)
    if whole is not tensor and whole.dim():
        gathered.append(weakref.ref(whole))
    return whole

def saving(saver, tensors, state):
    gathered.clear()
    save(saver, tensors, state)
    assert len(gathered) > 20
    saves.append(state.step)

World.unshard, Saver.save = counting, saving
runpy.run_path("train.py", run_name="__main__")
assert saves[-1] == 6
"""


@pytest.mark.slow
def test_a_save_gathers_one_parameter_after_the_other(tiny_args):
    ranks.run(2, "-c", ONE_AT_A_TIME, *tiny_args, "runtime.strategy=fsdp")


@pytest.mark.slow
def test_in_bfloat16_the_bytes_are_those_of_ddp_that_keeps_all_activations(train_in_processes):
    """Blocks' matrices are sent in bfloat16, to which autocast rounds them: every operation is the same.

    The sum of two processes' gradients has no order. Gradients are not clipped, because the norm sums in another order.
    """
    options = "runtime.dtype=bfloat16", "optim.grad_clip=null", "max_steps=3", "runtime.micro_batch=1"
    options += ("model.ngrams=[1,2]",)
    kept, *others = (
        find_newest(
            train_in_processes(
                f"{strategy}-{how}", 2, f"runtime.strategy={strategy}", f"runtime.recompute={how}", *options
            )
        )
        for strategy, how in [("ddp", "none"), ("ddp", "selective"), ("fsdp", "none"), ("fsdp", "block")]
    )
    for checkpoint in others:
        assert_same_checkpoint(kept, checkpoint, tolerance=0)


@pytest.mark.slow
def test_compiled_blocks_train_as_well(train_in_processes):
    short = "max_steps=2", "schedule.warmup_steps=1"
    plain = train_in_processes("plain", 1, *short)
    how = "runtime.strategy=fsdp", "runtime.compile=true", "runtime.recompute=selective"
    shared = train_in_processes("shared", 2, *short, *how)  # C++ compilers may take minutes
    assert_same_steps(plain, shared, tolerance=1e-9)


def test_without_a_launcher_it_is_told_how(command, tiny_args):
    result = command("train", *tiny_args, "runtime.strategy=fsdp")
    assert_one_line(result, "=fsdp needs ", ": start them with torchrun ", " instead of python, or")


def test_alone_nothing_is_shared():
    world = World(torch.device("cpu"))
    value = torch.arange(3.0)
    assert world.unshard(value) is value
    assert torch.equal(world.shard_like(value, torch.zeros(3)), value)
    assert [v.tolist() for v in world.gather(value)] == [[0, 1, 2]]
    with pytest.raises(UserError, match="torchrun"):
        world.wrap(torch.nn.Linear(1, 1), fsdp=True)


PARTS = """
import json, torch
from torch.distributed.tensor import DTensor
from runtime.distributed import join_world

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(3, 5, bias=False)])
        self.scale = torch.nn.Parameter(torch.tensor([2.0]))  # one row: fewer than processes
    def summed_loss(self, x):
        return (self.blocks[0](x) * self.scale).sum()
    def token_losses(self, x):
        return self.blocks[0](x) * self.scale

class Loss(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gpt = Model()
    def forward(self, x):
        return self.gpt.summed_loss(x)

with join_world(torch.device("cpu")) as world:
    torch.manual_seed(1)
    module = Loss().double()
    before = {key: value.clone() for key, value in module.state_dict().items()}
    wrapped = world.wrap(module, fsdp=True, dtype=torch.float64)
    for key, value in module.state_dict().items():
        assert isinstance(value, DTensor), key
        assert torch.equal(world.unshard(value), before[key]), key
        part = world.shard_like(before[key].float() + 1, value)  # another dtype: it becomes the parameter's
        assert part.dtype == torch.float64
        assert part.to_local().shape == value.to_local().shape, key
        torch.testing.assert_close(world.unshard(part), before[key] + 1, atol=1e-6, rtol=0)
        assert part.to_local().untyped_storage().nbytes() == part.to_local().nbytes  # not a view of the whole

    x = torch.full((2, 3), 1.0 + world.rank, dtype=torch.float64)
    with torch.no_grad():
        module.gpt.token_losses(x)
    assert all(isinstance(p, DTensor) for p in module.parameters())  # given back after a forward pass alone
    for now in (False, True):
        with world.sync_gradients(wrapped, now):
            wrapped(x).backward()
        assert all((p.grad is not None) == now for p in module.parameters())  # nothing is sent before the last
    mean = sum(1.0 + rank for rank in range(world.size)) / world.size
    gradient = module.gpt.blocks[0].weight.grad
    expected = torch.full((5, 3), 2 * 2 * 2.0 * mean, dtype=torch.float64)
    torch.testing.assert_close(world.unshard(gradient), expected)
    norm = world.unshard(torch.nn.utils.get_total_norm([p.grad for p in module.parameters()]))
    assert type(norm) is torch.Tensor and norm.dim() == 0 and norm > gradient.to_local().norm()
    seen = world.gather(torch.tensor([world.rank], dtype=torch.uint8))
    assert [int(value) for value in seen] == list(range(world.size))

    module = Loss()
    world.wrap(module, fsdp=True, dtype=torch.bfloat16)
    def whole(block, inputs):
        assert not isinstance(block.weight, DTensor)
        assert (block.weight.dtype, module.gpt.scale.dtype) == (torch.bfloat16, torch.float32)
        assert inputs[0].dtype == torch.float32  # the residual stream is not rounded
        seen.append(block)
    module.gpt.blocks[0].register_forward_pre_hook(whole)
    seen.clear()
    with torch.autocast("cpu", torch.bfloat16):
        module(x.float()).backward()
    assert len(seen) == 1
    assert {t.dtype for p in module.parameters() for t in (p, p.grad)} == {torch.float32}
"""


@pytest.mark.slow
def test_parts_and_wholes():
    """Every process has its rows and nothing else; unshard and shard_like undo each other; gradients are means."""
    assert [result.err for result in ranks.run(3, "-c", PARTS)] == [""] * 3


INITIAL = """
import itertools
import torch
from torch.profiler import ProfilerActivity, profile
from tests.tools.test_step_memory import allocations, config_of
from model.gpt import GPT
from runtime.distributed import join_world
from trainer.step import SummedLoss

with join_world(torch.device("cpu")) as world:
    of_others = {"block": "mlp", "position": "learned", "tied": False, "norm": "rms", "bias": False}
    for changes in ({"n_layer": 12, "ngrams": [1, 2]}, of_others):
        config = config_of(**changes)
        with torch.device("meta"):
            gpt = GPT(config).double()
        world.wrap(SummedLoss(gpt), fsdp=True, dtype=torch.float64)
        torch.manual_seed(7)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            gpt.to_empty(device=world.device).init_weights(world.shard_like)
        last = torch.rand(1)
        torch.manual_seed(7)
        expected = GPT(config).double().state_dict()
        assert torch.equal(torch.rand(1), last)
        for key, value in gpt.state_dict().items():
            assert torch.equal(world.unshard(value), expected[key]), key
        if config.n_layer == 12:
            peak = max(itertools.accumulate(event.nbytes() for event in allocations(profiled)))
            weights = sum(value.nbytes for value in expected.values())
            block = sum(value.nbytes for key, value in expected.items() if key.startswith("blocks.0."))
            assert peak < weights / world.size + 4 * block < 0.9 * weights, (peak, weights, block)
"""


@pytest.mark.slow
def test_first_weights_are_those_of_ddp_and_are_never_whole():
    ranks.run(2, "-c", INITIAL)
