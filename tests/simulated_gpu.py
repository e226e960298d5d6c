"""A GPU made of the CPU: its tensors say that they are on "cuda", and the CPU computes what is done with them.

So tests for GPUs run without one: SIMULATED_GPU=1 python -m pytest -m gpu. As on a GPU, an operation on tensors of two
devices is an error. Memory, streams, inference mode, compiled code and speed are not simulated, and kernels run in
Triton's interpreter.

A tensor of this GPU wraps one of the CPU. Operations arrive here after autograd, which believes in the GPU because of
simulated_gpu.cpp: that is compiled by g++, and must be loaded before torch.
"""

import contextlib
import ctypes
import importlib.util
import os
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace


def _load_guard():
    folder = Path(importlib.util.find_spec("torch").origin).parent
    with tempfile.TemporaryDirectory() as build:
        library = Path(build) / "guard.so"
        torch_itself = [f"-I{folder / 'include'}", f"-L{folder / 'lib'}", f"-Wl,-rpath,{folder / 'lib'}"]
        options = ["-std=c++20", "-shared", "-fPIC", *torch_itself, "-lc10", "-ltorch_cpu", "-o", library]
        subprocess.run(["g++", Path(__file__).with_suffix(".cpp"), *options], check=True)
        return ctypes.CDLL(str(library))


ASKED_FOR = os.environ.get("SIMULATED_GPU") == "1"
if ASKED_FOR:
    library = _load_guard()

import torch  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves, tree_map_only  # noqa: E402

GPU = torch.device("cuda", 0)
COPIES = ("aten::copy_", "aten::_to_copy")
TAKES_INDICES_OF_THE_CPU = ("aten::index.Tensor", "aten::index_put_", "aten::index_put")


class OnGPU(torch.Tensor):
    """A tensor of the simulated GPU; `own` is the one of the CPU that has its numbers."""

    @staticmethod
    def __new__(cls, own):
        place = {"strides": own.stride(), "storage_offset": own.storage_offset(), "device": GPU}
        tensor = torch.Tensor._make_wrapper_subclass(cls, own.shape, dtype=own.dtype, **place)
        tensor.own = own
        return tensor

    def __repr__(self, *, tensor_contents=None):
        return f"OnGPU({self.own})"

    def tolist(self):
        return self.own.tolist()

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return compute(func, args, kwargs or {})


class Operations(TorchDispatchMode):
    """Lets also operations without tensors, such as torch.empty(..., device="cuda"), arrive here."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return compute(func, args, kwargs or {})


def compute(func, args, kwargs):
    """Run an operation on the CPU; what it returns is on the device where the GPU's own operation would leave it."""
    name, tensors = func.name(), [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    on_gpu = [isinstance(x, OnGPU) for x in tensors]
    if "triton" in name and not any(on_gpu):
        raise RuntimeError(f"{name}: kernels take tensors of the GPU")
    own_code = torch._library.custom_ops.OPDEFS.get(name)
    if own_code is not None and "triton" not in name and any(on_gpu):
        with Operations():  # operators of this project: what they do is checked too
            return own_code._init_fn(*args, **kwargs)
    strict = torch.are_deterministic_algorithms_enabled() and any(on_gpu)
    if strict and name == "aten::cumsum" and tensors[0].is_floating_point():
        raise RuntimeError("cumsum_cuda_kernel does not have a deterministic implementation")  # the GPU's own words
    free = name in COPIES or (name.startswith(TAKES_INDICES_OF_THE_CPU) and on_gpu[0])
    if any(on_gpu) and not free and any(x.dim() for x, here in zip(tensors, on_gpu, strict=True) if not here):
        raise RuntimeError(f"{name}: tensors on cuda and cpu: {[(x.device.type, tuple(x.shape)) for x in tensors]}")
    device = kwargs.get("device")
    if device is None:
        to_gpu = bool(on_gpu) and (on_gpu[0] if name in COPIES else any(on_gpu))
    else:
        to_gpu, kwargs = device.type == "cuda", kwargs | {"device": torch.device("cpu")}
    if "pin_memory" in kwargs:
        kwargs = kwargs | {"pin_memory": False}
    found = func(*tree_map_only(OnGPU, lambda x: x.own, args), **tree_map_only(OnGPU, lambda x: x.own, kwargs))
    if not to_gpu:
        return found
    wrapped = {id(x.own): x for x in tensors if isinstance(x, OnGPU)}  # an operation in place returns its argument
    return tree_map_only(torch.Tensor, lambda x: wrapped.get(id(x)) if id(x) in wrapped else OnGPU(x), found)


def inference_mode(mode=True):
    """torch's refuses wrappers."""
    return torch.no_grad() if mode else contextlib.nullcontext()


def failed_check(name, *_, **__):
    """Kernels of log attention are used. Those of other operators would read the memory of wrappers."""
    return None if name == "log attention by triton" else "is not simulated"


def in_a_thread(function, *arguments):
    """Call a function in a new thread, where the GPU is absent if it is simulated."""
    with Operations() if ASKED_FOR else contextlib.nullcontext():
        return function(*arguments)


def begin():
    """Make "cuda" the simulated GPU, for tensors of threads that enter `Operations`."""
    facts = {"is_available": True, "device_count": 1, "current_device": 0, "get_device_name": "a simulated GPU"}
    facts |= {"is_bf16_supported": True, "get_rng_state": torch.zeros(16, dtype=torch.uint8), "is_initialized": True}
    memory, gpu = 80 * 10**9, {"name": "a simulated GPU", "major": 9, "minor": 0, "multi_processor_count": 132}
    facts |= {"get_device_properties": SimpleNamespace(total_memory=memory, **gpu), "get_arch_list": ["sm_90"]}
    facts |= {"mem_get_info": (memory, memory), "max_memory_allocated": memory, "is_current_stream_capturing": False}
    facts |= dict.fromkeys(["_lazy_init", "synchronize", "empty_cache", "set_rng_state", "set_device"])
    for name, value in facts.items():
        setattr(torch.cuda, name, lambda *_, value=value, **__: value)
    math = torch.ops.aten._scaled_dot_product_attention_math  # torch's own choice asks CUDA

    def attention(q, k, v, attn_mask=None, **options):
        if attn_mask is not None and attn_mask.dtype == torch.bool:  # would be added as 0 and 1
            attn_mask = torch.where(attn_mask, 0.0, -torch.inf).to(q.dtype)
        return math(q, k, v, attn_mask, **options)[0]

    torch.nn.functional.scaled_dot_product_attention = attention
    from model.ops import checks

    checks.failed_check = failed_check
    torch.inference_mode = inference_mode
    torch.Tensor.pin_memory = lambda self: self
    torch.Generator = type("Generator", (torch.Generator,), {"__new__": lambda cls, _=None: torch._C.Generator()})
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # the numbers of a wrapper cannot be replaced
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda") is made on the CPU and copied
    library.guard()  # again, in place of the one that a torch with CUDA has brought
    Operations().__enter__()
