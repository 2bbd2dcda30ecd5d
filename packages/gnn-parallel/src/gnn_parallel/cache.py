"""Which rows of other ranks are worth a copy: those that a rank will read most often.

Hotness is computed, not observed: the expected number of reads of a node is the expected number of sampled edges out of
it, and expectations pass from hop to hop along the in-edges of the graph. That takes one pass over the edges per layer,
has no sampling noise, and unlike the degree knows where the seeds are. Observed counts from a few sampled batches rank
rarely read nodes at random; degrees ignore the seeds.

Source: the pre-sampling policies of GNNLab (EuroSys 2022) and APT (PPoPP 2025), which this replaces by expectations.
"""

from __future__ import annotations

import torch
from torch import Tensor

from core_kernels import Graph

__all__ = ["choose_cached", "expected_reads"]


def expected_reads(graph: Graph, weight: Tensor, fanouts: tuple[int, ...]) -> Tensor:
    """Return how often each node is expected to be drawn as a source of the input layer.

    Args:
        graph: The full graph.
        weight: ``[num_nodes]``, probability (up to a factor) that a node is a seed.
        fanouts: Neighbours per layer, the hop at the seeds first; -1 for all.

    Returns:
        float64 ``[num_nodes]``, up to the same factor.

    Cost: one pass over the edges per layer.

    >>> graph = Graph.from_edge_index(torch.tensor([[0, 1, 2], [3, 3, 3]]), 4)
    >>> expected_reads(graph, torch.tensor([0.0, 0, 0, 1]), (1,)).tolist()
    [0.3333333333333333, 0.3333333333333333, 0.3333333333333333, 0.0]
    """
    degrees = graph.in_degrees()
    reached = weight.double()
    drawn = reached
    for fanout in fanouts:
        kept = torch.ones_like(reached) if fanout < 0 else (fanout / degrees.clamp(min=1)).clamp(max=1.0)
        per_edge = torch.repeat_interleave(reached * kept, degrees)
        drawn = torch.bincount(graph.indices.long(), weights=per_edge, minlength=graph.num_nodes)
        reached = reached + drawn  # a destination stays in the next layer's destinations
    return drawn


def choose_cached(
    graph: Graph, owner: Tensor, rank: int, num_rows: int, seeds: Tensor, fanouts: tuple[int, ...], strategy: str
) -> Tensor:
    """Return the rows of other ranks that a rank should keep copies of.

    Args:
        graph: The full graph.
        owner: int64 ``[num_nodes]``.
        rank: The rank.
        num_rows: Copies it has room for.
        seeds: Nodes trained on.
        fanouts: Neighbours per layer.
        strategy: ``"dnp"`` reads for destinations it owns, the others for seeds they take.

    Returns:
        int64 node ids, at most ``num_rows``, the hottest first.
    """
    if num_rows == 0:
        return torch.empty(0, dtype=torch.int64)
    weight = torch.zeros(graph.num_nodes, dtype=torch.float64)
    weight[seeds] = 1.0
    if strategy == "dnp":
        reached = weight.clone()
        for depth in range(1, len(fanouts)):
            reached += expected_reads(graph, weight, fanouts[:depth])
        hotness = expected_reads(graph, torch.where(owner == rank, reached, 0.0), fanouts[-1:])
    else:
        hotness = expected_reads(graph, torch.where(owner == rank, weight, 0.0), fanouts)
    hotness[owner == rank] = -1.0
    hottest = torch.topk(hotness, min(num_rows, graph.num_nodes))
    return hottest.indices[hottest.values > 0]
