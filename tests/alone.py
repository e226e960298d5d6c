"""A run whose steps a test takes itself."""

from runtime.device import choose_compute
from runtime.distributed import World
from trainer import loop, start


class Run(start.TrainingRun):
    """A run with its steps as methods."""

    def share(self, step):
        """This process's micro-batches of a step, counted from 0."""
        return loop.local_micro_batches(self.batches, step, self.group, self.micro_batch, self.world.device)

    def train_step(self):
        """Take the next step; returns its line."""
        return loop.take_step(self, self.share(self.state.step), lambda: False)[0]


def open_run(config, size=1):
    """The run in a world of so many processes, of which only this one is there."""
    compute = choose_compute(config.runtime)
    return Run(**vars(start.open_run(config, compute, World(compute.device, size=size))))
