"""Sparse attention: softmax over a pattern of keys (patterns.py), at a cost proportional to their number."""

from model.ops.sparse_attention.attend import document_attention, forgetting_attention, sparse_attention
from model.ops.sparse_attention.naive import masked_attention, naive_sparse_attention

__all__ = [
    "document_attention",
    "forgetting_attention",
    "masked_attention",
    "naive_sparse_attention",
    "sparse_attention",
]
