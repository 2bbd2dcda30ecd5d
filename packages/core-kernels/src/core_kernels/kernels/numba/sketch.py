"""Count sketch on the CPU: signed sums in hashed columns; table rows are independent and split over threads."""

from __future__ import annotations

import numpy as np
from numba import njit

from core_kernels.kernels.numba._arrays import array
from core_kernels.kernels.numba._threads import run_ranges
from core_kernels.kernels.numba.random import absorb, bounded, row_key, stream_key

__all__ = ["sketch_estimate", "sketch_insert_"]


def sketch_insert_(table, keys, values, seed):
    """Add signed values to every row of ``table``, in order of the keys."""
    run_ranges(_insert, table.shape[0], None, array(table), array(keys), array(values), seed, unit=keys.shape[0])


def sketch_estimate(table, keys, seed, out):
    """Fill ``out`` with the median estimate of each key."""
    run_ranges(_estimate, keys.shape[0], None, array(table), array(keys), seed, array(out), unit=8 * table.shape[0])


@njit(cache=True, nogil=True)
def _insert(start, stop, table, keys, values, seed):
    for row in range(start, stop):
        stream, cells = stream_key(seed, 0, row), table[row]
        for place in range(len(keys)):
            bits = absorb(row_key(stream, keys[place]), 0)
            value = values[place]
            cells[bounded(bits, len(cells))] += value if bits & np.uint64(1) else -value


@njit(cache=True, nogil=True)
def _estimate(start, stop, table, keys, seed, out):
    num_rows = table.shape[0]
    sorted_values = np.empty(num_rows, np.float32)
    streams = np.empty(num_rows, np.uint64)
    for row in range(num_rows):
        streams[row] = stream_key(seed, 0, row)
    for place in range(start, stop):
        for row in range(num_rows):
            bits = absorb(row_key(streams[row], keys[place]), 0)
            value = table[row, bounded(bits, table.shape[1])]
            value = value if bits & np.uint64(1) else -value
            # Insertion sort: tables have a handful of rows.
            slot = row
            while slot > 0 and sorted_values[slot - 1] > value:
                sorted_values[slot] = sorted_values[slot - 1]
                slot -= 1
            sorted_values[slot] = value
        middle = num_rows // 2
        if num_rows % 2:
            out[place] = sorted_values[middle]
        else:
            out[place] = (sorted_values[middle - 1] + sorted_values[middle]) * np.float32(0.5)
