"""Layer-wise results against the full forward: bit for bit unfused, to rounding fused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import gnn_eval
from gnn_eval.verify import relative_error

gnn = pytest.importorskip("torch_geometric.nn")

WIDTH = 10


class Net(nn.Module):
    def __init__(self, *convs):
        super().__init__()
        self.convs = nn.ModuleList(convs)

    def forward(self, x, edge_index):
        for conv in self.convs:
            x = conv(x, edge_index).relu()
        return x


class Residual(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.inp, self.convs = nn.Linear(WIDTH, 8), nn.ModuleList(make() for _ in range(2))

    def forward(self, x, edge_index):
        x = x0 = self.inp(x)
        for conv in self.convs:
            x = conv(x, x0, edge_index)
        return x


MODELS = {
    "GCN": lambda: gnn.GCN(WIDTH, 8, 3, out_channels=4, jk="cat"),
    "SAGE": lambda: gnn.GraphSAGE(WIDTH, 8, 3, out_channels=4, norm="batch_norm"),
    "GAT": lambda: gnn.GAT(WIDTH, 8, 2, out_channels=4, heads=2, jk="lstm"),
    "GCN2": lambda: Residual(lambda: gnn.GCN2Conv(8, 0.1)),
    "FA": lambda: Residual(lambda: gnn.FAConv(8)),
    "EG": lambda: Net(gnn.EGConv(WIDTH, 8, aggregators=["sum", "max", "symnorm"], num_heads=2)),
    "LG": lambda: Net(gnn.LGConv(), gnn.LGConv()),
    "DirGNN": lambda: Net(gnn.DirGNNConv(gnn.SAGEConv(WIDTH, 8)), gnn.DirGNNConv(gnn.SAGEConv(8, 4))),
    "SGC": lambda: gnn.SGConv(WIDTH, 4, K=3),
    "SSG": lambda: gnn.SSGConv(WIDTH, 4, alpha=0.1, K=3),
    "APPNP": lambda: gnn.APPNP(5, 0.1),
    "TAG": lambda: gnn.TAGConv(WIDTH, 4),
    "ARMA": lambda: gnn.ARMAConv(WIDTH, 4, num_stacks=2, num_layers=2),
    "Cheb": lambda: gnn.ChebConv(WIDTH, 4, K=3),
    "MixHop": lambda: gnn.MixHopConv(WIDTH, 4, [0, 1, 2]),
    "GatedGraph": lambda: gnn.GatedGraphConv(WIDTH, 2),
}


@pytest.mark.parametrize("name", MODELS)
def test_equals_full_forward(name, make_graph):
    torch.manual_seed(0)
    model, data = MODELS[name]().eval(), make_graph()
    with torch.no_grad():
        expected = model(*data)
    plan = gnn_eval.compile(model, data)
    for options in ({"batch_rows": 7}, {"batch_rows": 50, "order": "cluster"}, {}):
        found = plan.run(data, fuse=False, **options)
        assert torch.equal(found, expected), options
        assert relative_error(found, expected) <= 1e-5
    assert relative_error(plan.run(data, batch_rows=31), expected) <= 1e-5


def test_a_layerwise_loop_that_recomputes_degrees_is_wrong(make_graph):
    """The twin of the test above: the usual loop over one-hop blocks gives another result for GCN."""
    torch.manual_seed(0)
    model, (x, edges) = gnn.GCN(WIDTH, 8, 1, out_channels=4).eval(), make_graph()
    with torch.no_grad():
        expected = model(x, edges)
        inside = edges[1] < 20
        block = edges[:, inside]
        wrong = model(x, block)[:20]
    assert relative_error(wrong, expected[:20]) > 0.01


def test_float64_is_exact(make_graph):
    torch.manual_seed(0)
    model, data = gnn.GCN(WIDTH, 8, 2, out_channels=4).double().eval(), make_graph(dtype=torch.float64)
    with torch.no_grad():
        expected = model(*data)
    assert relative_error(gnn_eval.evaluate(model, data, batch_rows=13), expected) < 1e-12


def test_cached_layers_and_the_users_model_stay_as_they_were(make_graph):
    torch.manual_seed(0)
    model, data = Net(gnn.GCNConv(WIDTH, 8, cached=True)).eval(), make_graph()
    before = copy.deepcopy(model.state_dict())
    x, edges = data[0].clone(), data[1].clone()
    gnn_eval.evaluate(model, data, batch_rows=20)
    assert model.convs[0]._cached_edge_index is None
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(x, data[0])
    assert torch.equal(edges, data[1])
    assert not model.training


class Relational(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = (gnn.RGCNConv(a, b, 4, num_bases=3) for a, b in ((6, 7), (7, 5)))

    def forward(self, x, edge_index, edge_type):
        return self.second(self.first(x, edge_index, edge_type).relu(), edge_index, edge_type)


class Stacks(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = gnn.ARMAConv(6, 7, num_stacks=3, num_layers=2), gnn.ARMAConv(7, 5, num_stacks=2)

    def forward(self, x, edge_index):
        return self.second(self.first(x, edge_index).relu(), edge_index)


@pytest.mark.parametrize("num_nodes", [301, 302])
@pytest.mark.parametrize("make", [Relational, Stacks])
def test_products_of_narrow_rows_are_bit_identical_in_layers_kept_whole_and_in_batches(make, num_nodes):
    x, edge_index, edge_type = torch.randn(num_nodes, 6), torch.randint(num_nodes, (2, 1500)), torch.randint(4, (1500,))
    model, inputs = make().eval(), (x, edge_index, edge_type) if make is Relational else (x, edge_index)
    plan = gnn_eval.compile(model, inputs)
    with torch.inference_mode():
        full = model(*inputs)
    for settings in ({"batch_rows": 3}, {"batch_rows": 41, "order": "cluster"}, {"batch_rows": 97, "order": "natural"}):
        assert torch.equal(plan.run(inputs, fuse=False, **settings), full), settings
