"""Training from top to bottom: open the run; for each step read, train, log, evaluate, save."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import numpy as np
import torch

from common.command_line import format_options
from common.console import say
from common.exits import AGAIN
from common.memory import is_out_of_memory
from common.numbers import plus_minus
from common.settings import JsonDict, UserError
from data.loader import Prefetch
from runtime.checkpoint import Saver, find_newest
from runtime.device import Compute, choose_compute, peak_flops
from runtime.distributed import World, join_world
from runtime.losses import evaluate_windows
from trainer.bad_steps import skip_step
from trainer.config import TrainConfig
from trainer.init_from import open_init_from
from trainer.records.announce import TrainingProgress, announce_run
from trainer.records.run_dir import check_folder, own_run
from trainer.records.run_records import Records
from trainer.records.samples import sample_text
from trainer.signals import StopSignals
from trainer.start import TrainingRun, open_data, open_run
from trainer.step import MicroBatches, local_micro_batches, train_step


def check_run(config: TrainConfig) -> None:
    """Raise the errors of `fit` that need neither a device nor the model, and write nothing."""
    config.tracker.import_packages()
    _, _, tokenizer, *_ = open_data(config)
    if config.init_from is not None and find_newest(config.run_dir) is None:
        open_init_from(config.init_from, config.model, tokenizer)


def fit(config: TrainConfig) -> float | None:
    """Train until config.last_step, or resume a run; results are written to config.run_dir.

    Returns:
        The lowest validation loss in nats per token, or None if nothing was evaluated.

    Raises:
        UserError: the user must fix something; no checkpoint is lost.
        ModuleNotFoundError: a package that the configuration needs is not installed.
        SystemExit: the run was asked to stop, or lost a process: the same command resumes it
            (exits.AGAIN).
    """
    config.tracker.import_packages()
    check_folder(config.run_dir)
    compute = choose_compute(config.runtime)
    with (
        StopSignals() as signals,
        join_world(compute.device, timedelta(minutes=config.runtime.timeout_minutes)) as world,
        own_run(config.run_dir) if world.is_main else contextlib.nullcontext(),
    ):
        # No variable here may hold the run: its model must be freed before the world ends.
        return train(config, compute, world, signals)


def train(
    config: TrainConfig, compute: Compute, world: World, signals: StopSignals
) -> float | None:
    """Train in a run directory that this process owns: see `fit`."""
    run = open_run(config, compute, world)  # as after its newest checkpoint, or new
    config = run.config  # with the length of a run of epochs
    if run.state.step >= config.last_step:
        _say_nothing_to_train(run)
        return run.state.best_val_loss
    # The batches of later steps are read while a step is taken.
    steps = range(run.state.step, config.last_step)
    stopped = False
    with (
        _open_files(run) as (records, saver),
        Prefetch(
            local_micro_batches(run.batches, step, run.group, run.micro_batch, world.device)
            for step in steps
        ) as batches,
        TrainingProgress(config.last_step, run.state.step) as progress,
    ):
        while run.state.step < config.last_step and not stopped:
            # Take a step on its batch.
            saver.check()
            started = time.perf_counter()
            result = take_step(run, next(batches), lambda: signals.received is not None)
            if result is None:  # asked to stop within the step: the run is as it was before it
                saver.wait()
                if saver.saved_step != run.state.step:
                    _save(run, saver)
                break
            # Record it.
            line, stopped = result
            if "loss" in line:
                line |= _speed(run, time.perf_counter() - started)
            records.write(line)
            progress.take(line)
            # Evaluate, and save.
            improved = False
            if _is_due(run, config.eval.every):
                progress.flush()
                improved = _evaluate(run, records)
            is_last = stopped or run.state.step == config.last_step
            if improved or is_last or _is_due(run, config.checkpoint.every):
                _save(run, saver)
            if _is_due(run, config.eval.every):
                records.draw()
        records.draw()
    if run.state.step < config.last_step:
        _say_stopped(run, signals)
        raise SystemExit(AGAIN)
    _say_done(run)
    return run.state.best_val_loss


def _say_nothing_to_train(run: TrainingRun) -> None:
    config = run.config
    step = run.state.step
    remedy = f"max_steps above {step}"
    if config.epochs is not None:
        remedy = f"epochs above {config.epochs:g}"
    if step < config.max_steps:
        remedy = f"stop_at above {step}, or leave it out"
    elif config.schedule.longer:
        remedy += f"; without a jump of the learning rate: {config.schedule.longer}"
    status = f"{config.run_dir} is already at step {step}: nothing to train"
    say(f"{status}. To continue, give a {remedy}")


@contextlib.contextmanager
def _open_files(run: TrainingRun) -> Iterator[tuple[Records, Saver]]:
    """Open what a run writes, and finish its last save in the end."""
    config = run.config
    world = run.world
    world.wait_for_all()  # until every process has read what the main process is about to change
    records = Records(run)
    if world.is_main:
        announce_run(run, records.curves.rate)
    saver = Saver(config.run_dir, run.tokenizer, config.checkpoint, world, run.checkpoint)
    try:
        yield records, saver
        saver.wait()
        saver.check()
    except BaseException:
        saver.wait()
        with contextlib.suppress(OSError):  # a warning was printed, and the error matters more
            records.close()
        raise
    records.close()


def take_step(
    run: TrainingRun, micro_batches: MicroBatches, asked_to_stop: Callable[[], bool]
) -> tuple[JsonDict, bool] | None:
    """Take the run's next step, or skip it if it is bad.

    Returns:
        Its line for metrics.jsonl, and whether any process was asked to stop. None: this process is
        alone and was asked to stop before the last micro-batch; the run is unchanged.

    Raises:
        UserError: the run must halt, or memory ran out. Weights and optimizer are unchanged.
    """
    config = run.config
    state = run.state
    step = state.step + 1
    # Steps are counted from 1, and the schedule counts from 0.
    factor = config.schedule.factor(state.step, config.max_steps)
    config.optim.set_learning_rate(run.optimizer, factor)
    try:
        result = train_step(
            run.summed_loss,
            run.optimizer,
            micro_batches,
            run.compute,
            run.world,
            grad_clip=config.optim.grad_clip,
            asked_to_stop=asked_to_stop,
        )
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(
            f"out of memory in step {step} with micro-batches of {run.micro_batch} sequences: "
            "lower runtime.micro_batch"
        ) from error
    if result is None:
        return None
    # The weights are unchanged: halt, or go on with the next batch.
    if result.refused is not None:
        return skip_step(run, result.refused), result.stop
    run.update(step=step)
    line = run.line(loss=result.loss, lr=config.optim.max_lr * factor, grad_norm=result.grad_norm)
    return line, result.stop


def _speed(run: TrainingRun, seconds: float) -> dict[str, float | None]:
    """Throughput of a step that took so many seconds."""
    rate = run.config.tokens(1) / seconds
    mfu = None
    peak = peak_flops(run.world.device, run.compute.dtype)
    if peak is not None:
        flops = run.gpt.flops_per_token(run.config.seq_len)
        mfu = round(rate * flops / (peak * run.world.size), 4)
    return {"tokens_per_second": round(rate, 1), "mfu": mfu}


def _is_due(run: TrainingRun, every: int | None) -> bool:
    """Whether something is due that happens every `every` steps and at the schedule's end."""
    step = run.state.step
    return step == run.config.max_steps or (every is not None and step % every == 0)


def _evaluate(run: TrainingRun, records: Records) -> bool:
    """Measure and log the validation loss.

    Returns:
        Whether it is the lowest so far.
    """
    config = run.config
    step = run.state.step
    # Measure the loss, in chunks that fit where training used chunks.
    byte_lengths = torch.from_numpy(run.tokenizer.byte_lengths).to(run.world.device)
    chunk = run.compute.sequence_chunk or config.seq_len // run.group.size
    *groups, loss = evaluate_windows(
        run.gpt, run.windows, byte_lengths, run.micro_batch, run.compute, run.world, chunk
    )
    if not math.isfinite(loss.nats):
        raise UserError(
            f"step {step}: validation loss is {loss.nats}: lower optim.max_lr, and start again"
        )
    # Write the sample that was asked for.
    text = None
    if config.eval.prompt is not None:
        text = sample_text(
            run.gpt, config.eval.prompt, run.tokenizer, run.compute, run.world, config.seed
        )
    # Leave out what is not known, such as bits of a text without bytes.
    figures: JsonDict = {
        "val_loss_stderr": loss.stderr,
        "val_loss_groups": [group.per_token for group in groups],
        "val_bits_per_byte": loss.bits_per_byte,
        "val_bits_per_byte_stderr": loss.bits_stderr,
        "val_bits_per_byte_groups": [group.bits_per_byte for group in groups],
    }
    known = {key: value for key, value in figures.items() if np.isfinite(value).all()}
    line = run.line(val_loss=loss.per_token, **known)
    # Record and print them.
    losses = f"{loss.per_token:.4f}{plus_minus(loss.stderr)} nats/token"
    if loss.bytes:
        losses += f", {loss.bits_per_byte:.4f}{plus_minus(loss.bits_stderr)} bits/byte"
    if text:  # ids without text have none
        line["sample"] = text
    records.write(line)
    answers = " on answers" if config.data.loss == "answers" else ""
    say(f"step {step}: validation loss{answers} {losses}")
    if text:
        say(f"step {step} writes:\n  | " + text.replace("\n", "\n  | "))
    # A checkpoint follows if it is the lowest.
    improved = run.state.best_val_loss is None or loss.per_token < run.state.best_val_loss
    if improved:
        run.update(best_val_loss=loss.per_token, best_step=step)
    return improved


def _save(run: TrainingRun, saver: Saver) -> None:
    """Write a checkpoint in the background, and delete those that need not be kept."""
    # Older skipped steps are not in a row with later ones.
    first = run.state.step - run.config.runtime.max_bad_steps
    skipped_steps = {
        step: reason for step, reason in run.state.skipped_steps.items() if step >= first
    }
    run.update(skipped_steps=skipped_steps)
    saver.save(run.tensors(), run.state)


def _say_stopped(run: TrainingRun, signals: StopSignals) -> None:
    reason = "another process was asked to stop"
    if signals.received is not None:
        reason = f"stopped by {signals.received.name}"
    progress = f"step {run.state.step:,} of {run.config.max_steps:,}"
    say(f"{reason}: {progress} is saved, and the same command resumes from it")


def _say_done(run: TrainingRun) -> None:
    config = run.config
    lowest = ""
    if run.state.best_val_loss is not None:
        loss = f"{run.state.best_val_loss:.4f}, at step {run.state.best_step}"
        lowest = f"; lowest validation loss {loss}"
    progress = f"step {run.state.step:,} of {config.max_steps:,}"
    picture = ", with loss.png" if (config.run_dir / "loss.png").exists() else ""
    say(f"{progress} saved in {config.run_dir}{picture}{lowest}")
    options: JsonDict = {"checkpoint": str(config.run_dir)}
    if config.data.loss == "answers":
        options["interactive"] = True
    say(f"to sample from it: python sample.py {format_options(options)}")
