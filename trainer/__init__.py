"""Training: its configuration, the loop, optimizers and schedules, checkpoints, processes, metrics."""
