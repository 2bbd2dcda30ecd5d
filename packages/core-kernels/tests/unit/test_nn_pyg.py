"""Layers with the weights of PyTorch Geometric give its results and gradients."""

from __future__ import annotations

import pytest
import torch

from core_kernels import Graph, nn
from core_kernels.testing.layer_cases import LAYER_CASES, layer_edges, layer_inputs

pyg = pytest.importorskip("torch_geometric.nn", reason="torch_geometric is not installed")
pytestmark = pytest.mark.peer

NUM_NODES, WIDTH = 30, 7
CASES = [name for name, case in LAYER_CASES.items() if case.in_pyg]
RUNS = [(name, torch.float64) for name in CASES]
RUNS += [(name, torch.float32) for name in CASES if LAYER_CASES[name].is_common]


def run(layer, first, second, extra, weights):
    """Return the output and the gradients of everything that wants one, parameters by name."""
    layer.zero_grad()
    out = layer(first, second, *extra)
    wanted = [one for one in (first, second, *extra) if isinstance(one, torch.Tensor) and one.requires_grad]
    wanted += [parameter for _, parameter in sorted(layer.named_parameters())]
    return [out, *torch.autograd.grad(out, wanted, weights[:, : out.shape[1]].contiguous())]


def pair(name, dtype):
    """Return their layer and ours with the same weights."""
    torch.manual_seed(0)
    case = LAYER_CASES[name]
    theirs, ours = case.make(pyg, WIDTH).to(dtype), case.make(nn, WIDTH).to(dtype)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


@pytest.mark.parametrize(("name", "dtype"), RUNS)
def test_equal_to_pyg(name, dtype):
    theirs, ours = pair(name, dtype)
    edges = layer_edges(NUM_NODES)
    graph = Graph.from_edge_index(edges, NUM_NODES)
    x, *extra = layer_inputs(LAYER_CASES[name], graph, WIDTH, dtype)
    weights = torch.randn(NUM_NODES, 64, dtype=dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-10
    found, expected = run(ours, graph, x, extra, weights), run(theirs, x, edges, extra, weights)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() <= tolerance * (1 + other.abs().max())


@pytest.mark.parametrize("name", CASES)
def test_state_dicts_go_both_ways(name):
    theirs, ours = pair(name, torch.float32)
    theirs.load_state_dict(ours.state_dict())
    assert {k: v.shape for k, v in ours.state_dict().items()} == {k: v.shape for k, v in theirs.state_dict().items()}


def test_other_weights_are_noticed():
    theirs, ours = pair("gat", torch.float64)
    with torch.no_grad():
        ours.att_dst[0, 1, 2] += 1e-3
    edges = layer_edges(NUM_NODES)
    x = torch.randn(NUM_NODES, WIDTH, dtype=torch.float64)
    assert (ours(Graph.from_edge_index(edges, NUM_NODES), x) - theirs(x, edges)).abs().max() > 1e-6


def test_attention_dropout_keeps_the_expectation():
    torch.manual_seed(0)
    graph, x = Graph.from_edge_index(layer_edges(NUM_NODES), NUM_NODES), torch.randn(NUM_NODES, WIDTH)
    layer = nn.GATConv(WIDTH, 4, heads=2, dropout=0.5)
    mean = torch.stack([layer(graph, x) for _ in range(400)]).mean(0)
    layer.eval()
    assert (mean - layer(graph, x)).abs().mean() < 0.05
    assert (layer.train()(graph, x) - layer.eval()(graph, x)).abs().max() > 0.05
