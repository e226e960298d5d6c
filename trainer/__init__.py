"""Training: its configuration, the loop, optimizers, schedules, checkpoints, processes, metrics."""
