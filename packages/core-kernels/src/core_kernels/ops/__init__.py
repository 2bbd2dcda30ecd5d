"""Differentiable graph and embedding operators, registered with ``torch.library`` under ``core_kernels``.

Every operator has a readable torch reference, a Numba kernel for the CPU and a CUDA kernel; all are deterministic.
:func:`core_kernels.backend` pins one of them. Public functions take graphs and check their arguments; the raw operators
behind them (:mod:`core_kernels.ops._schemas`) take plain tensors.
"""

from __future__ import annotations

from core_kernels.ops.aggregation import spmm
from core_kernels.ops.edgewise import sddmm
from core_kernels.ops.embedding import embedding_bag
from core_kernels.ops.fused_optimizers import fused_adagrad_, fused_adam_, fused_rowwise_adagrad_, fused_sgd_
from core_kernels.ops.partial import PartialState, partial_aggregate
from core_kernels.ops.quantize import dequantize_rows, quantize_rows
from core_kernels.ops.relabel import unique_relabel
from core_kernels.ops.rows import bucket_by_owner, gather, pack_rows, scatter_add, unpack_rows
from core_kernels.ops.sampling import sample_block, sample_blocks, sample_neighbors
from core_kernels.ops.segment import segment_reduce, segment_softmax
from core_kernels.ops.sketch import CountSketch

__all__ = [
    "CountSketch",
    "PartialState",
    "bucket_by_owner",
    "dequantize_rows",
    "embedding_bag",
    "fused_adagrad_",
    "fused_adam_",
    "fused_rowwise_adagrad_",
    "fused_sgd_",
    "gather",
    "pack_rows",
    "partial_aggregate",
    "quantize_rows",
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
