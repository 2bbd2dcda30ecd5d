"""Which rows of other ranks are worth a copy: those that a rank will read most often.

Hotness is computed, not observed: a node is expected as often as sampled edges leave it, and expectations pass from hop
to hop along the in-edges of the graph. That takes one pass over the edges per layer,
has no sampling noise, and unlike the degree knows where the seeds are. Observed counts from a few sampled batches rank
rarely read nodes at random; degrees ignore the seeds.

Source: the pre-sampling policies of GNNLab (EuroSys 2022) and APT (PPoPP 2025), which this replaces by expectations.
"""

from __future__ import annotations

import torch
from torch import Tensor

from core_kernels import Graph

__all__ = ["choose_cached", "expected_reads", "expected_visits"]


def expected_visits(graph: Graph, weight: Tensor, fanouts: tuple[int, ...]) -> Tensor:
    """Return how often each node is expected in the sampled neighbourhood of a batch, its seeds included.

    Args:
        graph: The full graph.
        weight: ``[num_nodes]``, probability (up to a factor) that a node is a seed.
        fanouts: Neighbours per layer, the hop at the seeds first; -1 for all.

    Returns:
        float64 ``[num_nodes]``, up to the same factor.

    Cost: one pass over the edges per layer.

    >>> graph = Graph.from_edge_index(torch.tensor([[0, 1], [2, 2]]), 3)
    >>> expected_visits(graph, torch.tensor([0.0, 0.0, 1.0]), (1,)).tolist()
    [0.5, 0.5, 1.0]
    """
    degrees = graph.in_degrees()
    visits = weight.double()
    for fanout in fanouts:
        kept = torch.ones_like(visits) if fanout < 0 else (fanout / degrees.clamp(min=1)).clamp(max=1.0)
        per_edge = torch.repeat_interleave(visits * kept, degrees)
        visits = visits + torch.bincount(graph.indices, weights=per_edge, minlength=graph.num_nodes)
    return visits


def choose_cached(hotness: Tensor, owner: Tensor, rank: int, num_rows: int) -> Tensor:
    """Return the rows of other ranks that a rank should keep copies of.

    Args:
        hotness: ``[num_nodes]``, expected reads of this rank, see :func:`expected_reads`.
        owner: int64 ``[num_nodes]``.
        rank: The rank.
        num_rows: Copies it has room for.

    Returns:
        int64 node ids, at most ``num_rows``, the hottest first.
    """
    remote = torch.where(owner == rank, -1.0, hotness)
    hottest = torch.topk(remote, min(num_rows, len(remote)))
    return hottest.indices[hottest.values > 0]


def expected_reads(
    graph: Graph, owner: Tensor, rank: int, seeds: Tensor, fanouts: tuple[int, ...], strategy: str
) -> Tensor:
    """Return how often a rank is expected to read each row, float64 ``[num_nodes]``, up to a factor.

    Args:
        graph: The full graph.
        owner: int64 ``[num_nodes]``.
        rank: The rank.
        seeds: Nodes trained on.
        fanouts: Neighbours per layer.
        strategy: ``"dnp"`` reads for destinations it owns, the others for seeds they take.
    """
    weight = torch.zeros(graph.num_nodes, dtype=torch.float64)
    weight[seeds] = 1.0
    if strategy == "dnp":
        destinations = expected_visits(graph, weight, fanouts[:-1])
        return expected_visits(graph, torch.where(owner == rank, destinations, 0.0), fanouts[-1:])
    return expected_visits(graph, torch.where(owner == rank, weight, 0.0), fanouts)
