"""Sparse times dense on the CPU: sums and extrema of source rows, and the gradients of extrema."""

from __future__ import annotations

from numba import njit

from core_kernels._huge_pages import collapse
from core_kernels.kernels.numba._arrays import array, fill_through_float32, is_half
from core_kernels.kernels.numba._rows import extremum_rows, sum_rows
from core_kernels.kernels.numba._threads import run_ranges

__all__ = ["spmm_extremum", "spmm_extremum_backward", "spmm_extremum_weight_backward", "spmm_sum"]


def spmm_sum(indptr, indices, x, weight, edge_ids, src_scale, dst_scale, out):
    """Fill ``out`` with the (weighted, scaled) sum of source rows."""
    if out.shape[1] == 0:
        return
    if is_half(x):
        fill_through_float32(spmm_sum, indptr, indices, x, weight, edge_ids, src_scale, dst_scale, out)
        return
    collapse(x, indices.shape[0])
    pointers, heads = array(indptr), 1 if weight is None else weight.shape[1]
    run_ranges(
        sum_rows, out.shape[0], pointers, pointers, array(indices), array(x), array(weight), heads, array(edge_ids),
        array(src_scale), array(dst_scale), array(out), unit=x.shape[1],
    )  # fmt: skip


def spmm_extremum(indptr, indices, x, weight, edge_ids, largest, out, arg):
    """Fill ``out`` with the extremum of source rows and ``arg`` with its slot."""
    if is_half(x):
        fill_through_float32(spmm_extremum, indptr, indices, x, weight, edge_ids, largest, out, arg, num_outputs=2)
        return
    collapse(x, indices.shape[0])
    pointers, heads = array(indptr), 1 if weight is None else weight.shape[1]
    run_ranges(
        extremum_rows, out.shape[0], pointers, pointers, array(indices), array(x), array(weight), heads,
        array(edge_ids), largest, array(out), array(arg), unit=x.shape[1],
    )  # fmt: skip


def spmm_extremum_backward(indptr, indices, grad, arg, weight, edge_ids, t_indptr, t_indices, t_positions, out):
    """Fill ``out`` with the gradient of the source rows: rows in order, columns split over threads."""
    if is_half(grad):
        fill_through_float32(
            spmm_extremum_backward, indptr, indices, grad, arg, weight, edge_ids, t_indptr, t_indices, t_positions, out
        )
        return
    out.zero_()
    heads = 1 if weight is None else weight.shape[1]
    run_ranges(
        _route_columns, grad.shape[1], None, array(indptr), array(indices), array(grad), array(arg), array(weight),
        heads, array(edge_ids), array(out), unit=grad.shape[0],
    )  # fmt: skip


def spmm_extremum_weight_backward(indptr, indices, x, grad, arg, edge_ids, heads, out):
    """Fill ``out`` with the gradient of the edge weights."""
    if is_half(x):
        fill_through_float32(spmm_extremum_weight_backward, indptr, indices, x, grad, arg, edge_ids, heads, out)
        return
    out.zero_()
    run_ranges(
        _weigh_winners, grad.shape[0], None, array(indptr), array(indices), array(x), array(grad), array(arg),
        array(edge_ids), array(out), unit=grad.shape[1],
    )  # fmt: skip


@njit(cache=True, nogil=True)
def _edge_row(edge_ids, position):
    if edge_ids is None:
        return position
    return edge_ids[position]


@njit(cache=True, nogil=True)
def _route_columns(start, stop, indptr, indices, grad, arg, weight, heads, edge_ids, out):
    head_width = grad.shape[1] // heads
    for row in range(grad.shape[0]):
        for column in range(start, stop):
            slot = arg[row, column]
            if slot >= 0:
                position = indptr[row] + slot
                if weight is None:
                    out[indices[position], column] += grad[row, column]
                else:
                    factor = weight[_edge_row(edge_ids, position), column // head_width]
                    out[indices[position], column] += factor * grad[row, column]


@njit(cache=True, nogil=True)
def _weigh_winners(start, stop, indptr, indices, x, grad, arg, edge_ids, out):
    head_width = grad.shape[1] // out.shape[1]
    for row in range(start, stop):
        for column in range(grad.shape[1]):
            slot = arg[row, column]
            if slot >= 0:
                position = indptr[row] + slot
                edge = _edge_row(edge_ids, position)
                out[edge, column // head_width] += grad[row, column] * x[indices[position], column]
