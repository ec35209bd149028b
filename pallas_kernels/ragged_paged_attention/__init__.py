"""Attention of a ragged batch of queries over paged keys and values."""

from pallas_kernels.ragged_paged_attention.api import AttentionOp, RaggedBatch, get_attention

__all__ = ["AttentionOp", "RaggedBatch", "get_attention"]
