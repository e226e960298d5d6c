"""Saves in the background: training waits while tensors are copied, not while they are written."""

import threading
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from common.console import warn
from common.settings import UserError
from data.tokenizer import Tokenizer
from trainer.checkpoint import Tensors, retain, save_checkpoint
from trainer.config import CheckpointConfig
from trainer.distributed import World
from trainer.metrics import MetricsLog
from trainer.state import TrainState


class Saver:
    """Writes one checkpoint at a time in a thread; the next save waits for it."""

    def __init__(
        self, run_dir: Path, tokenizer: Tokenizer, config: CheckpointConfig, log: MetricsLog | None, writers: World
    ) -> None:
        """Prepare to save.

        Args:
            log: in the main process, the run's.
            writers: the processes that write parts of a checkpoint, with connections of their own.
        """
        self._run_dir, self._tokenizer, self._config, self._log = run_dir, tokenizer, config, log
        self._writers = writers
        self._copies: dict[tuple[str, str], Tensor] = {}  # reused: copying into new memory takes 30 times as long
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._step = 0
        """The step of the save that was started last."""
        self.saved_step: int | None = None
        """The step of the newest checkpoint, if it is the run's state after that step."""
        self.newest = -1
        """The step of the newest checkpoint that is known to be whole; -1: there is none."""

    def save(self, parts: Tensors, state: TrainState) -> None:
        """Copy all tensors, which may be on any device, and start to write them.

        Raises:
            UserError: the previous save failed; see `check`.
        """
        self.wait()
        self.check()
        tensors = {
            part: {name: self._copy(part, name, value) for name, value in named.items()}
            for part, named in parts.items()
        }
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # finishes the copies into pinned memory
        self._step, self.saved_step = state.step, None
        self._thread = threading.Thread(target=self._write, args=(tensors, state), name="saver", daemon=True)
        self._thread.start()

    def check(self, last: bool = False) -> None:
        """Warn if the last save failed.

        Raises:
            UserError: it failed, and checkpoint.on_error=stop, or there is no next save (`last`).
        """
        error, self._error = self._error, None
        if error is None:
            return
        if not isinstance(error, OSError | SafetensorError):
            raise error
        if not self._writers.is_main:
            return  # the main process has an error, too
        why = getattr(error, "strerror", None) or error
        problem = f"the save after step {self._step} failed ({why}); earlier checkpoints are whole"
        if last or self._config.on_error == "stop":
            hint = "" if last else ", or use checkpoint.on_error=continue to keep training"
            raise UserError(f"{problem}: fix that, and run the same command again{hint}")
        warn(f"{problem}, and training continues to the next save")

    def finish(self) -> None:
        """Wait for the last save.

        Raises:
            UserError: it failed. checkpoint.on_error does not matter here, because there is no next save.
        """
        self.wait()
        self.check(last=True)

    @property
    def writing(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Wait until nothing is being written, even if the save fails."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _copy(self, part: str, name: str, value: Tensor) -> Tensor:
        value = value.detach()
        copy = self._copies.get((part, name))
        if copy is None or (copy.shape, copy.dtype) != (value.shape, value.dtype):
            copy = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
            self._copies[part, name] = copy
        return copy.copy_(value, non_blocking=True)

    def _write(self, tensors: Tensors, state: TrainState) -> None:
        try:
            before = self._log.sync if self._log else lambda: None  # the checkpoint relies on these lines
            rank, exchange = self._writers.rank, self._writers.gather_text
            save_checkpoint(self._run_dir, tensors, state, self._tokenizer, before, rank, exchange)
            since, self.newest = self.newest, state.step
            if self._writers.is_main:
                retain(self._run_dir, state, since, self._config.keep_last, self._config.keep_every)
            self.saved_step = state.step
        except BaseException as error:  # `check` and `finish` raise it
            self._error = error
