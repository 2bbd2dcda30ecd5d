"""Kernels of the access statistics: one small cell per row, carries into a hash table.

A cell has three bytes: accesses, batches that touched the row, and the number of the last batch. A counter that
reaches 255 carries 255 into an exact table of the popular rows. One cache line is touched per access.
"""

from __future__ import annotations

import numpy as np
from numba import njit, uint64

__all__ = ["add_counts", "count_batch", "histogram", "read_counts"]

CARRY = 255
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


@njit(cache=True, nogil=True, inline="always")
def _cell_of(row, num_cells, num_rows):
    # Fewer cells than rows: a sketch with one hash; collisions raise counts of rare rows, never lower any.
    if num_cells == num_rows:
        return row
    return np.int64((uint64(row) * _MULTIPLIER) >> uint64(16)) % num_cells


@njit(cache=True, nogil=True)
def _carry(cell, which, carries, keys, amount):
    """Add to the table of popular cells; return False when it is full."""
    last = len(keys) - 1
    place = np.int64((uint64(cell) * _MULTIPLIER) >> uint64(20)) & last
    for _ in range(len(keys)):
        if keys[place] == cell or keys[place] < 0:
            keys[place] = cell
            carries[place, which] += amount
            return True
        place = (place + 1) & last
    return False


@njit(cache=True, nogil=True)
def count_batch(values, starts, first_rows, num_rows, stamp, total_rows, cells, keys, carries, start_feature, start):
    """Count the ids of one batch from (feature, position) on.

    Returns (feature, position, carried, distinct): where it stopped (a table of carries half full stops it early),
    how many keys were added, and how many rows were new to the batch. Ids out of range stop with carried = -1.
    """
    carried, distinct = 0, 0
    limit = len(keys) // 2
    is_exact = len(cells) == total_rows
    for feature in range(start_feature, len(starts) - 1):
        first, bound = first_rows[feature], num_rows[feature]
        begin = start if feature == start_feature else starts[feature]
        for position in range(begin, starts[feature + 1]):
            row = np.int64(values[position])
            if uint64(row) >= uint64(bound):  # negative ones, too
                return feature, position, -1, distinct
            if carried >= limit:
                return feature, position, carried, distinct
            cell = uint64(first + row if is_exact else _cell_of(first + row, len(cells), total_rows))
            # Whether a row is new to the batch is a coin toss: added instead of branched on, so that the processor
            # runs ahead and waits for many cells at once.
            is_new = np.int64(cells[cell, 2] != stamp)
            accesses, presence = np.int64(cells[cell, 0]), np.int64(cells[cell, 1])
            distinct += is_new
            if accesses == CARRY:
                carried += _carry(np.int64(cell), 0, carries, keys, CARRY)
                accesses = 0
            if presence + is_new > CARRY:
                carried += _carry(np.int64(cell), 1, carries, keys, CARRY)
                presence = 0
            cells[cell, 0] = accesses + 1
            cells[cell, 1] = presence + is_new
            cells[cell, 2] = stamp
    return len(starts) - 1, starts[-1], carried, distinct


@njit(cache=True, nogil=True)
def add_counts(rows, amounts, total_rows, cells, keys, carries):
    """Add (accesses, batches) of rows to the cells."""
    for position in range(len(rows)):
        cell = _cell_of(rows[position], len(cells), total_rows)
        for which in range(2):
            count = np.int64(cells[cell, which]) + amounts[position, which]
            if count > CARRY:
                _carry(cell, which, carries, keys, count - count % CARRY)
                count %= CARRY
            cells[cell, which] = count


@njit(cache=True, nogil=True)
def read_counts(start, stop, total_rows, cells, keys, carries, which, out):
    """Write the counts of the rows [start, stop)."""
    last = len(keys) - 1
    for row in range(start, stop):
        cell = _cell_of(row, len(cells), total_rows)
        count = np.int64(cells[cell, which])
        place = np.int64((uint64(cell) * _MULTIPLIER) >> uint64(20)) & last
        while keys[place] >= 0 and keys[place] != cell:
            place = (place + 1) & last
        if keys[place] == cell:
            count += carries[place, which]
        out[row - start] = count


@njit(cache=True, nogil=True)
def histogram(counts, weights, num_rows_of, sum_of):
    """Add rows, and their ``weights``, to the bins of their ``counts``."""
    for position in range(len(counts)):
        num_rows_of[counts[position]] += 1
        sum_of[counts[position]] += weights[position]
