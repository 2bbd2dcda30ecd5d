"""Row tasks and lane layout: how the rows of a CSR structure are spread over groups of lanes (see ``rows.cuh``).

Rows are ordered by falling power-of-two bucket of their degree; rows above ``CHUNK_EDGES`` are cut into chunks. The
plan of a row-pointer tensor is kept as long as that tensor lives, so a graph pays for it once.

Callers may not assume a plan after writing into the row pointers in place: the tensor's version is compared, but an
inference tensor has none and is planned anew each time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from core_kernels.kernels.cuda._instances import WIDE, accumulator

__all__ = ["CHUNK_EDGES", "LaneLayout", "RowTasks", "lane_layout", "row_tasks", "vec_for"]

CHUNK_EDGES = 4096
_SMALLEST_GROUP = 4

_plans: WeakIdKeyDictionary = WeakIdKeyDictionary()


@dataclass(frozen=True)
class RowTasks:
    """The tasks of one row-pointer tensor.

    Attributes:
        order: int64 [num_rows], rows by falling bucket, ``None`` for their own order.
        chunk_start: int64 [num_rows + 1], first chunk of the row at each place of ``order``; ``None`` without hubs.
        num_rows: Number of rows.
        max_chunks: Upper bound of the number of chunks, known without asking the device.
    """

    order: Tensor | None
    chunk_start: Tensor | None
    num_rows: int
    max_chunks: int

    @property
    def num_tasks(self) -> int:
        """Number of groups of lanes to start."""
        return self.num_rows + self.max_chunks

    def partial(self, width: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """Allocate one row of workspace for each chunk, ``None`` when there are none."""
        return torch.empty(self.max_chunks, width, dtype=dtype, device=device) if self.max_chunks else None


@dataclass(frozen=True)
class LaneLayout:
    """Lanes of a group: ``columns`` lanes side by side, ``size`` lanes in all, ``tiles`` groups of columns per row."""

    columns: int
    size: int
    tiles: int


def row_tasks(indptr: Tensor, num_edges: int, cached: bool = True) -> RowTasks:
    """Plan the rows of ``indptr``.

    Args:
        indptr: int64 [num_rows + 1].
        num_edges: ``indptr[-1]``, known to the caller, so the device is not asked.
        cached: Whether the same tensor will come again; if not, rows keep their order, which costs nothing to find.

    Returns:
        The tasks.
    """
    if not cached or indptr.is_inference():
        return _plan(indptr, num_edges, ordered=False)
    known = _plans.get(indptr)
    if known is None or known[0] != indptr._version:
        known = (indptr._version, _plan(indptr, num_edges, ordered=True))
        _plans[indptr] = known
    return known[1]


def _plan(indptr: Tensor, num_edges: int, ordered: bool) -> RowTasks:
    num_rows = indptr.numel() - 1
    # A hub has more than CHUNK_EDGES edges, so there are fewer than E / CHUNK_EDGES hubs and twice as many chunks.
    max_chunks = 2 * (num_edges // CHUNK_EDGES)
    if not ordered and not max_chunks:
        return RowTasks(None, None, num_rows, 0)
    degree = indptr.diff()
    order = None
    if ordered:
        bucket = torch.frexp(degree.clamp_min(1).sub_(1).double())[1].to(torch.uint8)  # ceil(log2(degree))
        order = torch.argsort(bucket, descending=True, stable=True)
        degree = degree[order]
    chunk_start = None
    if max_chunks:
        chunks = torch.where(degree > CHUNK_EDGES, (degree + (CHUNK_EDGES - 1)) // CHUNK_EDGES, 0)
        chunk_start = torch.zeros_like(indptr)
        torch.cumsum(chunks, 0, out=chunk_start[1:])
    return RowTasks(order, chunk_start, num_rows, max_chunks)


def lane_layout(width: int, vec: int, num_edges: int, num_rows: int) -> LaneLayout:
    """Choose the lanes of a group for rows of ``width`` columns read ``vec`` at a time.

    Narrow rows leave lanes free: those walk edges side by side, as many as a row of average degree keeps busy.

    >>> lane_layout(width=7, vec=1, num_edges=1000, num_rows=1000)
    LaneLayout(columns=8, size=8, tiles=1)
    >>> lane_layout(width=1, vec=1, num_edges=64000, num_rows=1000)
    LaneLayout(columns=1, size=32, tiles=1)
    >>> lane_layout(width=300, vec=4, num_edges=1, num_rows=1)
    LaneLayout(columns=32, size=32, tiles=3)
    """
    columns = min(32, _power_of_two_at_least(-(-width // vec)))
    edges_per_row = max(1, num_edges // max(1, num_rows))
    edge_lanes = min(32 // columns, max(_power_of_two_at_least(edges_per_row) // 2, _SMALLEST_GROUP // columns, 1))
    return LaneLayout(columns, columns * edge_lanes, max(1, -(-width // (columns * vec))))


def _power_of_two_at_least(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()


def vec_for(dtype: torch.dtype, width: int, *tensors: Tensor | None) -> int:
    """Return the columns of one load: wide when every row of every tensor starts at an aligned address, else 1.

    Args:
        dtype: Element type.
        width: Columns that must stay together, for example those of one head.
        tensors: Matrices read or written; an accumulator-typed one is written element by element and not listed.
    """
    wide = WIDE[dtype]
    size = wide * dtype.itemsize
    aligned = all(t.data_ptr() % size == 0 for t in tensors if t is not None)
    return wide if width % wide == 0 and width > 0 and aligned else 1


def as_scale(scale: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a per-row factor in the accumulator type of ``dtype``."""
    return None if scale is None else scale.to(accumulator(dtype)).contiguous()
