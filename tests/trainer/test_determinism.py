"""runtime.deterministic: what it switches, and that a run says so."""

import os

import pytest
import torch

from common.settings import decode
from runtime.device import RuntimeConfig, choose_compute

pytestmark = pytest.mark.usefixtures("restored_torch")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("deterministic", ["auto", True, False])
def test_auto_is_deterministic_on_cpus_only(monkeypatch, device, deterministic):
    monkeypatch.setattr("torch.cuda.is_available", lambda: device == "cuda")
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda **_: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "NVIDIA H100")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    torch.use_deterministic_algorithms(device == "cuda")
    compute = choose_compute(decode(RuntimeConfig, {"device": device, "deterministic": deterministic}))
    expected = device == "cpu" if deterministic == "auto" else deterministic
    assert torch.are_deterministic_algorithms_enabled() == expected
    assert ("CUBLAS_WORKSPACE_CONFIG" in os.environ) == expected
    assert ("runs differ in rounding" in str(compute)) != expected


def test_a_workspace_that_a_user_sets_stays(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    choose_compute(decode(RuntimeConfig, {"device": "cpu"}))
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
