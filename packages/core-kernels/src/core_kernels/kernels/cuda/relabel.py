"""Launcher of ``relabel.cuh``: distinct ids in first-seen order and the position of each id among them."""

from __future__ import annotations

import torch
from torch import Tensor

from core_kernels.kernels.cuda._instances import INDICES, Kernel
from core_kernels.kernels.cuda._launch import launch_threads

__all__ = ["KERNELS", "unique_relabel"]

_INSERT = Kernel("insert_ids", "relabel.cuh", indices=INDICES)
_MARK = Kernel("mark_first", "relabel.cuh")
_NUMBER = Kernel("number_ids", "relabel.cuh", indices=INDICES)
KERNELS = (_INSERT, _MARK, _NUMBER)


def unique_relabel(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct ids in first-seen order and each id's place among them (one device synchronisation)."""
    num_ids, device = ids.numel(), ids.device
    local = torch.empty(num_ids, dtype=torch.int64, device=device)
    if num_ids == 0:
        return torch.empty_like(ids), local
    capacity = 1 << (2 * num_ids - 1).bit_length()
    table = torch.full((capacity,), -1, dtype=torch.int64, device=device)
    slot_of = torch.empty(num_ids, dtype=torch.int64, device=device)
    launch_threads(_INSERT.instance(index=ids.dtype), num_ids, (ids, table, slot_of, num_ids, capacity), device)
    is_first = torch.empty(num_ids, dtype=torch.int32, device=device)
    launch_threads(_MARK.instance(), num_ids, (table, slot_of, is_first, num_ids), device)
    rank = torch.cumsum(is_first, 0, dtype=torch.int64)
    unique = torch.empty(int(rank[-1]), dtype=ids.dtype, device=device)
    number = _NUMBER.instance(index=ids.dtype)
    launch_threads(number, num_ids, (ids, table, slot_of, rank, unique, local, num_ids), device)
    return unique, local
