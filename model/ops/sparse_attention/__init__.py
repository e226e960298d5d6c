"""Sparse attention: softmax over a pattern of keys, at the cost of the keys that it sees."""

from model.ops.sparse_attention.attend import sparse_attention
from model.ops.sparse_attention.naive import masked_attention, naive_sparse_attention
from model.ops.sparse_attention.patterns import Pattern, fixed, longformer, pattern_mask, strided, window

__all__ = [
    "Pattern",
    "fixed",
    "longformer",
    "masked_attention",
    "naive_sparse_attention",
    "pattern_mask",
    "sparse_attention",
    "strided",
    "window",
]
