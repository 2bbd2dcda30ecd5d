"""Blocks made ready before they are needed: their edges, their source rows, and the rows that lie on disk.

While a block is computed, a thread builds the next one and reads its rows. Rows that the block before had read already
are copied from there instead of being read again: with an order that keeps neighbours together, most are. Memory holds
the rows of two blocks for this, which :func:`gnn_eval.memory.measure_stage` counts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numba import njit
from torch import Tensor

from gnn_eval.batches import Batcher
from gnn_eval.block import Block, BlockBuilder
from gnn_eval.disk_rows import DiskRows, bytes_of
from gnn_eval.lowering import StageProgram, Step
from gnn_eval.process_memory import is_out_of_memory
from gnn_eval.row_stores import RowStore

__all__ = ["BlockFeed", "Prepared", "RecentRows", "disk_loads"]

_logger = logging.getLogger(__name__)


@dataclass
class Prepared:
    """A block ready to run.

    Args:
        start: Number of its first row, in the order of computation.
        end: Number behind its last row.
        block: The block, with its rows from disk; ``None`` for a single row whose edges exceed the budget.
    """

    start: int
    end: int
    block: Block | None


class BlockFeed:
    """Prepares the blocks of one stage, one at a time.

    Args:
        stage: The stage whose steps run.
        batcher: Cuts rows into blocks.
        builder: Builds blocks.
        stores: Rows of inputs and stored values by name.
        stop: Number behind the last row.
        ahead: Whether the next block may be prepared while one runs.

    Attributes:
        limit: Most rows of a block, lowered when memory ran out.
        reused_rows: Rows copied from the block before instead of being read.
    """

    def __init__(
        self,
        stage: StageProgram,
        batcher: Batcher,
        builder: BlockBuilder,
        stores: Mapping[str, RowStore],
        stop: int,
        ahead: bool,
    ):
        self._batcher, self._builder, self._stop = batcher, builder, stop
        self._loads = disk_loads(stage, stores)
        on_disk = {step.name: stores[step.name] for step in self._loads}
        self._recent = {name: RecentRows(store) for name, store in on_disk.items() if isinstance(store, DiskRows)}
        self._pool = ThreadPoolExecutor(1) if ahead and self._loads else None
        self.limit = max(batcher.num_rows, 1)

    @property
    def reused_rows(self) -> int:
        """Rows copied from the block before instead of being read."""
        return sum(recent.reused_rows for recent in self._recent.values())

    def prepare(self, start: int, in_list_order: bool = False) -> Prepared | None:
        """Return the block that begins at ``start``, or ``None`` behind the last row.

        Args:
            start: Number of its first row.
            in_list_order: Take all rows, with edges in the order of the edge list.
        """
        if start >= self._stop:
            return None
        while True:
            end = self._stop if in_list_order else min(self._batcher.next_stop(start), start + self.limit, self._stop)
            try:
                return self._prepare(start, end, in_list_order)
            except (RuntimeError, MemoryError) as error:
                self.lower_limit(end - start, error)
                in_list_order = False

    def lower_limit(self, rows: int, error: BaseException) -> None:
        """Halve the size of blocks after one of ``rows`` rows ran out of memory; raise any other error again."""
        if not is_out_of_memory(error) or rows <= 1:
            raise error
        self.limit = rows // 2
        _logger.info("out of memory with %d rows; going on with %d", rows, self.limit)

    def prepare_later(self, start: int) -> Future[Prepared | None] | None:
        """Begin to prepare the block at ``start`` on the look-ahead thread; ``None`` where there is none."""
        return None if self._pool is None else self._pool.submit(self.prepare, start)

    def close(self) -> None:
        """Wait for the look-ahead thread, and forget what was read."""
        if self._pool is not None:
            self._pool.shutdown()
        self._recent.clear()

    def _prepare(self, start: int, end: int, in_list_order: bool) -> Prepared:
        batcher, budget = self._batcher, self._batcher.budget_bytes
        is_single = not in_list_order and end - start == 1
        if is_single and budget is not None and batcher.predicted_bytes(start, end) > budget:
            return Prepared(start, end, None)
        block = self._builder.build(batcher.destinations(start, end), in_list_order)
        while not in_list_order and (nearer := batcher.shrink(block, start, end)) < end:
            end = nearer
            block = self._builder.build(batcher.destinations(start, end))
        self._read(block)
        return Prepared(start, end, block)

    def _read(self, block: Block) -> None:
        """Read what the block's steps load from disk; source rows first, since others may be among them."""
        for recent in self._recent.values():
            recent.turn()
        chosen = block.destinations
        for step in sorted(self._loads, key=lambda step: step.rows.kind != "source"):
            recent = self._recent[step.name]
            if step.rows.kind == "source":
                ids = block.sources.get(step.rows.space)
                rows = recent.read(ids, keep=True) if ids is not None else recent.read_range(0, recent.store.num_rows)
            elif step.rows.kind == "range":
                if chosen.ids is None:
                    rows = recent.read_range(chosen.start, chosen.stop)
                else:
                    rows = recent.read(chosen.ids)
            else:
                where = block.edges_at(step.rows).edge_ids
                if isinstance(where, slice):
                    rows = recent.read_range(where.start, where.stop)
                else:
                    rows = recent.read(where)
            block.loaded[step.slot] = rows


def disk_loads(stage: StageProgram, stores: Mapping[str, RowStore]) -> list[Step]:
    """Return the steps of a stage that load rows from disk."""
    return [step for step in stage.loads() if isinstance(stores.get(step.name), DiskRows)]


class RecentRows:
    """Reads rows of one file, and copies those that were read for this block or the one before.

    Args:
        store: The file.
    """

    def __init__(self, store: DiskRows):
        self.store = store
        self.reused_rows = 0
        self._now: list[tuple[np.ndarray, Tensor]] = []
        self._before: list[tuple[np.ndarray, Tensor]] = []

    def turn(self) -> None:
        """Begin the next block: what the last one read becomes what was read before."""
        self._before, self._now = self._now, []

    def read_range(self, start: int, stop: int) -> Tensor:
        """Return rows ``start`` to ``stop``."""
        if not self._now and not self._before:
            return self.store.read_range(start, stop)
        return self._read(np.arange(start, stop), False)

    def read(self, ids: Tensor, keep: bool = False) -> Tensor:
        """Return the rows ``ids``.

        Args:
            ids: int64; rows that do not increase are read without a look at what is in memory.
            keep: Keep them for this block and the next.
        """
        wanted = ids.numpy()
        if wanted.size > 1 and not bool((wanted[1:] > wanted[:-1]).all()):
            return self.store.read_rows(ids)
        return self._read(wanted, keep)

    def _read(self, wanted: np.ndarray, keep: bool) -> Tensor:
        known = [part for part in (*self._now, *self._before) if part[0].size]
        if not known or not wanted.size:
            rows = self.store.read_into(wanted, self.store.empty(wanted.size))
        else:
            rows, missing = self.store.empty(wanted.size), np.ones(wanted.size, np.bool_)
            for ids, kept in known:
                self.reused_rows += _copy_known(
                    wanted, missing, ids, bytes_of(kept), bytes_of(rows), self.store.row_bytes
                )
            places = np.flatnonzero(missing)
            if places.size:
                self.store.read_into(wanted[places], rows, places)
        if keep:
            self._now.append((wanted, rows))
        return rows


@njit(cache=True, nogil=True)
def _copy_known(wanted, missing, ids, kept, rows, row_bytes):
    """Copy the wanted rows that are among ``ids``, both increasing; return how many, and mark them as found."""
    found, place = 0, np.searchsorted(ids, wanted[0])
    for position in range(wanted.size):
        while place < ids.size and ids[place] < wanted[position]:
            place += 1
        if place == ids.size:
            break
        if ids[place] == wanted[position] and missing[position]:
            missing[position] = False
            found += 1
            rows[position * row_bytes : (position + 1) * row_bytes] = kept[place * row_bytes : (place + 1) * row_bytes]
    return found
