"""Reductions and softmax over contiguous segments of edge-wise rows, on the CPU.

Sums and extrema are the row loops of spmm with the edge row as source row. Softmax runs in place where the columns of
a segment form one flat run of a supported period; else rows are copied to a padded scratch and back.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from core_kernels.kernels.numba._arrays import array, fill_through_float32, is_half
from core_kernels.kernels.numba._rows import extremum_rows, sum_rows
from core_kernels.kernels.numba._softmax_loop import PERIODS, softmax_backward_run, softmax_run
from core_kernels.kernels.numba._threads import run_ranges

__all__ = [
    "segment_expand",
    "segment_extremum",
    "segment_extremum_backward",
    "segment_softmax",
    "segment_softmax_backward",
    "segment_sum",
]

_soft_1, _soft_2, _soft_4, _soft_8 = softmax_run
_back_1, _back_2, _back_4, _back_8 = softmax_backward_run
_WIDEST = PERIODS[-1]


def segment_sum(x, indptr, edge_ids, dst_scale, out):
    """Fill ``out`` with the sum of each segment."""
    if is_half(x):
        fill_through_float32(segment_sum, x, indptr, edge_ids, dst_scale, out)
        return
    pointers = array(indptr)
    run_ranges(
        sum_rows, out.shape[0], pointers, pointers, None, array(x), None, 1, array(edge_ids), None, array(dst_scale),
        array(out), unit=x.shape[1],
    )  # fmt: skip


def segment_expand(x, indptr, edge_ids, dst_scale, num_edges, out):
    """Fill ``out`` with each segment's row of ``x`` at all its edges."""
    if is_half(x):
        fill_through_float32(segment_expand, x, indptr, edge_ids, dst_scale, num_edges, out)
        return
    pointers = array(indptr)
    run_ranges(
        _expand_rows, x.shape[0], pointers, pointers, array(x), array(edge_ids), array(dst_scale), array(out),
        unit=x.shape[1],
    )  # fmt: skip


def segment_extremum(x, indptr, edge_ids, largest, out, arg):
    """Fill ``out`` with the extremum of each segment and ``arg`` with its slot."""
    if is_half(x):
        fill_through_float32(segment_extremum, x, indptr, edge_ids, largest, out, arg, num_outputs=2)
        return
    pointers = array(indptr)
    run_ranges(
        extremum_rows, out.shape[0], pointers, pointers, None, array(x), None, 1, array(edge_ids), largest, array(out),
        array(arg), unit=x.shape[1],
    )  # fmt: skip


def segment_extremum_backward(grad, arg, indptr, edge_ids, num_edges, out):
    """Fill ``out`` with the gradient at the winners, zero elsewhere."""
    if is_half(grad):
        fill_through_float32(segment_extremum_backward, grad, arg, indptr, edge_ids, num_edges, out)
        return
    out.zero_()
    run_ranges(
        _route_rows, grad.shape[0], None, array(indptr), array(grad), array(arg), array(edge_ids), array(out),
        unit=grad.shape[1],
    )  # fmt: skip


def segment_softmax(logits, indptr, edge_ids, out):
    """Fill ``out`` with the softmax of each segment, per column."""
    if is_half(logits):
        fill_through_float32(segment_softmax, logits, indptr, edge_ids, out)
        return
    pointers, heads = array(indptr), logits.shape[1]
    if edge_ids is None and heads in PERIODS:
        flat = (array(logits).reshape(-1), array(out).reshape(-1))
        run_ranges(_softmax_flat, len(pointers) - 1, pointers, pointers, heads, *flat, unit=heads)
    else:
        run_ranges(
            _softmax_scratch,
            len(pointers) - 1,
            pointers,
            pointers,
            array(logits),
            array(edge_ids),
            array(out),
            unit=heads,
        )


def segment_softmax_backward(grad, out, indptr, edge_ids, grad_logits):
    """Fill ``grad_logits`` with the gradient of the logits."""
    if is_half(grad):
        fill_through_float32(segment_softmax_backward, grad, out, indptr, edge_ids, grad_logits)
        return
    pointers, heads = array(indptr), grad.shape[1]
    if edge_ids is None and heads in PERIODS:
        flat = (array(grad).reshape(-1), array(out).reshape(-1), array(grad_logits).reshape(-1))
        run_ranges(_backward_flat, len(pointers) - 1, pointers, pointers, heads, *flat, unit=heads)
    else:
        matrices = (array(grad), array(out), array(edge_ids), array(grad_logits))
        run_ranges(_backward_scratch, len(pointers) - 1, pointers, pointers, *matrices, unit=heads)


@njit(cache=True, nogil=True)
def _edge_row(edge_ids, position):
    if edge_ids is None:
        return position
    return edge_ids[position]


@njit(cache=True, nogil=True)
def _expand_rows(start, stop, indptr, x, edge_ids, dst_scale, out):
    for row in range(start, stop):
        scale = x.dtype.type(1) if dst_scale is None else dst_scale[row]
        for position in range(indptr[row], indptr[row + 1]):
            edge = _edge_row(edge_ids, position)
            for column in range(x.shape[1]):
                out[edge, column] = scale * x[row, column]


@njit(cache=True, nogil=True)
def _route_rows(start, stop, indptr, grad, arg, edge_ids, out):
    for row in range(start, stop):
        for column in range(grad.shape[1]):
            if arg[row, column] >= 0:
                out[_edge_row(edge_ids, indptr[row] + arg[row, column]), column] = grad[row, column]


@njit(cache=True, nogil=True)
def _softmax(heads, logits, out, begin, end):
    if heads == 1:
        _soft_1(logits, out, begin, end)
    elif heads == 2:
        _soft_2(logits, out, begin, end)
    elif heads == 4:
        _soft_4(logits, out, begin, end)
    else:
        _soft_8(logits, out, begin, end)


@njit(cache=True, nogil=True)
def _backward(heads, grad, soft, out, begin, end):
    if heads == 1:
        _back_1(grad, soft, out, begin, end)
    elif heads == 2:
        _back_2(grad, soft, out, begin, end)
    elif heads == 4:
        _back_4(grad, soft, out, begin, end)
    else:
        _back_8(grad, soft, out, begin, end)


@njit(cache=True, nogil=True)
def _softmax_flat(start, stop, indptr, heads, logits, out):
    for row in range(start, stop):
        _softmax(heads, logits, out, indptr[row] * heads, indptr[row + 1] * heads)


@njit(cache=True, nogil=True)
def _backward_flat(start, stop, indptr, heads, grad, soft, out):
    for row in range(start, stop):
        _backward(heads, grad, soft, out, indptr[row] * heads, indptr[row + 1] * heads)


@njit(cache=True, nogil=True)
def _longest(indptr, start, stop):
    longest = 0
    for row in range(start, stop):
        longest = max(longest, indptr[row + 1] - indptr[row])
    return longest


@njit(cache=True, nogil=True)
def _padded(heads):
    """Return the smallest supported period of at least ``heads``, the widest when there are more."""
    period = 1
    while period < min(heads, _WIDEST):
        period *= 2
    return period


@njit(cache=True, nogil=True)
def _read_group(matrix, edge_ids, begin, end, first_head, period, scratch):
    for position in range(begin, end):
        edge = _edge_row(edge_ids, position)
        for head in range(period):
            inside = first_head + head < matrix.shape[1]
            scratch[(position - begin) * period + head] = matrix[edge, first_head + head] if inside else 0


@njit(cache=True, nogil=True)
def _write_group(scratch, edge_ids, begin, end, first_head, period, out):
    for position in range(begin, end):
        edge = _edge_row(edge_ids, position)
        for head in range(min(period, out.shape[1] - first_head)):
            out[edge, first_head + head] = scratch[(position - begin) * period + head]


@njit(cache=True, nogil=True)
def _softmax_scratch(start, stop, indptr, logits, edge_ids, out):
    period = _padded(logits.shape[1])
    scratch = np.empty(_longest(indptr, start, stop) * period, logits.dtype)
    for row in range(start, stop):
        begin, end = indptr[row], indptr[row + 1]
        for first_head in range(0, logits.shape[1], period):
            _read_group(logits, edge_ids, begin, end, first_head, period, scratch)
            _softmax(period, scratch, scratch, 0, (end - begin) * period)
            _write_group(scratch, edge_ids, begin, end, first_head, period, out)


@njit(cache=True, nogil=True)
def _backward_scratch(start, stop, indptr, grad, soft, edge_ids, out):
    period = _padded(grad.shape[1])
    length = _longest(indptr, start, stop) * period
    upstream, values = np.empty(length, grad.dtype), np.empty(length, grad.dtype)
    for row in range(start, stop):
        begin, end = indptr[row], indptr[row + 1]
        for first_head in range(0, grad.shape[1], period):
            _read_group(grad, edge_ids, begin, end, first_head, period, upstream)
            _read_group(soft, edge_ids, begin, end, first_head, period, values)
            _backward(period, upstream, values, values, 0, (end - begin) * period)
            _write_group(values, edge_ids, begin, end, first_head, period, out)
