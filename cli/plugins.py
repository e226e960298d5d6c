"""What Hydra's sweepers and launchers need of us, and cannot do."""

import shutil

from omegaconf import DictConfig

from common.settings import UserError


def complete_plugins(chosen: DictConfig, searched: bool) -> None:
    """What a sweep that is started again, or that has GPUs to share, needs. `searched`: some option has several values.

    Raises:
        UserError: a launcher or a sweeper cannot work so.
    """
    launcher, sweeper = (chosen.runtime.choices[f"hydra/{plugin}"] for plugin in ("launcher", "sweeper"))
    if launcher == "joblib":
        from cli.sweep import let_workers_save, visible_gpus

        if chosen.launcher.n_jobs == 0:
            raise UserError("hydra.launcher.n_jobs=0 is no worker: use 1 or more, or -1 for one for every GPU or CPU")
        let_workers_save()
        if chosen.launcher.n_jobs == -1:  # one for every CPU
            chosen.launcher.n_jobs = len(visible_gpus()) or -1
    if launcher == "submitit_slurm" and shutil.which("srun") is None:
        raise UserError(
            "hydra/launcher=submitit_slurm: there is no srun here; start the sweep where SLURM's commands are"
        )
    if sweeper == "optuna":
        from optuna import logging as optuna_logging

        for key in ("n_trials", "n_jobs"):
            if chosen.sweeper[key] < 1:
                raise UserError(f"hydra.sweeper.{key}={chosen.sweeper[key]} is too few: use 1 or more")
        if chosen.sweeper.storage is not None:
            raise UserError(
                "hydra.sweeper.storage is not needed: started again, a sweep finds its jobs by their folders"
            )
        if not (searched or chosen.sweeper.get("params")):
            raise UserError(
                "hydra/sweeper=optuna has nothing to search: give a range or choices, such as "
                "'optim.max_lr=tag(log, interval(1e-3, 1e-2))'"
            )
        if "seed" in chosen.sweeper.sampler and chosen.sweeper.sampler.seed is None:  # others would be other jobs
            chosen.sweeper.sampler.seed = 1
        optuna_logging.set_verbosity(optuna_logging.WARNING)
