"""The root configuration of train.py, and the checks that need more than one of its parts."""

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from common.settings import Settings
from data.mixture import DataConfig
from model.gpt import GPTConfig
from trainer.metrics import TrackerConfig
from trainer.optim import OptimConfig
from trainer.runtime import RuntimeConfig
from trainer.schedule import ScheduleConfig


class CheckpointConfig(Settings):
    """When to save, and what to keep."""

    every: int = Field(1000, ge=1)
    """Steps between checkpoints; the last step is always saved."""
    keep_last: int = Field(2, ge=1)
    """Newest checkpoints to keep, beside the best by validation loss."""
    keep_every: int | None = Field(None, ge=1)
    """Checkpoints of every so many steps are kept for good; null: none."""
    on_error: Literal["stop", "continue"] = "stop"
    """When one cannot be written, on a full disk, say: stop, or train on and try again at the next."""


class EvalConfig(Settings):
    """Evaluation during training."""

    every: int = Field(1000, ge=1)
    """Steps between evaluations; the end of the schedule is always evaluated."""
    batches: int | None = Field(20, ge=1)
    """Batches of batch_tokens to evaluate, spread evenly over the validation split; null: all of it."""


class TrainConfig(Settings):
    """One training run."""

    run_dir: Path
    """Where checkpoints, metrics and pictures go."""
    dataset_dir: Path
    """What scripts/prepare_data.py made."""
    resume: Literal["auto", "never"] = "auto"
    """auto: continue the run in run_dir, if there is one; never: refuse to touch it."""
    seed: int = Field(1, ge=0, lt=2**63)
    """Of the initial weights and of the order of the data."""
    seq_len: int = Field(ge=1, le=2**24)
    """Tokens of a training sequence."""
    batch_tokens: int = Field(ge=1, le=2**48)
    """Tokens of a step: the global batch, over all processes and micro-batches."""
    max_steps: int = Field(ge=1, lt=10**18)
    """Length of the run, which the schedule spans."""
    stop_at: int | None = Field(None, ge=1)
    """Save and stop after this step, the schedule unchanged and nothing evaluated out of turn; null: at max_steps."""
    data: DataConfig = DataConfig()
    model: GPTConfig
    optim: OptimConfig
    schedule: ScheduleConfig
    runtime: RuntimeConfig
    checkpoint: CheckpointConfig
    eval: EvalConfig
    tracker: TrackerConfig

    @property
    def batch_size(self) -> int:
        """Sequences of a global batch."""
        return self.batch_tokens // self.seq_len

    @property
    def last_step(self) -> int:
        """Where this run stops."""
        return min(self.stop_at or self.max_steps, self.max_steps)

    @model_validator(mode="after")
    def _parts_fit(self) -> "TrainConfig":
        if self.batch_tokens % self.seq_len:
            near = (self.batch_tokens // self.seq_len or 1) * self.seq_len
            raise ValueError(
                f"batch_tokens={self.batch_tokens} is not divisible by seq_len={self.seq_len}: use {near}, for example"
            )
        if self.run_dir == Path():
            raise ValueError("run_dir is empty: give the folder of the run, such as run_dir=runs/demo")
        if self.model.max_len is not None and self.seq_len > self.model.max_len:
            raise ValueError(
                f"seq_len={self.seq_len} is longer than the {self.model.max_len} learned positions of the model: "
                f"use at most that, or set model.position.max_len"
            )
        n_global = max(getattr(layer, "n_global", 0) for layer in self.model.layers)
        if n_global > self.seq_len:
            raise ValueError(f"n_global={n_global} is more than the seq_len={self.seq_len} positions: lower it")
        if self.schedule.warmup_steps > self.max_steps:
            raise ValueError(
                f"schedule.warmup_steps={self.schedule.warmup_steps} is more than max_steps={self.max_steps}: lower it"
            )
        return self
