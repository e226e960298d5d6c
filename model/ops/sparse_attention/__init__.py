"""Sparse attention: softmax over a pattern of keys (patterns.py)."""
