"""Training: its configuration, the loop, a step, optimizers, schedules, records of a run."""
