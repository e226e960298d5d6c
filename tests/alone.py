"""A run whose steps a test takes itself."""

from trainer.distributed import World
from trainer.run import Run
from trainer.runtime import open_runtime


def open_run(config, size=1):
    """The run in a world of so many processes, of which only this one is there."""
    runtime = open_runtime(config.runtime)
    return Run(config, runtime, World(runtime.device, size=size))
