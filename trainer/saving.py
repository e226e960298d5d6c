"""Saving in the background: training is held up while tensors are copied, not while they are written."""

import threading
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from common.console import warn
from common.settings import UserError
from data.tokenizer import Tokenizer
from trainer.checkpoint import TrainState, retain, save_checkpoint
from trainer.config import CheckpointConfig
from trainer.metrics import MetricsLog

Parts = Iterable[tuple[str, Iterable[tuple[str, Tensor]]]]
"""("model", (name, tensor) ...), ("optimizer", ...), ("random", ...); on any device."""


class Saver:
    """Writes one checkpoint at a time in a thread; the next one waits for it. Belongs to the main process."""

    def __init__(self, run_dir: Path, tokenizer: Tokenizer, config: CheckpointConfig, log: MetricsLog) -> None:
        self._run_dir, self._tokenizer, self._config, self._log = run_dir, tokenizer, config, log
        self._copies: dict[tuple[str, str], Tensor] = {}  # kept: fresh memory costs thirty times a copy into old
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.saved_step: int | None = None
        """The step of the checkpoint that was begun last."""

    def save(self, parts: Parts, state: TrainState) -> None:
        """Copy all tensors, and have them written.

        Raises:
            UserError: as `check`, for the save before.
        """
        self.wait()
        self.check()
        tensors = {part: {name: self._copy(part, name, value) for name, value in named} for part, named in parts}
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # copies into pinned memory are under way until then
        self.saved_step = state.step
        self._thread = threading.Thread(target=self._write, args=(tensors, state), name="saver", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Say how an earlier save failed, if it did.

        Raises:
            UserError: it did, and checkpoint.on_error=stop.
        """
        error, self._error = self._error, None
        if error is None:
            return
        if not isinstance(error, OSError):
            raise error
        problem = f"the save after step {self.saved_step} failed ({error.strerror or error})"
        if self._config.on_error == "stop":
            raise UserError(
                f"{problem}; earlier checkpoints are whole: mend that, and give the same command again "
                "(checkpoint.on_error=continue would train on)"
            )
        warn(f"{problem}; earlier checkpoints are whole, and training goes on to the next save")

    def finish(self) -> None:
        """Wait for the last save.

        Raises:
            UserError: it failed, whatever checkpoint.on_error says: there is no next one.
        """
        self.wait()
        if isinstance(self._error, OSError):
            problem = self._error.strerror or self._error
            raise UserError(
                f"the last save, after step {self.saved_step}, failed ({problem}); earlier checkpoints are whole: mend "
                "that, and give the same command again"
            )
        self.check()

    @property
    def writing(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Wait until nothing is being written, whatever becomes of it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _copy(self, part: str, name: str, value: Tensor) -> Tensor:
        value = value.detach()
        copy = self._copies.get((part, name))
        if copy is None or copy.shape != value.shape:
            copy = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
            self._copies[part, name] = copy
        return copy.copy_(value, non_blocking=True)

    def _write(self, tensors: dict[str, dict[str, Tensor]], state: TrainState) -> None:
        try:
            self._log.sync()  # the lines that the checkpoint counts on
            save_checkpoint(self._run_dir, tensors, state, self._tokenizer)
            retain(self._run_dir, state, self._config.keep_last, self._config.keep_every)
        except BaseException as error:  # raised where the run asks for it
            self._error = error
