"""scripts/doctor.py describes the machine, says what is wrong with it, and names nobody."""

import os
import re
from types import SimpleNamespace

import pytest
import torch

from common.settings import UserError
from tools import doctor
from tools.bench.measuring import compose_run

pytestmark = pytest.mark.usefixtures("restored_torch")

SMALL = ["model=flagship_1m", "model.n_layer=1", "model.n_embd=16", "model.n_head=2", "model.n_vocab=64"]
SMALL += ["seq_len=16", "runtime.device=cpu", "batch_tokens=64"]


@pytest.fixture
def small(monkeypatch):
    """A model of no size, on the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "FLAGSHIP", SMALL)


def test_a_cpu_is_examined(small, command):
    result = command("scripts/doctor")
    assert result.status == 0, result.err
    for row in (f"torch +{re.escape(torch.__version__)}", r"tokens per second +[\d.,]*[1-9]", "a whole run +"):
        assert re.search(row, result.out)


def test_the_models_that_are_proved_use_all_operators_with_kernels():
    models = [compose_run([*doctor.FLAGSHIP, *words])["model"] for words in ([], *doctor.OTHERS)]
    attention = {model["attention"]["name"] for model in models}
    assert attention == {"log_space", "softmax", "sliding_window"}
    assert "log_recurrence" in {model["position"]["name"] for model in models}


def test_a_small_model_is_proved(small):
    assert doctor.prove_model(["model.n_layer=2", "runtime.dtype=float32"]) == doctor.AGREES


@pytest.mark.slow
def test_a_proof_that_crashes_its_process_is_a_finding(monkeypatch):
    monkeypatch.setattr(doctor, "FLAGSHIP", ["model=flagship_1m"])
    monkeypatch.setattr(doctor, "OTHERS", ())
    monkeypatch.setattr(doctor, "prove_model", crash)
    outcomes = doctor.prove_models()
    assert re.fullmatch(r".*terminated abruptly.*: train with runtime.kernels=false", outcomes["flagship_1m"])


def crash(words):
    os._exit(11)


def test_what_breaks_is_a_finding_and_the_rest_goes_on(small, monkeypatch, capsys):
    def breaks():
        raise RuntimeError("CUDA error: an illegal memory access\nmore")

    def lacks_memory(*_):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 2096640 bytes.")

    monkeypatch.setattr(doctor, "find_versions", breaks)
    monkeypatch.setattr(doctor, "measure_rate", lacks_memory)
    with pytest.raises(UserError, match="2 parts of this did not work"):
        doctor.examine_machine(training=True)
    out = capsys.readouterr().out
    assert "- versions fails (RuntimeError): CUDA error: an illegal memory access" in out
    assert "- a training step fails (RuntimeError): out of memory, use a machine with more" in out


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Where devices are listed: none, and torch sees none."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(free=1e12))
    (tmp_path / "dev").mkdir()
    return tmp_path / "dev"


def test_a_gpu_that_is_not_used_is_a_finding(places, monkeypatch):
    assert [*doctor.find_faults(places)] == []
    (places / "nvidia0").touch()
    (line,) = [*doctor.find_faults(places)]
    assert line.startswith("torch does not see the GPU: ")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert [*doctor.find_faults(places)] == ["CUDA_VISIBLE_DEVICES hides the GPU: unset it to train there"]


def test_a_full_disk_is_a_finding(places, monkeypatch):
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(free=1e9))
    (line,) = [*doctor.find_faults(places)]
    assert line == "only 1.0 GB are free here: give train.py a run_dir on a larger disk"


@pytest.mark.parametrize(
    ("emulated", "built", "said"), [(True, "sm_75", "emulates bfloat16"), (False, "sm_90", "has no kernels")]
)
def test_a_gpu_that_lacks_something_is_a_finding(places, monkeypatch, emulated, built, said):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(name="T4", major=7, minor=5))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: [built])
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: not emulated)
    monkeypatch.setattr(doctor, "triton_version", lambda: "3.7.1")
    (line,) = [*doctor.find_faults(places)]
    assert said in line


def test_the_drivers_version_is_read(tmp_path):
    path = tmp_path / "version"
    assert doctor.driver_version(path) is None
    path.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19\nGCC version:  gcc 12.2\n")
    assert doctor.driver_version(path) == "535.129.03"
