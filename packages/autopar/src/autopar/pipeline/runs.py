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
        a, b, count, width = np.int64(0), np.int64(0), np.int64(0), np.int64(1)
        if one >= 0:
            a, b = first[one], first[other]
            count, width = last[one] - a, last[other] - b
        is_thinned = ratio > 1 and count * width > 64
        if one < 0:
            begin, end = starts[-1 - one], starts[-one]
            sums, took = memory[begin:end], seconds[begin:end]
        elif is_thinned:
            sums = took = np.empty(0)
        else:
            sums, took = np.empty(count * width), np.empty(count * width)
            for i in range(count):
                for j in range(width):
                    sums[i * width + j] = sizes[a + i] + sizes[b + j]
                    took[i * width + j] = times[a + i] + times[b + j]
        if is_thinned:
            here, there = slice(a, a + count), slice(b, b + width)
            kept = _thin(sizes[here], times[here], sizes[there], times[there], ratio)
        else:
            kept = _keep(sums, took)
        while used + kept.shape[0] > sizes.shape[0]:
            sizes, times = np.append(sizes, np.empty_like(sizes)), np.append(times, np.empty_like(times))
            origin = np.concatenate((origin, np.empty_like(origin)))
        first[run] = used
        for place in kept:
            i, j = place // width, place % width
            origin[used, 0], origin[used, 1] = i, j
            if not is_thinned:
                sizes[used], times[used] = sums[place], took[place]
            else:
                sizes[used], times[used] = sizes[a + i] + sizes[b + j], times[a + i] + times[b + j]
            used += 1
        last[run] = used
    return first, last, sizes[:used].copy(), times[:used].copy(), origin[:used].copy()


@njit(cache=True, nogil=True)
def _keep(sums, took):
    """Return which sums are in the Pareto set, memory ascending."""
    kept = np.empty(sums.shape[0], np.int64)
    used, best = 0, np.inf
    for place in np.argsort(sums, kind="mergesort"):
        if took[place] >= best:
            continue
        if used and sums[kept[used - 1]] == sums[place]:
            used -= 1
        kept[used] = place
        used, best = used + 1, took[place]
    return kept[:used]


@njit(cache=True, nogil=True)
def _thin(sizes, times, other_sizes, other_times, ratio):
    """Return the fastest sum of two frontiers under each of the memory bounds that grow by ``ratio`` from the least.

    What fits a bound with one point of the first frontier is the longest beginning of the second, so each bound takes
    one walk along both.
    """
    count, width = sizes.shape[0], other_sizes.shape[0]
    bound, most = sizes[0] + other_sizes[0], sizes[-1] + other_sizes[-1]
    fastest = times[-1] + other_times[-1]
    step = max(bound * (ratio - 1), most * 1e-9)
    kept = np.empty(1024, np.int64)
    used, last = 0, np.inf
    while True:
        best, chosen, j = np.inf, np.int64(0), width - 1
        for i in range(count):
            while j >= 0 and sizes[i] + other_sizes[j] > bound:
                j -= 1
            if j < 0:
                break
            if times[i] + other_times[j] < best:
                best, chosen = times[i] + other_times[j], i * width + j
        if best < last:
            if used == kept.shape[0]:
                kept = np.append(kept, np.empty_like(kept))
            kept[used] = chosen
            used, last = used + 1, best
        if bound >= most or best <= fastest:
            return kept[:used]
        bound = max(bound * ratio, bound + step)


@njit(cache=True, nogil=True)
def fastest_that_fit(first, last, sizes, times, budgets):
    """Return float64 [runs] the seconds of the fastest point of every run within its budget, infinite without one."""
    found = np.full(first.shape[0], np.inf)
    for run in range(first.shape[0]):
        place = np.searchsorted(sizes[first[run] : last[run]], budgets[run], side="right")
        if place > 0:
            found[run] = times[first[run] + place - 1]
    return found
