"""What a run's main process records besides checkpoints."""

from common.files import write_or_warn
from common.settings import JsonDict
from trainer.records.curves import RunCurves, draw_losses
from trainer.records.metrics import MetricsLog, read_metrics
from trainer.records.run_dir import write_config
from trainer.records.trackers import Tracker, open_trackers
from trainer.start import TrainingRun


class Records:
    """config.json, metrics.jsonl, loss.png, samples.txt, and lines for trackers."""

    def __init__(self, run: TrainingRun) -> None:
        """Write config.json, and open the others. In other processes, do nothing."""
        self.curves = RunCurves()
        self.log: MetricsLog | None = None
        self._trackers: list[Tracker] = []
        self._run_dir = run.config.run_dir
        self._loss_suffix = " on answers" if run.config.data.loss == "answers" else ""
        if not run.world.is_main:
            return
        config = run.config.model_dump(mode="json")
        step = run.state.step
        derived = {
            "micro_batch": run.micro_batch,
            "n_params": run.gpt.n_params(),
            "flops_per_token": run.gpt.flops_per_token(run.config.seq_len),
            "dtype": str(run.compute.dtype).removeprefix("torch."),
            "tokenizer": run.tokenizer.sha256,
            "dataset_dir": str(run.state.dataset_dir),  # absolute
        }
        write_config(self._run_dir / "config.json", config, run.world, derived, resumed=step > 0)
        self.log = MetricsLog(self._run_dir / "metrics.jsonl", resumed_at=step)
        self.curves = RunCurves(read_metrics(self.log.path))
        self._trackers = open_trackers(
            run.config.tracker, run.state.run_id, self._run_dir, config, resumed_at=step
        )

    def write(self, line: JsonDict) -> None:
        """Write a line."""
        if self.log is not None:
            self.log.write(line)
            self.curves.add(line)
        for tracker in self._trackers:
            tracker.log(line)

    def draw(self) -> None:
        """Redraw loss.png, and write samples.txt."""
        if self.log is None:
            return
        draw_losses(self.curves, self._run_dir / "loss.png", str(self._run_dir), self._loss_suffix)
        if self.curves.samples:
            samples = [f"--- step {step}\n{text}" for step, text in self.curves.samples]
            write_or_warn(self._run_dir / "samples.txt", "\n\n".join(samples) + "\n")

    def close(self) -> None:
        """Finish the trackers and close metrics.jsonl."""
        for tracker in self._trackers:
            tracker.finish()
        if self.log is not None:
            self.log.close()
