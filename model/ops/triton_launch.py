"""How Triton compiles our own kernels for compute capability 9.0: docs/kernels.md says why."""

import contextlib
import functools
import os
from collections.abc import Iterator

import torch
import triton
from torch import Tensor
from triton.runtime import driver

HOPPER = 90
RIGHT_FOR_HOPPER = (12, 9)  # the first release of ptxas that assembles our kernels rightly


@contextlib.contextmanager
def launching(x: Tensor) -> Iterator[None]:
    """Launch kernels on the GPU of x. A kernel compiles at its first launch, and reads its settings
    then.

    They are environment variables, which are put back: other kernels, such as those of
    torch.compile, keep theirs.
    """
    with torch.cuda.device_of(x):
        settings = {} if triton.knobs.runtime.interpret else _settings(_capability())
        before = {name: os.environ.get(name) for name in settings}
        os.environ.update(settings)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def _capability() -> int:
    """The compute capability of the current GPU, times 10."""
    return int(driver.active.get_current_target().arch)


@functools.cache
def _settings(capability: int) -> dict[str, str]:
    """Environment variables for Triton's compiler."""
    if capability != HOPPER:
        return {}
    settings = {"DISABLE_MMA_V3": "1"}  # mma.sync in place of wgmma
    tools = triton.knobs.nvidia
    newer = tools.ptxas_blackwell
    if _release(tools.ptxas.version) < RIGHT_FOR_HOPPER and _driver_loads(newer.version):
        settings["TRITON_PTXAS_PATH"] = newer.path
    return settings


def _driver_loads(version: str) -> bool:
    """Whether the driver loads machine code of this version of CUDA. It does if torch's CUDA is as
    new a major one."""
    return torch.version.cuda is None or _release(torch.version.cuda)[0] >= _release(version)[0]


def _release(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))
