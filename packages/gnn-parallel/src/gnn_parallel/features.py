"""Where the rows of input features are, and how a rank gets at them.

Two placements. ``replicated``: every rank can address the whole matrix (host memory of one machine, or a memory map).
``sharded``: a rank holds the rows of the nodes it owns, and other rows cross the network when they are read; a cache
may hold copies of often-read rows of others. Features are inputs: they never receive gradients, and rows travel only
forward.

Callers may not assume that a lookup copies: a replicated table returns itself.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from core_kernels import ops
from core_kernels.comm import Group
from gnn_parallel.clock import TermClock
from gnn_parallel.exchange import exchange_ids, exchange_sizes

__all__ = ["PLACEMENTS", "FeatureTable", "ReplicatedFeatures", "ShardedFeatures", "column_slices"]

PLACEMENTS = ("replicated", "sharded")


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
    """

    def __init__(
        self, group: Group, matrix: Tensor, owner: Tensor, cached: Tensor, id_dtype: torch.dtype, clock: TermClock
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
        self.rows_read = self.rows_fetched = 0

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
        self.rows_read += len(unique)
        self.rows_fetched += len(elsewhere)
        with self.clock("load"):
            table = ops.gather(self.rows_held, row.clamp_(min=0)) if len(self.rows_held) else self._empty(len(unique))
        fetched = self._fetch(unique[elsewhere])
        if fetched is not None:
            order, rows = fetched
            table[elsewhere[order]] = rows
        return table, local

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
