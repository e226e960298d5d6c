"""Forgets what a terminal, a launcher or a service has set in the environment of the tests. Before rich and torch."""

import os

_OF_TERMINALS = ("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
_OF_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

for name in [*os.environ]:
    if name in (*_OF_TERMINALS, *_OF_LAUNCHERS) or name.startswith(("TORCHELASTIC_", "SLURM_", "WANDB_", "OMPI_")):
        del os.environ[name]

# Workers of pytest share the CPU: a thread that waits for another must not spin meanwhile.
os.environ.setdefault("GOMP_SPINCOUNT", "0")
