"""Where a run's numbers go: metrics.jsonl always, wandb if asked for. The only file that imports wandb."""

import json
import os
import queue
import threading
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from common.console import say, warn
from common.files import write_atomic
from common.settings import Settings, UserError


class LocalTrackerConfig(Settings):
    """metrics.jsonl and loss.png in the run directory; no account."""

    name: Literal["local"]
    every: int = Field(1, ge=1)
    """Steps between training lines."""

    def open(self, run_id: str, run_dir: Path, config: dict[str, Any]) -> "Tracker":
        """The tracker of a run."""
        return Tracker()


class WandbTrackerConfig(Settings):
    """The same lines to Weights & Biases too. Training goes on whatever becomes of it."""

    name: Literal["wandb"]
    every: int = Field(10, ge=1)
    """Steps between training lines."""
    mode: Literal["online", "offline", "disabled"] = "online"
    """offline writes under the run directory, for `wandb sync` later."""
    project: str = "log-gpt"
    """wandb's project."""
    run_name: str | None = None
    """Name of the run in wandb; null: the run directory's."""
    finish_seconds: float = Field(60.0, gt=0)
    """How long the end of training waits for the last uploads."""

    def open(self, run_id: str, run_dir: Path, config: dict[str, Any]) -> "Tracker":
        """The tracker of a run."""
        settings = {
            "id": run_id,
            "resume": "allow",
            "mode": self.mode,
            "project": self.project,
            "name": self.run_name or run_dir.name,
            "dir": str(run_dir),
            "config": config,
        }
        return WandbTracker(settings, self.finish_seconds)


TrackerConfig = Annotated[LocalTrackerConfig | WandbTrackerConfig, Field(discriminator="name")]


class Tracker:
    """Takes the lines of metrics.jsonl elsewhere; this one, nowhere."""

    def log(self, line: dict[str, Any]) -> None:
        """Take a line. Never blocks, never raises."""

    def finish(self) -> None:
        """Hand over what is left, in bounded time."""


class WandbTracker(Tracker):
    """wandb in a thread of its own: whatever hangs or fails there costs a warning, never the run."""

    def __init__(self, settings: dict[str, Any], finish_seconds: float) -> None:
        self._settings, self._finish_seconds = settings, finish_seconds
        self._lines: queue.Queue[dict[str, Any] | None] = queue.Queue(maxsize=10_000)
        self._lost = False
        self._thread = threading.Thread(target=self._run, name="wandb", daemon=True)
        self._thread.start()

    def log(self, line: dict[str, Any]) -> None:
        """Queue a line; if wandb is that far behind, or gone, the line is in metrics.jsonl alone."""
        if not self._lost:
            try:
                self._lines.put_nowait(line)
            except queue.Full:
                self._give_up("it does not keep up")

    def finish(self) -> None:
        """Wait for the last lines, but no longer than finish_seconds."""
        if not self._lost:
            try:
                self._lines.put(None, timeout=self._finish_seconds)
            except queue.Full:
                return self._give_up("it does not keep up")
            self._thread.join(self._finish_seconds)
            if self._thread.is_alive():
                self._give_up(f"it did not finish within {self._finish_seconds:g} seconds")
        return None

    def _run(self) -> None:
        try:
            os.environ.setdefault("WANDB_SILENT", "true")  # its many lines would break up the progress
            import wandb

            run = wandb.init(**self._settings)
            if url := getattr(run, "url", None):
                say(f"wandb: {url}")
            # A resumed run sends some steps again: as an axis of its own, steps need not grow.
            run.define_metric("step")
            run.define_metric("*", step_metric="step")
            while not self._lost and (line := self._lines.get()) is not None:
                run.log(line)
            run.finish()
        except Exception as error:  # wandb's failures are many, and none of them is worth a run
            self._give_up(f"{type(error).__name__}: {error}")

    def _give_up(self, why: str) -> None:
        if self._lost:
            return
        self._lost = True
        warn(f"wandb failed ({why}); training goes on, and metrics.jsonl has every line")


class MetricsLog:
    """metrics.jsonl: one JSON object a line, appended; never two lines of one kind for one step."""

    def __init__(self, path: Path, resumed_at: int) -> None:
        """Open the log of a run that continues after step `resumed_at`: later lines are dropped, to come again."""
        if path.exists():
            kept = [line for line in read_metrics(path) if line["step"] <= resumed_at]
            write_atomic(path, "".join(json.dumps(line) + "\n" for line in kept))
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (open as long as the run)

    def write(self, line: dict[str, Any]) -> None:
        """Append a line; others can read it at once."""
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Have every line on disk, before a checkpoint that counts on them."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl, without a last one that a crash cut short."""
    whole, _, _ = path.read_text(encoding="utf-8", errors="replace").rpartition("\n")
    try:
        return [json.loads(line) for line in whole.split("\n") if line]
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}): mend or delete that line, or use another run_dir") from None
