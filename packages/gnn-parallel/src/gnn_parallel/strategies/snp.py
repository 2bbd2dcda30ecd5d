"""SNP, source-node parallel: the owner of a source aggregates it, the rank that asked merges the partial states.

The in-edges of a destination are split by the owner of their source. Each (destination, owner) pair is a *virtual row*;
its owner returns one mergeable state for it, so a destination costs as many rows as it has ranks among its neighbours,
not as many as it has neighbours. Counts need not travel: who sampled the edges knows them.

Where we differ from the released APT: states are merged as (sum, count), not averaged per partition, and attention
returns (log-sum-exp, value) per virtual row instead of the projected sources.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from core_kernels import ops
from gnn_parallel.exchange import exchange_ids, exchange_rows, exchange_sizes
from gnn_parallel.layers import ProjectedSplit, SplitLayer, View, VirtualRows
from gnn_parallel.linear_split import LinearSplit
from gnn_parallel.strategies.base import Context, Strategy, join_runs, split_runs

__all__ = ["SourceNodeParallel", "SourceSplit", "roots_travel_projected", "split_by_source_owner"]


@dataclass
class SourceSplit:
    """The in-edges of some destinations, regrouped by the owner of their source.

    Attributes:
        virtual: Destination and number of edges of each virtual row, those of rank 0 first.
        sources: Source of each edge in the order of virtual rows.
        row_counts: Virtual rows per owner.
        edge_counts: Edges per owner.
    """

    virtual: VirtualRows
    sources: Tensor
    row_counts: list[int]
    edge_counts: list[int]


def split_by_source_owner(indptr: Tensor, sources: Tensor, owner_of_edge: Tensor, num_ranks: int) -> SourceSplit:
    """Regroup in-edges by the owner of their source.

    Args:
        indptr: int64 ``[destinations + 1]``.
        sources: ``[edges]``.
        owner_of_edge: int64 ``[edges]``, in ``[0, num_ranks)``.
        num_ranks: Number of ranks.

    Cost: a handful of vectorised passes over the edges.

    >>> split = split_by_source_owner(torch.tensor([0, 3]), torch.tensor([4, 5, 6]), torch.tensor([1, 0, 1]), 2)
    >>> split.sources.tolist(), split.virtual.destination.tolist(), split.virtual.counts.tolist()
    ([5, 4, 6], [0, 0], [1, 2])
    """
    num_destinations, num_edges = len(indptr) - 1, len(sources)
    destination = torch.repeat_interleave(torch.arange(num_destinations), indptr.diff())
    order, edge_counts = ops.bucket_by_owner(owner_of_edge, torch.arange(num_ranks + 1))
    # An edge opens a virtual row when its (owner, destination) differs from that of the edge before it.
    key = (owner_of_edge * num_destinations + destination)[order]
    opens = torch.ones(num_edges, dtype=torch.bool)
    torch.ne(key[1:], key[:-1], out=opens[1:])
    first = torch.nonzero(opens).view(-1)
    counts = torch.diff(first, append=torch.tensor([num_edges]))
    owner_of_row = owner_of_edge[order[first]]
    virtual = VirtualRows(destination[order[first]], counts, num_destinations)
    row_counts = torch.bincount(owner_of_row, minlength=num_ranks).tolist()
    return SourceSplit(virtual, sources[order], row_counts, edge_counts.tolist())


def roots_travel_projected(layer: SplitLayer, placement: str) -> bool:
    """Return whether owners of destinations send projected own rows, rather than the rank that asked reading raw ones.

    Only where reading crosses the network, and the projected row with its gradient is the smaller.
    """
    if not isinstance(layer, LinearSplit | ProjectedSplit):
        return False
    width = layer.query_width or layer.projected_width
    return layer.reads_roots and placement == "sharded" and 2 * width <= layer.input_width


@dataclass
class Parcel:
    """What this rank asks for: virtual rows of each owner, and own rows of destinations held elsewhere."""

    destinations: Tensor
    split: SourceSplit
    root_ids: Tensor
    root_home: Tensor
    root_counts: list[int]


@dataclass
class Work:
    """What this rank computes for others, and what it needs to complete its own rows.

    Attributes:
        view: Edges of the virtual rows of all ranks, over sources held here.
        row_counts: Virtual rows of each rank.
        parcel: What this rank asked for.
        scale: Factor of each own destination, or ``None``.
        root_rows: Feature rows of own destinations, or of the destinations others asked for.
        root_counts: Own rows asked by each rank; ``None`` when roots are read where they are needed.
    """

    view: View
    row_counts: list[int]
    parcel: Parcel
    scale: Tensor | None
    root_rows: Tensor | None
    root_counts: list[int] | None


class SourceNodeParallel(Strategy):
    """Each rank aggregates the sources it owns, for all ranks."""

    name = "snp"
    summary = "source-node parallel: owners of sources send mergeable partial sums"

    def __init__(self, context: Context):
        super().__init__(context)
        self.sends_roots = roots_travel_projected(context.layer, context.placement)

    def permute(self, destinations: Tensor, step: int) -> Parcel:
        """Sample and split edges by the owner of their source, destinations by their own."""
        context, size = self.context, self.context.group.size
        indptr, sources = context.sample(destinations, step)
        with context.early_clock("sample"):
            split = split_by_source_owner(indptr, sources, self._executor(sources), size)
            if not self.sends_roots:
                return Parcel(destinations, split, destinations[:0], destinations[:0], [0] * size)
            home, counts = ops.bucket_by_owner(self._executor(destinations), torch.arange(size + 1))
            return Parcel(destinations, split, destinations[home], home, counts.tolist())

    def _executor(self, ids: Tensor) -> Tensor:
        """Return the rank that works on each node: this one for rows it holds, else the owner."""
        context = self.context
        owner = context.owner[ids]
        if context.placement == "replicated":
            return owner
        here = context.features.is_local(ids)
        return owner if here is None else torch.where(here, context.group.rank, owner)

    def shuffle(self, parcel: Parcel) -> Work:
        """Send every owner its virtual rows, their sources and the destinations asked of it."""
        context, split = self.context, parcel.split
        group, clock = context.early_group, context.early_clock
        parts = [
            (split.virtual.counts, split.row_counts),
            (split.sources, split.edge_counts),
            (parcel.root_ids, parcel.root_counts),
        ]
        with clock("shuffle"):
            message, lengths = join_runs(parts, context.id_dtype)
            sizes = torch.tensor([counts for _, counts in parts], dtype=torch.int64).T.contiguous()
        asked = exchange_sizes(group, sizes, clock)
        received = exchange_ids(group, message, lengths, asked.sum(1).tolist(), clock)
        with clock("shuffle"):
            row_counts, edge_counts, root_counts = asked.T.tolist()
            counts, sources, roots = split_runs(received, [row_counts, edge_counts, root_counts])
            indptr = torch.zeros(len(counts) + 1, dtype=torch.int64)
            torch.cumsum(counts, 0, out=indptr[1:])
        view = context.view(indptr, sources, None, is_partial=True)
        scales = context.layer.destination_scale
        scale = None if scales is None else scales[parcel.destinations]
        if not context.layer.reads_roots:
            return Work(view, row_counts, parcel, scale, None, None)
        with clock("load"):
            if self.sends_roots:
                root_rows = ops.gather(*context.features.local(roots.long()))
                return Work(view, row_counts, parcel, scale, root_rows, root_counts)
            root_rows = ops.gather(*context.features.lookup(parcel.destinations))
            return Work(view, row_counts, parcel, scale, root_rows, None)

    def execute(self, work: Work) -> tuple[Tensor, Tensor | None]:
        """Compute partial states for all ranks, and own rows or queries of this rank's destinations."""
        layer, roots = self.context.layer, self._project_roots(work)
        if isinstance(layer, LinearSplit):
            return layer.partial(work.view), roots
        assert isinstance(layer, ProjectedSplit)
        if roots is None:
            return layer.partial(work.view, None), None
        split, query = work.parcel.split, layer.complete_query(roots)
        rows = ops.gather(query, split.virtual.destination)
        context = self.context
        asked = exchange_rows(context.group, rows, split.row_counts, work.row_counts, context.clock, context.travel)
        return layer.partial(work.view, asked), query

    def _project_roots(self, work: Work) -> Tensor | None:
        """Project own rows of destinations, here or at their owners, and return them in the batch's order."""
        if work.root_rows is None:
            return None
        context, parcel, layer = self.context, work.parcel, self.context.layer
        assert isinstance(layer, LinearSplit | ProjectedSplit)  # others have an obstacle
        projected = layer.project_root(work.root_rows)
        if work.root_counts is None:
            return projected
        received = exchange_rows(
            context.group, projected, work.root_counts, parcel.root_counts, context.clock, context.travel
        )
        place = torch.empty_like(parcel.root_home)
        place[parcel.root_home] = torch.arange(len(place))
        return ops.gather(received, place)

    def reshuffle(self, work: Work, rows: tuple[Tensor, Tensor | None]) -> Tensor:
        """Send states home, merge those of each destination and complete the rows."""
        context, split, layer = self.context, work.parcel.split, self.context.layer
        assert isinstance(layer, LinearSplit | ProjectedSplit)
        states, roots = rows
        states = exchange_rows(context.group, states, work.row_counts, split.row_counts, context.clock, context.travel)
        merged = layer.merge(states, split.virtual, work.scale)
        return layer.conclude(merged, roots)
