"""Launchers of ``pack.cuh``: positions by owner, and rows written back by index."""

from __future__ import annotations

import torch
from torch import Tensor

from core_kernels.kernels.cuda import _runs
from core_kernels.kernels.cuda._instances import INDICES, Kernel
from core_kernels.kernels.cuda._launch import launch_threads
from core_kernels.kernels.cuda._runs import runs_of_equal_keys
from core_kernels.kernels.cuda.gather import copy_layout
from core_kernels.kernels.cuda.spmm import sum_rows

__all__ = ["KERNELS", "bucket_by_owner", "unpack_rows_"]

_FIND_OWNER = Kernel("find_owner", "pack.cuh", indices=INDICES)
_FIND_LAST = Kernel("find_last", "pack.cuh", indices=INDICES)
_UNPACK = Kernel("unpack_rows", "gather.cuh", indices=INDICES, options={"bytes": (16, 8, 4, 2, 1)})
KERNELS = (_FIND_OWNER, _FIND_LAST, _UNPACK, *_runs.KERNELS)


def bucket_by_owner(ids: Tensor, offsets: Tensor, order: Tensor, counts: Tensor) -> None:
    """Fill ``order`` with positions by owner, stable, and ``counts`` with the ids of each owner."""
    num_parts = counts.numel()
    owner = torch.empty(ids.numel(), dtype=torch.int32, device=ids.device)
    offsets = offsets.to(torch.int64)
    find = _FIND_OWNER.instance(index=ids.dtype)
    launch_threads(find, ids.numel(), (ids, offsets, owner, ids.numel(), num_parts), ids.device)
    # The fewer bits a key has, the fewer passes a radix sort makes.
    owner = owner.to(torch.uint8 if num_parts <= 256 else torch.int32)
    owner, positions = torch.sort(owner, stable=True)
    order.copy_(positions)
    bounds = torch.searchsorted(owner.int(), torch.arange(num_parts + 1, dtype=torch.int32, device=ids.device))
    torch.sub(bounds[1:], bounds[:-1], out=counts)


def unpack_rows_(out: Tensor, index: Tensor, rows: Tensor, accumulate: bool) -> None:
    """Write ``rows[i]`` to ``out[index[i]]`` (the last of equals stays), or add them in ascending ``i``."""
    num_index, width = index.numel(), rows.shape[1]
    if num_index == 0 or width == 0:
        return
    if accumulate:
        order, starts, row_ids = runs_of_equal_keys(index)
        sum_rows(starts, order, rows, out, num_edges=num_index, row_ids=row_ids, accumulate=True, cached=False)
        return
    last = torch.full((out.shape[0],), -1, dtype=torch.int64, device=out.device)
    launch_threads(_FIND_LAST.instance(index=index.dtype), num_index, (index, last, num_index), out.device)
    unit, num_units, lanes = copy_layout(width * rows.element_size(), rows, out)
    launch_threads(
        _UNPACK.instance(index=index.dtype, bytes=unit),
        num_index * lanes,
        (rows, index, last, out, num_index, num_units, lanes),
        out.device,
    )
