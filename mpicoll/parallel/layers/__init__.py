"""Tensor and sequence parallel layers."""

from mpicoll.parallel.layers.linear import (
    ColumnParallelLinear,
    LayerNorm,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
    column_parallel_linear,
    shard_,
    whole_state_dict,
)

__all__ = [
    "ColumnParallelLinear",
    "LayerNorm",
    "RMSNorm",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "column_parallel_linear",
    "shard_",
    "whole_state_dict",
]
