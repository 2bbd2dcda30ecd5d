"""Bit for bit the full forward, whatever the block, the order and the place of the rows."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import gnn_eval

WIDTH = 5


class TwoLayers(nn.Module):
    """A mean and a maximum over neighbours, each with a linear layer and the node's own row."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.lin1, self.lin2 = nn.Linear(WIDTH, 4), nn.Linear(4, 3)

    def forward(self, x, edge_index):
        source, target = edge_index[0], edge_index[1]
        degree = torch.zeros(x.size(0)).index_add(0, target, torch.ones(target.size(0))).clamp(min=1).unsqueeze(1)
        x = self.lin1(x + torch.zeros(x.size(0), x.size(1)).index_add(0, target, x[source]) / degree).relu()
        index = target.unsqueeze(1).expand(-1, x.size(1))
        top = torch.zeros(x.size(0), x.size(1)).scatter_reduce(0, index, x[source], "amax", include_self=False)
        return self.lin2(x + top)


@pytest.fixture(scope="module")
def model():
    return TwoLayers().eval()


@st.composite
def graphs(draw):
    """Draw features and edges with isolated nodes, duplicates, self-loops, and as many edges as nodes now and then."""
    num_nodes = draw(st.integers(1, 60))
    num_edges = draw(st.one_of(st.just(num_nodes), st.integers(0, 200)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    reach = draw(st.integers(1, num_nodes))
    edges = torch.randint(reach, (2, num_edges), generator=generator)
    half = num_edges // 3
    edges[:, :half] = edges[:, half : 2 * half]
    return torch.randn(num_nodes, WIDTH, generator=generator), edges


@settings(max_examples=40, deadline=None)
@given(
    graph=graphs(),
    batch_rows=st.integers(1, 70),
    order=st.sampled_from(["natural", "cluster", "rcm"]),
    kind=st.sampled_from(["ram", "disk", "stored", "stored in cluster order"]),
    some=st.booleans(),
)
def test_bit_identical_to_the_full_forward(model, graph, batch_rows, order, kind, some):
    x, edges = graph
    with torch.no_grad():
        expected = model(x, edges)
    nodes = torch.arange(x.size(0)).flip(0)[::2] if some else None
    roles = {"x": "node", "edge_index": "relation"}
    plan = gnn_eval.compile(model, {"x": x, "edge_index": edges}, roles=roles, verify=False)
    with tempfile.TemporaryDirectory() as place:
        data = {"x": x, "edge_index": edges}
        if kind.startswith("stored"):
            data = gnn_eval.convert(data, Path(place) / "graph", "cluster" if "cluster" in kind else "natural", 8)
        store = "ram" if kind == "ram" else Path(place) / "work"
        found = plan.run(data, nodes, batch_rows=batch_rows, order=order, store=store, fuse=False)
        assert torch.equal(found, expected if nodes is None else expected[nodes])


@settings(max_examples=15, deadline=None)
@given(graph=graphs(), batch_rows=st.integers(1, 20), death=st.integers(1, 30))
def test_a_run_that_died_anywhere_is_taken_up(model, graph, batch_rows, death):
    from gnn_eval.executor import StageRunner

    x, edges = graph
    data = {"x": x, "edge_index": edges}
    plan = gnn_eval.compile(model, data, roles={"x": "node", "edge_index": "relation"}, verify=False)
    run, calls = StageRunner.run, []

    def dies(self, block):
        calls.append(1)
        if len(calls) == death:
            raise KeyboardInterrupt
        return run(self, block)

    options = {"batch_rows": batch_rows, "fuse": False}
    with tempfile.TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        patch.setattr(StageRunner, "run", dies)
        whole = -(-x.size(0) // batch_rows) * len(plan.compiled.stages)
        try:
            plan.run(data, store=Path(place) / "work", **options)
        except KeyboardInterrupt:
            assert torch.equal(plan.run(data, store=Path(place) / "work", resume=True, **options), model(x, edges))
            assert len(calls) == whole + 1  # only the block that died was begun twice
