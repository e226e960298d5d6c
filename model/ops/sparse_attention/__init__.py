"""Sparse attention: softmax over a pattern of keys, at a cost proportional to the number of these keys."""

from model.ops.sparse_attention.attend import sparse_attention
from model.ops.sparse_attention.naive import masked_attention, naive_sparse_attention
from model.ops.sparse_attention.patterns import (
    Pattern,
    fixed,
    longformer,
    needed_keys,
    pattern_mask,
    reach_of,
    strided,
    window,
)

__all__ = [
    "Pattern",
    "fixed",
    "longformer",
    "masked_attention",
    "naive_sparse_attention",
    "needed_keys",
    "pattern_mask",
    "reach_of",
    "sparse_attention",
    "strided",
    "window",
]
