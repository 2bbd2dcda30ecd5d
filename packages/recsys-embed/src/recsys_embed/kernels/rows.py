"""Kernels on row ids and row gradients: placing, splitting by owner, summing occurrences, merging partial sums.

Sums are defined by the data alone. Occurrences are added one by one in their order; partial sums of leaves (fixed
parts of the global batch) are merged in a binary tree over leaf numbers, absent ones skipped. A rank that holds an
aligned power-of-two run of leaves holds a subtree, so the result does not depend on how leaves are spread over ranks.
"""

from __future__ import annotations

import numpy as np
from numba import njit, uint64

__all__ = ["build_slots", "find_slots", "merge_tree", "place_ids", "split_by_owner", "sum_occurrences"]

STRICT, CLAMP, MODULO = 0, 1, 2
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


@njit(cache=True, nogil=True)
def place_ids(values, starts, first_rows, num_rows, policy, multiplier, total, places):
    """Write the scattered place of every id; return the position of the first bad one under the strict policy, or -1.

    Feature f has the values ``starts[f]`` to ``starts[f + 1]`` and the rows ``first_rows[f] + [0, num_rows[f])``.
    """
    for feature in range(len(starts) - 1):
        first, bound = first_rows[feature], num_rows[feature]
        for position in range(starts[feature], starts[feature + 1]):
            row = np.int64(values[position])
            if row < 0 or row >= bound:
                if policy == STRICT:
                    return position
                row = min(max(row, 0), bound - 1) if policy == CLAMP else row % bound
            places[position] = first + row if multiplier == 1 else (first + row) * multiplier % total
    return -1


@njit(cache=True, nogil=True)
def build_slots(places, keys, slots):
    """Fill an open-addressing table (power-of-two size, keys -1) that maps ``places[i]`` to ``i``."""
    last = len(keys) - 1
    for slot in range(len(places)):
        cell = np.int64((uint64(places[slot]) * _MULTIPLIER) >> uint64(20)) & last
        while keys[cell] >= 0:
            cell = (cell + 1) & last
        keys[cell], slots[cell] = places[slot], slot


@njit(cache=True, nogil=True)
def find_slots(places, keys, slots, found):
    """Write the slot of each place, -1 where there is none."""
    last = len(keys) - 1
    for position in range(len(places)):
        cell = np.int64((uint64(places[position]) * _MULTIPLIER) >> uint64(20)) & last
        while keys[cell] >= 0 and keys[cell] != places[position]:
            cell = (cell + 1) & last
        found[position] = slots[cell] if keys[cell] >= 0 else -1


@njit(cache=True, nogil=True)
def split_by_owner(unique, hot_slots, bounds, local, cold, hot, counts):
    """Order distinct places: cold ones by owner, then hot ones; renumber ``local`` to that order.

    Args: ``hot_slots`` slot or -1 per distinct place; ``bounds`` [ranks + 1] of the owners' ranges; ``local`` [n]
    number of every occurrence, rewritten; ``cold`` and ``hot`` [len(unique)] outputs (places, slots); ``counts``
    [ranks + 1] output, the last one counts hot rows.
    """
    num_ranks = len(bounds) - 1
    owners = np.empty(len(unique), np.int32)
    counts[:] = 0
    for number in range(len(unique)):
        owner = num_ranks
        if hot_slots[number] < 0:
            low, high = 0, num_ranks
            while high - low > 1:
                middle = (low + high) // 2
                if bounds[middle] <= unique[number]:
                    low = middle
                else:
                    high = middle
            owner = low
        owners[number] = owner
        counts[owner] += 1
    cursor = np.zeros(num_ranks + 1, np.int64)
    for owner in range(num_ranks):
        cursor[owner + 1] = cursor[owner] + counts[owner]
    num_cold = cursor[num_ranks]
    moved = np.empty(len(unique), np.int64)
    for number in range(len(unique)):
        target = cursor[owners[number]]
        cursor[owners[number]] += 1
        moved[number] = target
        if owners[number] < num_ranks:
            cold[target] = unique[number]
        else:
            hot[target - num_cold] = hot_slots[number]
    for position in range(len(local)):
        local[position] = moved[local[position]]


@njit(cache=True, nogil=True)
def sum_occurrences(grad, offsets, local, weights, leaf_of_bag, num_leaves, sums, present):
    """Add the gradient of every bag to the (row, leaf) sums it names, in order; ``sums`` [rows * leaves, width]."""
    for bag in range(len(offsets) - 1):
        leaf = leaf_of_bag[bag] if num_leaves > 1 else 0
        for position in range(offsets[bag], offsets[bag + 1]):
            target = local[position] * num_leaves + leaf
            present[target] = True
            if len(weights):
                factor = weights[position]
                for column in range(grad.shape[1]):
                    sums[target, column] += grad[bag, column] * factor
            else:
                for column in range(grad.shape[1]):
                    sums[target, column] += grad[bag, column]


@njit(cache=True, nogil=True)
def merge_tree(partials, sources, merged):
    """Merge partial sums per row in a binary tree over their numbers.

    Args: ``partials`` [n, width]; ``sources`` int64 [rows, leaves], the partial of each leaf or -1, ``leaves`` a power
    of two; ``merged`` [rows, width] output.
    """
    num_leaves, width = sources.shape[1], partials.shape[1]
    buffer = np.empty((num_leaves, width), partials.dtype)
    filled = np.empty(num_leaves, np.bool_)
    for row in range(sources.shape[0]):
        count, last = 0, -1
        for leaf in range(num_leaves):
            filled[leaf] = sources[row, leaf] >= 0
            if filled[leaf]:
                count += 1
                last = sources[row, leaf]
        if count == 1:
            merged[row, :] = partials[last, :]
            continue
        for leaf in range(num_leaves):
            if filled[leaf]:
                buffer[leaf, :] = partials[sources[row, leaf], :]
        reach = 1
        while reach < num_leaves:
            for left in range(0, num_leaves, 2 * reach):
                right = left + reach
                if filled[right]:
                    if filled[left]:
                        for column in range(width):
                            buffer[left, column] += buffer[right, column]
                    else:
                        buffer[left, :] = buffer[right, :]
                        filled[left] = True
            reach *= 2
        merged[row, :] = buffer[0, :]
