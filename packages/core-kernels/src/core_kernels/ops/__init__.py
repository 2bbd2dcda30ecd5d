"""Differentiable graph and embedding operators, registered with ``torch.library`` under ``core_kernels``."""

from __future__ import annotations

from core_kernels.ops.aggregation import spmm
from core_kernels.ops.edgewise import sddmm
from core_kernels.ops.segment import segment_reduce, segment_softmax

__all__ = ["sddmm", "segment_reduce", "segment_softmax", "spmm"]
