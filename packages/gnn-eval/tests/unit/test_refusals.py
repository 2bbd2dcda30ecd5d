"""What cannot be evaluated in parts is refused with the operator and the line that called it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gnn_eval


class After(nn.Module):
    """A linear layer, then whatever is to be refused."""

    def __init__(self, function):
        super().__init__()
        self.lin, self.function = nn.Linear(10, 4), function

    def forward(self, x, edge_index):
        return self.function(self.lin(x), edge_index)


@pytest.mark.parametrize(
    ("function", "operator"),
    [
        (lambda x, e: x - x.mean(0, keepdim=True), "aten.mean.dim"),
        (lambda x, e: x.softmax(0), "aten.softmax.int"),
        (lambda x, e: x @ (x.t() @ x), "aten.matmul.default"),
        (lambda x, e: x.cumsum(0), "aten.cumsum.default"),
        (lambda x, e: x.sum() * x, "aten.sum.default"),
        (lambda x, e: x.flip(0), "aten.flip.default"),
        (lambda x, e: x.sort(0).values, "aten.sort.default"),
        (lambda x, e: torch.zeros(3, 4).index_add(0, e[1] * 0, x[e[0]])[0] + x, "aten.index_add.default"),
        (lambda x, e: nn.functional.batch_norm(x, None, None, training=True), "batch_norm"),
        (lambda x, e: nn.functional.dropout(x, 0.5, training=True), "dropout"),
    ],
)
def test_row_mixing_operators_are_refused(function, operator, make_graph):
    with pytest.raises(gnn_eval.UnsupportedModelError) as caught:
        gnn_eval.evaluate(After(function).eval(), make_graph())
    assert operator in caught.value.operator
    assert "test_refusals.py" in caught.value.source


@pytest.mark.parametrize(
    "function",
    [
        lambda x, e: x.softmax(-1),
        lambda x, e: x.reshape(-1, 2, 2).transpose(1, 2).flatten(1),
        lambda x, e: torch.cat([x, x.relu()], -1).cumsum(-1),
        lambda x, e: torch.einsum("nf,gf->ng", x, torch.ones(3, 4)),
        lambda x, e: x[: x.size(0)] * torch.arange(x.size(0)).unsqueeze(-1),
        lambda x, e: torch.zeros_like(x).index_add(0, e[1], x[e[0]]) / x.size(0),
    ],
)
def test_row_wise_operators_are_not_refused(function, make_graph):
    model, data = After(function).eval(), make_graph()
    with torch.no_grad():
        expected = model(*data)
    assert torch.equal(gnn_eval.evaluate(model, data, batch_rows=16, fuse=False), expected)


def test_dynamic_graph_is_refused(make_graph):
    def nearest(x, edge_index):
        chosen = x[:, 0].argsort()
        return x[chosen]

    with pytest.raises(gnn_eval.UnsupportedModelError, match="argsort"):
        gnn_eval.evaluate(After(nearest).eval(), make_graph())


def test_ids_out_of_range_are_refused(sum_net, make_graph):
    x, edges = make_graph()
    edges[0, 3] = 120
    with pytest.raises(ValueError, match=r"edge_index\[0\] holds 120, outside \[0, 120\)"):
        gnn_eval.evaluate(sum_net, (x, edges))


def test_equal_numbers_of_nodes_and_edges_need_a_role(make_graph):
    class Other(nn.Module):
        def forward(self, x, edge_index, scale):
            return torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]]) * scale

    x, edges = make_graph(120, 120)
    scale = torch.rand(120, 1)
    with pytest.raises(ValueError, match="say which it is"):
        gnn_eval.evaluate(Other(), (x, edges, scale))
    found = gnn_eval.evaluate(Other(), (x, edges, scale), roles={"scale": "node"}, batch_rows=9, fuse=False)
    assert torch.equal(found, Other()(x, edges, scale))


def test_a_convolution_that_looks_beyond_its_block_is_caught(make_graph):
    """Kept whole, a two-hop layer is wrong on one-hop blocks; verification must find it."""
    gnn = pytest.importorskip("torch_geometric.nn")
    with pytest.raises(gnn_eval.InexactPlanError, match="differs from the full forward"):
        gnn_eval.compile(gnn.SGConv(10, 4, K=2).eval(), make_graph(), frontend="fx")
    plan = gnn_eval.compile(gnn.SAGEConv(10, 4).eval(), make_graph(), frontend="fx")
    assert plan.compiled.frontend == "fx"
