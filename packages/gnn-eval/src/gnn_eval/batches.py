"""How many destinations make a block: as many as the memory budget holds.

Edges of any range are known from prefix sums, source rows from the ratio seen in the blocks before (at first, one
source row per edge). The symbolic model turns these counts into bytes, and the largest range that fits is found by
bisection. A block whose exact number of source rows breaks the budget is cut down before it runs, not after.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gnn_eval.block import Block, Destinations
from gnn_eval.edge_structure import EdgeStructure
from gnn_eval.lowering import EdgeSet, Rows, StageProgram
from gnn_eval.memory import Correction, StageMemory
from gnn_eval.sizes import Size

__all__ = ["Batcher"]

_FIRST_BLOCK_SHARE = 0.25


@dataclass
class Batcher:
    """Cuts the rows of a stage into blocks.

    Args:
        stage: The stage.
        memory: Its symbolic memory.
        structures: Its edge sets.
        rows: Rows in the order in which they are to be computed; ``None`` for all in natural order.
        num_rows: Number of rows to compute.
        budget_bytes: What one block may use, or ``None``.
        batch_rows: Largest number of destinations of a block, or ``None``.
        space_rows: Number of rows of each space read at source rows.
        direct: Spaces read as stored.
        measured: Whether peaks of blocks are measured, so that the first block is small.
    """

    stage: StageProgram
    memory: StageMemory
    structures: dict[EdgeSet, EdgeStructure]
    rows: Tensor | None
    num_rows: int
    budget_bytes: float | None
    batch_rows: int | None
    space_rows: dict[Size, int]
    direct: set[Size]
    measured: bool = False

    def __post_init__(self) -> None:
        self.correction = Correction()
        self._ratio = dict.fromkeys(self.space_rows, 1.0)
        self._prefix: dict[EdgeSet, Tensor] = {}

    def held_bytes(self) -> int:
        """Return the bytes of the edge counts kept for the rows to compute, made now if they were not yet."""
        counted = [self._edges_before(edge_set) for edge_set in self.stage.edge_sets]
        return 0 if self.rows is None else sum(prefix.numel() * prefix.element_size() for prefix in counted)

    @property
    def takes_all(self) -> bool:
        """Whether one block holds everything, judged without looking at single rows."""
        if self.rows is not None or (self.batch_rows is not None and self.batch_rows < self.num_rows):
            return False
        if self.budget_bytes is None:
            return True
        counts: dict[str, float] = {Rows("range", self.stage.space).key: self.num_rows}
        for edge_set in self.stage.edge_sets:
            counts[self._edge_key(edge_set)] = self.structures[edge_set].num_edges
        for space, rows in self.space_rows.items():
            counts[Rows("source", space).key] = 0 if space in self.direct else rows
        return self.memory.peak(counts) * self.correction.factor <= self._careful_budget()

    def destinations(self, start: int, stop: int) -> Destinations:
        """Return rows number ``start`` to ``stop`` of those to compute."""
        if self.rows is None:
            return Destinations(start, stop)
        return Destinations(ids=self.rows[start:stop])

    def next_stop(self, start: int) -> int:
        """Return where the block that begins at ``start`` ends; always at least one row further."""
        low, high = start + 1, min(self.num_rows, start + (self.batch_rows or self.num_rows))
        if self.budget_bytes is None or self._fits(start, high):
            return high
        while low < high:
            middle = (low + high + 1) // 2
            if self._fits(start, middle):
                low = middle
            else:
                high = middle - 1
        return low

    def predicted_bytes(self, start: int, stop: int) -> float:
        """Return the corrected prediction for a range of rows."""
        return self.memory.peak(self._counts(start, stop)) * self.correction.factor

    def block_bytes(self, block: Block, following: Block | None = None) -> float:
        """Return the corrected prediction for a block whose counts are known exactly.

        Args:
            block: The block.
            following: The block that is read meanwhile, assumed to be of equal size if left out.
        """
        counts = None if following is None else following.counts
        return self.memory.peak(block.counts, counts) * self.correction.factor

    def shrink(self, block: Block, start: int, stop: int) -> int:
        """Return a nearer end for a block that turned out too large, or ``stop`` if it is not."""
        if self.budget_bytes is None or stop - start <= 1:
            return stop
        need = self.block_bytes(block)
        if need <= self.budget_bytes:
            return stop
        return start + max(1, int((stop - start) * 0.95 * self.budget_bytes / need))

    def learn(self, block: Block) -> None:
        """Remember how many source rows the edges of a block had."""
        for space in self._ratio:
            if space in block.sources:
                edges = sum(
                    local.numel() for (es, i), local in block.local.items() if self.stage.edge_sets[es][i] == space
                )
                if edges:
                    self._ratio[space] = 0.5 * self._ratio[space] + 0.5 * block.sources[space].numel() / edges

    def work_prefix(self) -> Tensor:
        """Return rows plus edges before each row, int64 [num_rows + 1]; used to split work evenly."""
        total = torch.arange(self.num_rows + 1)
        for edge_set in self.stage.edge_sets:
            total = total + self._edges_before(edge_set)
        return total

    def _fits(self, start: int, stop: int) -> bool:
        return self.predicted_bytes(start, stop) <= self._careful_budget()

    def _careful_budget(self) -> float:
        """Return the budget, or a part of it until a block has shown how far the prediction is to be trusted."""
        waits = self.measured and not self.correction.seen
        budget_bytes = float("inf") if self.budget_bytes is None else self.budget_bytes
        return budget_bytes * (_FIRST_BLOCK_SHARE if waits else 1)

    def _counts(self, start: int, stop: int) -> dict[str, float]:
        counts: dict[str, float] = {Rows("range", self.stage.space).key: stop - start}
        read: dict[Size, float] = {}
        for edge_set, indices in self.stage.edge_sets.items():
            prefix = self._edges_before(edge_set)
            edges = int(prefix[stop] - prefix[start])
            counts[self._edge_key(edge_set)] = edges
            for space in indices.values():
                read[space] = read.get(space, 0) + edges
        for space, edges in read.items():
            known = 0 if space in self.direct else min(edges * self._ratio[space], self.space_rows[space])
            counts[Rows("source", space).key] = known
        return counts

    def _edges_before(self, edge_set: EdgeSet) -> Tensor:
        if edge_set not in self._prefix:
            pointers = self.structures[edge_set].indptr
            if self.rows is None:
                self._prefix[edge_set] = pointers
            else:
                prefix = torch.zeros(self.num_rows + 1, dtype=torch.int64)
                torch.cumsum(pointers[self.rows + 1] - pointers[self.rows], 0, out=prefix[1:])
                self._prefix[edge_set] = prefix
        return self._prefix[edge_set]

    def _edge_key(self, edge_set: EdgeSet) -> str:
        if edge_set.grouping is None:
            return Rows("range", self.stage.space).key
        return Rows("edge", edge_set.space, edge_set.grouping).key
