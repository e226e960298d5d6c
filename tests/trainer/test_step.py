"""How often the CPU waits for the device in a training step, counted on a device without data."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from model.gpt import GPT
from runtime.device import Compute
from runtime.distributed import World
from trainer.step import SummedLoss, train_step

aten = torch.ops.aten
pytestmark = pytest.mark.usefixtures("restored_torch")


class Waits(TorchDispatchMode):
    """Notes what makes the CPU wait for the device "meta", which stands for a GPU; whatever is read from it is 1."""

    def __init__(self):
        super().__init__()
        self.reads = []
        self.blocking_copies = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        source = args[0] if args else None
        if func is aten._local_scalar_dense.default and source.is_meta:
            self.reads.append(())
            return 1
        if func is aten._to_copy.default and "device" in kwargs:
            if source.is_meta and kwargs["device"].type == "cpu":
                self.reads.append(tuple(source.shape))
                return torch.ones(source.shape, dtype=kwargs.get("dtype") or source.dtype)
            if source.is_cpu and kwargs["device"].type == "meta" and not kwargs.get("non_blocking"):
                self.blocking_copies.append(tuple(source.shape))
        return func(*args, **kwargs)


@pytest.mark.parametrize("grad_clip", [None, 1.0])
def test_a_step_waits_for_the_device_once(tiny, grad_clip, monkeypatch):
    monkeypatch.setattr("torch.is_autocast_enabled", lambda *_: False)  # it does not know the device
    config = tiny({"model.attention": {"name": "softmax"}})
    device = torch.device("meta")
    gpt = GPT(config.model).to(device)
    optimizer = config.optim.build(gpt)
    batches = [(torch.zeros(2, 16, dtype=torch.int64), torch.zeros(2, 16, dtype=torch.int64)) for _ in range(3)]
    with Waits() as waits:
        compute = Compute(torch.device("cpu"), torch.float32)  # asked for autocast only
        result = train_step(SummedLoss(gpt), optimizer, batches, compute, World(device), grad_clip=grad_clip)
    assert waits.reads == [(3,)]
    assert waits.blocking_copies == []
    assert (result.loss, result.grad_norm, result.stop) == (1, 1, True)
