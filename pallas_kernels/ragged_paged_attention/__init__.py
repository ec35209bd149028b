"""Attention of a ragged batch of queries over paged keys and values."""

from pallas_kernels.ragged_paged_attention.api import attention_names, get_attention
from pallas_kernels.ragged_paged_attention.contract import AttentionNeeds, AttentionOp, RaggedBatch
from pallas_kernels.ragged_paged_attention.cpu import SOURCE as NATIVE_SOURCE

__all__ = ["NATIVE_SOURCE", "AttentionNeeds", "AttentionOp", "RaggedBatch", "attention_names", "get_attention"]
