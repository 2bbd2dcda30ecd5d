"""The outer loops over rows: which columns one pass takes, how hubs are cut, what empty rows get.

A pass covers up to eight vectors of columns. With heads (several weights per edge) a vector must lie inside one head;
where heads end inside a vector, each head is a pass of its own.
"""

from __future__ import annotations

from numba import njit

from core_kernels.kernels.numba._row_loops import row_dot, row_extremum, row_sum

__all__ = ["HUB_CHUNK", "dot_rows", "extremum_rows", "sum_rows"]

#: Positions that are summed in one go; longer rows add such partial sums, which bounds the fp32 error of hubs.
HUB_CHUNK = 4096
#: Edges of a row that are visited head by head before the next are: their source rows stay in the cache.
_DOT_CHUNK = 64

_sum_1, _sum_2, _sum_4, _sum_8 = row_sum
_extremum_1, _extremum_2, _extremum_4, _extremum_8 = row_extremum
_dot_1, _dot_2, _dot_4, _dot_8 = row_dot


@njit(cache=True, nogil=True)
def sum_rows(start, stop, indptr, indices, x, weight, heads, edge_ids, src_scale, dst_scale, out):
    """Write the weighted sum of source rows for the rows [start, stop)."""
    width = x.shape[1]
    lanes = 64 // x.itemsize
    head_width = width // heads
    span = width if head_width % lanes == 0 or weight is None else head_width
    limit = indptr[stop]
    for row in range(start, stop):
        end = indptr[row + 1]
        scale = x.dtype.type(1) if dst_scale is None else dst_scale[row]
        for begin in range(0, width, span):
            for column in range(begin, begin + span, 8 * lanes):
                left = (begin + span - column + lanes - 1) // lanes
                first = indptr[row]
                while True:
                    last = min(first + HUB_CHUNK, end)
                    fresh = first == indptr[row]
                    if left > 4:
                        _sum_8(x, column, begin + span, indices, first, last, limit, weight, head_width, edge_ids,
                               src_scale, out, row, scale, fresh)  # fmt: skip
                    elif left > 2:
                        _sum_4(x, column, begin + span, indices, first, last, limit, weight, head_width, edge_ids,
                               src_scale, out, row, scale, fresh)  # fmt: skip
                    elif left > 1:
                        _sum_2(x, column, begin + span, indices, first, last, limit, weight, head_width, edge_ids,
                               src_scale, out, row, scale, fresh)  # fmt: skip
                    else:
                        _sum_1(x, column, begin + span, indices, first, last, limit, weight, head_width, edge_ids,
                               src_scale, out, row, scale, fresh)  # fmt: skip
                    first = last
                    if first >= end:
                        break


@njit(cache=True, nogil=True)
def extremum_rows(start, stop, indptr, indices, x, weight, heads, edge_ids, largest, out, arg):
    """Write extremum and slot per column for the rows [start, stop); empty rows get 0 and -1."""
    width = x.shape[1]
    lanes = 64 // x.itemsize
    head_width = width // heads
    span = width if head_width % lanes == 0 or weight is None else head_width
    limit = indptr[stop]
    for row in range(start, stop):
        first, last = indptr[row], indptr[row + 1]
        for begin in range(0, width, span):
            for column in range(begin, begin + span, 8 * lanes):
                left = (begin + span - column + lanes - 1) // lanes
                if left > 4:
                    _extremum_8(x, column, begin + span, indices, first, last, limit, weight, head_width, edge_ids, out,
                                arg, row, largest)  # fmt: skip
                elif left > 2:
                    _extremum_4(x, column, begin + span, indices, first, last, limit, weight, head_width, edge_ids, out,
                                arg, row, largest)  # fmt: skip
                elif left > 1:
                    _extremum_2(x, column, begin + span, indices, first, last, limit, weight, head_width, edge_ids, out,
                                arg, row, largest)  # fmt: skip
                else:
                    _extremum_1(x, column, begin + span, indices, first, last, limit, weight, head_width, edge_ids, out,
                                arg, row, largest)  # fmt: skip


@njit(cache=True, nogil=True)
def dot_rows(start, stop, indptr, indices, a, b, heads, edge_ids, out):
    """Write, for the edges of the rows [start, stop) and each head, the dot product of source and destination row."""
    width = a.shape[1]
    lanes = 64 // a.itemsize
    head_width = width // heads
    limit = indptr[stop]
    for row in range(start, stop):
        for first in range(indptr[row], indptr[row + 1], _DOT_CHUNK):
            last = min(first + _DOT_CHUNK, indptr[row + 1])
            for head in range(heads):
                end = (head + 1) * head_width
                for column in range(head * head_width, end, 8 * lanes):
                    left = (end - column + lanes - 1) // lanes
                    fresh = column == head * head_width
                    if left > 4:
                        _dot_8(a, column, end, indices, first, last, limit, edge_ids, b, row, out, head, fresh)
                    elif left > 2:
                        _dot_4(a, column, end, indices, first, last, limit, edge_ids, b, row, out, head, fresh)
                    elif left > 1:
                        _dot_2(a, column, end, indices, first, last, limit, edge_ids, b, row, out, head, fresh)
                    else:
                        _dot_1(a, column, end, indices, first, last, limit, edge_ids, b, row, out, head, fresh)
