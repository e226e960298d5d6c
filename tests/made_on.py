"""Tensors of tests on the GPU."""

import contextlib
import sys
from pathlib import Path

from torch import overrides
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

TESTS = Path(__file__).resolve().parent


class MadeOn(TorchFunctionMode):
    """Tensors that a test itself makes are made on the CPU, where a seed always gives the same numbers, and moved.

    The program names its devices itself.
    """

    def __init__(self, device):
        super().__init__()
        self.device = device

    def __torch_function__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        of_a_test = Path(sys._getframe(1).f_code.co_filename).is_relative_to(TESTS)
        if not of_a_test or func not in _device_constructors() or (kwargs or {}).get("device") is not None:
            return made
        return made.detach().to(self.device).requires_grad_(made.requires_grad)


def suspended():
    """A context without MadeOn, which torch.compile would trace, for code that compiles."""
    active = any(isinstance(mode, MadeOn) for mode in overrides._get_current_function_mode_stack())
    return overrides._pop_mode_temporarily() if active else contextlib.nullcontext()
