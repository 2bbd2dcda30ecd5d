"""What one step moves and computes, in rows and edges, per rank and under every strategy.

Counting samples the step as training will, by the same stateless draws, but reads no feature and computes nothing. The
counts are exact for the step they are made for; :mod:`gnn_parallel.cost_model` turns them into bytes and seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from core_kernels import Graph, ops
from gnn_parallel.layers import SplitLayer
from gnn_parallel.strategies.base import sample_in_edges
from gnn_parallel.strategies.snp import split_by_source_owner

__all__ = ["StepCounts", "count_step"]


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
    """

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

    @classmethod
    def mean(cls, counts: list[StepCounts]) -> StepCounts:
        """Return the average over steps."""
        return cls(*(torch.stack([getattr(c, f.name) for c in counts]).mean(0) for f in fields(cls)))

    @classmethod
    def join(cls, parts: list[StepCounts]) -> StepCounts:
        """Add counts in which every rank filled in only its own rows."""
        return cls(*(torch.stack([getattr(c, f.name) for c in parts]).sum(0) for f in fields(cls)))


def count_step(
    graph: Graph,
    owner: Tensor,
    layer: SplitLayer,
    fanouts: tuple[int, ...],
    seed: int,
    step: int,
    shares: list[Tensor],
    held: list[Tensor] | None = None,
) -> StepCounts:
    """Count a step.

    Args:
        graph: The full graph.
        owner: int64 ``[num_nodes]``.
        layer: The input layer; only whether it wants self-loops and reads own rows matters.
        fanouts: Neighbours per layer, the hop at the seeds first.
        seed: Seed of the sampler.
        step: The step.
        shares: Seeds of each rank.
        held: Per rank a boolean ``[num_nodes]``: rows it owns or caches; ``None`` where features are replicated.

    Cost: the sampling of the step, once for the ranks that ask and once for the owners.
    """
    num_ranks, depth = len(shares), len(fanouts) - 1
    per_rank = {f.name: torch.zeros(num_ranks, dtype=torch.float64) for f in fields(StepCounts)}
    pairs = {
        name: torch.zeros(num_ranks, num_ranks, dtype=torch.float64)
        for name in ("destinations_by_owner", "virtual_rows", "virtual_edges", "remote_roots", "fetch_gdp", "fetch_dnp")
    }
    all_destinations, sources_of_owner = [], [[] for _ in range(num_ranks)]

    def fetched(rank: int, ids: Tensor) -> Tensor:
        missing = ids[~held[rank][ids]] if held is not None else ids[:0]
        return torch.bincount(owner[missing], minlength=num_ranks).double()

    for rank, seeds in enumerate(shares):
        blocks = ops.sample_blocks(graph, seeds, list(fanouts[:-1]), seed=seed, step=step) if depth else []
        destinations = blocks[0].src_ids if blocks else seeds
        indptr, sources = sample_in_edges(graph, destinations, fanouts[-1], seed, step, depth, layer)
        sources = sources.long()
        executor = owner[sources] if held is None else torch.where(held[rank][sources], rank, owner[sources])
        split = split_by_source_owner(indptr, sources, executor, num_ranks)
        for owned, group in zip(sources_of_owner, split.sources.split(split.edge_counts), strict=True):
            owned.append(group)
        distinct = ops.unique_relabel(sources)[0]
        read = ops.unique_relabel(torch.cat([destinations, sources]))[0] if layer.reads_roots else distinct
        all_destinations.append(destinations)
        per_rank["seeds"][rank] = len(seeds)
        per_rank["upper_edges"][rank] = sum(block.num_edges for block in blocks)
        per_rank["destinations"][rank] = len(destinations)
        per_rank["edges"][rank] = len(sources)
        per_rank["sources"][rank] = len(distinct)
        pairs["destinations_by_owner"][rank] = torch.bincount(owner[destinations], minlength=num_ranks).double()
        pairs["virtual_rows"][rank] = torch.tensor(split.row_counts, dtype=torch.float64)
        pairs["virtual_edges"][rank] = torch.tensor(split.edge_counts, dtype=torch.float64)
        pairs["remote_roots"][rank] = fetched(rank, destinations)
        pairs["fetch_gdp"][rank] = fetched(rank, read)

    distinct_destinations = ops.unique_relabel(torch.cat(all_destinations))[0]
    for rank in range(num_ranks):
        owned = distinct_destinations[owner[distinct_destinations] == rank]
        indptr, sources = sample_in_edges(graph, owned, fanouts[-1], seed, step, depth, layer)
        sources = sources.long()
        distinct = ops.unique_relabel(sources)[0]
        read = ops.unique_relabel(torch.cat([owned, sources]))[0] if layer.reads_roots else distinct
        per_rank["owned_destinations"][rank] = len(owned)
        per_rank["owned_edges"][rank] = len(sources)
        per_rank["owned_sources"][rank] = len(distinct)
        pairs["fetch_dnp"][rank] = fetched(rank, read)
        per_rank["virtual_sources"][rank] = len(ops.unique_relabel(torch.cat(sources_of_owner[rank]))[0])
    return StepCounts(**(per_rank | pairs))
