"""runtime.micro_batch=auto finds the fewest equal micro-batches that fit. Trials run on a CPU, called a GPU."""

import math
import weakref

import pytest
import ranks
import torch
from faults import metrics
from test_torchrun import assert_same_steps
from torch import nn

from common.settings import UserError, decode
from model.config import GPTConfig
from model.gpt import GPT
from runtime.checkpoint import find_newest, open_checkpoint
from runtime.device import Compute, RuntimeConfig
from runtime.distributed import World
from trainer.micro_batch import choose_micro_batch
from trainer.step import SummedLoss

pytestmark = pytest.mark.usefixtures("restored_torch")

CPU = Compute(torch.device("cpu"), torch.float32)


class Limited(nn.Module):
    """Has memory for `limit` sequences and no more, forward or backward."""

    def __init__(self, limit, where="forward", error=None):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.limit = limit
        self.where = where
        self.error = error
        self.sizes = []
        self.held = []

    def forward(self, ids, targets):
        assert ids.shape == targets.shape == (len(ids), 16)
        assert self.weight.grad is not None, "a trial has the gradients of the micro-batch before"
        self.sizes.append(len(ids))
        x = torch.ones(len(ids), 100) * self.weight[0]
        self.held.append(weakref.ref(x))
        if len(ids) > self.limit:
            if self.where == "forward":
                self.fail()
            x.register_hook(self.fail)
        return x.exp().sum()

    def fail(self, *grad):
        raise self.error or torch.OutOfMemoryError("CUDA out of memory: injected")


def tiny_gpt():
    raw = {"n_vocab": 257, "n_layer": 2, "n_head": 2, "n_embd": 16, "block": {"name": "mlp"}}
    raw |= {"attention": {"name": "log_space"}, "position": {"name": "log_recurrence"}}
    torch.manual_seed(0)
    return SummedLoss(GPT(decode(GPTConfig, raw)))


@pytest.fixture
def choose(monkeypatch):
    """Chooses among at most so many sequences."""
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (0, 1000))
    return lambda module, share: choose_micro_batch(module, share, 16, CPU, World(CPU.device))


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("share", [1, 2, 7, 20, 60])
def test_the_fewest_that_fit_are_found(choose, where, share, capsys):
    for limit in range(1, share + 2):
        module = Limited(limit, where)
        chosen = choose(module, share)
        assert chosen == max(size for n in range(1, share + 1) if (size := math.ceil(share / n)) <= limit)
        assert capsys.readouterr().out.startswith(f"runtime.micro_batch=auto: {chosen} of up to {share} sequences, ")
        assert max(module.sizes) <= share
        assert len(module.sizes) <= 2 + 2 * math.log2(share)
        assert all(tensor() is None for tensor in module.held)
        assert module.weight.grad is None


def test_not_even_one_is_a_line_for_the_user(choose):
    with pytest.raises(UserError, match=r"one sequence does not fit in the [\d.]+ GB of the CPU"):
        choose(Limited(0), 8)


def test_a_library_that_finds_no_room_lacks_memory(choose):
    error = RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`")
    assert choose(Limited(2, error=error), 8) == 2


@pytest.mark.parametrize(
    "error", [RuntimeError("shapes do not match"), ValueError("out of memory"), KeyboardInterrupt()]
)
def test_other_errors_pass(choose, error):
    module = Limited(2, error=error)
    with pytest.raises(type(error)) as caught:
        choose(module, 8)
    assert caught.value is error
    assert module.weight.grad is None


def test_it_leaves_no_trace_and_compiles_nothing(choose):
    def refuse(graph, inputs):
        raise AssertionError("compiled")

    module = tiny_gpt()
    same = tiny_gpt()
    for block in module.gpt.blocks:
        block.compile(backend=refuse)
    random = torch.get_rng_state()
    assert choose(module, 4) == 4
    assert torch.equal(torch.get_rng_state(), random)
    assert all(p.grad is None for p in module.parameters())
    for p, q in zip(module.parameters(), same.parameters(), strict=True):
        assert torch.equal(p, q)
    with pytest.raises(Exception, match="compiled"):
        module(*torch.zeros(2, 1, 16, dtype=torch.int64))


@pytest.mark.slow
def test_two_processes_agree_on_what_the_poorer_one_can_do():
    script = """
import torch
from tests.trainer.test_micro_batch import CPU, Limited, choose_micro_batch
from runtime.distributed import join_world

torch.cuda.mem_get_info = lambda device: (0, 1000)
with join_world(CPU.device) as world:
    for where in ("forward", "backward"):
        module = world.wrap(Limited((5, 3)[world.rank], where))
        print("chosen", choose_micro_batch(module, 16, 16, CPU, world))
        module.module.limit = 1000
        module.module.weight.grad = torch.zeros(3)
        module(*torch.zeros(2, 1 + world.rank, 16, dtype=torch.int64)).backward()  # gradients are shared as ever
        print("gradient", module.module.weight.grad[0].item())
"""
    for rank, result in enumerate(ranks.run(2, "-c", script)):
        lines = [line.split() for line in result.out.splitlines()]
        assert [int(line[1]) for line in lines if line[0] == "chosen"] == [3, 3]
        gradients = [float(line[1]) for line in lines if line[0] == "gradient"]
        assert gradients == pytest.approx([1.5 * 100 * math.e] * 2, rel=1e-6)  # the mean of one and two sequences
        assert result.out.count("micro_batch=auto: 3") == (2 if rank == 0 else 0)


def test_a_run_has_the_losses_of_any_other_micro_batch_and_keeps_what_was_chosen(
    command, tiny_args, tmp_path, monkeypatch
):
    args = [*tiny_args, "eval.every=5"]
    assert command("train", *args, "runtime.micro_batch=1", f"run_dir={tmp_path / 'one'}").status == 0
    monkeypatch.setattr(RuntimeConfig, "micro_batch_on", lambda *_: None)  # as on a GPU
    monkeypatch.setattr("trainer.start.choose_micro_batch", lambda *_: 3)  # which does not divide 4 sequences
    args += ["runtime.micro_batch=auto"]
    assert command("train", *args, f"run_dir={tmp_path / 'whole'}").status == 0
    assert command("train", *args, "stop_at=2").status == 0
    monkeypatch.setattr("trainer.start.choose_micro_batch", lambda *_: 1)
    assert "resuming" in command("train", *args).out
    assert_same_steps(tmp_path / "one", tmp_path / "whole", tolerance=1e-5)
    a, b = (find_newest(tmp_path / name) for name in ("whole", "run"))
    assert open_checkpoint(a).state.micro_batch == open_checkpoint(b).state.micro_batch == 3
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (a / name).read_bytes() == (b / name).read_bytes(), name
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "run")


@pytest.mark.parametrize(
    ("settings", "device", "size"),
    [
        ({}, "cuda", None),
        ({}, "cpu", 8),
        ({"strategy": "fsdp"}, "cuda", 8),
        ({"context_parallel": 2}, "cuda", 8),
        ({"micro_batch": 3}, "cuda", 3),
    ],
)
def test_sizes_are_tried_where_that_is_possible(settings, device, size):
    assert decode(RuntimeConfig, settings).micro_batch_on(torch.device(device)) == size


@pytest.mark.gpu(alone=True)
def test_a_gpus_memory_is_used_but_for_a_reserve(request):
    """Of a fifth, more than half is reserved. The rest is left to the tests that run at the same time."""
    compute = Compute(torch.device("cuda"), torch.float32)
    module = tiny_gpt().cuda()
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    request.addfinalizer(lambda: torch.cuda.set_per_process_memory_fraction(1.0))
    torch.cuda.set_per_process_memory_fraction(0.2)
    before = torch.cuda.memory_allocated()
    chosen = choose_micro_batch(module, 2**16, 512, compute, World(compute.device))
    assert 1 <= chosen < 2**16
    assert torch.cuda.memory_allocated() <= before + 2**26  # but for what libraries keep
    for _ in range(2):
        module(*torch.zeros(2, chosen, 512, dtype=torch.int64, device="cuda")).backward()
    optimizer.step()


def test_what_is_compiled_by_itself_stays_so_in_trials(choose):
    """FlexAttention, uncompiled, would need more memory."""
    compiled = []
    double = torch.compile(lambda x: 2 * x, backend=lambda graph, inputs: compiled.append(graph) or graph)
    module = tiny_gpt()
    module.gpt.norm.register_forward_hook(lambda norm, inputs, x: double(x))
    module.gpt.blocks[0].compile(backend="eager")
    choose(module, 4)
    assert len(compiled) == 1
