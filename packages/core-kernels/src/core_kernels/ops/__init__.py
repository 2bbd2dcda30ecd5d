"""Differentiable graph and embedding operators, registered with ``torch.library`` under ``core_kernels``."""

from __future__ import annotations

from core_kernels.ops.aggregation import spmm
from core_kernels.ops.edgewise import sddmm
from core_kernels.ops.relabel import unique_relabel
from core_kernels.ops.rows import bucket_by_owner, gather, pack_rows, scatter_add, unpack_rows
from core_kernels.ops.sampling import sample_block, sample_blocks, sample_neighbors
from core_kernels.ops.segment import segment_reduce, segment_softmax

__all__ = [
    "bucket_by_owner",
    "gather",
    "pack_rows",
    "sample_block",
    "sample_blocks",
    "sample_neighbors",
    "scatter_add",
    "sddmm",
    "segment_reduce",
    "segment_softmax",
    "spmm",
    "unique_relabel",
    "unpack_rows",
]
