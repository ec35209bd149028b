"""Attention of a ragged batch of queries over paged keys and values."""

from pallas_kernels.ragged_paged_attention.api import get_attention
from pallas_kernels.ragged_paged_attention.contract import AttentionNeeds, AttentionOp, RaggedBatch

__all__ = ["AttentionNeeds", "AttentionOp", "RaggedBatch", "get_attention"]
