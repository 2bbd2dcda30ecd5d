"""Launchers of ``spmm.cuh``: sums and extrema over in-edges, and their gradients.

:func:`sum_rows` is the one sum that segment reduction, scatter-add, embedding bags and sketches also use.
"""

from __future__ import annotations

from torch import Tensor

from core_kernels.errors import argument_error
from core_kernels.kernels.cuda._instances import FLOATS, INDICES, Kernel, accumulator
from core_kernels.kernels.cuda._launch import launch_threads
from core_kernels.kernels.cuda._tasks import RowTasks, as_scale, lane_layout, row_tasks, vec_for
from core_kernels.kernels.cuda.sddmm import won_dot

__all__ = [
    "KERNELS",
    "extremum_rows",
    "spmm_extremum",
    "spmm_extremum_backward",
    "spmm_extremum_weight_backward",
    "spmm_sum",
    "sum_rows",
]

_SUM = Kernel("spmm_sum", "spmm.cuh", FLOATS, INDICES, vec=True)
_COMBINE = Kernel("combine_chunks", "spmm.cuh", FLOATS)
_EXTREMUM = Kernel("spmm_extremum", "spmm.cuh", FLOATS, INDICES)
_COMBINE_EXTREMA = Kernel("combine_extrema", "spmm.cuh", FLOATS)
_EXTREMUM_BACKWARD = Kernel("spmm_extremum_backward", "spmm.cuh", FLOATS, INDICES)
KERNELS = (_SUM, _COMBINE, _EXTREMUM, _COMBINE_EXTREMA, _EXTREMUM_BACKWARD)


def sum_rows(
    indptr: Tensor,
    indices: Tensor | None,
    x: Tensor,
    out: Tensor,
    *,
    num_edges: int,
    weight: Tensor | None = None,
    edge_ids: Tensor | None = None,
    src_scale: Tensor | None = None,
    dst_scale: Tensor | None = None,
    row_ids: Tensor | None = None,
    mean: bool = False,
    accumulate: bool = False,
    atomic: bool = False,
    cached: bool = True,
) -> None:
    """Write ``scale[r] * sum_p weight[edge_ids[p]] * src_scale[i] * x[i]``, ``i = indices[p]``, for every row ``r``.

    Args:
        indptr: int64 [R + 1].
        indices: Rows of ``x`` by position, ``None`` when the position is the row.
        x: [n, W].
        out: Written; [R, W], or any number of rows when ``row_ids`` names them.
        num_edges: ``indptr[-1]``.
        weight: [E, H] or ``None``.
        edge_ids: int64 [E]: where the weight of a position stands; ``None`` for the position itself.
        src_scale: Factor of each row of ``x``.
        dst_scale: Factor of each result.
        row_ids: int64 [R]: row of ``out`` that each row goes to, -1 for none.
        mean: Divide by the number of positions as well.
        accumulate: Add to ``out`` instead of writing; the named rows must differ.
        atomic: Let chunks of hubs add to ``out`` directly: no second pass, results vary in the last bits.
        cached: Whether this ``indptr`` tensor will come again.

    Raises:
        ArgumentError: ``atomic`` with 16-bit elements, which have no atomic addition here.
    """
    if atomic and x.dtype.itemsize == 2:
        raise argument_error("atomic", atomic, f"False for {x.dtype}", "convert to float32 or leave atomic out")
    width, device = x.shape[1], x.device
    tasks = row_tasks(indptr, num_edges, cached)
    heads = 1 if weight is None or weight.dim() == 1 else weight.shape[1]
    vec = vec_for(x.dtype, width // heads if heads > 1 else width, x, out)
    lanes = lane_layout(width, vec, num_edges, tasks.num_rows)
    index = indices if indices is not None else indptr
    atomic = atomic and tasks.max_chunks > 0 and row_ids is None
    if atomic and not accumulate:
        out.zero_()
    partial = None if atomic else tasks.partial(width, accumulator(x.dtype), device)
    dst_scale = as_scale(dst_scale, x.dtype)
    scales = (as_scale(src_scale, x.dtype), dst_scale)
    arrays = (indptr, indices, edge_ids, x, weight, *scales, tasks.order, tasks.chunk_start, row_ids, partial, out)
    sizes = (tasks.num_rows, tasks.max_chunks, width, heads, lanes.columns, lanes.size)
    launch_threads(
        _SUM.instance(x.dtype, index.dtype, vec=vec),
        tasks.num_tasks * lanes.size,
        (*arrays, *sizes, mean, accumulate, atomic),
        device,
        lanes.tiles if width else 0,
    )
    if partial is not None:
        _combine(tasks, indptr, dst_scale, row_ids, partial, out, mean, accumulate)


def _combine(
    tasks: RowTasks,
    indptr: Tensor,
    dst_scale: Tensor | None,
    row_ids: Tensor | None,
    partial: Tensor,
    out: Tensor,
    mean: bool = False,
    accumulate: bool = False,
) -> None:
    """Add the partial sums of each hub's chunks, in order."""
    width = partial.shape[1]
    launch_threads(
        _COMBINE.instance(out.dtype),
        tasks.max_chunks * 32,
        (indptr, dst_scale, tasks.order, tasks.chunk_start, row_ids, partial, out)
        + (tasks.num_rows, tasks.max_chunks, width, mean, accumulate),
        out.device,
        -(-width // 32),
    )


def spmm_sum(
    indptr: Tensor,
    indices: Tensor,
    x: Tensor,
    weight: Tensor | None,
    edge_ids: Tensor | None,
    src_scale: Tensor | None,
    dst_scale: Tensor | None,
    out: Tensor,
    atomic: bool = False,
) -> None:
    """Fill ``out`` with the weighted sum of each destination's sources; see ``core_kernels.ops._schemas``."""
    sum_rows(
        indptr,
        indices,
        x,
        out,
        num_edges=indices.numel(),
        weight=weight,
        edge_ids=edge_ids,
        src_scale=src_scale,
        dst_scale=dst_scale,
        atomic=atomic,
    )


def extremum_rows(
    indptr: Tensor,
    indices: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    edge_ids: Tensor | None,
    largest: bool,
    out: Tensor,
    arg: Tensor,
    num_edges: int,
) -> None:
    """Fill ``out`` and ``arg`` with each row's extremum and its slot; ``indices`` None reads row ``p`` of ``x``."""
    width, device = x.shape[1], x.device
    tasks = row_tasks(indptr, num_edges)
    heads = 1 if weight is None else weight.shape[1]
    lanes = lane_layout(width, 1, num_edges, tasks.num_rows)
    index = indices if indices is not None else indptr
    partial = tasks.partial(width, accumulator(x.dtype), device)
    slots = tasks.partial(width, indptr.dtype, device)
    launch_threads(
        _EXTREMUM.instance(x.dtype, index.dtype),
        tasks.num_tasks * lanes.size,
        (indptr, indices, edge_ids, x, weight, tasks.order, tasks.chunk_start, partial, slots, out, arg)
        + (tasks.num_rows, tasks.max_chunks, width, heads, lanes.columns, lanes.size, largest),
        device,
        lanes.tiles if width else 0,
    )
    if partial is not None:
        launch_threads(
            _COMBINE_EXTREMA.instance(x.dtype),
            tasks.max_chunks * 32,
            (indptr, tasks.order, tasks.chunk_start, partial, slots, out, arg)
            + (tasks.num_rows, tasks.max_chunks, width, largest),
            device,
            -(-width // 32),
        )


def spmm_extremum(
    indptr: Tensor,
    indices: Tensor,
    x: Tensor,
    weight: Tensor | None,
    edge_ids: Tensor | None,
    largest: bool,
    out: Tensor,
    arg: Tensor,
) -> None:
    """Fill ``out`` and ``arg`` with the extremum over each destination's sources."""
    extremum_rows(indptr, indices, x, weight, edge_ids, largest, out, arg, indices.numel())


def spmm_extremum_backward(
    indptr: Tensor,
    indices: Tensor,
    grad: Tensor,
    arg: Tensor,
    weight: Tensor | None,
    edge_ids: Tensor | None,
    t_indptr: Tensor,
    t_indices: Tensor,
    t_positions: Tensor,
    out: Tensor,
) -> None:
    """Fill ``out`` with the gradient of the sources: each source sums over the destinations where it won."""
    width, device = grad.shape[1], grad.device
    tasks = row_tasks(t_indptr, indices.numel())
    heads = 1 if weight is None else weight.shape[1]
    lanes = lane_layout(width, 1, indices.numel(), tasks.num_rows)
    partial = tasks.partial(width, accumulator(grad.dtype), device)
    launch_threads(
        _EXTREMUM_BACKWARD.instance(grad.dtype, t_indices.dtype),
        tasks.num_tasks * lanes.size,
        (
            indptr,
            t_indptr,
            t_indices,
            t_positions,
            edge_ids,
            grad,
            arg,
            weight,
            tasks.order,
            tasks.chunk_start,
            partial,
            out,
        )
        + (tasks.num_rows, tasks.max_chunks, width, heads, lanes.columns, lanes.size),
        device,
        lanes.tiles if width else 0,
    )
    if partial is not None:
        _combine(tasks, t_indptr, None, None, partial, out)


def spmm_extremum_weight_backward(
    indptr: Tensor,
    indices: Tensor,
    x: Tensor,
    grad: Tensor,
    arg: Tensor,
    edge_ids: Tensor | None,
    heads: int,
    out: Tensor,
) -> None:
    """Fill ``out`` with the gradient of the edge weights of an extremum."""
    won_dot(indptr, indices, x, grad, arg, edge_ids, heads, out)
