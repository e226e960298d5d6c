"""The state of a run besides its model and optimizer: fixed settings, progress, random numbers.

Every process has random numbers of its own, and a resumed run continues their sequence.
"""

import hashlib
from pathlib import Path
from typing import Annotated, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from common.settings import Settings, UserError
from data.config import DataConfig
from model.config import GPTConfig
from runtime.tensor_file import Expected

FORMAT_VERSION: Literal[6] = 6
RANDOM = "states"
"""Name of the one tensor in random.safetensors: (processes, bytes of a state)."""
_GPU_BYTES = 16
NO_DATASET = Path("no-dataset-that-was-given")
"""The dataset of an imported model."""


class FixedSettings(Settings):
    """The settings that cannot change during a run: others would mean other weights or batches."""

    model: GPTConfig
    seed: int = Field(ge=0, lt=2**63)
    """Seed of the initial weights and of the order of the data."""
    seq_len: int = Field(ge=1, le=2**24)
    """Tokens per training sequence."""
    batch_tokens: int = Field(ge=1, le=2**28)
    """Tokens per step: the global batch, over all processes and micro-batches."""
    data: DataConfig
    init_from: Path | None = None
    """Weights to start from: those of a run's newest checkpoint, or of a given one. It must have
    the same model and tokenizer; optimizer, step and schedule start from scratch. null: random
    weights."""

    @property
    def batch_size(self) -> int:
        """Sequences per step, over all processes."""
        return self.batch_tokens // self.seq_len

    def tokens(self, steps: int) -> int:
        """Tokens of the first `steps` steps."""
        return steps * self.batch_size * self.seq_len

    @model_validator(mode="after")
    def _documents_fit(self) -> Self:
        if self.data.keeps_apart:
            self.model.check_documents()
        return self


class TrainState(FixedSettings):
    """The state of a run besides its tensors."""

    format_version: Literal[6] = FORMAT_VERSION
    optimizer: str = "adamw"
    """Its name: another one has other state."""
    step: int = Field(ge=0, lt=10**18)
    """Steps done."""
    best_val_loss: float | None = None
    """Lowest validation loss so far, nats per token."""
    best_step: Annotated[int, Field(ge=0)] | None = None
    """The step with the lowest loss, whose checkpoint is kept."""
    skipped_steps: dict[Annotated[int, Field(ge=1)], str] = Field(default_factory=dict)
    """Recent steps, counted from 1, that were skipped, with the reason."""
    micro_batch: Annotated[int, Field(ge=1)] | None = None
    """What runtime.micro_batch=auto chose."""
    micro_batch_for: str = ""
    """The device and the number of processes that micro_batch was chosen for."""
    eval_batches: Annotated[int, Field(ge=1)] | None = None
    """What eval.batches was last."""
    processes: Annotated[int, Field(ge=1, le=2**20)] = 1
    """Number of processes, each with its own random numbers."""
    device: Literal["cpu", "cuda"] = "cpu"
    """What the processes ran on."""
    run_id: str = Field(pattern=r"^[\w-]{1,64}$")
    """Name of the run for trackers; a resumed run keeps it."""
    dataset_dir: Path
    dataset_fingerprint: str

    def own_dataset(self) -> Path:
        """dataset_dir, for a command that was given none; UserError: an imported model has none."""
        if self.dataset_dir == NO_DATASET:
            raise UserError("an imported model has no dataset of its own: give dataset_dir=...")
        return self.dataset_dir


def random_state(device: torch.device) -> Tensor:
    """The state of torch's generators, the CPU's and this process's GPU's: uint8 (bytes,)."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return torch.cat(states)


def set_random_state(state: Tensor, device: torch.device) -> None:
    """Restore what `random_state` returned."""
    on_cpu = torch.get_rng_state().numel()
    torch.set_rng_state(state[:on_cpu].clone())
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[on_cpu:].clone(), device)


def random_tensors(processes: int, device: str) -> Expected:
    """The expected content of random.safetensors for so many processes on "cpu" or "cuda"."""
    n_bytes = torch.get_rng_state().numel() + (_GPU_BYTES if device == "cuda" else 0)
    return {RANDOM: (torch.Size([processes, n_bytes]), (torch.uint8,))}


def seed_process(key: str) -> None:
    """Seed torch's generators from a string."""
    torch.manual_seed(int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little") >> 1)
