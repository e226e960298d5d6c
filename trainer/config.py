"""The root configuration of train.py, and checks across its parts."""

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from common.settings import Settings
from model.gpt import GPT
from trainer.checkpoint import CheckpointConfig
from trainer.optim import OptimConfig
from trainer.runtime import RuntimeConfig
from trainer.schedule import ScheduleConfig
from trainer.state import FixedSettings
from trainer.trackers import TrackerConfig


class EvalConfig(Settings, defaults="train:eval"):
    """Evaluation during training."""

    every: int = Field(ge=1)
    """Steps between evaluations; the end of the schedule is always evaluated."""
    batches: int | None = Field(ge=1)
    """Batches of batch_tokens to evaluate, spread evenly over the validation split; null: all of it."""
    prompt: str | None
    """Text that every evaluation continues by up to 100 tokens. The sample is printed, and written to samples.txt and
    to the trackers; null: none."""

    @field_validator("prompt", mode="before")
    @classmethod
    def _null(cls, raw: object) -> object:
        return (
            None if raw == "null" else raw
        )  # the command line's words for it are taken as they are


class TrainConfig(FixedSettings, defaults="train"):
    """One training run."""

    run_dir: Path
    """Directory for checkpoints, metrics and pictures."""
    dataset_dir: Path
    """A dataset made by scripts/prepare_data.py."""
    resume: Literal["auto", "never"]
    """auto: continue the run in run_dir if there is one; never: stop with an error instead."""
    max_steps: int = Field(ge=1, lt=10**18)
    """Number of steps of the run, which the schedule spans."""
    stop_at: int | None = Field(ge=1)
    """Save and stop after this step. The schedule still spans max_steps, and there is no extra evaluation. null: run to
    max_steps."""
    optim: OptimConfig
    schedule: ScheduleConfig
    runtime: RuntimeConfig
    checkpoint: CheckpointConfig
    eval: EvalConfig
    tracker: TrackerConfig

    def share_of(self, n_device: int) -> int:
        """Most sequences that each of n_device devices has in a step."""
        return -(-self.batch_size * self.runtime.context_parallel // n_device)

    def means(self, gpt: GPT) -> float:
        """Numbers that training stores for each parameter, besides weight and gradient."""
        return self.optim.means(gpt) + (self.average is not None)

    @property
    def last_step(self) -> int:
        """The step after which this run stops."""
        return min(self.stop_at or self.max_steps, self.max_steps)

    @model_validator(mode="after")
    def _parts_fit(self) -> "TrainConfig":
        if self.batch_tokens % self.seq_len:
            near = (self.batch_size or 1) * self.seq_len
            given = f"batch_tokens={self.batch_tokens} is not divisible by seq_len={self.seq_len}"
            raise ValueError(f"{given}: use {near}")
        if (share := self.runtime.context_parallel) > 1:
            self._check_shared_sequences(share)
        if self.run_dir == Path():
            raise ValueError(
                "run_dir is empty, or this folder: give one for the run, such as run_dir=runs/demo"
            )
        if self.model.max_len is not None and self.seq_len > self.model.max_len:
            what = f"seq_len={self.seq_len} is longer than the {self.model.max_len} learned positions of the model"
            raise ValueError(f"{what}: use at most that, or set model.position.max_len")
        if (self.runtime.sequence_chunk or self.seq_len) < self.seq_len:
            self.model.check_constant_state(f"runtime.sequence_chunk={self.runtime.sequence_chunk}")
        n_global = max(getattr(layer, "n_global", 0) for layer in self.model.layers)
        if n_global > self.seq_len:
            raise ValueError(
                f"n_global={n_global} is more than the seq_len={self.seq_len} positions: lower it"
            )
        return self

    def _check_shared_sequences(self, share: int) -> None:
        """Raise ValueError if that many processes cannot share a sequence."""
        given, runtime = f"runtime.context_parallel={share}", self.runtime
        self.model.check_constant_state(given, from_empty=True)
        if self.seq_len % share:
            raise ValueError(f"{given} does not divide seq_len={self.seq_len}: use a divisor")
        for setting, value, instead in [
            ("strategy", runtime.strategy == "fsdp", "ddp"),
            ("compile", runtime.compile is True, "false"),
            ("sequence_chunk", runtime.sequence_chunk is not None, "null"),
            ("micro_batch", runtime.micro_batch == "auto", "a number, such as 1"),
        ]:
            if value:
                wrong = str(getattr(runtime, setting)).lower()
                raise ValueError(
                    f"{given} does not work with runtime.{setting}={wrong}: use {instead}"
                )
