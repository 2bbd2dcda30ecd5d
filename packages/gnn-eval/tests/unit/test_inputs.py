"""Every way to hand over a graph gives the result of the model's own forward on it, or is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gnn_eval
from gnn_eval.verify import relative_error

gnn = pytest.importorskip("torch_geometric.nn")
data_classes = pytest.importorskip("torch_geometric.data")

pytestmark = pytest.mark.filterwarnings("ignore:Sparse", "ignore:Converting sparse")
NODES = 90


class SparseTensor:
    """Has the methods of ``torch_sparse.SparseTensor`` that are looked at, and nothing else."""

    def __init__(self, row, col, value=None, sparse_sizes=None):
        self._parts, self._sizes = (row, col, value), sparse_sizes

    def coo(self):
        return self._parts

    def csr(self):
        raise AssertionError("not needed")

    def sparse_sizes(self):
        return self._sizes


class Sums(nn.Module):
    """Sums over in-edges; over an adjacency object it reads the edges from it, and weights if ``weighted``."""

    def __init__(self, weighted=True, clear_loops=False):
        super().__init__()
        self.lin, self.weighted, self.clear_loops = nn.Linear(10, 4), weighted, clear_loops

    def forward(self, x, edges, edge_weight=None):
        if isinstance(edges, SparseTensor):
            row, col, value = edges.coo()
            edge_weight = value if self.weighted else None
            if self.clear_loops:
                row, col = row[row != col], col[row != col]
            edges = torch.stack([col, row])
        messages = self.lin(x)[edges[0]]
        if edge_weight is not None:
            messages = messages * edge_weight.unsqueeze(-1)
        return torch.zeros(x.size(0), 4).index_add(0, edges[1], messages)


@pytest.fixture
def graph(make_graph):
    torch.manual_seed(0)
    x, edges = make_graph(NODES, 500)
    return x, edges.unique(dim=1)


def adjacency(edges, layout, value=None):
    if layout is SparseTensor:
        return SparseTensor(edges[1], edges[0], value, (NODES, NODES))
    values = torch.ones(edges.size(1)) if value is None else value
    coo = torch.sparse_coo_tensor(edges.flip(0), values, (NODES, NODES)).coalesce()
    return {"coo": lambda: coo, "csr": coo.to_sparse_csr, "csc": coo.to_sparse_csc}[layout]()


def without_loops(edges):
    return edges[:, edges[0] != edges[1]]


def full(model, *args):
    with torch.no_grad():
        return model(*args)


@pytest.mark.parametrize("layout", ["coo", "csr", "csc"])
def test_torch_sparse_matrices(layout, graph):
    x, edges = graph
    model, given = gnn.GraphSAGE(10, 8, 2, out_channels=4).eval(), adjacency(edges, layout)
    assert relative_error(gnn_eval.evaluate(model, (x, given), batch_rows=17), full(model, x, given)) <= 1e-5


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_weights_of_a_matrix_are_those_of_its_edges(layout, graph):
    x, edges = graph[0], without_loops(graph[1])
    model, given = gnn.GCN(10, 8, 2, out_channels=4).eval(), adjacency(edges, layout, torch.rand(edges.size(1)))
    assert relative_error(gnn_eval.evaluate(model, (x, given), batch_rows=17), full(model, x, given)) <= 1e-5
    data = data_classes.Data(x=x, adj_t=given)
    assert relative_error(gnn_eval.evaluate(model, data, batch_rows=17), full(model, x, given)) <= 1e-5


def test_a_form_with_self_loops_of_another_meaning_is_refused(graph):
    """PyG's GCN adds to the loops of a matrix, and keeps those of an edge list."""
    x, edges = graph
    model, given = gnn.GCN(10, 8, 2, out_channels=4).eval(), adjacency(edges, "csr")
    as_list = gnn_eval.evaluate(model, (x, edges))
    assert relative_error(as_list, full(model, x, given)) > 1e-2
    with pytest.raises(gnn_eval.InexactPlanError, match=r"another result for a torch\.sparse_csr"):
        gnn_eval.evaluate(model, (x, given))
    plan = gnn_eval.compile(model, (x, adjacency(without_loops(edges), "csr")))
    with pytest.raises(ValueError, match=r"verified for a torch.sparse_csr .* or self-loops; got .* with self-loops"):
        plan.run((x, given))


def test_sparse_tensors_of_another_library(graph):
    x, edges = graph
    weight = torch.rand(edges.size(1))
    for value in (None, weight):
        given = adjacency(edges, SparseTensor, value)
        assert relative_error(gnn_eval.evaluate(Sums(), (x, given), batch_rows=17), full(Sums(), x, given)) > 0.1
        model = Sums()
        found = gnn_eval.evaluate(model, (x, given), batch_rows=17)
        assert relative_error(found, full(model, x, given)) <= 1e-5
    for model in (Sums(weighted=False), Sums(clear_loops=True)):
        with pytest.raises(gnn_eval.InexactPlanError, match="another result for a SparseTensor"):
            gnn_eval.evaluate(model, (x, adjacency(edges, SparseTensor, None if model.clear_loops else weight)))


def test_real_sparse_tensors(graph):
    sparse = pytest.importorskip("torch_sparse")
    x, edges = graph
    model = gnn.GCN(10, 8, 2, out_channels=4).eval()
    given = sparse.SparseTensor(row=edges[1], col=edges[0], sparse_sizes=(NODES, NODES))
    assert relative_error(gnn_eval.evaluate(model, (x, given), batch_rows=17), full(model, x, given)) <= 1e-5
    weighted = given.set_value(torch.rand(edges.size(1)), layout="coo")
    with pytest.raises(gnn_eval.InexactPlanError, match="SparseTensor"):
        gnn_eval.evaluate(model, (x, weighted))


def test_data_objects_stay_as_they_were(graph):
    x, edges = graph
    weight, labels = torch.rand(edges.size(1)), torch.randint(3, (NODES,))
    data = data_classes.Data(x=x, edge_index=edges, edge_weight=weight, y=labels, num_nodes=NODES)
    model = gnn.GCN(10, 8, 2, out_channels=4).eval()
    keys, before = list(data.keys()), {k: v.clone() for k, v in data if isinstance(v, torch.Tensor)}
    found = gnn_eval.evaluate(model, data, batch_rows=17)
    assert relative_error(found, full(model, x, edges, weight)) <= 1e-5
    assert list(data.keys()) == keys
    assert all(torch.equal(data[key], value) for key, value in before.items())


def test_a_forward_that_takes_the_data_object(graph):
    class OnData(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = gnn.GCNConv(10, 4)

        def forward(self, data):
            return self.conv(data.x, data.edge_index, data.edge_weight)

    x, edges = graph
    model = OnData().eval()
    data = data_classes.Data(x=x, edge_index=edges, edge_weight=torch.rand(edges.size(1)), num_nodes=NODES)
    assert relative_error(gnn_eval.evaluate(model, data, batch_rows=17), full(model, data)) <= 1e-5
    assert data.num_nodes == NODES


def test_hetero_data_of_a_transformed_model():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.conv2 = gnn.SAGEConv((-1, -1), 8), gnn.SAGEConv((-1, -1), 3)

        def forward(self, x, edge_index):
            return self.conv2(self.conv1(x, edge_index).relu(), edge_index)

    torch.manual_seed(0)
    data = data_classes.HeteroData()
    data["user"].x, data["item"].x = torch.randn(40, 5), torch.randn(30, 7)
    data["user", "buys", "item"].edge_index = torch.stack([torch.randint(40, (200,)), torch.randint(30, (200,))])
    data["item", "of", "user"].edge_index = torch.empty(2, 0, dtype=torch.int64)
    model = gnn.to_hetero(Net(), data.metadata(), aggr="sum").eval()
    expected = full(model, data.x_dict, data.edge_index_dict)
    found = gnn_eval.evaluate(model, data, batch_rows=9)
    assert {t: relative_error(found[t], expected[t]) <= 1e-5 for t in expected} == {"user": True, "item": True}
    some = gnn_eval.evaluate(model, data, nodes={"item": [3, 1]})
    assert relative_error(some["item"], expected["item"][[3, 1]]) <= 1e-4


def test_odd_graphs(make_graph):
    """As many nodes as edges, no edges, one node, only self-loops, one edge many times."""
    torch.manual_seed(0)
    model = gnn.GAT(10, 8, 2, out_channels=4, heads=2).eval()
    once = torch.tensor([[1], [2]])
    for x, edges in (
        make_graph(150, 150),
        (torch.randn(6, 10), torch.empty(2, 0, dtype=torch.int64)),
        (torch.randn(1, 10), torch.zeros(2, 1, dtype=torch.int64)),
        (torch.randn(20, 10), torch.arange(20).repeat(2, 1)),
        (torch.randn(20, 10), once.repeat(1, 50)),
        (torch.randn(20, 10).t().contiguous().t(), make_graph(20, 60)[1].int()),
    ):
        expected = full(model, x, edges.long())
        assert relative_error(gnn_eval.evaluate(model, (x, edges), batch_rows=7), expected) <= 1e-5


# Twins: a plan with a planted fault must not get past verification.


def test_a_wrong_hoist_is_caught(graph, monkeypatch):
    from gnn_eval.hoisting import StructureEvaluator

    original = StructureEvaluator._evaluate

    def off_by_one(self, value):
        found = original(self, value)
        return found + 1 if value.short_op == "scatter_add" and value.type.static else found

    monkeypatch.setattr(StructureEvaluator, "_evaluate", off_by_one)
    with pytest.raises(gnn_eval.InexactPlanError, match="GCNConv by"):
        gnn_eval.compile(gnn.GCNConv(10, 4).eval(), graph)


def test_a_mean_over_the_batch_is_caught(graph, monkeypatch):
    from gnn_eval import row_rules

    class Centred(Sums):
        def forward(self, x, edges):
            return super().forward(x - x.mean(0, keepdim=True), edges)

    with pytest.raises(gnn_eval.UnsupportedModelError, match=r"aten\.mean\.dim"):
        gnn_eval.compile(Centred(), {"x": graph[0], "edges": graph[1]}, roles={"edges": "relation"})
    rules = [(ops, (lambda *_: None) if "mean" in ops else rule) for ops, rule in row_rules._RULES]
    monkeypatch.setattr(row_rules, "_RULES", rules)
    with pytest.raises((gnn_eval.InexactPlanError, gnn_eval.UnsupportedModelError)):
        gnn_eval.compile(Centred(), {"x": graph[0], "edges": graph[1]}, roles={"edges": "relation"})


class Chain(nn.Module):
    """Returns its input, a value that a later stage reads, and that stage's result; edges have a name of their own."""

    def forward(self, x, ei):
        h = torch.zeros_like(x).index_add(0, ei[1], x[ei[0]])
        return x, h, torch.zeros_like(x).index_add(0, ei[1], h[ei[0]])


@pytest.mark.parametrize("store", ["ram", "disk"])
def test_inputs_and_values_between_stages_may_be_results(make_graph, tmp_path, store):
    inputs = make_graph()
    place = store if store == "ram" else tmp_path
    results = gnn_eval.evaluate(Chain(), inputs, fuse=False, batch_rows=17, store=place)
    for found, expected in zip(results, Chain()(*inputs), strict=True):
        assert torch.equal(found, expected)


def test_a_model_that_changes_its_input_is_refused(make_graph):
    class InPlace(nn.Module):
        def forward(self, x, edge_index):
            return x.add_(1)

    x, edges = make_graph()
    before = x.clone()
    with pytest.raises(gnn_eval.UnsupportedModelError, match=r"changes its input x; change a copy"):
        gnn_eval.evaluate(InPlace(), (x, edges))
    assert torch.equal(x, before)


def test_the_output_tensor_of_some_nodes(sum_net, make_graph):
    inputs, out = make_graph(), torch.empty(3, 3)
    assert gnn_eval.evaluate(sum_net, inputs, nodes=[4, 4, 1], out=out, fuse=False) is out
    assert torch.equal(out, sum_net(*inputs)[[4, 4, 1]])
