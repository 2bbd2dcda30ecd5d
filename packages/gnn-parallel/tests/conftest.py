"""Fixtures of all tests: one pool of four ranks, and small graphs with every awkward feature."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from core_kernels import Graph
from core_kernels.testing import RankPool


def make_problem(
    dtype: torch.dtype = torch.float64, num_nodes: int = 120, width: int = 7, two_way: bool = False
) -> SimpleNamespace:
    """Duplicate edges, isolated nodes, two clusters, and a width that no world size divides.

    Edges go one way and some are self-loops, or all go both ways and none is.
    """
    generator = torch.Generator().manual_seed(3)
    num_edges = 6 * num_nodes
    linked = num_nodes - 10  # the last ten nodes are isolated
    half = linked // 2
    source = torch.randint(0, linked, (num_edges,), generator=generator)
    near = torch.randint(0, half, (num_edges,), generator=generator) + (source >= half) * half
    far = torch.randint(0, linked, (num_edges,), generator=generator)
    destination = torch.where(torch.rand(num_edges, generator=generator) < 0.8, near, far)
    edges = torch.stack([source, destination])
    edges = torch.cat([edges, edges[:, :40]], dim=1)
    if two_way:
        edges = edges[:, edges[0] != edges[1]]
        edges = torch.cat([edges, edges.flip(0)], dim=1)
    else:
        edges = torch.cat([edges, torch.arange(0, 20).repeat(2, 1)], dim=1)
    return SimpleNamespace(
        graph=Graph.from_edge_index(edges, num_nodes),
        features=torch.randn(num_nodes, width, generator=generator, dtype=torch.float64).to(dtype),
        labels=torch.randint(0, 3, (num_nodes,), generator=generator),
        seeds=torch.cat([torch.arange(0, linked, 2), torch.arange(linked, num_nodes)]),
        fanouts=(3, 4),
        batch_size=18,
    )


@pytest.fixture
def problem() -> SimpleNamespace:
    """A float64 problem."""
    return make_problem()


@pytest.fixture
def two_way_problem() -> SimpleNamespace:
    """A float64 problem with every edge in both directions, for GCN."""
    return make_problem(two_way=True)


@pytest.fixture
def problem32() -> SimpleNamespace:
    """A float32 problem with every edge in both directions."""
    return make_problem(torch.float32, two_way=True)


@pytest.fixture(scope="session")
def four_ranks():
    """Four ranks that stay up for the whole session; smaller worlds are their first ranks."""
    with RankPool(4, timeout_seconds=60) as pool:
        yield pool
