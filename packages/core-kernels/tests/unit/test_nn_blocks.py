"""Layers on blocks give the rows of the full graph; coarsening."""

from __future__ import annotations

import pytest
import torch

from core_kernels import Graph, nn
from core_kernels.errors import ArgumentError
from core_kernels.nn.self_loops import replace_self_loops

LAYERS = {
    "gcn": lambda: nn.GCNConv(6, 4),
    "gcn-plain": lambda: nn.GCNConv(6, 9, add_self_loops=False),
    "sage": lambda: nn.SAGEConv(6, 4),
    "sage-max": lambda: nn.SAGEConv(6, 4, aggr="max"),
    "gin": lambda: nn.GINConv(torch.nn.Linear(6, 4)),
    "gat": lambda: nn.GATConv(6, 4, heads=2),
    "gatv2": lambda: nn.GATv2Conv(6, 4, heads=2),
}


@pytest.fixture
def graph():
    edges = torch.randint(0, 40, (2, 150), generator=torch.Generator().manual_seed(0))
    return Graph.from_edge_index(edges[:, edges[0] != edges[1]], 40)


@pytest.mark.parametrize("name", LAYERS)
def test_a_block_gives_the_rows_of_the_full_graph(graph, name):
    torch.manual_seed(0)
    layer = LAYERS[name]().double()
    x = torch.randn(40, 6, dtype=torch.float64)
    seeds = torch.tensor([7, 3, 39, 11])
    block = graph.in_subgraph(seeds)
    torch.testing.assert_close(layer(block, x[block.src_ids]), layer(graph, x)[seeds], rtol=0, atol=1e-12)


def test_local_degrees_would_be_wrong(graph):
    layer, x = nn.GCNConv(6, 4), torch.randn(40, 6)
    block = graph.in_subgraph(torch.tensor([7, 3, 39, 11]))
    local = Graph(block.indptr, block.indices, block.num_src)
    degrees = torch.cat([local.in_degrees(), torch.zeros(block.num_src - 4, dtype=torch.int64)]) + 1.0
    assert not torch.allclose(layer(block, x[block.src_ids], degrees=degrees), layer(block, x[block.src_ids]))


def test_weighted_degrees_make_weighted_blocks_exact(graph):
    layer, x, weight = nn.GCNConv(6, 4).double(), torch.randn(40, 6).double(), torch.rand(graph.num_edges).double()
    seeds = torch.tensor([7, 3, 39])
    block = graph.in_subgraph(seeds)
    degrees = nn.weighted_degrees(graph, weight)
    found = layer(block, x[block.src_ids], weight[block.global_edge_ids], degrees=degrees[block.src_ids])
    torch.testing.assert_close(found, layer(graph, x, weight)[seeds], rtol=0, atol=1e-12)
    with pytest.raises(ArgumentError, match="weighted_degrees"):
        layer(block, x[block.src_ids], weight[block.global_edge_ids])


def test_blocks_with_self_loops_of_their_own_need_degrees():
    graph = Graph.from_edge_index(torch.tensor([[0, 1, 2, 1], [1, 1, 0, 2]]), 3)
    layer, x = nn.GCNConv(2, 2).double(), torch.randn(3, 2).double()
    block = graph.in_subgraph(torch.tensor([1]))
    with pytest.raises(ArgumentError, match="self-loops"):
        layer(block, x[block.src_ids])
    degrees = nn.weighted_degrees(graph)[block.src_ids]
    torch.testing.assert_close(layer(block, x[block.src_ids], degrees=degrees), layer(graph, x)[1:2])


def test_self_loops_are_replaced_once_a_graph():
    graph = Graph.from_edge_index(torch.tensor([[0, 1, 2, 1], [1, 1, 0, 2]]), 3)
    looped = replace_self_loops(graph)
    assert replace_self_loops(graph) is looped
    assert looped.graph.edge_index().tolist() == [[2, 0, 0, 1, 1, 2], [0, 0, 1, 1, 2, 2]]
    assert looped.old_loops.tolist() == [1]
    assert looped.edge_values(torch.tensor([10, 11, 12, 13]), torch.tensor([0, 1, 2])).tolist() == [12, 0, 10, 1, 13, 2]


def test_edge_types_are_split_again_when_they_change():
    graph = Graph.from_edge_index(torch.tensor([[0, 1, 2, 1], [1, 1, 0, 2]]), 3)
    layer, x, types = nn.RGCNConv(2, 2, 2).double(), torch.randn(3, 2).double(), torch.tensor([0, 1, 0, 1])
    first = layer(graph, x, types)
    types[0] = 1
    changed = layer(graph, x, types)
    assert not torch.equal(first, changed)
    torch.testing.assert_close(changed, layer(graph, x, types.clone()))
    with pytest.raises(ArgumentError, match="edge_type"):
        layer(graph, x, types + 1)


def test_coarsening_keeps_totals(graph):
    torch.manual_seed(0)
    layer = nn.HAPCoarsening(6, 3).double()
    x = torch.randn(40, 6, dtype=torch.float64, requires_grad=True)
    features, adjacency, assignment = layer(graph, x)
    torch.testing.assert_close(assignment.sum(1), torch.ones(40, dtype=torch.float64))
    torch.testing.assert_close(features.sum(0), x.sum(0))
    torch.testing.assert_close(adjacency.sum(), torch.tensor(float(graph.num_edges), dtype=torch.float64))
    (features.square().sum() + adjacency.square().sum()).backward()
    assert x.grad.isfinite().all()
    assert nn.HAPCoarsening(6, 3, temperature=0.1)(graph, x.float())[1].sum(1).allclose(torch.ones(3))
