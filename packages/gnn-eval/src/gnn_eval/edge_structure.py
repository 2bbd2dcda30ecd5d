"""Edges grouped by destination, and the parts of them that belong to a block.

An :class:`EdgeStructure` is an edge set on an actual graph: where the edges of each destination lie, which edge of the
edge list is at each position, and the index vectors in that order. Edges of one destination keep the order of the edge
list, so sums add in the order of the full forward. A block takes a range of destinations, whose edges are contiguous,
or a list of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numba import njit
from torch import Tensor

from core_kernels.graph import Graph

__all__ = ["EdgeBlock", "EdgeStructure", "RowNumbers"]


@dataclass
class EdgeBlock:
    """The edges of a block's destinations in one edge set.

    Args:
        num_edges: Number of edges.
        num_rows: Number of destinations.
        positions: Positions in the structure: a slice, or int64 ids.
        edge_ids: Edges in the edge list: a slice, or int64 ids.
        local_rows: int64 [num_edges], destination of each edge, counted within the block; ``None`` until asked for.
        indptr: int64 [num_rows + 1], positions within the block where each destination's edges start.
    """

    num_edges: int
    num_rows: int
    positions: slice | Tensor
    edge_ids: slice | Tensor
    local_rows: Tensor | None
    indptr: Tensor | None

    @property
    def pointers(self) -> Tensor:
        """The row pointers of a block whose edges are grouped."""
        assert self.indptr is not None, "the edges of this block are in the order of the edge list"
        return self.indptr

    def rows_of_edges(self) -> Tensor:
        """Return the destination of each edge within the block."""
        if self.local_rows is None:
            local = torch.arange(self.num_rows)
            self.local_rows = torch.repeat_interleave(local, self.indptr.diff(), output_size=self.num_edges)
        return self.local_rows


class EdgeStructure:
    """One edge set of an actual graph.

    Args:
        grouping: Destination of each edge, or ``None`` for the order of the edge list.
        indices: Index vectors read through the edge set, by name, in the order of the edge list.
        num_rows: Number of destinations; of edges if there is no grouping.
    """

    def __init__(self, grouping: Tensor | None, indices: dict[str, Tensor], num_rows: int):
        self.num_rows, self._grouping, self._given = num_rows, grouping, indices
        self.num_edges = num_rows if grouping is None else grouping.numel()
        self.edge_ids: Tensor | None = None
        self._indptr: Tensor | None = None
        self._sorted: dict[str, Tensor] = {}
        self.orders: dict[tuple[str, int], Tensor] = {}

    @classmethod
    def from_csc(cls, indptr: Tensor, name: str, indices: Tensor) -> EdgeStructure:
        """Make a structure of edges that are grouped already."""
        structure = cls(None, {name: indices}, indptr.numel() - 1)
        structure.num_edges, structure._indptr, structure._sorted = indices.numel(), indptr, {name: indices}
        return structure

    @property
    def indptr(self) -> Tensor:
        """int64 [num_rows + 1], where the edges of each destination start; sorts the edges when first asked for."""
        if self._indptr is None:
            if self._grouping is None:
                self._indptr = torch.arange(self.num_rows + 1)
                self._sorted = dict(self._given)
            else:
                self._indptr = self._sort(self._grouping)
        return self._indptr

    def _sort(self, grouping: Tensor) -> Tensor:
        first = next(iter(self._given), None)
        column = self._given[first] if first is not None else grouping
        bound = int(column.max()) + 1 if column.numel() else 1
        graph = Graph.from_edge_index((column, grouping), (bound, self.num_rows))
        self.edge_ids = graph.edge_ids
        for name, given in self._given.items():
            if name == first:
                self._sorted[name] = graph.indices
            else:
                self._sorted[name] = given if self.edge_ids is None else given[self.edge_ids]
        return graph.indptr

    def held_bytes(self) -> int:
        """Return the bytes sorting has added."""
        added = [self._indptr, self.edge_ids, *(t for n, t in self._sorted.items() if t is not self._given.get(n))]
        return sum(t.numel() * t.element_size() for t in added if t is not None)

    def sorted_index(self, name: str) -> Tensor:
        """Return an index vector for all positions."""
        self.indptr  # noqa: B018 - sorts on first use
        return self._sorted[name]

    def index(self, name: str, block: EdgeBlock) -> Tensor:
        """Return an index vector for the edges of a block."""
        if block.local_rows is self._grouping and self._grouping is not None:
            return self._given[name]
        return self.sorted_index(name)[block.positions]

    def whole(self) -> EdgeBlock:
        """Return all edges in the order of the edge list, without sorting them."""
        everything = slice(0, self.num_edges)
        if self._grouping is None:
            return self.range(0, self.num_rows)
        return EdgeBlock(self.num_edges, self.num_rows, everything, everything, self._grouping, None)

    def range(self, start: int, stop: int) -> EdgeBlock:
        """Return the edges of destinations ``start`` to ``stop``."""
        first, last = int(self.indptr[start]), int(self.indptr[stop])
        positions = slice(first, last)
        edge_ids = positions if self.edge_ids is None else self.edge_ids[first:last]
        indptr = self.indptr[start : stop + 1] - first
        return EdgeBlock(last - first, stop - start, positions, edge_ids, None, indptr)

    def rows(self, ids: Tensor) -> EdgeBlock:
        """Return the edges of the destinations ``ids``, in their order."""
        pointers = self.indptr
        counts = pointers[ids + 1] - pointers[ids]
        indptr = torch.zeros(ids.numel() + 1, dtype=torch.int64)
        torch.cumsum(counts, 0, out=indptr[1:])
        positions = torch.empty(int(indptr[-1]), dtype=torch.int64)
        _fill_positions(pointers.numpy(), ids.numpy(), indptr.numpy(), positions.numpy())
        edge_ids = positions if self.edge_ids is None else self.edge_ids[positions]
        return EdgeBlock(positions.numel(), ids.numel(), positions, edge_ids, None, indptr)

    def part(self, block: EdgeBlock, start: int, stop: int) -> EdgeBlock:
        """Return edges ``start`` to ``stop`` of a block; all its destinations stay."""

        def cut(where: slice | Tensor) -> slice | Tensor:
            if isinstance(where, slice):
                return slice(where.start + start, where.start + stop)
            return where[start:stop]

        local = block.rows_of_edges()[start:stop]
        indptr = (block.indptr.clamp(start, stop) - start) if block.indptr is not None else None
        return EdgeBlock(stop - start, block.num_rows, cut(block.positions), cut(block.edge_ids), local, indptr)


class RowNumbers:
    """Numbers the distinct rows a block reads, reusing its workspace from block to block.

    Args:
        num_rows: Number of rows of the space.
    """

    def __init__(self, num_rows: int):
        # Filled rather than left to the first use, so that a block's own memory can be told from this.
        self._stamp, self._number = np.full(num_rows, 0, np.int32), np.full(num_rows, 0, np.int32)
        self._block = 0

    def distinct(self, columns: list[Tensor], ordered: bool = False) -> tuple[Tensor, list[Tensor]]:
        """Return the distinct ids of all columns, and each column renumbered to positions among them.

        Args:
            columns: Index vectors.
            ordered: Return the ids in increasing order, for reading from disk; else in order of first occurrence.
        """
        self._block += 1
        capacity = min(sum(column.numel() for column in columns), self._stamp.size)
        ids = np.empty(capacity, np.int64)
        found = 0
        for column in columns:
            found = _collect(column.numpy(), self._stamp, self._block, self._number, ids, found)
        ids = ids[:found]
        if ordered:
            ids.sort()
            _renumber(ids, self._number)
        local = [torch.empty(column.numel(), dtype=torch.int32) for column in columns]
        for column, out in zip(columns, local, strict=True):
            _translate(column.numpy(), self._number, out.numpy())
        return torch.from_numpy(ids), local


@njit(cache=True, nogil=True)
def _fill_positions(pointers, ids, indptr, positions):
    for row in range(ids.size):
        first = pointers[ids[row]]
        for offset in range(indptr[row + 1] - indptr[row]):
            positions[indptr[row] + offset] = first + offset


@njit(cache=True, nogil=True)
def _collect(column, stamp, block, number, ids, found):
    for position in range(column.size):
        row = column[position]
        if stamp[row] != block:
            stamp[row] = block
            number[row] = found
            ids[found] = row
            found += 1
    return found


@njit(cache=True, nogil=True)
def _renumber(ids, number):
    for position in range(ids.size):
        number[ids[position]] = position


@njit(cache=True, nogil=True)
def _translate(column, number, out):
    for position in range(column.size):
        out[position] = number[column[position]]
