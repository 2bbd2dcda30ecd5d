"""Frontier algebra on flat arrays: union, product and reduce in one merging kernel.

A frontier is a run of points with memory ascending and seconds strictly descending. Both operations of the algebra are
the same merge: the result is the reduced union of several frontiers, each shifted by a constant:

- product of A and B: B shifted by every point of A;
- union over the choices of a variable: the products of all choices.

The kernel merges the shifted runs by a heap in ascending memory and keeps a point when it is faster than everything
before. A run whose next points are not faster skips ahead by galloping search, so dominated points cost a logarithm
instead of one step each. Where many runs meet, most are left out beforehand (:mod:`autopar.tracking.sieve`).

Source: TensorOpt's frontier operations (product, union, reduce), arXiv 2004.10856; the galloping merge is ours.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from autopar.tracking.sieve import find_boxes, useful_part

__all__ = ["combine_cells", "thin_run"]

_NO_POINT = np.int64(1) << 62

# Columns of a run, and of a point that leaves it: all but the last.
_MEMORY, _SECONDS, _CHOICE, _POINT_A, _POINT_B, _END = range(6)


@njit(cache=True, nogil=True)
def _skip_slower(costs: np.ndarray, start: int, end: int, limit: int) -> int:
    """Return the first point in [start, end) with seconds below ``limit``, or ``end``; seconds descend."""
    if start >= end or costs[start, 1] < limit:
        return start
    step = 1
    while start + step < end and costs[start + step, 1] >= limit:
        step *= 2
    low, high = start + step // 2, min(start + step, end)
    while low < high:
        middle = (low + high) // 2
        if costs[middle, 1] < limit:
            high = middle
        else:
            low = middle + 1
    return low


@njit(cache=True, nogil=True)
def _before(runs: np.ndarray, a: int, b: int) -> bool:
    """Order runs by (memory, seconds) of their next point, then by number."""
    if runs[a, _MEMORY] != runs[b, _MEMORY]:
        return runs[a, _MEMORY] < runs[b, _MEMORY]
    if runs[a, _SECONDS] != runs[b, _SECONDS]:
        return runs[a, _SECONDS] < runs[b, _SECONDS]
    return a < b


@njit(cache=True, nogil=True)
def _sift_down(heap: np.ndarray, root: int, size: int, runs: np.ndarray) -> None:
    """Restore the heap order below ``root``."""
    item = heap[root]
    while True:
        child = 2 * root + 1
        if child >= size:
            break
        other = child + 1
        if other < size and _before(runs, heap[other], heap[child]):
            child = other
        if not _before(runs, heap[child], item):
            break
        heap[root] = heap[child]
        root = child
    heap[root] = item


@njit(cache=True, nogil=True)
def _grown(array: np.ndarray) -> np.ndarray:
    larger = np.empty((2 * array.shape[0], array.shape[1]), array.dtype)
    larger[: array.shape[0]] = array
    return larger


@njit(cache=True, nogil=True)
def _open_runs(
    runs, cell_a, cell_b, stride_a, stride_b, num_choices, offsets_a, offsets_b, costs_a, costs_b,
    boxes, num_boxes, slopes, least_b,
):  # fmt: skip
    """List the shifted runs of one cell: per choice and point of A, the points of B. Returns (runs, their number).

    With boxes, only the parts of runs that may reach one.
    """
    num_runs = 0
    for choice in range(num_choices):
        a, b = cell_a + choice * stride_a, cell_b + choice * stride_b
        start, end = offsets_b[b], offsets_b[b + 1]
        if start == end:
            continue
        for point in range(offsets_a[a], offsets_a[a + 1]):
            memory, seconds = costs_a[point, 0], costs_a[point, 1]
            first, last = start, end
            if num_boxes > 0:
                first, last = useful_part(
                    boxes, num_boxes, memory, seconds, slopes, least_b[b], costs_b, start, end
                )  # fmt: skip
                if first >= last:
                    continue
            if num_runs == runs.shape[0]:
                runs = _grown(runs)
            run = runs[num_runs]
            run[_MEMORY], run[_SECONDS] = memory + costs_b[first, 0], seconds + costs_b[first, 1]
            run[_CHOICE], run[_POINT_A], run[_POINT_B], run[_END] = choice, point, first, last
            num_runs += 1
    return runs, num_runs


@njit(cache=True, nogil=True)
def _is_useful(run, rest, weights, limits, excess):
    """Whether a point may belong to an assignment that no known one beats; see :mod:`autopar.tracking.bounds`."""
    num_weights = weights.shape[0]
    for w in range(num_weights):
        excess[w] = run[_SECONDS] + weights[w] * run[_MEMORY] + rest[w]
    for group in range(num_weights):
        if excess[group] > limits[group, group]:
            continue  # its own weight, the one most likely to refuse
        holds = True
        for w in range(num_weights):
            if excess[w] > limits[group, w]:
                holds = False
                break
        if holds:
            return True
    return False


@njit(cache=True, nogil=True)
def _merge_runs(runs, num_runs, heap, costs_a, costs_b, rest, weights, limits, out, count):
    """Append the reduced union of the runs to ``out`` behind ``count`` points. Returns (out, new count).

    Points that are not useful are left out, and still leave out what they beat.
    """
    excess = np.empty(weights.shape[0])
    for run in range(num_runs):
        heap[run] = run
    for root in range(num_runs // 2 - 1, -1, -1):
        _sift_down(heap, root, num_runs, runs)
    fastest = _NO_POINT
    while num_runs > 0:
        run = runs[heap[0]]
        if run[_SECONDS] < fastest:
            fastest = run[_SECONDS]
            if weights.shape[0] == 0 or _is_useful(run, rest, weights, limits, excess):
                if count == out.shape[0]:
                    out = _grown(out)
                out[count] = run[:_END]
                count += 1
        a = run[_POINT_A]
        b = _skip_slower(costs_b, run[_POINT_B] + 1, run[_END], fastest - costs_a[a, 1])
        if b < run[_END]:
            run[_POINT_B] = b
            run[_MEMORY], run[_SECONDS] = costs_a[a, 0] + costs_b[b, 0], costs_a[a, 1] + costs_b[b, 1]
        else:
            num_runs -= 1
            heap[0] = heap[num_runs]
        if num_runs > 0:
            _sift_down(heap, 0, num_runs, runs)
    return out, count


@njit(cache=True, nogil=True)
def combine_cells(
    cells_a, cells_b, stride_a, stride_b, num_choices, offsets_a, offsets_b, costs_a, costs_b, rest, weights, limits,
    slopes, least_a, points_a, least_b, points_b,
):  # fmt: skip
    """Combine two tables cell by cell: product per choice, union over choices, reduce.

    Args:
        cells_a: int64 [cells], the cell of A at choice 0 of the eliminated variable; ``cells_b`` likewise.
        cells_b: See ``cells_a``.
        stride_a: Distance in A between successive choices of that variable; ``stride_b`` likewise.
        stride_b: See ``stride_a``.
        num_choices: Choices of the eliminated variable, 1 when nothing is eliminated.
        offsets_a: int64 [cells of A + 1]; ``offsets_b`` likewise.
        offsets_b: See ``offsets_a``.
        costs_a: int64 [points of A, 2], (memory, seconds); ``costs_b`` likewise.
        costs_b: See ``costs_a``.
        rest: float64 [cells, weights], bounds on what the rest of the problem adds; no weights for no bounds.
        weights: float64 [weights].
        limits: float64 [weights, weights], see :mod:`autopar.tracking.bounds`.
        slopes: float64 [slopes], weights of the sieve; none for no sieve.
        least_a: float64 [cells of A, slopes], with ``points_a`` as :func:`autopar.tracking.sieve.supports` returns
            them; ``least_b`` and ``points_b`` likewise.
        points_a: See ``least_a``.
        least_b: See ``least_a``.
        points_b: See ``least_a``.

    Returns:
        (offsets int64 [cells + 1], points int64 [points, 5]), a point being (memory, seconds, choice, point of A,
        point of B), the last three the way back.
    """
    offsets = np.zeros(cells_a.shape[0] + 1, np.int64)
    out = np.empty((max(1024, 2 * cells_a.shape[0]), _END), np.int64)
    runs, heap = np.empty((64, _END + 1), np.int64), np.empty(64, np.int64)
    num_slopes = slopes.shape[0]
    boxes, stairs, sums = np.empty((num_slopes + 2, 4)), np.empty((num_slopes + 2, 2)), np.empty(num_slopes)
    count = num_boxes = 0
    for cell in range(cells_a.shape[0]):
        if num_slopes > 0:
            num_boxes = find_boxes(
                boxes, stairs, sums, slopes, cells_a[cell], cells_b[cell], stride_a, stride_b, num_choices,
                offsets_a, offsets_b, costs_a, costs_b, least_a, points_a, least_b, points_b,
            )  # fmt: skip
        runs, num_runs = _open_runs(
            runs, cells_a[cell], cells_b[cell], stride_a, stride_b, num_choices, offsets_a, offsets_b, costs_a, costs_b,
            boxes, num_boxes, slopes, least_b,
        )  # fmt: skip
        if heap.shape[0] < runs.shape[0]:
            heap = np.empty(runs.shape[0], np.int64)
        out, count = _merge_runs(
            runs, num_runs, heap, costs_a, costs_b, rest[cell if weights.shape[0] else 0], weights, limits, out, count
        )
        offsets[cell + 1] = count
    return offsets, out[:count].copy()


@njit(cache=True, nogil=True)
def thin_run(costs: np.ndarray, offsets: np.ndarray, ratio: float):
    """Choose which points stay so that every point has one at least as fast within ``ratio`` times its memory.

    The first point of each run, the one of least memory, always stays.

    Returns:
        (new offsets, positions of the points that stay).
    """
    kept = np.empty(costs.shape[0], np.int64)
    new_offsets = np.zeros_like(offsets)
    count = 0
    for cell in range(offsets.shape[0] - 1):
        start, end = offsets[cell], offsets[cell + 1]
        if start < end:
            kept[count] = start
            count += 1
            first = start + 1
            while first < end:
                last = first
                while last + 1 < end and costs[last + 1, 0] <= ratio * costs[first, 0]:
                    last += 1
                kept[count] = last
                count += 1
                first = last + 1
        new_offsets[cell + 1] = count
    return new_offsets, kept[:count].copy()
