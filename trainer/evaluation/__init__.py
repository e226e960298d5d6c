"""Evaluation of checkpoints: eval.py, and the adapter for lm-evaluation-harness."""
