"""Products of the frontiers of runs of units, compiled: all runs of a chain in one call.

A run is made of two halves that were made before. Its points are the sums of theirs, of which the Pareto set is kept;
with a ratio above 1, one point per interval of memory that grows by this ratio, the fastest and of those the leanest.
"""

from __future__ import annotations

import numpy as np
from numba import njit

__all__ = ["fastest_that_fit", "multiply_runs"]


@njit(cache=True, nogil=True)
def multiply_runs(halves, order, starts, memory, seconds, ratio):
    """Return (first, last, memory, seconds, origin) of all runs.

    Points of run ``r`` stand at ``first[r]`` to ``last[r]``, memory ascending and seconds descending; ``origin`` holds
    the points of its halves, of a single unit the unit's point and 0.

    Args:
        halves: int64 [runs, 2] the runs it is made of; of a single unit ``(-1 - unit, 0)``.
        order: int64 [runs] an order in which halves come before what is made of them.
        starts: int64 [units + 1] where the points of each unit begin in ``memory`` and ``seconds``.
        memory: float64 [points].
        seconds: float64 [points].
        ratio: 1 for the exact Pareto set.
    """
    num_runs = halves.shape[0]
    first, last = np.zeros(num_runs, np.int64), np.zeros(num_runs, np.int64)
    sizes, times = np.empty(1024), np.empty(1024)
    origin = np.empty((1024, 2), np.int64)
    used = 0
    for run in order:
        one, other = halves[run]
        if one < 0:
            begin, end = starts[-1 - one], starts[-one]
            sums, took = memory[begin:end], seconds[begin:end]
            width = np.int64(1)
        else:
            a, b = first[one], first[other]
            count, width = last[one] - a, last[other] - b
            sums, took = np.empty(count * width), np.empty(count * width)
            for i in range(count):
                for j in range(width):
                    sums[i * width + j] = sizes[a + i] + sizes[b + j]
                    took[i * width + j] = times[a + i] + times[b + j]
        kept = _keep(sums, took, ratio)
        while used + kept.shape[0] > sizes.shape[0]:
            sizes, times = np.append(sizes, np.empty_like(sizes)), np.append(times, np.empty_like(times))
            origin = np.concatenate((origin, np.empty_like(origin)))
        first[run] = used
        for place in kept:
            sizes[used], times[used] = sums[place], took[place]
            origin[used, 0], origin[used, 1] = place // width, place % width
            used += 1
        last[run] = used
    return first, last, sizes[:used].copy(), times[:used].copy(), origin[:used].copy()


@njit(cache=True, nogil=True)
def _keep(sums, took, ratio):
    """Return which sums to keep, memory ascending."""
    count = sums.shape[0]
    if ratio > 1 and count > 64:
        candidates = _best_per_interval(sums, took, ratio)
        candidates = candidates[np.argsort(sums[candidates], kind="mergesort")]
    else:
        candidates = np.argsort(sums, kind="mergesort")
    kept = np.empty(candidates.shape[0], np.int64)
    used, best = 0, np.inf
    for place in candidates:
        if took[place] >= best:
            continue
        if used and sums[kept[used - 1]] == sums[place]:
            used -= 1
        kept[used] = place
        used, best = used + 1, took[place]
    return kept[:used]


@njit(cache=True, nogil=True)
def _best_per_interval(sums, took, ratio):
    """Return the fastest sum of every interval of memory, and the least memory of all."""
    least = np.argmin(sums)
    scale = 1 / np.log(ratio)
    floor = max(sums[least], 1e-300)
    num_intervals = int(np.log(max(sums.max(), 1e-300) / floor) * scale) + 2
    chosen = np.full(num_intervals + 1, -1, np.int64)
    chosen[num_intervals] = least
    for place in range(sums.shape[0]):
        interval = int(np.log(max(sums[place], 1e-300) / floor) * scale)
        held = chosen[interval]
        if held < 0 or took[place] < took[held] or (took[place] == took[held] and sums[place] < sums[held]):
            chosen[interval] = place
    if chosen[0] == least:
        chosen[num_intervals] = -1
    return chosen[chosen >= 0]


@njit(cache=True, nogil=True)
def fastest_that_fit(first, last, sizes, times, budgets):
    """Return float64 [runs] the seconds of the fastest point of every run within its budget, infinite without one."""
    found = np.full(first.shape[0], np.inf)
    for run in range(first.shape[0]):
        place = np.searchsorted(sizes[first[run] : last[run]], budgets[run], side="right")
        if place > 0:
            found[run] = times[first[run] + place - 1]
    return found
