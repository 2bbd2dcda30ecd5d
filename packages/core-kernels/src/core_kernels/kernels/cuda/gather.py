"""Launchers of ``gather.cuh``: rows by index, from one tensor or from two tiers, and sums into rows by index."""

from __future__ import annotations

from torch import Tensor

from core_kernels.kernels.cuda._instances import INDICES, Kernel
from core_kernels.kernels.cuda._launch import launch_threads
from core_kernels.kernels.cuda._runs import group_by_row
from core_kernels.kernels.cuda.spmm import sum_rows

__all__ = ["KERNELS", "copy_layout", "gather", "scatter_add", "tiered_gather"]

_UNIT_BYTES = (16, 8, 4, 2, 1)
_GATHER = Kernel("gather_rows", "gather.cuh", indices=INDICES, options={"bytes": _UNIT_BYTES})
_TIERED = Kernel("tiered_gather_rows", "gather.cuh", indices=INDICES, options={"bytes": _UNIT_BYTES})
KERNELS = (_GATHER, _TIERED)


def copy_layout(row_bytes: int, *tensors: Tensor) -> tuple[int, int, int]:
    """Return the widest unit that fits every row's address and length, units in a row, and lanes of a group.

    >>> import torch
    >>> copy_layout(40, torch.empty(4))
    (8, 5, 8)
    """
    unit = next(
        size for size in _UNIT_BYTES if row_bytes % size == 0 and all(t.data_ptr() % size == 0 for t in tensors)
    )
    num_units = row_bytes // unit
    return unit, num_units, min(32, 1 << max(0, num_units - 1).bit_length())


def gather(x: Tensor, index: Tensor, out: Tensor) -> None:
    """Fill ``out[i]`` with ``x[index[i]]``, any dtype."""
    unit, num_units, lanes = copy_layout(x.shape[1] * x.element_size(), x, out)
    launch_threads(
        _GATHER.instance(index=index.dtype, bytes=unit),
        index.numel() * lanes if num_units else 0,
        (x, index, out, index.numel(), num_units, lanes),
        out.device,
    )


def tiered_gather(position: Tensor, ids: Tensor, device_rows: Tensor, host_rows: Tensor, out: Tensor) -> None:
    """Fill ``out[i]`` from the tier that holds row ``ids[i]``.

    Args:
        position: int64 [N]: row of ``device_rows`` when not negative, else ``-1 - row`` of ``host_rows``.
        ids: int32 or int64 [n], in range.
        device_rows: Contiguous matrix on the device of ``out``.
        host_rows: Contiguous matrix of the same width and dtype; on a GPU its memory must be pinned: the kernel reads
            it over the bus.
        out: Contiguous [n, width].
    """
    unit, num_units, lanes = copy_layout(out.shape[1] * out.element_size(), device_rows, host_rows, out)
    launch_threads(
        _TIERED.instance(index=ids.dtype, bytes=unit),
        ids.numel() * lanes if num_units else 0,
        (position, ids, device_rows, host_rows, out, ids.numel(), num_units, lanes),
        out.device,
    )


def scatter_add(x: Tensor, index: Tensor, num_rows: int, out: Tensor) -> None:
    """Fill ``out[r]`` with the sum of the rows ``x[i]`` whose ``index[i]`` is ``r``, in ascending ``i``."""
    order, indptr = group_by_row(index, num_rows)
    sum_rows(indptr, order, x, out, num_edges=index.numel(), cached=False)
