"""Buckets by owner and rows written to given places, on the CPU."""

from __future__ import annotations

import numpy as np
from numba import njit

from core_kernels.kernels.numba._arrays import array, is_half
from core_kernels.kernels.numba._copy_loop import LINE_BYTES, copy_row, prefetch_row
from core_kernels.kernels.numba._threads import run_ranges

__all__ = ["bucket_by_owner", "unpack_rows_"]

_PREFETCH_DISTANCE = 8


def bucket_by_owner(ids, offsets, order, counts):
    """Fill ``order`` with positions by owner, stable, and ``counts`` with how many each owner has."""
    _bucket(array(ids), array(offsets), array(order), array(counts))


@njit(cache=True, nogil=True)
def _bucket(ids, offsets, order, counts):
    owners = np.empty(len(ids), np.int32)
    counts[:] = 0
    for place in range(len(ids)):
        low, high = 0, len(counts)
        while high - low > 1:
            middle = (low + high) // 2
            if offsets[middle] <= ids[place]:
                low = middle
            else:
                high = middle
        owners[place] = low
        counts[low] += 1
    cursor = np.zeros(len(counts), np.int64)
    for owner in range(1, len(counts)):
        cursor[owner] = cursor[owner - 1] + counts[owner - 1]
    for place in range(len(ids)):
        order[cursor[owners[place]]] = place
        cursor[owners[place]] += 1


def unpack_rows_(out, index, rows, accumulate):
    """Write (or add) ``rows`` to the rows of ``out`` that ``index`` names, in order; threads take columns."""
    if not accumulate:
        size = out.element_size()
        row_bytes = out.shape[1] * size
        run_ranges(
            _place_lines, -(-row_bytes // LINE_BYTES), None, array(index), rows.data_ptr(), out.data_ptr(),
            out.stride(0) * size, row_bytes, unit=index.shape[0] * 8,
        )  # fmt: skip
    elif is_half(out):
        out.index_add_(0, index, rows)
    else:
        place = (out.data_ptr(), out.stride(0) * out.element_size())
        run_ranges(_add_columns, out.shape[1], None, array(index), array(rows), array(out), *place, unit=index.shape[0])


@njit(cache=True, nogil=True)
def _place_lines(start, stop, index, source, target, stride, row_bytes):
    begin = start * LINE_BYTES
    num_bytes = min(stop * LINE_BYTES, row_bytes) - begin
    for row in range(len(index)):
        if row + _PREFETCH_DISTANCE < len(index):
            prefetch_row(target + index[row + _PREFETCH_DISTANCE] * stride + begin, num_bytes, True)
        copy_row(target + index[row] * stride + begin, source + row * row_bytes + begin, num_bytes)


@njit(cache=True, nogil=True)
def _add_columns(start, stop, index, rows, out, address, stride):
    begin, num_bytes = start * rows.itemsize, (stop - start) * rows.itemsize
    for row in range(len(index)):
        if row + _PREFETCH_DISTANCE < len(index):
            prefetch_row(address + index[row + _PREFETCH_DISTANCE] * stride + begin, num_bytes, True)
        target, addend = out[index[row], start:stop], rows[row, start:stop]
        for column in range(len(target)):
            target[column] += addend[column]
