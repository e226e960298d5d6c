"""Sparse attention: softmax over a pattern of keys (patterns.py), at a cost proportional to their
number."""
