"""Rows grouped by key: sorting, and the runs of equal keys as a CSR structure whose length the device alone knows."""

from __future__ import annotations

import torch
from torch import Tensor

from core_kernels.kernels.cuda._instances import INDICES, Kernel
from core_kernels.kernels.cuda._launch import launch_threads

__all__ = ["KERNELS", "group_by_row", "runs_of_equal_keys"]

_MARK_RUNS = Kernel("mark_runs", "pack.cuh", indices=INDICES)
KERNELS = (_MARK_RUNS,)


def runs_of_equal_keys(keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Group positions by key without asking the device how many different keys there are.

    Args:
        keys: int32 or int64 [n].

    Returns:
        ``(order, starts, row_ids)``: positions sorted by key, stable, int64 [n]; int64 [n + 1], run ``r`` is
        ``order[starts[r]:starts[r + 1]]``; its key, int64 [n], -1 (and an empty run) where there is no such run.
    """
    num_keys, device = keys.numel(), keys.device
    starts = torch.full((num_keys + 1,), num_keys, dtype=torch.int64, device=device)
    row_ids = torch.full((num_keys,), -1, dtype=torch.int64, device=device)
    ordered, order = torch.sort(keys, stable=True)
    is_first = torch.ones(num_keys, dtype=torch.int32, device=device)
    is_first[1:] = ordered[1:] != ordered[:-1]
    rank = torch.cumsum(is_first, 0, dtype=torch.int64)
    mark = _MARK_RUNS.instance(index=keys.dtype)
    launch_threads(mark, num_keys, (ordered, rank, starts, row_ids, num_keys), device)
    return order, starts, row_ids


def group_by_row(keys: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Group positions by key into one list per row.

    Args:
        keys: int32 or int64 [n] in [0, num_rows).
        num_rows: Number of rows.

    Returns:
        ``(order, indptr)``: positions sorted by key, stable, int64 [n]; int64 [num_rows + 1].
    """
    ordered, order = torch.sort(keys, stable=True)
    rows = torch.arange(num_rows + 1, dtype=keys.dtype, device=keys.device)
    return order, torch.searchsorted(ordered, rows)
