"""Launchers of ``sddmm.cuh``: edge values from the rows at both ends."""

from __future__ import annotations

import torch
from torch import Tensor

from core_kernels.kernels.cuda._instances import FLOATS, INDICES, Kernel
from core_kernels.kernels.cuda._launch import launch_threads
from core_kernels.kernels.cuda._tasks import lane_layout, row_tasks, vec_for

__all__ = ["KERNELS", "dot_per_edge", "sddmm", "won_dot"]

_DOT = Kernel("sddmm_dot", "sddmm.cuh", FLOATS, INDICES, vec=True)
_WON_DOT = Kernel("won_dot", "sddmm.cuh", FLOATS, INDICES)
_ELEMENTWISE = Kernel("sddmm_elementwise", "sddmm.cuh", FLOATS, INDICES, vec=True)
KERNELS = (_DOT, _WON_DOT, _ELEMENTWISE)


def sddmm(
    indptr: Tensor,
    indices: Tensor,
    a: Tensor,
    b: Tensor,
    edge_ids: Tensor | None,
    op: str,
    heads: int,
    out: Tensor,
) -> None:
    """Fill ``out`` with the dot product per head, the sum or the product of both end rows of each edge."""
    if op == "dot":
        dot_per_edge(indptr, indices, a, b, edge_ids, heads, out)
        return
    width, num_edges = a.shape[1], indices.numel()
    vec = vec_for(a.dtype, width, a, b, out)
    tasks, lanes = row_tasks(indptr, num_edges), lane_layout(width, vec, num_edges, indptr.numel() - 1)
    launch_threads(
        _ELEMENTWISE.instance(a.dtype, indices.dtype, vec=vec),
        tasks.num_tasks * lanes.size if num_edges and width else 0,
        (indptr, indices, a, b, edge_ids, tasks.order, tasks.chunk_start, out)
        + (tasks.num_rows, tasks.max_chunks, width, lanes.columns, lanes.size, op == "mul"),
        a.device,
    )


def dot_per_edge(
    indptr: Tensor,
    indices: Tensor,
    a: Tensor,
    b: Tensor,
    edge_ids: Tensor | None,
    heads: int,
    out: Tensor,
    mean: bool = False,
    cached: bool = True,
) -> None:
    """Fill ``out`` [E, heads] with dot products of ``a[indices[p]]`` and ``b[d]``, over d's degree for ``mean``."""
    width, num_edges = a.shape[1], indices.numel()
    head_width = width // max(1, heads)
    vec = vec_for(a.dtype, head_width, a, b)
    tasks, lanes = row_tasks(indptr, num_edges, cached), lane_layout(head_width, vec, num_edges, indptr.numel() - 1)
    launch_threads(
        _DOT.instance(a.dtype, indices.dtype, vec=vec),
        tasks.num_tasks * lanes.size if num_edges and heads else 0,
        (indptr, indices, a, b, edge_ids, tasks.order, tasks.chunk_start, out)
        + (tasks.num_rows, tasks.max_chunks, width, heads, lanes.columns, lanes.size, mean),
        a.device,
    )


def won_dot(
    indptr: Tensor,
    indices: Tensor,
    x: Tensor,
    grad: Tensor,
    arg: Tensor,
    edge_ids: Tensor | None,
    heads: int,
    out: Tensor,
) -> None:
    """Fill ``out`` [E, heads] with ``grad[d] . x[s]`` over the columns whose extremum the edge won."""
    width, num_edges = x.shape[1], indices.numel()
    tasks = row_tasks(indptr, num_edges)
    lanes = lane_layout(width // max(1, heads), 1, num_edges, indptr.numel() - 1)
    launch_threads(
        _WON_DOT.instance(x.dtype, indices.dtype),
        tasks.num_tasks * lanes.size if num_edges and heads else 0,
        (indptr, indices, x, grad, arg.to(torch.int32), edge_ids, tasks.order, tasks.chunk_start, out)
        + (tasks.num_rows, tasks.max_chunks, width, heads, lanes.columns, lanes.size),
        x.device,
    )
