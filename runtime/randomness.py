"""Random numbers: every process has its own, and a resumed run continues the same sequence."""

import hashlib

import torch
from torch import Tensor

from common.settings import UserError
from runtime.tensor_file import Expected

RANDOM = "states"
"""Name of the one tensor in random.safetensors: (processes, bytes of a state)."""
_GPU_BYTES = 16


def random_state(device: torch.device) -> Tensor:
    """The state of torch's generators, the CPU's and this process's GPU's: uint8 (bytes,)."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return torch.cat(states)


def set_random_state(state: Tensor, device: torch.device) -> None:
    """Restore what `random_state` returned.

    Raises:
        UserError: these bytes are not a state of torch's generators.
    """
    on_cpu = torch.get_rng_state().numel()
    try:
        torch.set_rng_state(state[:on_cpu].clone())
        if device.type == "cuda":
            torch.cuda.set_rng_state(state[on_cpu:].clone(), device)
    except RuntimeError as error:
        raise UserError(
            f"the checkpoint's random.safetensors does not hold a generator's state: {error}"
        ) from None


def random_tensors(processes: int, device: str) -> Expected:
    """The expected content of random.safetensors for a number of processes on "cpu" or "cuda"."""
    n_bytes = torch.get_rng_state().numel() + (_GPU_BYTES if device == "cuda" else 0)
    return {RANDOM: (torch.Size([processes, n_bytes]), (torch.uint8,))}


def seed_process(key: str) -> None:
    """Seed torch's generators from a string."""
    torch.manual_seed(int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little") >> 1)
