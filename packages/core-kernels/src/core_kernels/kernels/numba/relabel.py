"""Distinct ids in first-seen order on the CPU, by a direct table where ids are small, else by a hash table.

The direct table has one int32 per possible id, all -1 between calls: each call resets just what it touched, so a table
is paid once per thread. The hash table is open addressing with linear probing, at most half full.
"""

from __future__ import annotations

import threading

import numpy as np
import torch
from numba import njit, uint64

from core_kernels.kernels.numba._arrays import array
from core_kernels.kernels.numba._copy_loop import prefetch_row

__all__ = ["direct_table", "relabel_direct", "relabel_hashed", "reset_table", "unique_relabel"]

#: A direct table larger than this many ids must pay off within one call.
_MAX_KEPT_IDS = 1 << 26
_SMALL_IDS = 1 << 20
#: Keys between the request for an entry of the table and its use.
_PREFETCH_DISTANCE = 24
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)

_kept = threading.local()


def direct_table(num_ids: int, num_keys: int) -> np.ndarray | None:
    """Return this thread's table of at least ``num_ids`` entries, all -1; None where hashing is cheaper."""
    num_ids = max(num_ids, 1)
    if num_ids > max(_SMALL_IDS, 8 * num_keys) and num_ids > getattr(_kept, "size", 0):
        return None
    if num_ids > _MAX_KEPT_IDS:
        return np.full(num_ids, -1, np.int32) if num_ids <= 8 * num_keys else None
    if getattr(_kept, "size", 0) < num_ids:
        _kept.table, _kept.size = np.full(num_ids, -1, np.int32), num_ids
    return _kept.table


def unique_relabel(ids):
    """Return the distinct ids in first-seen order and the position of each id among them."""
    keys = array(ids)
    unique, local = torch.empty_like(ids), torch.empty(ids.shape, dtype=torch.int64)
    outputs = (array(unique), array(local))
    lowest, highest = _range(keys)
    table = direct_table(highest + 1, len(keys)) if lowest >= 0 else None
    if table is None:
        count = relabel_hashed(keys, *outputs)
    else:
        count = relabel_direct(keys, table, *outputs, 0)
        reset_table(table, outputs[0], count)
    return unique[:count].clone(), local


@njit(cache=True, nogil=True)
def _range(keys):
    lowest, highest = np.int64(0), np.int64(-1)
    for key in keys:
        lowest, highest = min(lowest, np.int64(key)), max(highest, np.int64(key))
    return lowest, highest


@njit(cache=True, nogil=True)
def relabel_direct(keys, table, unique, local, known):
    """Number keys after the ``known`` ones that ``table`` has; return how many are distinct altogether."""
    count = np.int32(known)
    for place in range(len(keys)):
        if place + _PREFETCH_DISTANCE < len(keys):
            soon = np.int64(keys[place + _PREFETCH_DISTANCE])
            prefetch_row(table.ctypes.data + soon * table.itemsize, 1, True)
        key = keys[place]
        found = table[key]
        # Without branches, which would be mispredicted for every other key: both stores are harmless for known keys,
        # and ``count`` never exceeds the number of keys seen before.
        is_new = found < 0
        number = count if is_new else found
        table[key] = number
        unique[count] = key
        local[place] = number
        count += np.int32(is_new)
    return count


@njit(cache=True, nogil=True)
def reset_table(table, unique, count):
    """Make the table all -1 again."""
    for number in range(count):
        table[unique[number]] = -1


@njit(cache=True, nogil=True, inline="always")
def _cell(key, shift):
    return np.int64((uint64(key) * _MULTIPLIER) >> shift)


@njit(cache=True, nogil=True)
def relabel_hashed(keys, unique, local):
    """Write distinct keys and local numbers; return how many are distinct."""
    bits = 4
    while (1 << bits) < 2 * len(keys):
        bits += 1
    # An entry is the number of the key plus one; 0 is free.
    table = np.zeros(1 << bits, np.int32)
    shift, last = uint64(64 - bits), (1 << bits) - 1
    count = 0
    for place in range(len(keys)):
        if place + _PREFETCH_DISTANCE < len(keys):
            soon = _cell(keys[place + _PREFETCH_DISTANCE], shift)
            prefetch_row(table.ctypes.data + soon * table.itemsize, 1, True)
        key = keys[place]
        cell = _cell(key, shift)
        while table[cell] != 0 and unique[table[cell] - 1] != key:
            cell = (cell + 1) & last
        if table[cell] == 0:
            unique[count] = key
            count += 1
            table[cell] = count
        local[place] = table[cell] - 1
    return count
