"""Edge-wise products of source and destination rows on the CPU."""

from __future__ import annotations

from numba import njit

from core_kernels._huge_pages import collapse
from core_kernels.kernels.numba._arrays import array, fill_through_float32, is_half
from core_kernels.kernels.numba._copy_loop import prefetch_row
from core_kernels.kernels.numba._rows import dot_rows
from core_kernels.kernels.numba._threads import run_ranges

__all__ = ["sddmm"]

#: Edges between the request for a source row and its use.
_PREFETCH_DISTANCE = 16


def sddmm(indptr, indices, a, b, edge_ids, op, heads, out):
    """Fill ``out`` with the dot product per head, the sum or the product of both rows of every edge."""
    if is_half(a):
        fill_through_float32(sddmm, indptr, indices, a, b, edge_ids, op, heads, out)
        return
    collapse(a, indices.shape[0])
    pointers, num_rows = array(indptr), b.shape[0]
    shared = (pointers, array(indices), array(a), array(b))
    if op == "dot":
        run_ranges(dot_rows, num_rows, pointers, *shared, heads, array(edge_ids), array(out), unit=a.shape[1])
    else:
        kernel = _add_rows if op == "add" else _multiply_rows
        run_ranges(kernel, num_rows, pointers, *shared, array(edge_ids), array(out), unit=a.shape[1])


@njit(cache=True, nogil=True, inline="always")
def _prefetch_source(indices, position, limit, a):
    if position + _PREFETCH_DISTANCE < limit:
        row_bytes = a.shape[1] * a.itemsize
        prefetch_row(a.ctypes.data + indices[position + _PREFETCH_DISTANCE] * row_bytes, row_bytes, False)


@njit(cache=True, nogil=True)
def _add_rows(start, stop, indptr, indices, a, b, edge_ids, out):
    for row in range(start, stop):
        for position in range(indptr[row], indptr[row + 1]):
            edge = position if edge_ids is None else edge_ids[position]
            source = indices[position]
            _prefetch_source(indices, position, indptr[stop], a)
            for column in range(a.shape[1]):
                out[edge, column] = a[source, column] + b[row, column]


@njit(cache=True, nogil=True)
def _multiply_rows(start, stop, indptr, indices, a, b, edge_ids, out):
    for row in range(start, stop):
        for position in range(indptr[row], indptr[row + 1]):
            edge = position if edge_ids is None else edge_ids[position]
            source = indices[position]
            _prefetch_source(indices, position, indptr[stop], a)
            for column in range(a.shape[1]):
                out[edge, column] = a[source, column] * b[row, column]
