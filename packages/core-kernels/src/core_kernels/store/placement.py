"""Which rows live in which tier: the hottest in the fastest.

For a fixed sampler the expected number of reads of a row does not change, so the best static placement fills the tiers
in the order of hotness. Dynamic replacement repeats that with counts that fade, and moves only what differs.

Source: J. Dong et al., "Global Neighbor Sampling for Mixed CPU-GPU Training on Giant Graphs", KDD 2021, and Z. Lin et
al., "PaGraph: Scaling GNN Training on Large Graphs via Computation-aware Caching", SoCC 2020 (hotness by degree).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from core_kernels.errors import argument_error

__all__ = ["Placement", "place_by_hotness", "plan_replacement"]


@dataclass(frozen=True, eq=False)
class Placement:
    """Rows of the cached tiers; all others are read from where the whole table lies.

    Args:
        device_rows: int64, row ids kept in device memory.
        host_rows: int64, row ids kept in host memory.
    """

    device_rows: Tensor
    host_rows: Tensor


def place_by_hotness(hotness: Tensor, num_device_rows: int, num_host_rows: int) -> Placement:
    """Fill the tiers with the hottest rows; lower ids win ties.

    Args:
        hotness: [num_rows], expected reads of each row, for example its out-degree.
        num_device_rows: Capacity of device memory in rows.
        num_host_rows: Capacity of host memory in rows.

    Returns:
        The placement.

    Raises:
        ArgumentError: ``hotness`` is no list of numbers, or a capacity is negative.

    >>> place_by_hotness(torch.tensor([5, 0, 9, 5]), 1, 2).host_rows.tolist()
    [0, 3]
    """
    if hotness.dim() != 1 or hotness.dtype == torch.bool or bool(hotness.isnan().any()):
        shown = (tuple(hotness.shape), hotness.dtype)
        raise argument_error("hotness", shown, "one number per row, none of them NaN", "pass graph.out_degrees()")
    for name, count in (("num_device_rows", num_device_rows), ("num_host_rows", num_host_rows)):
        if count < 0:
            raise argument_error(name, count, "at least 0", "pass the capacity in rows")
    order = torch.sort(hotness.cpu(), descending=True, stable=True).indices
    return Placement(order[:num_device_rows], order[num_device_rows : num_device_rows + num_host_rows])


def plan_replacement(rows_of_slots: Tensor, wanted: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return the slots to overwrite and the rows to put there, so that the slots hold ``wanted``.

    Args:
        rows_of_slots: int64, the row in each slot.
        wanted: int64, as many distinct rows.
        num_rows: Number of all rows.
    """
    is_wanted = torch.zeros(num_rows, dtype=torch.bool)
    is_wanted[wanted] = True
    slots = (~is_wanted[rows_of_slots]).nonzero().squeeze(1)
    is_wanted[rows_of_slots] = False
    return slots, wanted[is_wanted[wanted]]
