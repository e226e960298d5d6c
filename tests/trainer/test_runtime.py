"""Devices, types and compilation are chosen for what the machine has; what is wrong with it is an error."""

import platform
import resource

import pytest
import ranks
import torch

from common.settings import UserError, decode
from model.ops import kernels
from runtime import device
from runtime.device import DeviceConfig, Runtime, RuntimeConfig, compiles, open_runtime, why_gpu_is_unseen

pytestmark = pytest.mark.usefixtures("restored_torch")


@pytest.fixture
def gpu_node(tmp_path, monkeypatch):
    """A folder of devices with a GPU, which torch does not see."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "nvidia0").touch()
    return tmp_path


def test_a_gpu_that_torch_does_not_see_has_a_cause(gpu_node, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert why_gpu_is_unseen(gpu_node).endswith("is built without CUDA: install a build of torch with it")
    monkeypatch.setattr(torch.version, "cuda", "13.0")

    def refuse():
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12020). Please update\nit.")

    monkeypatch.setattr(torch.cuda, "init", refuse)
    assert why_gpu_is_unseen(gpu_node).startswith(
        "The NVIDIA driver on your system is too old (found version 12020), and torch"
    )

    def find_none():
        raise RuntimeError("No CUDA GPUs are available")

    monkeypatch.setattr(torch.cuda, "init", find_none)
    assert why_gpu_is_unseen(gpu_node).startswith("No CUDA GPUs are available, and torch")


def test_a_gpu_that_is_hidden_or_absent_is_no_cause(gpu_node, monkeypatch, tmp_path):
    assert why_gpu_is_unseen(tmp_path / "none") is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert why_gpu_is_unseen(gpu_node) is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert why_gpu_is_unseen(gpu_node) is None


def test_training_does_not_fall_back_to_the_cpu_in_silence(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(device, "why_gpu_is_unseen", lambda: "the driver is too old: update it")
    with pytest.raises(UserError, match=r"^this machine has a GPU .* too old: update it; or use runtime\.device=cpu$"):
        open_runtime(decode(DeviceConfig, {"device": "auto"}))
    assert open_runtime(decode(DeviceConfig, {"device": "cpu"})).device.type == "cpu"


@pytest.mark.parametrize(("emulated", "dtype"), [(True, torch.float32), (False, torch.bfloat16)])
def test_auto_takes_float32_where_bfloat16_is_emulated(monkeypatch, emulated, dtype):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or not emulated
    )
    assert open_runtime(decode(DeviceConfig, {"device": "auto"})).dtype == dtype


@pytest.mark.parametrize(("fast", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_takes_bfloat16_on_a_cpu_with_units_for_it(monkeypatch, fast, dtype):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: fast)
    assert open_runtime(decode(DeviceConfig, {"device": "cpu"})).dtype == dtype
    assert open_runtime(decode(DeviceConfig, {"device": "cpu", "dtype": "float64"})).dtype == torch.float64


FAULTS = """
import resource, torch
from common.settings import decode
from runtime.device import DeviceConfig, open_runtime
open_runtime(decode(DeviceConfig, {"device": "cpu", "dtype": "float32"}))
torch.ones(4 * 9 * 2**20)  # freed at once: room for two of a quarter, wherever the heap has put small things since
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
tensors = [torch.ones(9 * 2**20) for _ in range(2)]  # by default, so large ones always have new pages
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has mallopt")
def test_memory_that_tensors_free_is_kept_for_the_next():
    (child,) = ranks.run(1, "-c", FAULTS)
    assert int(child.out.split()[-1]) < 2 * 4 * 9 * 2**20 // resource.getpagesize() // 8


@pytest.mark.parametrize(("given", "device", "expected"), [("auto", "cuda", True), ("auto", "cpu", False)])
def test_gpus_compile(given, device, expected):
    assert compiles(decode(RuntimeConfig, {"compile": given}), Runtime(torch.device(device), torch.float32)) == expected


def test_processes_that_share_sequences_do_not_compile():
    config = decode(RuntimeConfig, {"context_parallel": 2})
    assert not compiles(config, Runtime(torch.device("cuda"), torch.bfloat16))


def test_kernels_can_be_left_out():
    open_runtime(decode(DeviceConfig, {"device": "cpu", "kernels": False}))
    assert kernels.left_out == {*kernels.OPERATORS}
    assert not open_runtime(decode(DeviceConfig, {"device": "cpu"})).proof
    assert kernels.left_out == set()
