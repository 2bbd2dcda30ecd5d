"""Where the rows of input features are, and how a rank gets at them.

Three placements. ``replicated``: every rank can address the whole matrix (host memory of one machine, or a memory map).
``sharded``: a rank holds the rows of the nodes it owns, and other rows cross the network when they are read; a cache
may hold copies of often-read rows of others, and the rows of one step may be kept for the next. ``disk``: the matrix is
a file, host memory holds the hottest rows and those of the step before, and rows of coming steps are read ahead.
Features are inputs: they never receive gradients, and rows travel only forward.

Callers may not assume that a lookup copies: a replicated table returns itself.

Source: keeping the rows of a step is the batch reuse of BRGraph; the coordinated tiers follow HMGraph.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from pathlib import Path

import torch
from torch import Tensor

from core_kernels import ops
from core_kernels.comm import Group
from core_kernels.store import FeatureStore
from gnn_parallel.clock import TermClock
from gnn_parallel.exchange import exchange_ids, exchange_sizes

__all__ = ["PLACEMENTS", "FeatureTable", "ReplicatedFeatures", "ShardedFeatures", "StoredFeatures", "column_slices"]

PLACEMENTS = ("replicated", "sharded", "disk")


def column_slices(width: int, num_ranks: int) -> list[slice]:
    """Return the columns of each rank: equal shares, the first ``width mod num_ranks`` ranks hold one more.

    >>> column_slices(7, 3)
    [slice(0, 3, None), slice(3, 5, None), slice(5, 7, None)]
    """
    share, extra = divmod(width, num_ranks)
    starts = [rank * share + min(rank, extra) for rank in range(num_ranks + 1)]
    return [slice(start, stop) for start, stop in itertools.pairwise(starts)]


class FeatureTable(ABC):
    """Feature rows addressed by node id.

    Attributes:
        width: Columns of a row.
        dtype: Type of the elements.
        num_nodes: Number of rows over all ranks.
    """

    width: int
    dtype: torch.dtype
    num_nodes: int

    @abstractmethod
    def lookup(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``(table, rows)`` with ``table[rows[i]]`` the features of node ``ids[i]``.

        Collective: all ranks, where features are sharded.
        """

    @abstractmethod
    def local(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the same for nodes this rank can read without communication."""

    @abstractmethod
    def is_local(self, ids: Tensor) -> Tensor | None:
        """Return which nodes this rank can read without communication; ``None`` means all."""


class ReplicatedFeatures(FeatureTable):
    """The whole matrix, addressable by this rank.

    Args:
        matrix: ``[num_nodes, width]``; may be a memory map.
    """

    def __init__(self, matrix: Tensor):
        self.matrix = matrix
        self.num_nodes, self.width = matrix.shape
        self.dtype = matrix.dtype

    def lookup(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the matrix itself and the ids."""
        return self.matrix, ids

    local = lookup

    def is_local(self, ids: Tensor) -> Tensor | None:
        """Return ``None``: all nodes."""
        return None


class ShardedFeatures(FeatureTable):
    """The rows this rank owns, copies of some rows of others, and a way to ask the owners for the rest.

    Args:
        group: The ranks.
        matrix: ``[num_nodes, width]`` of which only the rows named below are read; a memory map will do.
        owner: ``[num_nodes]``, rank that owns each node.
        cached: Distinct ids of nodes of which a copy is kept.
        id_dtype: Integer type in which ids travel.
        clock: Takes the seconds of requests (``shuffle``) and rows (``load``).
        reuse: Whether the rows of a lookup are kept until the next one.

    Attributes:
        rows_read: Distinct rows looked up so far.
        rows_fetched: Those that came from other ranks.
        rows_reused: Those that were kept from the lookup before and would have had to be fetched.
    """

    def __init__(
        self,
        group: Group,
        matrix: Tensor,
        owner: Tensor,
        cached: Tensor,
        id_dtype: torch.dtype,
        clock: TermClock,
        reuse: bool = False,
    ):
        self.group, self.owner, self.id_dtype, self.clock = group, owner, id_dtype, clock
        self.num_nodes, self.width = matrix.shape
        self.dtype = matrix.dtype
        owned = torch.nonzero(owner == group.rank).view(-1)
        cached = cached[owner[cached] != group.rank]
        held = torch.cat([owned, cached])
        self.rows_held = ops.gather(matrix, held)
        self.num_cached = len(cached)
        # Row of each node in rows_held, -1 for nodes that are elsewhere.
        self.row_of_node = torch.full((self.num_nodes,), -1, dtype=torch.int32)
        self.row_of_node[held] = torch.arange(len(held), dtype=torch.int32)
        self.rows_read = self.rows_fetched = self.rows_reused = 0
        # Ids and rows of the lookup before, and the row of each node among them.
        self._kept: tuple[Tensor, Tensor] | None = None
        self._kept_row_of_node = torch.full((self.num_nodes,), -1, dtype=torch.int32) if reuse else None

    def is_local(self, ids: Tensor) -> Tensor | None:
        """Return which nodes are owned or cached here."""
        return self.row_of_node[ids] >= 0

    def local(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows held here; every id must be owned or cached."""
        return self.rows_held, self.row_of_node[ids].long()

    def lookup(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Gather the distinct rows, those of others from their owners."""
        unique, local = ops.unique_relabel(ids[:0], ids)
        row = self.row_of_node[unique].long()
        elsewhere = torch.nonzero(row < 0).view(-1)
        with self.clock("load"):
            table = ops.gather(self.rows_held, row.clamp_(min=0)) if len(self.rows_held) else self._empty(len(unique))
            elsewhere = self._reuse(unique, elsewhere, table)
        self.rows_read += len(unique)
        self.rows_fetched += len(elsewhere)
        fetched = self._fetch(unique[elsewhere])
        if fetched is not None:
            order, rows = fetched
            table[elsewhere[order]] = rows
        self._keep(unique, table)
        return table, local

    def _reuse(self, unique: Tensor, elsewhere: Tensor, table: Tensor) -> Tensor:
        """Fill in the rows that the lookup before had, and return the places that are still missing."""
        if self._kept is None or self._kept_row_of_node is None:
            return elsewhere
        kept = self._kept_row_of_node[unique[elsewhere]].long()
        places = elsewhere[kept >= 0]
        table[places] = self._kept[1].index_select(0, kept[kept >= 0])
        self.rows_reused += len(places)
        return elsewhere[kept < 0]

    def _keep(self, unique: Tensor, table: Tensor) -> None:
        """Remember a lookup; tables are read only, so there is no need to copy."""
        if self._kept_row_of_node is None:
            return
        if self._kept is not None:
            self._kept_row_of_node[self._kept[0]] = -1
        self._kept = unique, table
        self._kept_row_of_node[unique] = torch.arange(len(unique), dtype=torch.int32)

    def _empty(self, num_rows: int) -> Tensor:
        return torch.empty(num_rows, self.width, dtype=self.dtype)

    def _fetch(self, ids: Tensor) -> tuple[Tensor, Tensor] | None:
        """Ask the owners; returns the order in which rows came back and the rows."""
        group = self.group
        if group.size == 1:
            return None
        order, counts = ops.bucket_by_owner(self.owner[ids], torch.arange(group.size + 1))
        asked = exchange_sizes(group, counts.view(-1, 1), self.clock).view(-1).tolist()
        asks = counts.tolist()
        wanted = exchange_ids(group, ids[order].to(self.id_dtype), asks, asked, self.clock)
        with self.clock("load"):
            answer = ops.gather(self.rows_held, self.row_of_node[wanted.long()].long())
            return order, group.all_to_all_v(answer, asked, asks, tag="features")[0]


class StoredFeatures(FeatureTable):
    """The whole matrix in a ``.npy`` file, with tiers of faster memory in front of it.

    Args:
        path: The file.
        num_host_rows: Rows kept in host memory.
        hotness: ``[num_nodes]``, expected reads of each row by this rank; the hottest are kept.
        clock: Takes the seconds of reading as ``load``.

    Attributes:
        store: The tiers and their counters.
    """

    def __init__(self, path: Path, num_host_rows: int, hotness: Tensor, clock: TermClock):
        self.store = FeatureStore(path, num_host_rows=num_host_rows, hotness=hotness, reuse=True)
        self.num_nodes, self.width, self.dtype = self.store.num_rows, self.store.num_features, self.store.dtype
        self.clock = clock

    def lookup(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Read the distinct rows."""
        unique, local = ops.unique_relabel(ids[:0], ids)
        return self.store.gather(unique), local

    local = lookup

    def is_local(self, ids: Tensor) -> Tensor | None:
        """Return ``None``: all nodes."""
        return None

    def prefetch(self, ids: Tensor) -> None:
        """Start to read what a coming lookup will need."""
        self.store.prefetch(ops.unique_relabel(ids[:0], ids)[0])

    def close(self) -> None:
        """Close the file."""
        self.store.close()
