"""runtime.micro_batch=auto finds the largest size that fits, whatever limits the memory."""

import math
import weakref

import pytest
import ranks
import torch
from alone import open_run
from faults import metrics
from test_torchrun import assert_same_steps
from torch import nn

from common.memory import available_memory, out_of_memory
from common.settings import UserError, decode
from model.gpt import GPT, GPTConfig
from trainer import micro_batch
from trainer.checkpoint import newest, open_checkpoint
from trainer.distributed import World
from trainer.memory import Memory, memory_of
from trainer.micro_batch import choose_micro_batch
from trainer.runtime import Runtime
from trainer.step import SummedLoss

pytestmark = pytest.mark.usefixtures("restored_torch")

CPU = Runtime(torch.device("cpu"), torch.float32)
ALONE = World(CPU.device)
GB = 10**9


@pytest.mark.parametrize(("share", "warns"), [(0.75, False), (0.85, True)])
def test_a_plan_of_most_of_the_memory_is_said_before_the_model_is_made(tiny, monkeypatch, capsys, share, warns):
    config = tiny()
    with torch.device("meta"):
        gpt = GPT(config.model)
    room = int(memory_of(gpt, config, CPU, 1, 2).peak / share)
    monkeypatch.setattr(micro_batch, "available_memory", lambda: room)
    open_run(config)
    assert ("GB are available: use a smaller model, seq_len or" in capsys.readouterr().err) == warns


# What child processes begin with: a weight of 64 MiB, and 16 MiB that each sequence has kept for its backward pass.
CHILD = """
import os, sys, torch
from torch import nn
from trainer.distributed import World, join_world
from trainer.micro_batch import choose_micro_batch
from trainer.runtime import Runtime

class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2**24))

    def forward(self, ids, targets):
        return (torch.ones(len(ids), 2**21) * self.weight[0]).exp().sum()

runtime = Runtime(torch.device("cpu"), torch.float32)
"""


class Limited(nn.Module):
    """Has memory for `limit` sequences and no more, forward or backward."""

    def __init__(self, limit, where="forward", error=None):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.limit, self.where, self.error = limit, where, error
        self.sizes = []
        self.held = []

    def forward(self, ids, targets):
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


def tiny_gpt(attention="log_space", position="log_recurrence", block="mlp", n_embd=16):
    raw = {"n_vocab": 257, "n_layer": 2, "n_head": 2, "n_embd": n_embd, "block": {"name": block}}
    raw |= {"attention": {"name": attention}, "position": {"name": position}}
    torch.manual_seed(0)
    return SummedLoss(GPT(decode(GPTConfig, raw)))


def choose(module, share, predict=lambda size: 0):
    return choose_micro_batch(module, share, 16, predict, CPU, ALONE)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("share", [1, 2, 7, 20])
def test_the_largest_that_fits_is_found(where, share, capsys):
    for limit in range(1, share + 2):
        module = Limited(limit, where)
        chosen = choose(module, share)
        assert chosen == min(limit, share)
        assert capsys.readouterr().out.startswith(f"runtime.micro_batch=auto: {chosen} of up to {share} sequences, ")
        assert max(module.sizes) <= share
        assert len(module.sizes) <= 2 + 2 * math.log2(share)
        assert all(tensor() is None for tensor in module.held)
        assert module.weight.grad is None


def test_not_even_one_is_a_line_for_the_user(monkeypatch):
    with pytest.raises(UserError, match=r"one sequence does not fit in the [\d.]+ GB of the CPU"):
        choose(Limited(0), 8)
    monkeypatch.setattr(micro_batch, "available_memory", lambda: 1000)
    module = Limited(1000)
    with pytest.raises(UserError, match="one sequence does not fit"):
        choose(module, 20, lambda size: 501 * size)
    assert module.sizes == [], "no trial is needed where the prediction is enough"


@pytest.mark.parametrize(
    "error", [RuntimeError("shapes do not match"), ValueError("out of memory"), KeyboardInterrupt()]
)
def test_other_errors_pass(error):
    module = Limited(2, error=error)
    with pytest.raises(type(error)) as caught:
        choose(module, 8)
    assert caught.value is error
    assert module.weight.grad is None


def test_what_means_that_memory_is_out():
    with pytest.raises(RuntimeError) as real:
        torch.empty(2**50, dtype=torch.uint8)
    assert out_of_memory(real.value)
    assert out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    assert out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert out_of_memory(RuntimeError("could not create a primitive"))
    assert out_of_memory(ImportError("libtorch_cpu.so: failed to map segment from shared object"))
    assert out_of_memory(MemoryError())
    assert not out_of_memory(RuntimeError("could not create a primitive descriptor for a matmul primitive"))
    assert not out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not out_of_memory(OSError(28, "No space left on device"))


def test_it_leaves_no_trace():
    module, same = tiny_gpt(), tiny_gpt()
    random = torch.get_rng_state()
    assert choose(module, 4) == 4
    assert torch.equal(torch.get_rng_state(), random)
    assert all(p.grad is None for p in module.parameters())
    for p, q in zip(module.parameters(), same.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_trial_has_the_gradients_of_the_micro_batch_before():
    seen = []

    class Watched(Limited):
        def forward(self, ids, targets):
            assert ids.shape == targets.shape == (len(ids), 16)
            assert ids.dtype == targets.dtype == torch.int64
            seen.append(self.weight.grad is not None)
            return super().forward(ids, targets)

    assert choose(Watched(9), 1) == 1
    assert seen == [True]


def test_what_was_compiled_for_trials_is_forgotten():
    shapes = []

    def backend(graph, inputs):
        shapes.append([tuple(x.shape) for x in inputs if isinstance(x, torch.Tensor) and x.dtype == torch.int64])
        return graph.forward

    module = Limited(1000)
    module.compile(backend=backend)
    assert choose(module, 6) == 6
    shapes.clear()
    module(*torch.zeros(2, 6, 16, dtype=torch.int64))
    assert shapes  # compiled again,
    assert all(isinstance(n, int) for shape in shapes[0] for n in shape)  # for this size alone


@pytest.mark.parametrize(("fit", "processes"), [(1, 1), (5, 1), (5, 2), (12, 1)])
def test_no_more_than_half_of_a_cpus_memory_is_tried(fit, processes, monkeypatch):
    monkeypatch.setattr(micro_batch, "available_memory", lambda: 2 * processes * (100 + 10 * fit) + 7)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    module = Limited(1000)
    assert choose(module, 20, lambda size: 100 + 10 * size) == fit
    assert max(module.sizes) == fit


def group(folder, limit, used, cache):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 7\ninactive_file {cache}\n")


def test_available_memory_is_what_the_tightest_control_group_leaves(tmp_path):
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    physical = available_memory(proc, cgroups)  # nothing is known
    assert physical > 0
    (proc / "meminfo").write_text("MemTotal:       32000000 kB\nMemAvailable:   20000000 kB\n")
    assert available_memory(proc, cgroups) == 20_000_000 * 1024

    (proc / "self" / "cgroup").write_text("5:devices:/other\n0::/job/step\n")
    assert available_memory(proc, cgroups) == 20_000_000 * 1024  # the groups cannot be seen
    group(cgroups / "job" / "step", "max", 3 * GB, GB)
    assert available_memory(proc, cgroups) == 20_000_000 * 1024
    group(cgroups / "job", 8 * GB, 5 * GB, 2 * GB)
    assert available_memory(proc, cgroups) == 5 * GB
    group(cgroups, 4 * GB, 3 * GB, 0)  # as a container sees its own
    assert available_memory(proc, cgroups) == GB
    group(cgroups, 4 * GB, 5 * GB, 0)
    assert available_memory(proc, cgroups) == 0


LIMIT = f"""{CHILD}
import resource

def leave(mebibytes):
    used = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + mebibytes * 2**20, resource.RLIM_INFINITY))

def train(size):
    for _ in range(2):
        module(*torch.zeros(2, size, 16, dtype=torch.int64)).backward()
    optimizer.step()
    optimizer.zero_grad()

from trainer import micro_batch
module, world = Wide(), World(runtime.device)
optimizer = torch.optim.AdamW(module.parameters(), fused=True)
"""


@pytest.mark.slow
def test_a_limit_of_the_process_counts_as_its_memory_which_may_run_out_for_real(run_process):
    tried = f"""{LIMIT}
leave(600)
chosen = choose_micro_batch(module, 1000, 16, lambda size: 0, runtime, world)
train(chosen // 2)
print(chosen)
"""
    predicted = f"""{LIMIT}
leave(1200)
chosen = choose_micro_batch(module, 1000, 16, lambda size: (64 + 16 * size) * 2**20, runtime, world)
train(chosen)
print(chosen)
"""
    children = run_process(["-c", tried], ["-c", predicted])
    chosen = [int(child.out.split()[-1]) for child in children]
    # 600 MiB less the gradient, and another that is added to it, of 64 MiB each; or half of 1,200 MiB.
    assert 1 < chosen[0] <= (600 - 2 * 64) // 16
    assert 20 <= chosen[1] <= (600 - 64) // 16
    assert " in the 1.3 GB of the CPU" in children[1].out


@pytest.mark.slow
def test_two_processes_agree_on_what_the_poorer_one_can_do_and_sharded_weights_want_a_number():
    script = f"""{CHILD}
from common.settings import UserError
from tests.trainer.test_micro_batch import Limited, tiny_gpt
with join_world(runtime.device) as world:
    for where in ("forward", "backward"):
        module = world.wrap(Limited((5, 3)[world.rank], where))
        chosen = choose_micro_batch(module, 16, 16, lambda size: 0, runtime, world)
        module.module.limit = 1000
        module(*torch.zeros(2, 1 + world.rank, 16, dtype=torch.int64)).backward()  # gradients are shared as ever
        print("chosen", chosen, "gradient", module.module.weight.grad[0].item())
    try:
        choose_micro_batch(world.wrap(tiny_gpt(), fsdp=True), 16, 16, lambda size: 0, runtime, world)
    except UserError as error:
        print("refused:", error)
"""
    for rank, result in enumerate(ranks.run(2, "-c", script)):
        lines = [line.split() for line in result.out.splitlines() if line.startswith("chosen")]
        assert [int(line[1]) for line in lines] == [3, 3]
        for line in lines:
            assert float(line[3]) == pytest.approx(1.5 * 100 * math.e, rel=1e-6)  # the mean of one and two sequences
        assert result.out.count("micro_batch=auto: 3") == (2 if rank == 0 else 0)
        assert "refused: runtime.micro_batch=auto" in result.out
        assert "give a number" in result.out


@pytest.fixture
def room_for(monkeypatch):
    """Simulates a machine on which half of the memory is enough for so many sequences."""

    def room_for(sequences):
        monkeypatch.setattr("trainer.start.step_memory", lambda gpt, size, *rest, **settings: Memory(0, 0, 0, size, 0))
        monkeypatch.setattr(micro_batch, "available_memory", lambda: 2 * sequences)

    return room_for


def test_a_run_has_the_losses_of_any_other_micro_batch_and_keeps_what_was_chosen(
    command, room_for, tiny_args, tmp_path
):
    args = [*tiny_args, "eval.every=5"]
    one = command("train", *args, "runtime.micro_batch=1", f"run_dir={tmp_path / 'one'}")
    args += ["runtime.micro_batch=auto"]
    room_for(3)  # which does not divide the batch's 4 sequences
    whole = command("train", *args, f"run_dir={tmp_path / 'whole'}")
    assert command("train", *args, "stop_at=2").status == 0
    room_for(1)
    rest = command("train", *args)
    assert one.status == whole.status == rest.status == 0, whole.err + rest.err
    assert "micro_batch=auto" not in one.out
    assert whole.out.count("runtime.micro_batch=auto: 3 of up to 4 sequences, in the 0.0 GB of ") == 1
    assert "1 of up to" not in rest.out
    assert "resuming" in rest.out
    assert_same_steps(tmp_path / "one", tmp_path / "whole", tolerance=1e-5)
    a, b = (newest(tmp_path / name) for name in ("whole", "run"))
    assert open_checkpoint(a).state.micro_batch == open_checkpoint(b).state.micro_batch == 3
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (a / name).read_bytes() == (b / name).read_bytes(), name
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "run")


@pytest.mark.gpu(alone=True)
def test_a_gpus_memory_is_used_but_for_a_reserve():
    runtime = Runtime(torch.device("cuda"), torch.float32)
    module = tiny_gpt().cuda()
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    free, total = torch.cuda.mem_get_info()
    others = torch.empty(max(0, free - total // 10), dtype=torch.uint8, device="cuda")  # a tenth is left, half reserved
    before = torch.cuda.memory_allocated()
    chosen = choose_micro_batch(module, 2**16, 512, lambda size: 0, runtime, World(runtime.device))
    assert 1 <= chosen < 2**16
    assert torch.cuda.memory_allocated() <= before + 2**26  # but for what libraries keep
    for _ in range(2):
        module(*torch.zeros(2, chosen, 512, dtype=torch.int64, device="cuda")).backward()
    optimizer.step()
    del others
