"""Frontier algebra on flat arrays: union, product and reduce in one merging kernel.

A frontier is a run of points with memory ascending and seconds strictly descending. Both operations of the algebra are
the same merge: the result is the reduced union of several frontiers, each shifted by a constant:

- product of A and B: B shifted by every point of A;
- union over the choices of a variable: the products of all choices.

The kernel merges the shifted runs by a heap in ascending memory and keeps a point when it is faster than everything
before. A run whose next points are not faster skips ahead by galloping search, so dominated points cost a logarithm
instead of one step each.

Source: TensorOpt's frontier operations (product, union, reduce), arXiv 2004.10856; the galloping merge is ours.
"""

from __future__ import annotations

import numpy as np
from numba import njit

__all__ = ["combine_cells", "thin_run"]

_NO_POINT = np.int64(1) << 62


@njit(cache=True, nogil=True)
def _skip_slower(seconds: np.ndarray, start: int, end: int, limit: int) -> int:
    """Return the first index in [start, end) whose value is below ``limit``, or ``end``; values descend."""
    if start >= end or seconds[start] < limit:
        return start
    step = 1
    while start + step < end and seconds[start + step] >= limit:
        step *= 2
    low, high = start + step // 2, min(start + step, end)
    while low < high:
        middle = (low + high) // 2
        if seconds[middle] < limit:
            high = middle
        else:
            low = middle + 1
    return low


@njit(cache=True, nogil=True)
def _sift_down(heap: np.ndarray, size: int, memory: np.ndarray, seconds: np.ndarray) -> None:
    """Restore the heap order from the root; the order is by (memory, seconds, number of the run)."""
    root = 0
    item = heap[0]
    while True:
        child = 2 * root + 1
        if child >= size:
            break
        other = child + 1
        if other < size and _before(heap[other], heap[child], memory, seconds):
            child = other
        if not _before(heap[child], item, memory, seconds):
            break
        heap[root] = heap[child]
        root = child
    heap[root] = item


@njit(cache=True, nogil=True)
def _before(a: int, b: int, memory: np.ndarray, seconds: np.ndarray) -> bool:
    if memory[a] != memory[b]:
        return memory[a] < memory[b]
    if seconds[a] != seconds[b]:
        return seconds[a] < seconds[b]
    return a < b


@njit(cache=True, nogil=True)
def _grown(array: np.ndarray) -> np.ndarray:
    larger = np.empty(2 * array.shape[0], array.dtype)
    larger[: array.shape[0]] = array
    return larger


@njit(cache=True, nogil=True)
def combine_cells(
    cells_a,  # [cells]: cell of A at choice 0 of the eliminated variable
    cells_b,
    stride_a,  # distance in A between successive choices of the eliminated variable
    stride_b,
    num_choices,  # 1 when nothing is eliminated
    offsets_a,
    memory_a,
    seconds_a,
    offsets_b,
    memory_b,
    seconds_b,
):
    """Combine two tables cell by cell: product per choice, union over choices, reduce.

    Returns:
        (offsets, memory, seconds, choice, point of A, point of B), the last three as back pointers.
    """
    num_cells = cells_a.shape[0]
    offsets = np.zeros(num_cells + 1, np.int64)
    capacity = max(1024, 2 * num_cells)
    out_memory, out_seconds = np.empty(capacity, np.int64), np.empty(capacity, np.int64)
    out_choice = np.empty(capacity, np.int32)
    out_a, out_b = np.empty(capacity, np.int64), np.empty(capacity, np.int64)
    size = 64
    run_position, run_end = np.empty(size, np.int64), np.empty(size, np.int64)
    run_choice, run_a = np.empty(size, np.int32), np.empty(size, np.int64)
    key_memory, key_seconds = np.empty(size, np.int64), np.empty(size, np.int64)
    heap = np.empty(size, np.int64)
    count = 0
    for cell in range(num_cells):
        num_runs = 0
        for choice in range(num_choices):
            a, b = cells_a[cell] + choice * stride_a, cells_b[cell] + choice * stride_b
            start, end = offsets_b[b], offsets_b[b + 1]
            if start == end:
                continue
            for point in range(offsets_a[a], offsets_a[a + 1]):
                if num_runs == run_end.shape[0]:
                    run_position, run_end = _grown(run_position), _grown(run_end)
                    run_choice, run_a = _grown(run_choice), _grown(run_a)
                    key_memory, key_seconds, heap = _grown(key_memory), _grown(key_seconds), _grown(heap)
                run_position[num_runs], run_end[num_runs] = start, end
                run_choice[num_runs], run_a[num_runs] = choice, point
                key_memory[num_runs] = memory_a[point] + memory_b[start]
                key_seconds[num_runs] = seconds_a[point] + seconds_b[start]
                num_runs += 1
        for run in range(num_runs):  # insertion into the heap, sifting up
            place = run
            while place > 0:
                parent = (place - 1) // 2
                if not _before(run, heap[parent], key_memory, key_seconds):
                    break
                heap[place] = heap[parent]
                place = parent
            heap[place] = run
        fastest = _NO_POINT
        while num_runs > 0:
            run = heap[0]
            if key_seconds[run] < fastest:
                if count == out_memory.shape[0]:
                    out_memory, out_seconds = _grown(out_memory), _grown(out_seconds)
                    out_choice, out_a, out_b = _grown(out_choice), _grown(out_a), _grown(out_b)
                fastest = key_seconds[run]
                out_memory[count], out_seconds[count] = key_memory[run], fastest
                out_choice[count], out_a[count], out_b[count] = run_choice[run], run_a[run], run_position[run]
                count += 1
            shift = seconds_a[run_a[run]]
            position = _skip_slower(seconds_b, run_position[run] + 1, run_end[run], fastest - shift)
            if position < run_end[run]:
                run_position[run] = position
                key_memory[run] = memory_a[run_a[run]] + memory_b[position]
                key_seconds[run] = shift + seconds_b[position]
            else:
                num_runs -= 1
                heap[0] = heap[num_runs]
            if num_runs > 0:
                _sift_down(heap, num_runs, key_memory, key_seconds)
        offsets[cell + 1] = count
    return (
        offsets,
        out_memory[:count].copy(),
        out_seconds[:count].copy(),
        out_choice[:count].copy(),
        out_a[:count].copy(),
        out_b[:count].copy(),
    )


@njit(cache=True, nogil=True)
def thin_run(memory: np.ndarray, offsets: np.ndarray, ratio: float):
    """Choose which points stay so that every point has one at least as fast within ``ratio`` times its memory.

    The first point of each run, the one of least memory, always stays.

    Returns:
        (new offsets, positions of the points that stay).
    """
    kept = np.empty(memory.shape[0], np.int64)
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
                while last + 1 < end and memory[last + 1] <= ratio * memory[first]:
                    last += 1
                kept[count] = last
                count += 1
                first = last + 1
        new_offsets[cell + 1] = count
    return new_offsets, kept[:count].copy()
