"""Gather and scatter-add of rows on the CPU.

Gather copies bytes, so one kernel serves all dtypes; the source's rows may be strided. Scatter-add groups positions by
row and sums each group in order: deterministic with any number of threads, and hubs are summed in chunks.
"""

from __future__ import annotations

from numba import njit

from core_kernels._huge_pages import collapse
from core_kernels.kernels.numba._arrays import array, fill_through_float32, is_half
from core_kernels.kernels.numba._copy_loop import LINE_BYTES, copy_row, prefetch_row, stream_row
from core_kernels.kernels.numba._groups import group_positions
from core_kernels.kernels.numba._rows import sum_rows
from core_kernels.kernels.numba._threads import run_ranges

__all__ = ["gather", "scatter_add"]

#: Results above this size would not stay in a cache: they are written past it.
_STREAM_BYTES = 1 << 24
_PREFETCH_DISTANCE = 8


def gather(x, index, out):
    """Fill ``out`` with the rows of ``x`` that ``index`` names."""
    collapse(x, index.shape[0])
    row_bytes = x.shape[1] * x.element_size()
    source, target = (x.data_ptr(), x.stride(0) * x.element_size()), out.data_ptr()
    aligned = target % LINE_BYTES == 0 and row_bytes % LINE_BYTES == 0
    stream = aligned and row_bytes * index.shape[0] >= _STREAM_BYTES
    run_ranges(
        _copy_rows, index.shape[0], None, array(index), *source, target, row_bytes, stream, unit=row_bytes // 4 + 1
    )


@njit(cache=True, nogil=True)
def _copy_rows(start, stop, index, source, stride, target, row_bytes, stream):
    for row in range(start, stop):
        if row + _PREFETCH_DISTANCE < stop:
            prefetch_row(source + index[row + _PREFETCH_DISTANCE] * stride, row_bytes, False)
        if stream:
            stream_row(target + row * row_bytes, source + index[row] * stride, row_bytes)
        else:
            copy_row(target + row * row_bytes, source + index[row] * stride, row_bytes)


def scatter_add(x, index, num_rows, out):
    """Fill ``out`` with the sum, in order, of the rows of ``x`` that go to each of its rows."""
    if is_half(x):
        fill_through_float32(scatter_add, x, index, num_rows, out)
        return
    pointers, positions = group_positions(array(index), num_rows)
    run_ranges(
        sum_rows, num_rows, pointers, pointers, None, array(x), None, 1, positions, None, None, array(out),
        unit=x.shape[1],
    )  # fmt: skip
