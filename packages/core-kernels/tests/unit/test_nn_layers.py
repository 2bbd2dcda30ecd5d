"""Every shipped layer, with its options: gradients against finite differences everywhere, export and compile."""

from __future__ import annotations

import copy

import pytest
import torch

from core_kernels import Graph, backend, nn
from core_kernels.errors import ArgumentError, CoreKernelsError
from core_kernels.testing.emulator import compiler_skip_reason
from core_kernels.testing.layer_cases import LAYER_CASES, layer_edges, layer_inputs

BACKENDS = ["torch", "numba", *([] if compiler_skip_reason() else ["emulate"])]
NUM_NODES, WIDTH = 5, 2
COMMON = [name for name, case in LAYER_CASES.items() if case.is_common]


def small_graph():
    return Graph.from_edge_index(layer_edges(NUM_NODES, 9, seed=3)[:, :12], NUM_NODES)


def test_every_layer_is_listed():
    made = {type(case.make(nn, 4)).__name__ for case in LAYER_CASES.values()}
    layers = {name for name in nn.__all__ if isinstance(getattr(nn, name), type)}
    assert made == layers
    assert {type(LAYER_CASES[name].make(nn, 4)).__name__ for name in COMMON} == layers


@pytest.mark.parametrize("name", LAYER_CASES)
def test_gradients_of_every_layer(name):
    torch.manual_seed(0)
    case, graph = LAYER_CASES[name], small_graph()
    layer = case.make(nn, WIDTH).double()
    inputs, parameters = layer_inputs(case, graph, WIDTH), dict(layer.named_parameters())
    # Without biases' help a leaky ReLU may sit on its kink: gradients differ there from both sides.
    values = [(one.detach() + 0.01).requires_grad_() for one in parameters.values()]

    def call(*tensors):
        given, rest = tensors[: len(inputs)], tensors[len(inputs) :]
        return torch.func.functional_call(layer, dict(zip(parameters, rest, strict=True)), (graph, *given))

    for chosen in BACKENDS:
        with backend(chosen):
            assert torch.autograd.gradcheck(call, (*inputs, *values), fast_mode=chosen == "emulate"), chosen


class Model(torch.nn.Module):
    """All layers in one model, each fed by the one before it."""

    def __init__(self, graph, edge_type):
        super().__init__()
        self.graph, self.edge_type = graph, edge_type
        self.layers = torch.nn.ModuleList(
            [
                nn.GCNConv(8, 16),
                nn.GATConv(16, 4, heads=4),
                nn.SAGEConv(16, 5),
                nn.SAGEConv(5, 6, aggr="max"),
                nn.GATv2Conv(6, 3),
                nn.GINConv(torch.nn.Linear(3, 3)),
                nn.APPNP(2, 0.1),
            ]
        )
        self.typed = nn.RGCNConv(3, 4, 2)
        self.pool = nn.HAPCoarsening(4, 2)

    def forward(self, x):
        for layer in self.layers:
            x = layer(self.graph, x).relu()
        x = self.typed(self.graph, x, self.edge_type)
        features, adjacency, _ = self.pool(self.graph, x)
        return features, adjacency


@pytest.fixture
def model():
    torch.manual_seed(0)
    graph = Graph.from_edge_index(layer_edges(7, 20), 7)
    return Model(graph, torch.arange(graph.num_edges) % 2)


def test_compile_takes_a_model_of_all_layers_in_one_graph(model):
    fresh = copy.deepcopy(model)
    x = torch.randn(7, 8, requires_grad=True)
    results = []
    for one in (model, torch.compile(fresh, fullgraph=True, backend="aot_eager")):
        features, adjacency = one(x)
        (grad,) = torch.autograd.grad(features.square().sum() + adjacency.square().sum(), x)
        results.append((features, adjacency, grad))
    for found, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(found, expected)


def test_export_takes_a_model_of_all_layers(model):
    x = torch.randn(7, 8)
    exported = torch.export.export(model, (x,))
    names = [str(node.target) for node in exported.graph.nodes if "vertex_forward" in str(node.target)]
    assert len(names) == 8 + 2  # seven layers, one of them with two steps, and one program per edge type
    for found, expected in zip(exported.module()(x), model(x), strict=True):
        torch.testing.assert_close(found, expected)


def test_a_traced_model_refuses_other_edge_types(model):
    layer, x = model.typed, torch.randn(7, 3)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(model.graph, x, model.edge_type), layer(model.graph, x, model.edge_type))
    with pytest.raises(RuntimeError, match="edge_type differs"):
        compiled(model.graph, x, 1 - model.edge_type)


def test_exported_edge_types_must_be_constants(model):
    class Typed(torch.nn.Module):
        def forward(self, x, edge_type):
            return model.typed(model.graph, x, edge_type)

    with pytest.raises(ArgumentError, match="attribute of the model"):
        torch.export.export(Typed(), (torch.randn(7, 3), model.edge_type))


FEATURES = [name for name in COMMON if name != "hap coarsening"]


@pytest.mark.parametrize("name", FEATURES)
def test_a_graph_first_used_in_inference_mode_serves_training_and_autocast(name):
    torch.manual_seed(0)
    case, graph = LAYER_CASES[name], small_graph()
    layer = case.make(nn, WIDTH)
    inputs = layer_inputs(case, graph, WIDTH, torch.float32)
    with torch.inference_mode():
        expected = layer(graph, *inputs)
    out = layer(graph, *inputs)
    out.sum().backward()
    assert torch.equal(out, expected)
    assert inputs[0].grad is not None
    with torch.autocast("cpu", torch.bfloat16):
        narrow = layer(graph, *inputs)
    narrow.float().sum().backward()
    assert torch.allclose(narrow.float(), out, atol=0.1)


@pytest.mark.parametrize("name", ["gcn", "sage max", "gat"])
def test_second_derivatives_are_refused_and_not_wrong(name):
    case, graph = LAYER_CASES[name], small_graph()
    layer = case.make(nn, WIDTH)
    inputs = layer_inputs(case, graph, WIDTH, torch.float32)
    (grad,) = torch.autograd.grad(layer(graph, *inputs).square().sum(), inputs[0], create_graph=True)
    with pytest.raises(CoreKernelsError, match=r"second derivative of a vertex program.*; expected .*; write"):
        grad.square().sum().backward()


def test_features_without_columns_pass():
    x = torch.ones(NUM_NODES, 0, requires_grad=True)
    out = nn.APPNP(2, 0.1)(small_graph(), x)
    out.sum().backward()
    assert out.shape == x.grad.shape == (NUM_NODES, 0)
