"""Devices, types and compilation are chosen for what the machine has; what is wrong with it is an error."""

import platform
import resource
from types import SimpleNamespace

import pytest
import ranks
import torch

from common.console import say_once
from common.settings import UserError, decode
from model import compiled
from model.gpt import GPT, GPTConfig
from model.ops import checks
from model.ops.checks import Wrong
from trainer import runtime
from trainer.runtime import DeviceConfig, Runtime, RuntimeConfig, maybe_compile, open_runtime, why_gpu_is_unseen

pytestmark = pytest.mark.usefixtures("restored_torch")

COMPILE = torch.compile
MODEL = {
    "n_vocab": 50,
    "n_layer": 3,
    "n_head": 2,
    "n_embd": 8,
    "attention": {"name": "log_space"},
    "block": {"name": "glu"},
    "position": {"name": "log_recurrence"},
    "ngrams": [1, 2],
}


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
    monkeypatch.setattr(runtime, "why_gpu_is_unseen", lambda: "the driver is too old: update it")
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
from trainer.runtime import DeviceConfig, open_runtime
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


@pytest.mark.parametrize("fails", [None, "torch.compile"])
def test_a_gpu_compiles_what_passes(monkeypatch, capsys, tmp_path, fails):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    facts = SimpleNamespace(name="NVIDIA Test", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: facts)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    checks.failed_check.cache_clear()
    say_once.cache_clear()
    asked = []

    def run(check, given, *more):
        asked.append(given)
        return ("failed a check: it is off" if fails and given.get("compiled", True) else None), ""

    monkeypatch.setattr(checks, "_run", run)
    module, here = torch.nn.Linear(1, 1), Runtime(torch.device("cuda"), torch.bfloat16)
    config = decode(RuntimeConfig, {"strategy": "fsdp", "recompute": "block"})
    maybe_compile([module], config, here, GPT(decode(GPTConfig, MODEL), eot_id=0))
    assert [given.get("compiled", True) for given in asked] == [False, True]
    assert all(given["by_block"] and given["documents"] and given["recompute"] == "block" for given in asked)
    assert (module._compiled_call_impl is None) == (fails is not None)
    if fails:
        assert f"not compiled: {fails} failed a check: it is off" in capsys.readouterr().out


def faked(monkeypatch, backend):
    monkeypatch.setattr(torch, "compile", lambda function: COMPILE(function, backend=backend))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of torch.compile
def test_a_compiled_model_is_compared_with_eager(monkeypatch):
    model = compiled.shortened(decode(GPTConfig, MODEL))
    assert '"n_layer": 2' in model
    faked(monkeypatch, "eager")
    compiled.check("cpu", model, "float32", True, recompute="selective", by_block=True, documents=True)

    def off(graph, inputs):
        return lambda *given: [x * 1.01 if x.requires_grad else x for x in graph(*given)]

    torch.compiler.reset()
    faked(monkeypatch, off)
    for how in ({}, {"recompute": "block", "by_block": True, "documents": True}):
        torch.compiler.reset()
        with pytest.raises(Wrong, match=r"^(the loss|the gradient of .*) is off by"):
            compiled.check("cpu", model, "float32", True, **how)
        compiled.check("cpu", model, "float32", True, **how, compiled=False)
