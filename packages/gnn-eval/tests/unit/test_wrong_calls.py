"""Every wrong call is answered with what was given, what was expected and what to do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gnn_eval

SEEDED = torch.Generator().manual_seed(0)
X, EDGES = torch.randn(12, 10, generator=SEEDED), torch.randint(12, (2, 30), generator=SEEDED)


class TwoSums(nn.Module):
    def forward(self, x, edge_index, edge_weight=None):
        messages = x[edge_index[0]]
        if edge_weight is not None:
            messages = messages * edge_weight.unsqueeze(-1)
        return torch.zeros_like(x).index_add(0, edge_index[1], messages)


class Wide(TwoSums):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(9, 3)

    def forward(self, x, edge_index):
        return super().forward(self.lin(x), edge_index)


def run(data=(X, EDGES), model=None, **options):
    return gnn_eval.evaluate(model or TwoSums(), data, **options)


def weighted_adjacency():
    return torch.sparse_coo_tensor(torch.tensor([[0, 1], [1, 2]]), torch.tensor([0.5, 2.0]), (12, 12)).coalesce()


# What is called, the name and the value the message must hold, and a word of the remedy.
WRONG_CALLS = {
    "model": (lambda: run(model=lambda x: x), "model", "function", "module's forward"),
    "missing input": (lambda: run((X,)), "edge_index", "1 positional", "pass a tuple"),
    "too many inputs": (lambda: run((X, EDGES, None, None)), "forward", "4 positional", "pass a tuple"),
    "data object": (lambda: run(object()), "'x'", "object", "tuple or a dict"),
    "transposed edges": (lambda: run((X, EDGES.t().contiguous())), "edge_index", "[30, 2]", "transpose"),
    "float edges": (lambda: run((X, EDGES.float())), "edge_index", "torch.float32", ".long()"),
    "source out of range": (lambda: run((X, EDGES + 1000)), "edge_index[0]", "outside [0, 12)", "missing rows"),
    "negative id": (lambda: run((X, EDGES - 12)), "edge_index[0]", "outside [0, 12)", "pass ids"),
    "weights of another length": (lambda: run((X, EDGES, torch.ones(29))), "edge_weight", "29 rows", "each edge"),
    "width": (lambda: run(model=Wide()), "Wide", "9x3", "shapes of the inputs"),
    "weights without an argument": (
        lambda: run((X, weighted_adjacency()), nn.Identity()),
        "edge_weight",
        "no free",
        "pass edge_index",
    ),
    "role": (lambda: run(roles={"x": "vertex"}), "roles['x']", "'vertex'", "one of node, edge"),
    "name in roles": (lambda: run(roles={"features": "node"}), "roles", "'features'", "one of x, edge_index"),
    "front end": (lambda: run(frontend="jit"), "frontend", "'jit'", "pass 'auto'"),
    "memory text": (lambda: run(memory="lots"), "memory", "'lots'", "pass a number"),
    "memory sign": (lambda: run(memory=-5), "memory", "-5", "leave it out"),
    "memory too small": (lambda: run(memory="10KB"), "memory", "10000", "store=PATH"),
    "block rows": (lambda: run(batch_rows=0), "batch_rows", "0", "at least 1"),
    "order": (lambda: run(order="shuffled"), "order", "'shuffled'", "pass 'auto'"),
    "nodes out of range": (lambda: run(nodes=[12]), "nodes", "12", "below 12"),
    "nodes of floats": (lambda: run(nodes=[0.5]), "nodes", "torch.float32", ".long()"),
    "mask of another length": (lambda: run(nodes=torch.ones(5, dtype=torch.bool)), "nodes", "mask of 5", "pass ids"),
    "node type": (lambda: run(nodes={"paper": [0]}), "nodes", "'paper'", "pass ids alone"),
    "nodes of text": (lambda: run(nodes="all"), "nodes", "'all'", "pass a list or a tensor"),
    "output of all nodes for some": (lambda: run(nodes=[2], out=torch.empty(12, 10)), "out", "[12, 10]", "[1, 10]"),
    "output with gradients": (lambda: run(out=torch.empty(12, 10, requires_grad=True)), "out", "gradients", "detach"),
    "output without a directory": (lambda: run(out="/nowhere/o.npy"), "out", "/nowhere", "name one"),
    "store in a file": (lambda: run(store=__file__), "store", "is a file", "name another"),
    "memory without end": (lambda: run(memory="inf"), "memory", "'inf'", "pass a number"),
    "block rows of a fraction": (lambda: run(batch_rows=1.5), "batch_rows", "1.5", "at least 1"),
    "roles as a list": (lambda: run(roles=["node"]), "roles", "list", "name: role"),
    "two numbers of nodes": (
        lambda: run((X, EDGES, torch.ones(31)), roles={"edge_weight": "node"}),
        "edge_weight",
        "31",
        "tensors of one graph",
    ),
    "lazy layer": (lambda: run(model=nn.LazyLinear(3)), "weight of LazyLinear", "no shape yet", "call the model once"),
    "links": (lambda: gnn_eval.score_links(X, torch.tensor([[0], [-1]])), "links", "-1", "rows of embeddings"),
    "links transposed": (lambda: gnn_eval.score_links(X, EDGES.t()), "links", "[30, 2]", "transpose"),
    "output shape": (lambda: run(out=torch.empty(3, 3)), "out", "[3, 3]", "allocate it"),
    "registered layer": (lambda: gnn_eval.register(nn.Linear(1, 1), gnn_eval.LayerSpec()), "layer", "Linear", "class"),
    "specification": (lambda: gnn_eval.register(Wide, "block"), "spec", "'block'", "LayerSpec()"),
    "way of calling": (lambda: gnn_eval.register(Wide, gnn_eval.LayerSpec("csr")), "graph", "'csr'", "one of them"),
}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("name", WRONG_CALLS)
def test_the_message_names_fact_expectation_and_remedy(name):
    call, *parts = WRONG_CALLS[name]
    with pytest.raises(gnn_eval.EvaluationArgumentError) as caught:
        call()
    assert isinstance(caught.value, ValueError)
    assert [part for part in parts if part not in str(caught.value)] == [], str(caught.value)


def test_a_plan_is_not_run_on_other_inputs():
    plan = gnn_eval.compile(TwoSums(), (X, EDGES))
    with pytest.raises(ValueError, match=r"got x \(node\), edge_index \(relation\), edge_weight \(edge\)"):
        plan.run((X, EDGES, torch.ones(30)))
