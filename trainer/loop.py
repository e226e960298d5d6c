"""The training loop."""

import contextlib

from common.console import count, say
from common.exits import AGAIN
from common.files import make_directory
from trainer.checkpoint import newest, retain
from trainer.config import TrainConfig
from trainer.distributed import join_world
from trainer.progress import TrainingProgress
from trainer.resume import open_source
from trainer.run import Run, open_data
from trainer.run_dir import check_folder, own_run, say_changes
from trainer.runtime import open_runtime
from trainer.signals import StopSignals
from trainer.step import Abandoned


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
        runtime.announce()
        # No variable here may hold the run: its model must be freed before the world ends (see join_world).
        return _train(Run(config, runtime, world, signals), config)


def check(config: TrainConfig) -> None:
    """Raise the errors of `fit` that need neither a device nor the model, and write nothing."""
    config.tracker.import_packages()
    _, tokenizer, *_ = open_data(config)
    if config.init_from is not None and newest(config.run_dir) is None:
        open_source(config.init_from, config.model, tokenizer)


def _train(run: Run, config: TrainConfig) -> float | None:
    # A killed save may have left this undone. If newer checkpoints are damaged, they stay: a disk may recover.
    if run.world.is_main and run.checkpoint is not None and not run.checkpoint.damaged:
        retain(config.run_dir, run.state, config.checkpoint)
    if run.step >= config.last_step:
        if run.world.is_main:
            line = "{key}={new} was given, but this run was trained with {old}"
            say_changes(config.run_dir / "config.json", config.model_dump(mode="json"), line, {})
        more = f"max_steps above {run.step}"
        if run.step < config.max_steps:
            more = f"stop_at above {run.step}, or leave it out"
        say(f"{config.run_dir} is already at step {run.step}: nothing to train. To go on, give a {more}")
        return run.state.best_val_loss
    if (warmup := config.schedule.warmup(config.max_steps)) < config.schedule.warmup_steps:
        asked = f"schedule.warmup_steps={config.schedule.warmup_steps} does not fit in max_steps={config.max_steps}"
        say(f"{asked}: the learning rate rises for {count(warmup, 'step')}")
    with run.open_files():
        _train_on(run, config)
        run.draw()
    if run.step < config.last_step:
        say(f"{run.stopped_by}: step {run.step} of {config.max_steps} is saved, and the same command resumes from it")
        raise SystemExit(AGAIN)
    run_dir = config.run_dir
    say(f"step {run.step} of {config.max_steps} saved in {run_dir}; loss curve: {run_dir / 'loss.png'}")
    return run.state.best_val_loss


def _train_on(run: Run, config: TrainConfig) -> None:
    """Train to the end of the run, or until a signal stops it, and save the last step."""
    with run.reading_ahead(), TrainingProgress(config.tokens, config.last_step, run.step, run.curves) as progress:
        while not run.ended:
            run.saver.check()
            try:
                line = run.train_step()
            except Abandoned:
                run.saver.wait()
                if run.saver.saved_step != run.step:
                    run.save()
                return
            run.write(line)
            progress.take(line)
            improved = run.due(config.eval.every) and run.evaluate()
            if improved or run.due(config.checkpoint.every) or run.ended:
                run.save()
