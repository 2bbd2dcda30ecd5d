"""Building and transforming adjacency: stable counting sorts in O(rows + edges), frugal with memory and cache.

Scattering edges straight to their place touches a random cache line and page per edge once the graph outgrows the
caches. Edges therefore go first to one of some hundred coarse buckets of ``2**row_bits`` rows (sequential streams), and
are then counted and sorted within their bucket, which fits the cache. Both passes keep the order of equal keys.
No temporary has the size of the edges: between the passes the low bits of the key travel in the upper 16 bits of the
id, inside the outputs.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from core_kernels.kernels.numba._copy_loop import LINE_BYTES, prefetch_row

__all__ = [
    "ID_BITS",
    "count_buckets",
    "count_cut",
    "count_keys",
    "expand_rows",
    "is_non_decreasing",
    "merge_sorted_rows",
    "move_rows",
    "scatter_edges",
    "scatter_reversed",
    "sort_buckets",
]

#: Bits of a packed id that hold the id; the others but the sign hold the low bits of its key.
ID_BITS = 48
_ID_MASK = (1 << ID_BITS) - 1
#: Edges between the request for an entry of a table and its use; rows whose entries are requested together.
_PREFETCH_DISTANCE, _BLOCK_ROWS = 48, 16


@njit(cache=True, nogil=True)
def is_non_decreasing(keys):
    """Return whether ``keys`` never decreases."""
    for i in range(1, keys.shape[0]):  # noqa: SIM110, a plain loop compiles best
        if keys[i] < keys[i - 1]:
            return False
    return True


@njit(cache=True, nogil=True)
def count_keys(keys, indptr):
    """Fill ``indptr`` [rows + 1] with the row pointers of ``keys``, each key in [0, rows)."""
    indptr[:] = 0
    for i in range(keys.shape[0]):
        indptr[keys[i] + 1] += 1
    for row in range(1, indptr.shape[0]):
        indptr[row] += indptr[row - 1]


@njit(cache=True, nogil=True)
def count_buckets(keys, row_bits, starts):
    """Fill ``starts`` [buckets + 1] with the first position of each coarse bucket."""
    starts[:] = 0
    for i in range(keys.shape[0]):
        starts[(keys[i] >> row_bits) + 1] += 1
    for bucket in range(1, starts.shape[0]):
        starts[bucket] += starts[bucket - 1]


@njit(cache=True, nogil=True)
def scatter_edges(keys, values, row_bits, starts, out_values, packed_ids):
    """Write values and packed ids (positions below the low bits of their keys) by coarse bucket, stably."""
    cursor = starts.copy()
    mask = (1 << row_bits) - 1
    for i in range(keys.shape[0]):
        key = np.int64(keys[i])
        bucket = key >> row_bits
        place = cursor[bucket]
        cursor[bucket] = place + 1
        out_values[place] = values[i]
        packed_ids[place] = (key & mask) << ID_BITS | i


@njit(cache=True, nogil=True)
def scatter_reversed(indptr, indices, row_bits, starts, out_values, packed_ids):
    """Do as ``scatter_edges`` with sources as keys and rows as values."""
    cursor = starts.copy()
    mask = (1 << row_bits) - 1
    for row in range(indptr.shape[0] - 1):
        for position in range(indptr[row], indptr[row + 1]):
            key = np.int64(indices[position])
            bucket = key >> row_bits
            place = cursor[bucket]
            cursor[bucket] = place + 1
            out_values[place] = row
            packed_ids[place] = (key & mask) << ID_BITS | position


@njit(cache=True, nogil=True)
def sort_buckets(row_bits, starts, indptr, values, packed_ids):
    """Order values and ids by key inside each coarse bucket, in place and stably; unpack the ids; fill ``indptr``."""
    num_rows = indptr.shape[0] - 1
    num_buckets = starts.shape[0] - 1
    largest = 0
    for bucket in range(num_buckets):
        largest = max(largest, starts[bucket + 1] - starts[bucket])
    kept_values = np.empty(largest, values.dtype)
    kept_ids = np.empty(largest, packed_ids.dtype)
    cursor = np.empty(1 << row_bits, np.int64)
    indptr[0] = 0
    for bucket in range(num_buckets):
        start = starts[bucket]
        size = starts[bucket + 1] - start
        first = bucket << row_bits
        rows = min(1 << row_bits, num_rows - first)
        cursor[:rows] = 0
        for i in range(size):
            packed = packed_ids[start + i]
            kept_ids[i] = packed
            kept_values[i] = values[start + i]
            cursor[packed >> ID_BITS] += 1
        place = start
        for row in range(rows):
            count = cursor[row]
            cursor[row] = place
            place += count
            indptr[first + row + 1] = place
        for i in range(size):
            packed = kept_ids[i]
            row = packed >> ID_BITS
            place = cursor[row]
            cursor[row] = place + 1
            values[place] = kept_values[i]
            packed_ids[place] = packed & _ID_MASK


@njit(cache=True, nogil=True)
def expand_rows(indptr, out):
    """Write to ``out`` [edges] the row of each position."""
    for row in range(indptr.shape[0] - 1):
        for position in range(indptr[row], indptr[row + 1]):
            out[position] = row


@njit(cache=True, nogil=True)
def move_rows(indptr, indices, edge_ids, row_of_new, new_of_source, new_indptr, out_indices, out_ids):
    """Copy row ``row_of_new[i]`` to row ``i``, renaming its entries; ``out_ids`` gets their edge ids.

    Row pointers are asked for two blocks of rows before their use, rows one block, the names of their entries just
    before: all of these are read at random.
    """
    num_rows, names, name_bytes = row_of_new.shape[0], new_of_source.ctypes.data, new_of_source.itemsize
    for block in range(0, num_rows, _BLOCK_ROWS):
        stop = min(block + _BLOCK_ROWS, num_rows)
        for new_row in range(block, stop):
            if new_row + 2 * _BLOCK_ROWS < num_rows:
                row = row_of_new[new_row + 2 * _BLOCK_ROWS]
                prefetch_row(indptr.ctypes.data + row * indptr.itemsize, 1, False)
            if new_row + _BLOCK_ROWS < num_rows:
                start = indptr[row_of_new[new_row + _BLOCK_ROWS]]
                prefetch_row(indices.ctypes.data + start * indices.itemsize, 2 * LINE_BYTES, False)
                if edge_ids is not None:
                    prefetch_row(edge_ids.ctypes.data + start * edge_ids.itemsize, 4 * LINE_BYTES, False)
            start = indptr[row_of_new[new_row]]
            for k in range(new_indptr[new_row + 1] - new_indptr[new_row]):
                prefetch_row(names + np.int64(indices[start + k]) * name_bytes, 1, False)
        for new_row in range(block, stop):
            start, place = indptr[row_of_new[new_row]], new_indptr[new_row]
            for k in range(new_indptr[new_row + 1] - place):
                out_indices[place + k] = new_of_source[indices[start + k]]
                out_ids[place + k] = start + k if edge_ids is None else edge_ids[start + k]


@njit(cache=True, nogil=True)
def merge_sorted_rows(indptr_a, indices_a, indptr_b, indices_b, indptr_out, indices_out, count_only):
    """Union of two adjacencies with sorted rows, without duplicates: first call counts, second call writes."""
    indptr_out[0] = 0
    for row in range(indptr_a.shape[0] - 1):
        a, a_stop = indptr_a[row], indptr_a[row + 1]
        b, b_stop = indptr_b[row], indptr_b[row + 1]
        place = indptr_out[row]
        previous = -1
        while a < a_stop or b < b_stop:
            if b >= b_stop or (a < a_stop and indices_a[a] <= indices_b[b]):
                value = np.int64(indices_a[a])
                a += 1
            else:
                value = np.int64(indices_b[b])
                b += 1
            if value != previous:
                if not count_only:
                    indices_out[place] = value
                place += 1
                previous = value
        indptr_out[row + 1] = place


@njit(cache=True, nogil=True)
def count_cut(indptr, indices, part_of_node):
    """Return how many edges join nodes of different parts."""
    cut, parts, item_bytes = 0, part_of_node.ctypes.data, part_of_node.itemsize
    limit = indices.shape[0] - _PREFETCH_DISTANCE
    for row in range(indptr.shape[0] - 1):
        part = part_of_node[row]
        for position in range(indptr[row], indptr[row + 1]):
            if position < limit:
                prefetch_row(parts + np.int64(indices[position + _PREFETCH_DISTANCE]) * item_bytes, 1, False)
            cut += part_of_node[indices[position]] != part
    return cut
