"""Linear attention (Katharopoulos et al. 2020): attention whose weights are products of positive features."""

from model.ops.linear_attention.chunked import LinearAttentionState, linear_attention
from model.ops.linear_attention.naive import naive_linear_attention

__all__ = ["LinearAttentionState", "linear_attention", "naive_linear_attention"]
