"""Training, from top to bottom: open the run, then for each step read, train, log, evaluate and save."""

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from common.command_line import overrides
from common.console import say, warn
from common.exits import AGAIN
from common.files import make_directory, write_or_warn
from common.memory import out_of_memory
from common.settings import JsonDict, UserError
from data.loader import Prefetch
from trainer.announce import TrainingProgress, announce
from trainer.bad_steps import Symptoms, first_not_finite, why_bad
from trainer.checkpoint import Saver, newest
from trainer.config import TrainConfig
from trainer.curves import RunCurves, draw_losses
from trainer.distributed import World, join_world
from trainer.losses import evaluate
from trainer.metrics import MetricsLog, read_metrics
from trainer.run_dir import check_folder, own_run, write_config
from trainer.runtime import Runtime, open_runtime, peak_flops
from trainer.samples import sample
from trainer.signals import StopSignals
from trainer.start import Run, open_data, open_run, open_source
from trainer.step import NO_TARGETS, MicroBatches, train_step
from trainer.trackers import Tracker, open_trackers


def fit(config: TrainConfig) -> float | None:
    """Train until config.last_step, or resume a run; results are written to config.run_dir.

    Returns:
        The lowest validation loss in nats per token, or None if nothing was evaluated.

    Raises:
        UserError: the user must fix something; no checkpoint is lost.
        ModuleNotFoundError: a package that the configuration needs is not installed.
        SystemExit: the run was asked to stop, or lost a process: the same command resumes it (exits.AGAIN).
    """
    config.tracker.import_packages()
    check_folder(config.run_dir)
    runtime = open_runtime(config.runtime)
    make_directory(config.run_dir, "run_dir")
    with (
        StopSignals() as signals,
        join_world(runtime.device, config.runtime.hang_seconds) as world,
        own_run(config.run_dir) if world.is_main else contextlib.nullcontext(),
    ):
        # No variable here may hold the run: its model must be freed before the world ends (see join_world).
        return train(config, runtime, world, signals)


def check(config: TrainConfig) -> None:
    """Raise the errors of `fit` that need neither a device nor the model, and write nothing."""
    config.tracker.import_packages()
    _, tokenizer, *_ = open_data(config)
    if config.init_from is not None and newest(config.run_dir) is None:
        open_source(config.init_from, config.model, tokenizer)


def train(
    config: TrainConfig, runtime: Runtime, world: World, signals: StopSignals
) -> float | None:
    """Train in a run directory that this process owns: see `fit`."""
    run = open_run(config, runtime, world)  # as after its newest checkpoint, or new
    if run.state.step >= config.last_step:
        step = run.state.step
        more = (
            f"stop_at above {step}, or leave it out"
            if step < config.max_steps
            else f"max_steps above {step}"
        )
        if step >= config.max_steps and config.schedule.longer:
            more += f"; without a jump of the learning rate: {config.schedule.longer}"
        say(
            f"{config.run_dir} is already at step {step}: nothing to train. To continue, give a {more}"
        )
        return run.state.best_val_loss
    steps, stopped = range(run.state.step, config.last_step), False
    with (
        _open_files(run) as (records, saver),
        Prefetch(local_micro_batches(run, step) for step in steps) as batches,
        TrainingProgress(config.last_step, run.state.step) as progress,
    ):
        symptoms = Symptoms(config.model.n_vocab, config.optim.max_lr)
        while run.state.step < config.last_step and not stopped:
            saver.check()
            started = time.perf_counter()
            world.at(f"step {run.state.step + 1}: data")
            micro_batches = next(batches)
            taken = take_step(
                run, micro_batches, asked_to_stop=lambda: signals.received is not None
            )
            if taken is None:  # asked to stop within the step: the run is as it was before it
                saver.wait()
                if saver.saved_step != run.state.step:
                    _save(run, saver)
                break
            line, stopped = taken
            if "loss" in line:
                line |= _speed(run, time.perf_counter() - started)
            records.write(line)
            progress.take(line)
            symptoms.take(line)
            if evaluates := _due(run, config.eval.every):
                progress.flush()
            improved = evaluates and _evaluate(run, records)
            if (
                improved
                or _due(run, config.checkpoint.every)
                or stopped
                or run.state.step == config.last_step
            ):
                _save(run, saver)
        records.draw()
    done = f"step {run.state.step:,} of {config.max_steps:,}"
    if run.state.step < config.last_step:
        own = signals.received
        why = "another process was asked to stop" if own is None else f"stopped by {own.name}"
        say(f"{why}: {done} is saved, and the same command resumes from it")
        raise SystemExit(AGAIN)
    best, at = run.state.best_val_loss, run.state.best_step
    lowest = "" if best is None else f"; lowest validation loss {best:.4f}, at step {at}"
    say(f"{done} saved in {config.run_dir}, with loss.png{lowest}")
    talk = {"interactive": True} if config.data.loss == "answers" else {}
    say(
        f"to sample from it: python sample.py {overrides({'checkpoint': str(config.run_dir)} | talk)}"
    )
    return best


def local_micro_batches(run: Run, step: int) -> MicroBatches:
    """This process's part of the global batch of a step, in pinned memory if a GPU reads it."""
    group = run.group
    first, stop = (
        index * run.config.batch_size // group.count for index in (group.index, group.index + 1)
    )
    whole = map(torch.from_numpy, run.batches.batch(step, first, stop))
    own = [ids.chunk(group.size, dim=1)[group.place] for ids in whole]
    if run.world.device.type == "cuda":
        own = [ids.contiguous().pin_memory() for ids in own]  # other memory is copied twice
    n = stop - first
    size = -(
        -n // -(-n // run.micro_batch)
    )  # as equal as possible; the last micro-batch may be smaller
    token_ids, targets = (ids.split(size) for ids in own)
    return list(zip(token_ids, targets, strict=True))


def take_step(
    run: Run, micro_batches: MicroBatches, asked_to_stop: Callable[[], bool]
) -> tuple[JsonDict, bool] | None:
    """Take the run's next step, or skip it if it is bad.

    Returns:
        Its line for metrics.jsonl, and whether any process was asked to stop. None: this process is alone and was
        asked to stop before the last micro-batch; the run is unchanged.

    Raises:
        UserError: the run must halt, or memory ran out. Weights and optimizer are unchanged.
    """
    config, state, step = run.config, run.state, run.state.step + 1
    factor = config.schedule.factor(state.step, config.max_steps)
    config.optim.schedule(run.optimizer, factor, state.step / config.max_steps)
    try:
        result = train_step(
            run.summed_loss,
            run.optimizer,
            micro_batches,
            run.runtime,
            run.world,
            grad_clip=config.optim.grad_clip,
            refuse=lambda loss, norm: why_bad(
                loss, norm, state.statistics, config.runtime.spike_sigmas
            ),
            asked_to_stop=asked_to_stop,
            name=f"step {step}",
        )
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        what = f"out of memory in step {step} with micro-batches of {run.micro_batch} sequences"
        raise UserError(f"{what}: lower runtime.micro_batch") from error
    if result is None:
        return None
    if result.refused is not None:
        return _skip(run, result.refused), result.stop
    statistics = (
        state.statistics.after(result.loss) if config.runtime.spike_sigmas else state.statistics
    )
    run.update(step=step, statistics=statistics)
    if run.average is not None:
        run.average.take(step)
    figures = {
        "loss": result.loss,
        "lr": config.optim.max_lr * factor,
        "grad_norm": result.grad_norm,
    }
    tiles = {"exact_tiles": result.exact_tiles} if result.exact_tiles else {}
    return _line(run, **figures, **tiles), result.stop


def _skip(run: Run, reason: str) -> JsonDict:
    """Skip a bad step, and return its line; raise UserError if the run must halt, as runtime.on_nonfinite says."""
    config, step = run.config, run.state.step + 1
    if bad := first_not_finite(run.gpt.named_parameters(), run.world):
        reason = f"{reason} (first gradients not finite: {', '.join(bad)})"
    run.optimizer.zero_grad()
    before = next(n for n in itertools.count() if step - n - 1 not in run.state.passed_over)
    halts = config.runtime.on_nonfinite == "halt" and reason != NO_TARGETS
    if halts or before >= config.runtime.max_bad_steps:
        often = "" if halts else f", after {before} bad steps in a row"
        look = f"scripts/inspect_dataset.py run_dir={config.run_dir} step={step} shows what it read"
        remedy = f"lower optim.max_lr={config.optim.max_lr:g}, or see runtime.on_nonfinite, and start again"
        remedy = "raise batch_tokens, in another run_dir" if reason == NO_TARGETS else remedy
        raise UserError(
            f"step {step}: {reason}{often}; the weights are unchanged: {remedy}; {look}"
        )
    warn(f"skipping step {step}: {reason}")
    run.update(step=step, passed_over={**run.state.passed_over, step: reason})
    return _line(run, event="skipped", reason=reason)


def _line(run: Run, **values: Any) -> JsonDict:
    """A line of metrics.jsonl."""
    return {"step": run.state.step, "tokens": run.config.tokens(run.state.step), **values}


def _speed(run: Run, seconds: float) -> dict[str, float | None]:
    """Throughput of a step that took so many seconds."""
    rate = run.config.tokens(1) / seconds
    peak = peak_flops(run.world.device, run.runtime.dtype)
    mfu = (
        rate * run.gpt.flops_per_token(run.config.seq_len) / (peak * run.world.size)
        if peak
        else None
    )
    return {"tokens_per_second": round(rate, 1), "mfu": mfu and round(mfu, 4)}


def _due(run: Run, every: int) -> bool:
    """Whether something that happens every `every` steps, and at the end of the schedule, is due."""
    return run.state.step % every == 0 or run.state.step == run.config.max_steps


def _evaluate(run: Run, records: "Records") -> bool:
    """Measure and log the validation loss, of the averaged weights if there are any; returns whether it is the best."""
    config, step = run.config, run.state.step
    byte_lengths = torch.from_numpy(run.tokenizer.byte_lengths).to(run.world.device)
    piece = run.runtime.sequence_chunk or config.seq_len // run.group.size
    how = byte_lengths, run.micro_batch, run.runtime, run.world, piece
    with contextlib.nullcontext() if run.average is None else run.average.in_place():
        loss = evaluate(run.gpt, run.windows, *how)
        if not math.isfinite(loss.nats):
            raise UserError(
                f"step {step}: validation loss is {loss.nats}: lower optim.max_lr, and start again"
            )
        prompt, from_run = config.eval.prompt, (run.tokenizer, run.runtime, run.world, config.seed)
        text = None if prompt is None else sample(run.gpt, prompt, *from_run)
    bits = {"val_bits_per_byte": loss.bits_per_byte} if loss.bytes else {}
    records.write(
        _line(run, val_loss=loss.per_token, **bits, **({} if text is None else {"sample": text}))
    )
    of = " on answers" if config.data.loss == "answers" else ""
    of += "" if run.average is None else " (averaged weights)"
    figures = f"{loss.per_token:.4f} nats/token" + (
        f", {loss.bits_per_byte:.4f} bits/byte" if bits else ""
    )
    say(f"step {step}: validation loss{of} {figures}")
    if text is not None:
        say(f"step {step} writes:\n  | " + text.replace("\n", "\n  | "))
    records.draw()
    improved = run.state.best_val_loss is None or loss.per_token < run.state.best_val_loss
    if improved:
        run.update(best_val_loss=loss.per_token, best_step=step)
    return improved


def _save(run: Run, saver: Saver) -> None:
    """Write a checkpoint in the background, and delete those that need not be kept."""
    run.world.at(f"step {run.state.step}: save")
    first = (
        run.state.step - run.config.runtime.max_bad_steps
    )  # older ones are not in a row with later ones
    run.update(
        passed_over={step: why for step, why in run.state.passed_over.items() if step >= first}
    )
    saver.save(run.tensors(), run.state)


class Records:
    """What the main process records: config.json, metrics.jsonl, loss.png, samples.txt, and lines for trackers."""

    def __init__(self, run: Run) -> None:
        """Write config.json, and open the others. In other processes, do nothing."""
        self.curves = RunCurves()
        self.log: MetricsLog | None = None
        self._trackers: list[Tracker] = []
        self._run_dir = run_dir = run.config.run_dir
        if not run.world.is_main:
            return
        config, step = run.config.model_dump(mode="json"), run.state.step
        found = {
            "micro_batch": run.micro_batch,
            "n_params": run.gpt.n_params(),
            "flops_per_token": run.gpt.flops_per_token(run.config.seq_len),
            "dtype": str(run.runtime.dtype).removeprefix("torch."),
            "dataset_dir": str(run.state.dataset_dir),  # absolute
        }
        write_config(run_dir / "config.json", config, run.world, found, resumed=step > 0)
        self.log = MetricsLog(run_dir / "metrics.jsonl", resumed_at=step)
        self.curves = RunCurves(read_metrics(self.log.path))
        self._trackers = open_trackers(
            run.config.tracker, run.state.run_id, run_dir, config, resumed_at=step
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
        if self.log is not None:
            draw_losses(self.curves, self._run_dir / "loss.png", str(self._run_dir))
            if samples := self.curves.samples:
                texts = "\n\n".join(f"--- step {step}\n{text}" for step, text in samples)
                write_or_warn(self._run_dir / "samples.txt", texts + "\n")

    def close(self) -> None:
        """Finish the trackers and close metrics.jsonl; OSError: its last lines are lost."""
        for tracker in self._trackers:
            tracker.finish()
        if self.log is not None:
            self.log.close()


@contextlib.contextmanager
def _open_files(run: Run) -> Iterator[tuple[Records, Saver]]:
    """Open what a run writes, and finish its last save in the end. The processes do not wait for each other then."""
    config, world = run.config, run.world
    world.wait_for_all()  # until every process has read what the main process is about to change
    records = Records(run)
    if world.is_main:
        announce(run, records.curves.rate)
    saver = Saver(
        config.run_dir, run.tokenizer, config.checkpoint, world, records.log, run.checkpoint
    )
    try:
        yield records, saver
        world.leave()
        saver.wait()
        saver.check(last=True)
    except BaseException as error:
        world.leave(error)
        saver.wait()
        with contextlib.suppress(OSError):  # a warning was printed, and `error` matters more
            records.close()
        raise
    records.close()
