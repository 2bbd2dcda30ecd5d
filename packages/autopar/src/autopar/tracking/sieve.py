"""Which products of a union need not be merged: most choices of an eliminated node lose everywhere.

One cell of a union holds many shifted runs, and few of them end up in its frontier. For some weights w (seconds per
unit of memory) each table knows per cell the point of least ``seconds + w * memory``. Their sums give, per cell of the
result, points that exist; with those of least memory and of least seconds they form a staircase p_1, p_2, ... of
ascending memory. What is not beaten lies in one of its boxes j::

    memory <= memory of p_(j+1)   and   seconds <= seconds of p_j

A run whose weighted sum is at least L for the weight of a box cannot reach it when L exceeds the weighted sum of the
box's far corner. Runs that reach no box are left out before the merge, and those that stay are cut to the part between
their first and their last box. Points on the edge of a box stay, so the frontier and the way back are as without it.

Source: the supported points of bicriteria optimisation (two-phase method, Ulungu and Teghem 1995), here per cell.
"""

from __future__ import annotations

import numpy as np
from numba import njit

__all__ = ["MEMORY", "SECONDS", "choose_weights", "find_boxes", "supports", "useful_part"]

_MOST_WEIGHTS = 12
_MOST_SAMPLES = 4096
# float64 sums of whole numbers below 2**52 are off by less than this share.
_ROUNDING = 1e-12

# Columns of a box: far corner (memory and seconds), place of its weight, weighted sum of the corner.
MEMORY, SECONDS, _WEIGHT, _SUM = range(4)


def choose_weights(*tables: np.ndarray) -> np.ndarray:
    """Return weights spread evenly over the slopes between neighbouring points of some tables, ascending.

    Args:
        tables: int64 [points, 2] each.
    """
    slopes = []
    for costs in tables:
        taken = costs[:: max(1, len(costs) // _MOST_SAMPLES)].astype(np.float64)
        steps = np.diff(taken, axis=0)
        falls = steps[(steps[:, 0] > 0) & (steps[:, 1] < 0)]
        slopes.append(-falls[:, 1] / falls[:, 0])
    found = np.sort(np.concatenate(slopes))
    if not len(found):
        return np.ones(1)
    return found[np.unique(np.linspace(0, len(found) - 1, _MOST_WEIGHTS).round().astype(np.int64))]


@njit(cache=True, nogil=True)
def supports(costs, offsets, weights):
    """Return per cell and weight the least weighted sum, infinite for no points, and the point that has it."""
    num_cells, num_weights = offsets.shape[0] - 1, weights.shape[0]
    least = np.full((num_cells, num_weights), np.inf)
    points = np.zeros((num_cells, num_weights), np.int64)
    for cell in range(num_cells):
        for point in range(offsets[cell], offsets[cell + 1]):
            for w in range(num_weights):
                total = costs[point, 1] + weights[w] * costs[point, 0]
                if total < least[cell, w]:
                    least[cell, w] = total
                    points[cell, w] = point
    return least, points


@njit(cache=True, nogil=True)
def _stand_first(stairs, count, memory, seconds):
    """Put a point into its place by (memory, seconds) behind ``count`` others."""
    place = count
    while place > 0 and (
        stairs[place - 1, 0] > memory or (stairs[place - 1, 0] == memory and stairs[place - 1, 1] > seconds)
    ):
        stairs[place] = stairs[place - 1]
        place -= 1
    stairs[place, 0], stairs[place, 1] = memory, seconds


@njit(cache=True, nogil=True)
def _staircase(
    stairs, sums, cell_a, cell_b, stride_a, stride_b, num_choices, offsets_a, offsets_b, costs_a, costs_b,
    least_a, points_a, least_b, points_b,
):  # fmt: skip
    """Fill ``stairs`` with points that exist, none beaten by another, and ``sums`` with the least weighted sums."""
    num_weights = sums.shape[0]
    sums[:] = np.inf
    count = 0
    first_memory = first_seconds = last_memory = last_seconds = np.int64(1) << 62
    best_a, best_b = np.zeros(num_weights, np.int64), np.zeros(num_weights, np.int64)
    for choice in range(num_choices):
        a, b = cell_a + choice * stride_a, cell_b + choice * stride_b
        if offsets_a[a] == offsets_a[a + 1] or offsets_b[b] == offsets_b[b + 1]:
            continue
        for w in range(num_weights):
            total = least_a[a, w] + least_b[b, w]
            if total < sums[w]:
                sums[w] = total
                best_a[w], best_b[w] = points_a[a, w], points_b[b, w]
        memory = costs_a[offsets_a[a], 0] + costs_b[offsets_b[b], 0]
        seconds = costs_a[offsets_a[a], 1] + costs_b[offsets_b[b], 1]
        if memory < first_memory or (memory == first_memory and seconds < first_seconds):
            first_memory, first_seconds = memory, seconds
        end_a, end_b = offsets_a[a + 1] - 1, offsets_b[b + 1] - 1
        memory, seconds = costs_a[end_a, 0] + costs_b[end_b, 0], costs_a[end_a, 1] + costs_b[end_b, 1]
        if seconds < last_seconds or (seconds == last_seconds and memory < last_memory):
            last_memory, last_seconds = memory, seconds
        count = 2
    if count == 0:
        return 0
    _stand_first(stairs, 0, first_memory, first_seconds)
    _stand_first(stairs, 1, last_memory, last_seconds)
    for w in range(num_weights):
        a, b = best_a[w], best_b[w]
        _stand_first(stairs, count, costs_a[a, 0] + costs_b[b, 0], costs_a[a, 1] + costs_b[b, 1])
        count += 1
    kept = 1
    for place in range(1, count):
        if stairs[place, 1] < stairs[kept - 1, 1]:
            stairs[kept] = stairs[place]
            kept += 1
    return kept


@njit(cache=True, nogil=True)
def find_boxes(
    boxes, stairs, sums, weights, cell_a, cell_b, stride_a, stride_b, num_choices, offsets_a, offsets_b,
    costs_a, costs_b, least_a, points_a, least_b, points_b,
):  # fmt: skip
    """Fill ``boxes`` for one cell of the result; returns their number.

    ``boxes`` and ``stairs`` have room for two more than there are weights; ``sums`` for one of each weight.
    """
    count = _staircase(
        stairs, sums, cell_a, cell_b, stride_a, stride_b, num_choices, offsets_a, offsets_b, costs_a, costs_b,
        least_a, points_a, least_b, points_b,
    )  # fmt: skip
    if count == 0:
        return 0
    for box in range(max(1, count - 1)):
        memory, seconds = stairs[min(box + 1, count - 1), 0], stairs[box, 1]
        nearest = np.inf
        for w in range(weights.shape[0]):
            total = seconds + weights[w] * memory
            slack = (total - sums[w]) / total if total > 0 else 0.0
            if slack < nearest:
                nearest = slack
                boxes[box, _WEIGHT], boxes[box, _SUM] = w, total + _ROUNDING * total
        boxes[box, MEMORY], boxes[box, SECONDS] = memory, seconds
    return max(1, count - 1)


@njit(cache=True, nogil=True)
def useful_part(boxes, num_boxes, memory, seconds, weights, least_b, costs_b, start, end):
    """Return which of the points [start, end) of B, shifted by (memory, seconds), may lie in a box; (0, 0) for none.

    ``least_b`` float64 [weights] holds the least weighted sums of those points.
    """
    first, last = -1, -1
    for box in range(num_boxes):
        w = int(boxes[box, _WEIGHT])
        if seconds + weights[w] * memory + least_b[w] > boxes[box, _SUM]:
            continue
        if memory + costs_b[start, 0] > boxes[box, MEMORY] or seconds + costs_b[end - 1, 1] > boxes[box, SECONDS]:
            continue
        if first < 0:
            first = box
        last = box
    if first < 0:
        return 0, 0
    low, high = start, end
    while low < high:  # the first point fast enough for the first box
        middle = (low + high) // 2
        if seconds + costs_b[middle, 1] <= boxes[first, SECONDS]:
            high = middle
        else:
            low = middle + 1
    start, high = low, end
    while low < high:  # the first point too large for the last box
        middle = (low + high) // 2
        if memory + costs_b[middle, 0] > boxes[last, MEMORY]:
            high = middle
        else:
            low = middle + 1
    return start, low
