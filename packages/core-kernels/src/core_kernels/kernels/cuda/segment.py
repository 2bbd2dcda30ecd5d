"""Launchers of ``segment.cuh``, and segment reductions through the kernels of ``spmm.cuh``."""

from __future__ import annotations

from torch import Tensor

from core_kernels.kernels.cuda._instances import FLOATS, Instance, Kernel, accumulator
from core_kernels.kernels.cuda._launch import launch_threads
from core_kernels.kernels.cuda._tasks import as_scale, lane_layout, row_tasks, vec_for
from core_kernels.kernels.cuda.spmm import extremum_rows, sum_rows

__all__ = [
    "KERNELS",
    "segment_expand",
    "segment_extremum",
    "segment_extremum_backward",
    "segment_softmax",
    "segment_softmax_backward",
    "segment_sum",
]

_EXPAND = Kernel("segment_expand", "segment.cuh", FLOATS, vec=True)
_EXTREMUM_BACKWARD = Kernel("segment_extremum_backward", "segment.cuh", FLOATS)
_SOFTMAX = Kernel("segment_softmax", "segment.cuh", FLOATS)
_SOFTMAX_CHUNKS = Kernel("segment_softmax_chunks", "segment.cuh", FLOATS)
_SOFTMAX_BACKWARD = Kernel("segment_softmax_backward", "segment.cuh", FLOATS)
_SOFTMAX_BACKWARD_CHUNKS = Kernel("segment_softmax_backward_chunks", "segment.cuh", FLOATS)
KERNELS = (
    _EXPAND,
    _EXTREMUM_BACKWARD,
    _SOFTMAX,
    _SOFTMAX_CHUNKS,
    _SOFTMAX_BACKWARD,
    _SOFTMAX_BACKWARD_CHUNKS,
)


def segment_sum(x: Tensor, indptr: Tensor, edge_ids: Tensor | None, dst_scale: Tensor | None, out: Tensor) -> None:
    """Fill ``out`` with the scaled sum of each segment's rows."""
    sum_rows(indptr, edge_ids, x, out, num_edges=x.shape[0], dst_scale=dst_scale)


def segment_extremum(
    x: Tensor, indptr: Tensor, edge_ids: Tensor | None, largest: bool, out: Tensor, arg: Tensor
) -> None:
    """Fill ``out`` and ``arg`` with each segment's extremum and the slot that won."""
    extremum_rows(indptr, edge_ids, x, None, None, largest, out, arg, x.shape[0])


def segment_expand(
    x: Tensor, indptr: Tensor, edge_ids: Tensor | None, dst_scale: Tensor | None, num_edges: int, out: Tensor
) -> None:
    """Fill ``out`` with each segment's scaled row, once for each of its positions."""
    vec = vec_for(x.dtype, x.shape[1], x, out)
    scale = as_scale(dst_scale, x.dtype)
    _launch_rows(_EXPAND.instance(x.dtype, vec=vec), (x, indptr, edge_ids, scale), (out,), indptr, out, num_edges, vec)


def segment_extremum_backward(
    grad: Tensor, arg: Tensor, indptr: Tensor, edge_ids: Tensor | None, num_edges: int, out: Tensor
) -> None:
    """Fill ``out`` with each segment's gradient at the position that won, zero elsewhere."""
    instance = _EXTREMUM_BACKWARD.instance(grad.dtype)
    _launch_rows(instance, (grad, arg, indptr, edge_ids), (out,), indptr, out, num_edges)


def segment_softmax(logits: Tensor, indptr: Tensor, edge_ids: Tensor | None, out: Tensor) -> None:
    """Fill ``out`` with the softmax over each segment, per column."""
    num_edges = logits.shape[0]
    tasks = row_tasks(indptr, num_edges)
    states = [tasks.partial(logits.shape[1], accumulator(logits.dtype), logits.device) for _ in range(2)]
    before, after = (logits, indptr, edge_ids), (*states, out)
    _launch_rows(_SOFTMAX.instance(logits.dtype), before, after, indptr, out, num_edges)
    if tasks.max_chunks:
        _launch_rows(_SOFTMAX_CHUNKS.instance(logits.dtype), before, after, indptr, out, num_edges, only_chunks=True)


def segment_softmax_backward(
    grad: Tensor, out: Tensor, indptr: Tensor, edge_ids: Tensor | None, grad_logits: Tensor
) -> None:
    """Fill ``grad_logits`` with ``out * (grad - sum of out * grad over the segment)``."""
    num_edges = grad.shape[0]
    tasks = row_tasks(indptr, num_edges)
    partial = tasks.partial(grad.shape[1], accumulator(grad.dtype), grad.device)
    before, after = (grad, out, indptr, edge_ids), (partial, grad_logits)
    _launch_rows(_SOFTMAX_BACKWARD.instance(grad.dtype), before, after, indptr, out, num_edges)
    if tasks.max_chunks:
        second = _SOFTMAX_BACKWARD_CHUNKS.instance(grad.dtype)
        _launch_rows(second, before, after, indptr, out, num_edges, only_chunks=True)


def _launch_rows(
    instance: Instance,
    before: tuple[Tensor | None, ...],
    after: tuple[Tensor | None, ...],
    indptr: Tensor,
    edge_rows: Tensor,
    num_edges: int,
    vec: int = 1,
    only_chunks: bool = False,
) -> None:
    """Start a kernel over the tasks of ``indptr``: its arguments are ``before``, the order, ``after``, the layout."""
    width = edge_rows.shape[1]
    tasks, lanes = row_tasks(indptr, num_edges), lane_layout(width, vec, num_edges, indptr.numel() - 1)
    num_groups = tasks.max_chunks if only_chunks else tasks.num_tasks
    launch_threads(
        instance,
        num_groups * lanes.size if num_edges and width else 0,
        (*before, tasks.order, tasks.chunk_start, *after)
        + (tasks.num_rows, tasks.max_chunks, width, lanes.columns, lanes.size),
        edge_rows.device,
    )
