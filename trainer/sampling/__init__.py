"""Text from checkpoints: sample.py."""
