"""The root configuration of train.py, and checks across its parts."""

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from common.numbers import ceil_div
from common.settings import JsonDict, Settings
from model.attention.longformer import LongformerConfig
from runtime.checkpoint import CheckpointConfig
from runtime.device import RuntimeConfig
from runtime.state import FixedSettings
from trainer.optim import OptimConfig
from trainer.records.trackers import TrackerConfig
from trainer.schedule import ScheduleConfig

_STEPS_OF_EPOCH = 30  # at least, where the dataset allows: with fewer, a small model learns little


class EvalConfig(Settings, defaults="train:eval"):
    """Evaluation during training."""

    every: int | None = Field(ge=1)
    """Steps between evaluations; null: only the end of the schedule, which is always evaluated."""
    batches: int | None = Field(ge=1)
    """Batches of batch_tokens to evaluate, spread evenly over the validation split; null: all."""
    prompt: str | None
    """Text that every evaluation continues by up to 100 tokens. The sample is printed, and written
    to samples.txt and to the trackers; null: none."""

    @field_validator("prompt", mode="before")
    @classmethod
    def _null(cls, raw: object) -> object:
        # The command line's words for the prompt are taken as they are.
        return None if raw == "null" else raw


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
    epochs: float | None = Field(gt=0, le=10**6)
    """Length of the run in passes over the data, instead of max_steps. On a small dataset, steps
    have fewer than batch_tokens, so that an epoch has 30 of them where it can, and every epoch ends
    with an evaluation and a checkpoint. null: max_steps."""
    stop_at: int | None = Field(ge=1)
    """Save and stop after this step. The schedule still spans max_steps, and there is no extra
    evaluation. null: run to max_steps."""
    optim: OptimConfig
    schedule: ScheduleConfig
    runtime: RuntimeConfig
    checkpoint: CheckpointConfig
    eval: EvalConfig
    tracker: TrackerConfig

    def for_rows(self, n_rows: int) -> "TrainConfig":
        """Return the configuration with the steps of its epochs, for n_rows rows of training data.

        The same dataset gives the same steps, so a resumed run finds what it began with.
        """
        if self.epochs is None:
            return self
        batch_size = min(self.batch_size, max(1, n_rows // _STEPS_OF_EPOCH))
        epoch = ceil_div(n_rows, batch_size)
        update: JsonDict = {
            "batch_tokens": batch_size * self.seq_len,
            "max_steps": max(1, round(self.epochs * n_rows / batch_size)),
        }
        sections: dict[str, EvalConfig | CheckpointConfig]
        sections = {"eval": self.eval, "checkpoint": self.checkpoint}
        for key, section in sections.items():
            if section.every is not None:
                every = min(section.every, epoch)
                update[key] = section.model_copy(update={"every": every})
        return self.model_copy(update=update)

    def share_of(self, n_device: int) -> int:
        """Most sequences that each of n_device devices has in a step."""
        return ceil_div(self.batch_size * self.runtime.context_parallel, n_device)

    @property
    def last_step(self) -> int:
        """The step after which this run stops."""
        return min(self.stop_at or self.max_steps, self.max_steps)

    @model_validator(mode="after")
    def _settings_fit(self) -> "TrainConfig":
        # The length of the run, and the size of its batches.
        if self.epochs is not None and self.data.mixture is not None:
            raise ValueError("epochs does not work with data.mixture: give max_steps instead")
        if self.batch_tokens % self.seq_len:
            nearest = (self.batch_size or 1) * self.seq_len
            raise ValueError(
                f"batch_tokens={self.batch_tokens} is not divisible by seq_len={self.seq_len}: "
                f"use {nearest}"
            )
        if self.runtime.context_parallel > 1:
            self._check_shared_sequences(self.runtime.context_parallel)
        # The folder.
        if self.run_dir == Path():
            raise ValueError(
                "run_dir is empty, or this folder: give one for the run, such as run_dir=runs/demo"
            )
        # What the model allows.
        if self.model.max_len is not None and self.seq_len > self.model.max_len:
            positions = f"the {self.model.max_len} learned positions of the model"
            raise ValueError(
                f"seq_len={self.seq_len} is longer than {positions}: "
                "use at most that, or set model.position.max_len"
            )
        chunk = self.runtime.sequence_chunk
        if chunk is not None and chunk < self.seq_len:
            self.model.check_constant_state(f"runtime.sequence_chunk={chunk}")
        for layer in self.model.layers:
            if isinstance(layer, LongformerConfig) and layer.n_global > self.seq_len:
                raise ValueError(
                    f"n_global={layer.n_global} is more than the seq_len={self.seq_len} positions: "
                    "lower it"
                )
        return self

    def _check_shared_sequences(self, share: int) -> None:
        """Raise ValueError if that many processes cannot share a sequence."""
        setting = f"runtime.context_parallel={share}"
        runtime = self.runtime
        self.model.check_constant_state(setting, from_empty=True)
        if self.seq_len % share:
            raise ValueError(f"{setting} does not divide seq_len={self.seq_len}: use a divisor")
        problem = None
        if runtime.strategy == "fsdp":
            problem = "runtime.strategy=fsdp: use ddp"
        if runtime.compile is True:
            problem = "runtime.compile=true: use false"
        if runtime.sequence_chunk is not None:
            problem = f"runtime.sequence_chunk={runtime.sequence_chunk}: use null"
        if problem is not None:
            raise ValueError(f"{setting} does not work with {problem}")
