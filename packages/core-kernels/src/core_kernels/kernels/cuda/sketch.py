"""Launchers of ``sketch.cuh``: insertion in input order (or atomic), and estimates."""

from __future__ import annotations

import torch
from torch import Tensor

from core_kernels.kernels.cuda._instances import Kernel
from core_kernels.kernels.cuda._launch import launch_threads
from core_kernels.kernels.cuda._runs import runs_of_equal_keys
from core_kernels.kernels.cuda.spmm import sum_rows

__all__ = ["KERNELS", "sketch_estimate", "sketch_insert_"]

_PLACES = Kernel("sketch_places", "sketch.cuh")
_INSERT_ATOMIC = Kernel("sketch_insert_atomic", "sketch.cuh")
_ESTIMATE = Kernel("sketch_estimate", "sketch.cuh")
KERNELS = (_PLACES, _INSERT_ATOMIC, _ESTIMATE)


def sketch_insert_(table: Tensor, keys: Tensor, values: Tensor, seed: int, atomic: bool = False) -> None:
    """Add signed values to the table; ``atomic`` saves the sort and gives up bitwise repeatability."""
    num_rows, num_columns = table.shape
    keys, values, device = keys.to(torch.int64), values.to(torch.float32), table.device
    num_keys = keys.numel()
    if num_keys == 0 or num_rows == 0:
        return
    if atomic:
        args = (table, keys, values, num_keys, num_rows, num_columns, seed)
        launch_threads(_INSERT_ATOMIC.instance(), num_keys, args, device)
        return
    cells = torch.empty(num_rows * num_keys, dtype=torch.int64, device=device)
    signed = torch.empty(num_rows * num_keys, 1, dtype=torch.float32, device=device)
    args = (keys, values, cells, signed, num_keys, num_rows, num_columns, seed)
    launch_threads(_PLACES.instance(), num_keys, args, device)
    order, starts, row_ids = runs_of_equal_keys(cells)
    sum_rows(
        starts,
        order,
        signed,
        table.view(-1, 1),
        num_edges=cells.numel(),
        row_ids=row_ids,
        accumulate=True,
        cached=False,
    )


def sketch_estimate(table: Tensor, keys: Tensor, seed: int, out: Tensor) -> None:
    """Fill ``out`` with the median estimate of each key."""
    num_rows, num_columns = table.shape
    args = (table, keys.to(torch.int64), out, keys.numel(), num_rows, num_columns, seed)
    launch_threads(_ESTIMATE.instance(), keys.numel(), args, table.device)
