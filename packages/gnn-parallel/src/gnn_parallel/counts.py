"""What one step moves and computes, in rows and edges, per rank and under every strategy.

Counting samples the step as training will, by the same stateless draws, but reads no feature and computes nothing. The
counts are exact for the step they are made for; :mod:`gnn_parallel.traffic` turns them into bytes and
:mod:`gnn_parallel.cost_model` into seconds.

With several hosts, ranks ask only ranks of their own host, so the matrices of pairs are block-diagonal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import ClassVar

import torch
from torch import Tensor

from core_kernels import Graph, ops
from gnn_parallel.layers import SplitLayer
from gnn_parallel.strategies.base import sample_in_edges
from gnn_parallel.strategies.snp import split_by_source_owner

__all__ = ["Reads", "StepCounter", "StepCounts"]

Reads = dict[str, list[Tensor]]
"""Per kind of lookup (``gdp``, ``dnp``, ``roots``), the distinct rows each rank read in a step."""


@dataclass(frozen=True)
class StepCounts:
    """Counts of a step, or their average over several; tensors are float64 with one row per rank.

    ``[W]`` are per rank. ``[W, W]`` are per pair; their diagonal is what stays.

    Attributes:
        seeds: ``[W]`` seeds of each rank.
        upper_edges: ``[W]`` edges of the layers above the input layer.
        destinations: ``[W]`` destinations of the input layer.
        edges: ``[W]`` their in-edges.
        sources: ``[W]`` distinct sources.
        destinations_by_owner: ``[W, W]`` destinations of rank r that rank q owns.
        virtual_rows: ``[W, W]`` destinations of rank r with sources that q aggregates (SNP).
        virtual_edges: ``[W, W]`` their edges.
        virtual_sources: ``[W]`` distinct sources a rank aggregates for all ranks (SNP).
        remote_roots: ``[W, W]`` destinations of rank r whose own row q holds and r does not.
        owned_destinations: ``[W]`` distinct destinations a rank computes for all ranks (DNP).
        owned_edges: ``[W]`` their in-edges.
        owned_sources: ``[W]`` distinct sources of those.
        fetch_gdp: ``[W, W]`` distinct rows rank r must get from q when features are sharded.
        fetch_dnp: ``[W, W]`` the same under DNP.
        fetch_roots: ``[W, W]`` the same for own rows of destinations under SNP.
        overlap_gdp: ``[W]`` rows that would have to be fetched, had the step before not read them.
        overlap_dnp: ``[W]`` the same under DNP.
        slow_gdp: ``[W]`` distinct rows that are read from disk.
        slow_dnp: ``[W]`` the same under DNP.
    """

    pairs: ClassVar[frozenset[str]] = frozenset(
        {
            "destinations_by_owner",
            "virtual_rows",
            "virtual_edges",
            "remote_roots",
            "fetch_gdp",
            "fetch_dnp",
            "fetch_roots",
        }
    )

    seeds: Tensor
    upper_edges: Tensor
    destinations: Tensor
    edges: Tensor
    sources: Tensor
    destinations_by_owner: Tensor
    virtual_rows: Tensor
    virtual_edges: Tensor
    virtual_sources: Tensor
    remote_roots: Tensor
    owned_destinations: Tensor
    owned_edges: Tensor
    owned_sources: Tensor
    fetch_gdp: Tensor
    fetch_dnp: Tensor
    fetch_roots: Tensor
    overlap_gdp: Tensor
    overlap_dnp: Tensor
    slow_gdp: Tensor
    slow_dnp: Tensor

    @classmethod
    def zeros(cls, num_ranks: int) -> StepCounts:
        """Return counts of nothing."""
        shapes = {f.name: (num_ranks, num_ranks) if f.name in cls.pairs else (num_ranks,) for f in fields(cls)}
        return cls(**{name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()})

    @classmethod
    def mean(cls, counts: Sequence[StepCounts]) -> StepCounts:
        """Return the average over steps."""
        return cls(*(torch.stack([getattr(c, f.name) for c in counts]).mean(0) for f in fields(cls)))

    def flatten(self) -> Tensor:
        """Return all numbers in one row."""
        return torch.cat([getattr(self, f.name).reshape(-1) for f in fields(self)])

    @classmethod
    def unflatten(cls, row: Tensor, num_ranks: int) -> StepCounts:
        """Undo :meth:`flatten`."""
        shapes = [(num_ranks, num_ranks) if f.name in cls.pairs else (num_ranks,) for f in fields(cls)]
        pieces = row.split([num_ranks ** len(shape) for shape in shapes])
        return cls(*(piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)))


@dataclass(frozen=True)
class StepCounter:
    """Counts steps of one workload.

    Attributes:
        graph: The full graph.
        owner: int64 ``[num_nodes]``, which rank of a host owns each node.
        layer: The input layer; only whether it wants self-loops and reads own rows matters.
        fanouts: Neighbours per layer, the hop at the seeds first.
        seed: Seed of the sampler.
        ranks_per_host: Ranks that exchange with each other.
        held: Per strategy (``gdp``, ``dnp``) and rank of a host a boolean ``[num_nodes]``: rows at hand. Without it,
            every row is.
        is_disk: Whether rows that are not at hand come from disk instead of their owner.
    """

    graph: Graph
    owner: Tensor
    layer: SplitLayer
    fanouts: tuple[int, ...]
    seed: int
    ranks_per_host: int
    held: dict[str, list[Tensor]]
    is_disk: bool = False

    def count(self, step: int, shares: list[Tensor], before: Reads | None = None) -> tuple[StepCounts, Reads]:
        """Count a step.

        Args:
            step: The step.
            shares: Seeds of each rank, host by host.
            before: What the step before read, where rows of a step are kept for the next.

        Returns:
            The counts and what was read.

        Cost: the sampling of the step, once for the ranks that ask and once for the owners.
        """
        counts = StepCounts.zeros(len(shares))
        reads: Reads = {"gdp": [], "dnp": [], "roots": []}
        size = self.ranks_per_host
        for first in range(0, len(shares), size):
            host = _Host(self, counts, reads, slice(first, first + size), step, before)
            for number in range(size):
                host.count_asking(number, shares[first + number])
            for number in range(size):
                host.count_owner(number)
        return counts, reads


class _Host:
    """Fills in the counts of the ranks of one host."""

    def __init__(
        self, counter: StepCounter, counts: StepCounts, reads: Reads, ranks: slice, step: int, before: Reads | None
    ):
        self.counter, self.counts, self.reads = counter, counts, reads
        self.ranks, self.step, self.before = ranks, step, before
        self.destinations: list[Tensor] = []
        self.sources_of_owner: list[list[Tensor]] = [[] for _ in range(counter.ranks_per_host)]

    def count_asking(self, number: int, seeds: Tensor) -> None:
        """Count what one rank needs for its seeds."""
        counter, counts, rank = self.counter, self.counts, self.ranks.start + number
        graph, depth = counter.graph, len(counter.fanouts) - 1
        fanouts = list(counter.fanouts[:-1])
        blocks = ops.sample_blocks(graph, seeds, fanouts, seed=counter.seed, step=self.step) if depth else []
        destinations = blocks[0].src_ids if blocks else seeds
        indptr, sources = self._sample(destinations)
        held = self._held("gdp", number)
        owner = counter.owner[sources]
        executor = owner if held is None or counter.is_disk else torch.where(held[sources], number, owner)
        split = split_by_source_owner(indptr, sources, executor, counter.ranks_per_host)
        for owned, part in zip(self.sources_of_owner, split.sources.split(split.edge_counts), strict=True):
            owned.append(part)
        distinct, read = self._distinct(destinations, sources)
        self.destinations.append(destinations)
        counts.seeds[rank] = len(seeds)
        counts.upper_edges[rank] = sum(block.num_edges for block in blocks)
        counts.destinations[rank] = len(destinations)
        counts.edges[rank] = len(sources)
        counts.sources[rank] = len(distinct)
        self._fill("destinations_by_owner", rank, self._by_owner(destinations))
        self._fill("virtual_rows", rank, torch.tensor(split.row_counts, dtype=torch.float64))
        self._fill("virtual_edges", rank, torch.tensor(split.edge_counts, dtype=torch.float64))
        if held is not None and not counter.is_disk:
            self._fill("remote_roots", rank, self._by_owner(destinations[~held[destinations]]))
        self._count_reads("roots", number, destinations)
        self._count_reads("gdp", number, read)

    def count_owner(self, number: int) -> None:
        """Count what one rank computes for the ranks of its host, once all of them have been counted."""
        counts, rank = self.counts, self.ranks.start + number
        distinct_destinations = ops.unique_relabel(torch.cat(self.destinations))[0]
        owned = distinct_destinations[self.counter.owner[distinct_destinations] == number]
        _, sources = self._sample(owned)
        distinct, read = self._distinct(owned, sources)
        counts.owned_destinations[rank] = len(owned)
        counts.owned_edges[rank] = len(sources)
        counts.owned_sources[rank] = len(distinct)
        self._count_reads("dnp", number, read)
        counts.virtual_sources[rank] = len(ops.unique_relabel(torch.cat(self.sources_of_owner[number]))[0])

    def _sample(self, destinations: Tensor) -> tuple[Tensor, Tensor]:
        c = self.counter
        depth = len(c.fanouts) - 1
        indptr, sources = sample_in_edges(c.graph, destinations, c.fanouts[-1], c.seed, self.step, depth, c.layer)
        return indptr, sources.long()

    def _distinct(self, destinations: Tensor, sources: Tensor) -> tuple[Tensor, Tensor]:
        """Return the distinct sources, and the distinct rows that are read."""
        distinct = ops.unique_relabel(sources)[0]
        if not self.counter.layer.reads_roots:
            return distinct, distinct
        return distinct, ops.unique_relabel(torch.cat([destinations, sources]))[0]

    def _count_reads(self, kind: str, number: int, rows: Tensor) -> None:
        """Count the rows that are not at hand, less those that the step before has read."""
        rank, held = self.ranks.start + number, self._held("dnp" if kind == "dnp" else "gdp", number)
        self.reads[kind].append(rows)
        if held is None:
            return
        missing = rows[~held[rows]]
        if self.before is not None:
            again = torch.isin(missing, self.before[kind][rank])
            if kind != "roots":
                getattr(self.counts, f"overlap_{kind}")[rank] = int(again.sum())
            missing = missing[~again]
        if not self.counter.is_disk:
            self._fill(f"fetch_{kind}", rank, self._by_owner(missing))
        elif kind != "roots":
            getattr(self.counts, f"slow_{kind}")[rank] = len(missing)

    def _held(self, strategy: str, number: int) -> Tensor | None:
        return self.counter.held[strategy][number] if self.counter.held else None

    def _by_owner(self, ids: Tensor) -> Tensor:
        return torch.bincount(self.counter.owner[ids], minlength=self.counter.ranks_per_host).double()

    def _fill(self, name: str, rank: int, row: Tensor) -> None:
        getattr(self.counts, name)[rank, self.ranks] = row
