"""Models written with core_kernels layers and vertex programs, called with a graph."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gnn_eval
from core_kernels import Graph, vertex
from core_kernels import nn as core_nn
from gnn_eval.verify import relative_error


@vertex.program
def scored_sum(v):
    alpha = vertex.softmax(vertex.leaky_relu(e.src.score + v.score) for e in v.in_edges)
    return vertex.sum(alpha * e.src.h for e in v.in_edges)


class Layers(nn.Module):
    def __init__(self, *convs):
        super().__init__()
        self.convs = nn.ModuleList(convs)

    def forward(self, graph, x):
        for conv in self.convs:
            x = conv(graph, x).relu()
        return x


class Direct(nn.Module):
    def __init__(self):
        super().__init__()
        self.lins = nn.ModuleList([nn.Linear(10, 6), nn.Linear(6, 4)])
        self.scores = nn.ModuleList([nn.Linear(6, 2), nn.Linear(4, 2)])

    def forward(self, graph, x):
        for lin, score in zip(self.lins, self.scores, strict=True):
            h = lin(x)
            left, right = score(h).unbind(-1)
            x = scored_sum(graph, src={"h": h, "score": left}, dst={"score": right})
        return x


@pytest.mark.parametrize("name", ["sage", "gat", "gcn", "program"])
def test_vertex_models_equal_the_full_forward(name, make_graph):
    torch.manual_seed(0)
    x, edges = make_graph()
    edges = edges[:, edges[0] != edges[1]]  # core_kernels.nn.GCNConv replaces loops, and refuses blocks that have some
    model = {
        "sage": lambda: Layers(core_nn.SAGEConv(10, 8), core_nn.SAGEConv(8, 4)),
        "gat": lambda: Layers(core_nn.GATConv(10, 4, heads=2), core_nn.GATConv(8, 4)),
        "gcn": lambda: Layers(core_nn.GCNConv(10, 8), core_nn.GCNConv(8, 4)),
        "program": Direct,
    }[name]().eval()
    graph = Graph.from_edge_index(edges, 120)
    with torch.no_grad():
        expected = model(graph, x)
    plan = gnn_eval.compile(model, (graph, x))
    assert plan.compiled.frontend == "vertex"
    assert relative_error(plan.run((graph, x), batch_rows=17), expected) <= 1e-5
    nodes = torch.tensor([5, 119, 2])
    assert relative_error(plan.run((graph, x), nodes=nodes), expected[nodes]) <= 1e-5


def test_a_registered_layer_is_kept_whole(make_graph):
    class Branching(nn.Module):
        """Counts edges in Python, which cannot be traced with open sizes."""

        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(10, 3)

        def forward(self, x, edge_index):
            if int((edge_index[0] == edge_index[1]).sum()) > -1:
                x = self.lin(x)
            return torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]])

    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = Branching()

        def forward(self, x, edge_index):
            return self.conv(x, edge_index).relu()

    model, data = Holder(), make_graph()
    with pytest.raises(gnn_eval.UnsupportedModelError):
        gnn_eval.compile(model, data)
    gnn_eval.register(Branching, gnn_eval.LayerSpec())
    with torch.no_grad():
        expected = model(*data)
    assert relative_error(gnn_eval.evaluate(model, data, batch_rows=9), expected) <= 1e-5
