"""What train.py, eval.py and sample.py share: configuration, the training loop, checkpoints, metrics."""
