"""Devices, types and compilation are chosen for what the machine has; what is wrong with it is an error."""

import pytest
import torch

from common.settings import UserError, decode
from model.ops import kernels
from runtime import device
from runtime.device import Compute, DeviceConfig, RuntimeConfig, choose_compute, should_compile

pytestmark = pytest.mark.usefixtures("restored_torch")


def test_training_does_not_fall_back_to_the_cpu_in_silence(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(device, "why_gpu_is_unseen", lambda: "the driver is too old: update it")
    with pytest.raises(UserError, match=r"^this machine has a GPU .* too old: update it; or use runtime\.device=cpu$"):
        choose_compute(decode(DeviceConfig, {"device": "auto"}))
    assert choose_compute(decode(DeviceConfig, {"device": "cpu"})).device.type == "cpu"


@pytest.mark.parametrize(("emulated", "dtype"), [(True, torch.float32), (False, torch.bfloat16)])
def test_auto_takes_float32_where_bfloat16_is_emulated(monkeypatch, emulated, dtype):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or not emulated
    )
    assert choose_compute(decode(DeviceConfig, {"device": "auto"})).dtype == dtype


@pytest.mark.parametrize(("fast", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_takes_bfloat16_on_a_cpu_with_units_for_it(monkeypatch, fast, dtype):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: fast)
    assert choose_compute(decode(DeviceConfig, {"device": "cpu"})).dtype == dtype
    assert choose_compute(decode(DeviceConfig, {"device": "cpu", "dtype": "float64"})).dtype == torch.float64


@pytest.mark.parametrize(("given", "device", "expected"), [("auto", "cuda", True), ("auto", "cpu", False)])
def test_gpus_compile(given, device, expected):
    assert (
        should_compile(decode(RuntimeConfig, {"compile": given}), Compute(torch.device(device), torch.float32))
        == expected
    )


def test_processes_that_share_sequences_do_not_compile():
    config = decode(RuntimeConfig, {"context_parallel": 2})
    assert not should_compile(config, Compute(torch.device("cuda"), torch.bfloat16))


def test_kernels_can_be_left_out():
    choose_compute(decode(DeviceConfig, {"device": "cpu", "kernels": False}))
    assert not kernels.enabled
    assert not choose_compute(decode(DeviceConfig, {"device": "cpu"})).proof
    assert kernels.enabled
