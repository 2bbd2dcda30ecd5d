"""Layers with the weights of PyTorch Geometric give its results and gradients."""

from __future__ import annotations

import pytest
import torch

from core_kernels import Graph, nn

pyg = pytest.importorskip("torch_geometric.nn", reason="torch_geometric is not installed")
pytestmark = pytest.mark.peer

NUM_NODES, WIDTH = 30, 7


def linear():
    return torch.nn.Linear(WIDTH, 5)


CASES = {
    "gcn": (lambda m: m.GCNConv(WIDTH, 9), ()),
    "gcn-narrowing": (lambda m: m.GCNConv(WIDTH, 3), ()),
    "gcn-improved-weights": (lambda m: m.GCNConv(WIDTH, 9, improved=True), ("weight",)),
    "gcn-plain": (lambda m: m.GCNConv(WIDTH, 9, normalize=False, bias=False), ("weight",)),
    "sage": (lambda m: m.SAGEConv(WIDTH, 9), ()),
    "sage-narrowing": (lambda m: m.SAGEConv(WIDTH, 3), ()),
    "sage-max": (lambda m: m.SAGEConv(WIDTH, 9, aggr="max"), ()),
    "sage-project": (lambda m: m.SAGEConv(WIDTH, 9, aggr="min", project=True, normalize=True), ()),
    "gin": (lambda m: m.GINConv(linear(), eps=0.3, train_eps=True), ()),
    "gat": (lambda m: m.GATConv(WIDTH, 5, heads=3), ()),
    "gat-mean-heads": (lambda m: m.GATConv(WIDTH, 1, heads=3, concat=False, negative_slope=0.1), ()),
    "gat-edges": (lambda m: m.GATConv(WIDTH, 5, heads=3, edge_dim=4, residual=True), ("features",)),
    "gat-edges-max": (lambda m: m.GATConv(WIDTH, 5, edge_dim=4, fill_value="max"), ("features",)),
    "gatv2": (lambda m: m.GATv2Conv(WIDTH, 5, heads=3), ()),
    "gatv2-shared": (lambda m: m.GATv2Conv(WIDTH, 5, share_weights=True, concat=False), ()),
    "gatv2-edges": (lambda m: m.GATv2Conv(WIDTH, 5, heads=3, edge_dim=4), ("features",)),
    "rgcn": (lambda m: m.RGCNConv(WIDTH, 9, 4), ("type",)),
    "rgcn-bases": (lambda m: m.RGCNConv(WIDTH, 9, 4, num_bases=2), ("type",)),
    "rgcn-blocks": (lambda m: m.RGCNConv(WIDTH, 14, 4, num_blocks=7, aggr="max"), ("type",)),
    "appnp": (lambda m: m.APPNP(3, 0.2), ()),
    "appnp-weights": (lambda m: m.APPNP(3, 0.2), ("weight",)),
}


def make_edges():
    generator = torch.Generator().manual_seed(0)
    edges = torch.randint(0, NUM_NODES, (2, 150), generator=generator)
    edges[1][edges[1] == 2] = 3  # vertex 2 has no in-edges
    edges = edges[:, (edges[0] != edges[1])]
    loops = torch.tensor([[5, 8], [5, 8]])
    return torch.cat([edges, edges[:, :10], loops], 1)


def run(layer, first, second, extra, grad):
    layer.zero_grad()
    out = layer(first, second, *extra)
    wanted = [x for x in (first, second, *extra) if isinstance(x, torch.Tensor) and x.requires_grad]
    parameters = [parameter for _, parameter in sorted(layer.named_parameters())]
    return [out, *torch.autograd.grad(out, wanted + parameters, grad(out))]


#: Cases that are compared in single precision too: one of each layer.
PLAIN = ("gcn", "sage", "sage-max", "gin", "gat", "gatv2", "rgcn", "appnp")


@pytest.mark.parametrize(
    ("case", "dtype"), [(case, torch.float64) for case in CASES] + [(case, torch.float32) for case in PLAIN]
)
def test_equal_to_pyg(case, dtype):
    make, extras = CASES[case]
    torch.manual_seed(0)
    theirs, ours = make(pyg).to(dtype), make(nn).to(dtype)
    ours.load_state_dict(theirs.state_dict())
    edges = make_edges()
    count = edges.shape[1]
    available = {
        "weight": torch.rand(count, dtype=dtype, requires_grad=True),
        "features": torch.randn(count, 4, dtype=dtype, requires_grad=True),
        "type": torch.randint(0, 3, (count,)),
    }
    extra = [available[name] for name in extras]
    x = torch.randn(NUM_NODES, WIDTH, dtype=dtype, requires_grad=True)
    weights = torch.randn(NUM_NODES, 64, dtype=dtype)

    def grad(out):
        return weights[:, : out.shape[1]].contiguous()

    tolerance = 1e-5 if dtype == torch.float32 else 1e-10
    for found, expected in zip(
        run(ours, Graph.from_edge_index(edges, NUM_NODES), x, extra, grad),
        run(theirs, x, edges, extra, grad),
        strict=True,
    ):
        assert (found - expected).abs().max() <= tolerance * (1 + expected.abs().max())


def test_attention_dropout_keeps_the_expectation():
    torch.manual_seed(0)
    graph, x = Graph.from_edge_index(make_edges(), NUM_NODES), torch.randn(NUM_NODES, WIDTH)
    layer = nn.GATConv(WIDTH, 4, heads=2, dropout=0.5)
    mean = torch.stack([layer(graph, x) for _ in range(400)]).mean(0)
    layer.eval()
    assert (mean - layer(graph, x)).abs().mean() < 0.05
    assert (layer.train()(graph, x) - layer.eval()(graph, x)).abs().max() > 0.05
