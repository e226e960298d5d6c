"""Sends a run's metrics to wandb and TensorBoard, if asked to. The only file that imports them."""

import importlib
import shlex
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Literal

from pydantic import Field

from common import exits
from common.console import say, warn
from common.settings import JsonDict, Settings

Log = Callable[[JsonDict], object]


class WandbConfig(Settings, defaults="tracker/wandb:wandb"):
    """Sends the metrics to Weights & Biases. Training continues even if that fails."""

    every: int = Field(ge=1)
    """Steps between training lines that are sent."""
    mode: Literal["online", "offline", "disabled"]
    """offline writes under the run directory, for `wandb sync` later."""
    project: str
    """wandb's project."""
    run_name: str | None
    """Name of the run in wandb; null: the name of the run directory."""
    finish_seconds: float = Field(gt=0)
    """Longest time that the end of training waits for the last uploads."""


class TensorBoardConfig(Settings, defaults="tracker/tensorboard:tensorboard"):
    """Writes the metrics for TensorBoard to the folder tensorboard in the run directory."""

    every: int = Field(ge=1)
    """Steps between training lines that are written."""


class TrackerConfig(Settings, defaults="train:tracker"):
    """Where the metrics go, besides metrics.jsonl and loss.png."""

    wandb: WandbConfig | None
    """Weights & Biases; null: not used."""
    tensorboard: TensorBoardConfig | None
    """TensorBoard; null: not used."""

    def import_packages(self) -> None:
        """Import what is not installed everywhere, before anything is made.

        Raises:
            ModuleNotFoundError: a package is missing.
        """
        if self.tensorboard is not None:
            importlib.import_module("tensorboard")


class Tracker:
    """Gives lines to a library, which sends them in threads of its own.

    Training continues whatever error the library raises.
    """

    def __init__(self, name: str, every: int, library: AbstractContextManager[Log]) -> None:
        """Start.

        Args:
            every: of the training lines, only those of a multiple of so many steps are sent.
            library: opens the library, gives what logs a line, and sends what is left when closed.
        """
        self._name = name
        self._every = every
        self._library = library
        self._log: Log | None = None
        with self._guarded():
            self._log = library.__enter__()

    def log(self, line: JsonDict) -> None:
        """Send a line."""
        is_left_out = "loss" in line and line["step"] % self._every != 0
        if self._log is not None and not is_left_out:
            with self._guarded():
                self._log(line)

    def finish(self) -> None:
        """Send what is left, and close the library."""
        if self._log is not None:
            with self._guarded():
                self._library.__exit__(None, None, None)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # no failure of a library is worth a run
            self._give_up(" ".join(f"{type(error).__name__}: {error}".split()))

    def _give_up(self, why: str) -> None:
        self._log = None
        exits.at_once = True  # a normal end of Python would wait for the library
        warn(f"{self._name} failed ({why}) and is off; metrics.jsonl keeps every line")


def open_trackers(
    config: TrackerConfig, run_id: str, run_dir: Path, settings: JsonDict, resumed_at: int
) -> list[Tracker]:
    """Start the trackers of a run with these settings; it continues after `resumed_at` (0: new)."""
    trackers = []
    if config.wandb is not None:
        run = _wandb(config.wandb, run_id, run_dir, settings)
        trackers.append(Tracker("wandb", config.wandb.every, run))
    if config.tensorboard is not None:
        files = _tensorboard(run_dir / "tensorboard", resumed_at)
        trackers.append(Tracker("tensorboard", config.tensorboard.every, files))
    return trackers


@contextmanager
def _wandb(config: WandbConfig, run_id: str, run_dir: Path, settings: JsonDict) -> Iterator[Log]:
    import wandb

    # A resumed run continues its own run there.
    run = wandb.init(
        id=run_id,
        resume="allow",
        mode=config.mode,
        project=config.project,
        name=config.run_name or run_dir.name,
        dir=str(run_dir),
        config=settings,
        settings={
            # It neither wraps stdout nor asks for a missing API key.
            "console": "off",
            "silent": True,
            "finish_timeout": config.finish_seconds,
            "finish_timeout_raises": True,
        },
    )
    # Say where it is.
    if config.mode == "offline":
        upload = shlex.join(["wandb", "sync", str(Path(run.dir).parent)])
        say(f"wandb: offline; to upload the run later: {upload}")
    elif run.url:
        say(f"wandb: {run.url}")
    # A resumed run repeats some steps: with an axis of their own, steps need not increase.
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    yield run.log
    run.finish()


@contextmanager
def _tensorboard(folder: Path, resumed_at: int) -> Iterator[Log]:
    from torch.utils.tensorboard import SummaryWriter  # here, because importing it is slow

    # Earlier lines of later steps are ignored.
    writer = SummaryWriter(str(folder), purge_step=resumed_at + 1)

    def log(line: JsonDict) -> None:
        for key, value in line.items():
            if isinstance(value, int | float) and key != "step":
                writer.add_scalar(key, value, line["step"])
        if "sample" in line:
            in_markdown = "    " + line["sample"].replace("\n", "\n    ")  # as it is
            writer.add_text("sample", in_markdown, line["step"])

    yield log
    writer.close()
