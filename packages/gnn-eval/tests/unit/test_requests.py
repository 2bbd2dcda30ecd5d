"""Some nodes, several types, several ranks of blocks, hubs, memory budgets, outputs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gnn_eval
import gnn_eval.engine
from gnn_eval.verify import relative_error


def _closure_edges(edges: torch.Tensor, num_nodes: int, targets: torch.Tensor, layers: int) -> int:
    """Count the edges of an exact backward closure by sets, independently of the package."""
    wanted, total = set(targets.tolist()), 0
    for _ in range(layers):
        inside = torch.tensor([node in wanted for node in range(num_nodes)])[edges[1]]
        total += int(inside.sum())
        wanted = set(edges[0][inside].tolist())  # this model does not read a node's own row
    return total


def test_some_nodes_visit_exactly_their_closure(sum_net, make_graph):
    x, edges = make_graph(400, 900)
    nodes = torch.tensor([7, 3, 399, 7, 20])
    plan = gnn_eval.compile(sum_net, (x, edges))
    found = plan.run((x, edges), nodes=nodes, fuse=False)
    assert torch.equal(found, sum_net(x, edges)[nodes])
    assert plan.last_report.num_edges == _closure_edges(edges, 400, nodes, 2)
    mask = torch.zeros(400, dtype=torch.bool)
    mask[[3, 9]] = True
    assert torch.equal(plan.run((x, edges), nodes=mask, fuse=False), sum_net(x, edges)[mask])


def test_unknown_nodes_are_refused(sum_net, make_graph):
    with pytest.raises(ValueError, match=r"nodes holds 120, outside \[0, 120\)"):
        gnn_eval.evaluate(sum_net, make_graph(), nodes=[120])


@pytest.mark.parametrize("rows", [0, 1, 2])
def test_tiny_and_edgeless_graphs(sum_net, rows):
    x, edges = torch.randn(rows, 10), torch.empty(2, 0, dtype=torch.int64)
    assert torch.equal(gnn_eval.evaluate(sum_net, (x, edges), fuse=False), sum_net(x, edges))


def test_weights_are_read_at_each_run(sum_net, make_graph):
    data = make_graph()
    plan = gnn_eval.compile(sum_net, data)
    with torch.no_grad():
        sum_net.lin1.weight.mul_(2)
    assert torch.equal(plan.run(data, fuse=False), sum_net(*data))
    assert gnn_eval.compile(sum_net, data).compiled is plan.compiled


def test_a_hub_is_split(sum_net, make_graph):
    x, edges = make_graph(3000, 60_000)
    edges[1, ::2] = 17
    plan = gnn_eval.compile(sum_net, (x, edges))
    with torch.no_grad():
        expected = sum_net(x, edges)
    # The hub's 30,000 edges need over a megabyte by themselves.
    found = plan.run((x, edges), memory=2_600_000, fuse=False)
    assert plan.last_report.stages[-1].blocks > 1
    assert torch.equal(found, expected)
    assert relative_error(plan.run((x, edges), memory=2_600_000), expected) < 1e-5


class Reduced(nn.Module):
    def __init__(self, reduce: str, spelling: str = "scatter", include_self: bool = False):
        super().__init__()
        self.reduce, self.spelling, self.include_self = reduce, spelling, include_self

    def forward(self, x, edge_index):
        rows, index = x[edge_index[0]], edge_index[1]
        base = torch.ones(x.size(0), x.size(1))
        if self.spelling == "index":
            return base.index_reduce(0, index, rows, self.reduce, include_self=self.include_self)
        index = index.unsqueeze(1).expand(-1, x.size(1))
        return base.scatter_reduce(0, index, rows, self.reduce, include_self=self.include_self)


class Softmax(nn.Module):
    def forward(self, x, edge_index):
        source, target = edge_index[0], edge_index[1]
        index = target.unsqueeze(1).expand(-1, x.size(1))
        score = x[source]
        top = torch.zeros(x.size(0), x.size(1)).scatter_reduce(0, index, score, "amax", include_self=False)
        weight = (score - top[target]).exp()
        total = torch.zeros(x.size(0), x.size(1)).index_add(0, target, weight)
        return torch.zeros(x.size(0), x.size(1)).index_add(0, target, weight / total[target] * x[source])


HUB_MODELS = {
    "sum": Reduced("sum"),
    "mean": Reduced("mean"),
    "mean with base": Reduced("mean", include_self=True),
    "mean by index": Reduced("mean", "index"),
    "mean by index with base": Reduced("mean", "index", True),
    "maximum": Reduced("amax"),
    "softmax": Softmax(),
}


@pytest.mark.parametrize("place", ["ram", "disk"])
@pytest.mark.parametrize("name", HUB_MODELS)
@pytest.mark.filterwarnings("ignore:index_reduce")
def test_each_reduction_of_a_hub_is_exact(make_graph, monkeypatch, tmp_path, name, place):
    from gnn_eval import look_ahead

    x, edges = make_graph(200, 2000)
    edges[1, ::2] = 11
    model = HUB_MODELS[name]
    plan = gnn_eval.compile(model, (x, edges), verify=False)
    data = (x, edges) if place == "ram" else gnn_eval.convert({"x": x, "edge_index": edges}, tmp_path / "graph")
    split, parts = gnn_eval.engine.run_in_edge_parts, []

    def in_small_parts(batcher, builder, runner, row):
        monkeypatch.setattr("gnn_eval.hubs._edges_per_part", lambda *_: 37)
        parts.append(row)
        return split(batcher, builder, runner, row)

    monkeypatch.setattr("gnn_eval.engine.run_in_edge_parts", in_small_parts)
    monkeypatch.setattr(look_ahead.Batcher, "predicted_bytes", lambda self, start, end: 2**40 if start == 11 else 0)
    found = plan.run(data, memory="8MB", batch_rows=1, fuse=False, store="ram" if place == "ram" else tmp_path / "work")
    assert parts == [11]
    with torch.no_grad():
        assert torch.equal(found, model(x, edges))


def test_softmax_of_a_hub_is_split(make_graph):
    gnn = pytest.importorskip("torch_geometric.nn")
    torch.manual_seed(0)
    x, edges = make_graph(2000, 40_000)
    edges[1, ::2] = 11
    model = gnn.GATConv(10, 8, heads=2).eval()
    with torch.no_grad():
        expected = model(x, edges)
    plan = gnn_eval.compile(model, (x, edges))
    found = plan.run((x, edges), memory=4_500_000)
    assert relative_error(found, expected) < 1e-5


def test_too_little_memory_is_said(sum_net, make_graph):
    with pytest.raises(ValueError, match="leaves 0 bytes for computing"):
        gnn_eval.evaluate(sum_net, make_graph(3000, 9000), memory="10KB")


def test_out_tensor_and_file(sum_net, make_graph, tmp_path):
    import numpy as np

    data = make_graph()
    out = torch.empty(120, 3)
    found = gnn_eval.evaluate(sum_net, data, out=out, fuse=False)
    assert found.data_ptr() == out.data_ptr()
    gnn_eval.evaluate(sum_net, data, out=tmp_path / "out.npy", fuse=False)
    assert np.array_equal(np.load(tmp_path / "out.npy"), out.numpy())


@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_adjacency(sum_net, make_graph):
    x, edges = make_graph()
    edges = edges.unique(dim=1)
    adjacency = torch.sparse_coo_tensor(edges.flip(0), torch.ones(edges.size(1)), (120, 120)).to_sparse_csr()
    order = (edges[1] * 120 + edges[0]).argsort()
    expected = sum_net(x, edges[:, order])
    assert torch.equal(gnn_eval.evaluate(sum_net, (x, adjacency), fuse=False, batch_rows=11), expected)


def test_types_of_nodes_and_zero_rows():
    class TwoTypes(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})

        def forward(self, x_dict, edge_index_dict):
            for _ in range(2):
                new = {t: self.lin[t](x) for t, x in x_dict.items()}
                for (source, _, target), edges in edge_index_dict.items():
                    new[target] = new[target].index_add(0, edges[1], x_dict[source][edges[0]])
                x_dict = {t: x.relu() for t, x in new.items()}
            return x_dict

    torch.manual_seed(0)
    model = TwoTypes()
    for num_b in (30, 0):
        edges = {("a", "to", "a"): torch.randint(50, (2, 90))}
        count = 200 if num_b else 0
        edges["a", "to", "b"] = torch.stack([torch.randint(50, (count,)), torch.randint(max(num_b, 1), (count,))])
        edges["b", "to", "a"] = edges["a", "to", "b"].flip(0)
        data = {"x_dict": {"a": torch.randn(50, 4), "b": torch.randn(num_b, 4)}, "edge_index_dict": edges}
        with torch.no_grad():
            expected = model(**data)
        found = gnn_eval.evaluate(model, data, batch_rows=8, fuse=False)
        assert all(torch.equal(found[t], expected[t]) for t in ("a", "b"))
        some = gnn_eval.evaluate(model, data, nodes={"a": [4, 2]}, fuse=False)
        assert torch.equal(some["a"], expected["a"][[4, 2]])
        assert some["b"].shape == (0, 4)


def test_blocks_form(make_graph):
    class Sampled(nn.Module):
        def __init__(self):
            super().__init__()
            self.lins = nn.ModuleList([nn.Linear(10, 10), nn.Linear(10, 3)])

        def forward(self, x, adjs):
            for lin, (edges, _, size) in zip(self.lins, adjs, strict=True):
                own = x[: size[1]]
                x = lin(own + torch.zeros_like(own).index_add(0, edges[1], x[edges[0]]))
            return x

    x, edges = make_graph()
    model = Sampled()
    full = [(edges, None, (120, 120))] * 2
    found = gnn_eval.evaluate(model, (x, gnn_eval.Blocks(edges, 2)), batch_rows=17, fuse=False)
    assert torch.equal(found, model(x, full))


def test_link_scores():
    embeddings = torch.randn(20, 5)
    links = torch.randint(20, (2, 33))
    expected = (embeddings[links[0]] * embeddings[links[1]]).sum(-1)
    assert torch.equal(gnn_eval.score_links(embeddings, links, batch_links=7), expected)
