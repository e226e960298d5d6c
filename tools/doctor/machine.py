"""Versions and hardware of this machine, and problems of its GPU, driver or installation."""

import os
import platform
from collections.abc import Iterator
from pathlib import Path

import torch

from common.memory import available_memory
from model.ops.checks import cache_folder, triton_version
from tools.bench.harness import Row, machine
from trainer.runtime import why_gpu_is_unseen

_LEAST_DISK = 20e9  # bytes: the checkpoints of a run of the flagship, and a dataset of its first hours


def versions() -> Row:
    """System, processor, versions and GPUs; nothing that names the host or its user."""
    here = machine()
    found: Row = {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": f"{here['cpu']}, {here['cores']} cores, load {here['load']:.1f}",
        "free_memory": available_memory(),
        "python": platform.python_version(),
        "torch": here["torch"],
        "cuda": torch.version.cuda,
        "triton": triton_version(),
        "driver": driver(),
        "commit": here["git_commit"],
    }
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        memory = f"{gpu.total_memory / 1e9:.0f} GB"
        found[f"gpu_{index}"] = f"{gpu.name}, {memory}, compute capability {gpu.major}.{gpu.minor}"
    return found


def driver(proc: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """The version of the NVIDIA driver that is loaded, or None."""
    words = proc.read_text().partition("\n")[0].split() if proc.is_file() else []
    return next((word for word in words if word[0].isdigit() and word.count(".") >= 1), None)


def findings(free: float, dev: Path = Path("/dev"), bus: Path = Path("/sys/bus/pci/devices")) -> Iterator[str]:
    """Yield lines that say what is wrong and what to do. `free`: bytes of the disk here."""
    if why := why_gpu_is_unseen(dev):
        yield f"torch does not see the GPU: {why}"
    elif any(dev.glob("nvidia[0-9]*")) and not torch.cuda.is_available():
        yield "CUDA_VISIBLE_DEVICES hides the GPU: unset it to train there"
    elif _on_bus(bus) and not torch.cuda.is_available():
        yield "there is an NVIDIA GPU, but no /dev/nvidia0: install its driver, or give this container the GPU"
    if torch.cuda.is_available():
        yield from _of_gpu()
    if free < _LEAST_DISK:
        yield f"only {free / 1e9:.1f} GB are free here: give train.py a run_dir on a larger disk"
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > cores:
        yield f"other work is running (load {load:.1f} on {cores} cores), so all rates are too low: measure them again"
    cache = cache_folder().absolute()
    if not os.access(next(folder for folder in (cache, *cache.parents) if folder.is_dir()), os.W_OK):
        yield "the cache folder is not writable: set XDG_CACHE_HOME to one that is"


def _of_gpu() -> Iterator[str]:
    gpu = torch.cuda.get_device_properties(0)
    built = torch.cuda.get_arch_list()
    if not any(name.startswith(f"sm_{gpu.major}") for name in built):
        yield f"torch {torch.__version__} has no kernels for {gpu.name} ({', '.join(built)}): install a build with them"
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        yield f"{gpu.name} emulates bfloat16, which is slow: runtime.dtype=auto takes float32 here"
    if triton_version() is None:
        yield "triton is not installed, so kernels and torch.compile are not used: install the extra triton"


def _on_bus(bus: Path) -> bool:
    """Whether an NVIDIA display device is on the PCI bus."""
    return any(
        (device / "vendor").read_text().strip() == "0x10de" and (device / "class").read_text().startswith("0x03")
        for device in bus.glob("*")
    )
