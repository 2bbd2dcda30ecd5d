"""A second call reuses the plan, and nothing the user changes in between is missed."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import gnn_eval
from gnn_eval import planner


class Net(nn.Module):
    """Reads a parameter, a buffer, a number, an unregistered tensor and a child module."""

    def __init__(self):
        super().__init__()
        self.lin, self.norm = nn.Linear(10, 4), nn.BatchNorm1d(4)
        self.register_buffer("shift", torch.zeros(4))
        self.slope, self.scale, self.act = 0.2, torch.ones(4), nn.Sigmoid()
        self.steps = [1.0, 2.0]

    def forward(self, x, edge_index):
        x = self.norm(self.lin(x)) * self.scale + self.shift
        x = torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]])
        return self.act(nn.functional.leaky_relu(x, self.slope) * self.steps[1])


@pytest.fixture
def compilations(monkeypatch):
    """Count how often a model is really compiled."""
    counted = []
    original = planner._compile_first_that_works

    def count(*args):
        counted.append(args)
        return original(*args)

    monkeypatch.setattr(planner, "_compile_first_that_works", count)
    return counted


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net().eval()


READ_AT_EACH_RUN = {
    "parameter": lambda m: m.lin.weight.data.mul_(2),
    "replaced parameter": lambda m: setattr(m.lin, "weight", nn.Parameter(torch.randn(4, 10))),
    "loaded state": lambda m: m.load_state_dict(Net().state_dict()),
    "buffer": lambda m: m.shift.add_(1),
    "running statistics": lambda m: m.norm.running_mean.add_(0.5),
}
FIXED_BY_TRACING = {
    "number": lambda m: setattr(m, "slope", 0.7),
    "unregistered tensor in place": lambda m: m.scale.mul_(3),
    "unregistered tensor replaced": lambda m: setattr(m, "scale", torch.full((4,), 5.0)),
    "list": lambda m: m.steps.__setitem__(1, -3.0),
    "module": lambda m: setattr(m, "act", nn.Tanh()),
    "hook": lambda m: m.lin.register_forward_hook(lambda module, given, result: result * 2),
    "method": lambda m: setattr(m.act, "forward", lambda x: x + 1),
}


@pytest.mark.parametrize("change", [*READ_AT_EACH_RUN, *FIXED_BY_TRACING])
def test_a_change_to_the_model_shows_in_the_next_call(change, net, make_graph, compilations):
    data = make_graph()
    before = gnn_eval.evaluate(net, data, batch_rows=50, fuse=False)
    assert torch.equal(gnn_eval.evaluate(net, data, batch_rows=30, fuse=False), before)
    assert len(compilations) == 1
    with torch.no_grad():
        (READ_AT_EACH_RUN | FIXED_BY_TRACING)[change](net)
        expected = net(*data)
    assert not torch.equal(expected, before)
    assert torch.equal(gnn_eval.evaluate(net, data, batch_rows=50, fuse=False), expected)
    assert len(compilations) == 1 + (change in FIXED_BY_TRACING)


def test_a_plan_serves_graphs_of_any_size(net, make_graph, compilations):
    for num_nodes, num_edges in ((120, 700), (40, 90), (300, 300)):
        data = make_graph(num_nodes, num_edges)
        with torch.no_grad():
            assert torch.equal(gnn_eval.evaluate(net, data, fuse=False), net(*data))
    assert len(compilations) == 1


def test_training_mode_is_another_plan(net, make_graph):
    data = make_graph()
    gnn_eval.evaluate(net, data)
    with pytest.raises(gnn_eval.UnsupportedModelError, match=r"call model\.eval\(\) first"):
        gnn_eval.evaluate(net.train(), data)
    assert net.training
    gnn_eval.evaluate(net.eval(), data)


def test_a_plan_that_was_not_verified_is_verified_when_asked(net, make_graph, monkeypatch):
    data, checked = make_graph(), []
    monkeypatch.setattr(planner, "verify_call", lambda *args: checked.append(args))
    gnn_eval.compile(net, data, verify=False)
    assert not checked
    gnn_eval.compile(net, data)
    gnn_eval.compile(net, data)
    assert len(checked) == 1


def test_model_and_data_stay_as_they_were(net, make_graph):
    x, edges = make_graph()
    net.norm.train()  # a mode of its own; evaluation must not touch it
    net.norm.track_running_stats = True
    state, modes = copy.deepcopy(net.state_dict()), [m.training for m in net.modules()]
    given = {"x": x.clone(), "edge_index": edges.clone()}
    with pytest.raises(gnn_eval.UnsupportedModelError):
        gnn_eval.evaluate(net, given)
    net.norm.eval()
    gnn_eval.evaluate(net, given, batch_rows=20)
    net.norm.train()
    assert modes == [m.training for m in net.modules()]
    assert all(torch.equal(state[name], tensor) for name, tensor in net.state_dict().items())
    assert list(given) == ["x", "edge_index"]
    assert torch.equal(given["x"], x)
    assert torch.equal(given["edge_index"], edges)
    assert not any(p.grad is not None for p in net.parameters())


def test_a_plan_made_under_autocast_is_not_used_without_it(net, make_graph):
    inputs = make_graph()
    with torch.autocast("cpu", torch.bfloat16):
        gnn_eval.evaluate(net, inputs)
    assert torch.equal(gnn_eval.evaluate(net, inputs, fuse=False), net(*inputs))


def test_an_unregistered_tensor_in_the_place_of_a_freed_one_is_noticed(net, make_graph):
    inputs = make_graph()
    for scale in range(2, 12):
        net.scale = torch.full((4,), float(scale))  # the tensor before is freed, so this may get its address
        assert torch.equal(gnn_eval.evaluate(net, inputs, fuse=False, verify=False), net(*inputs))


def test_a_compiled_model_is_evaluated_as_the_model_inside(net, make_graph):
    inputs = make_graph()
    assert torch.equal(gnn_eval.evaluate(torch.compile(net), inputs, fuse=False), net(*inputs))
