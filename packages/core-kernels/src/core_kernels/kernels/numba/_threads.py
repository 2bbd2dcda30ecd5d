"""Run a kernel over row ranges on a pool of threads.

Kernels are compiled with ``nogil=True`` and work on rows ``[start, stop)``, so plain Python threads run them side by
side; there is no OpenMP region that a later ``fork`` would break. A row is never split over threads: results do not
depend on their number.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

__all__ = ["run_ranges", "split_ranges"]

#: Work below this many units stays on the calling thread: waking another costs about as much.
_MIN_WORK = 1 << 16

_lock = threading.Lock()
_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}


def split_ranges(num_rows: int, num_parts: int, weights: np.ndarray | None = None) -> list[tuple[int, int]]:
    """Cut ``range(num_rows)`` into contiguous ranges of about equal work; empty ranges are left out.

    Args:
        num_rows: Number of rows.
        num_parts: Largest number of ranges.
        weights: Row pointers ``[num_rows + 1]``; the work of a row is one plus its length. None: all rows alike.

    >>> split_ranges(4, 2, np.array([0, 0, 0, 0, 90]))
    [(0, 3), (3, 4)]
    """
    if weights is None:
        cuts = [num_rows * part // num_parts for part in range(num_parts + 1)]
    else:
        total = int(weights[num_rows]) - int(weights[0]) + num_rows
        targets = [total * part // num_parts for part in range(1, num_parts)]
        cuts = [0, *(_row_at_work(weights, num_rows, target) for target in targets), num_rows]
    return [(start, stop) for start, stop in itertools.pairwise(cuts) if start < stop]


def _row_at_work(weights: np.ndarray, num_rows: int, target: int) -> int:
    """Return the row before which the work is nearest to ``target`` units, by bisection."""

    def work_before(row: int) -> int:
        return int(weights[row]) - int(weights[0]) + row

    low, high = 0, num_rows
    while low < high:
        middle = (low + high) // 2
        if work_before(middle) < target:
            low = middle + 1
        else:
            high = middle
    if low > 0 and target - work_before(low - 1) < work_before(low) - target:
        return low - 1
    return low


def run_ranges(
    kernel: Callable[..., None], num_rows: int, weights: np.ndarray | None, *args: Any, unit: int = 1
) -> None:
    """Call ``kernel(start, stop, *args)`` over all rows, on ``torch.get_num_threads()`` threads when that pays.

    Args:
        kernel: Function compiled with ``nogil=True`` that writes only what belongs to its rows.
        num_rows: Number of rows.
        weights: Row pointers that balance the ranges, or None.
        *args: Passed on.
        unit: Work of one edge (or row without ``weights``), for example the feature width.
    """
    num_threads = torch.get_num_threads()
    if num_threads > 1:
        work = num_rows if weights is None else num_rows + int(weights[num_rows]) - int(weights[0])
        if work * unit >= _MIN_WORK:
            ranges = split_ranges(num_rows, num_threads, weights)
            futures = [_pool(num_threads).submit(kernel, start, stop, *args) for start, stop in ranges[1:]]
            if ranges:
                kernel(*ranges[0], *args)
            for future in futures:
                future.result()
            return
    if num_rows:
        kernel(0, num_rows, *args)


def _pool(num_threads: int) -> ThreadPoolExecutor:
    # The process id is part of the key: a forked child must not wait for threads that only its parent has.
    key = (os.getpid(), num_threads)
    with _lock:
        if key not in _pools:
            _pools[key] = ThreadPoolExecutor(num_threads - 1, thread_name_prefix="core-kernels")
        return _pools[key]
