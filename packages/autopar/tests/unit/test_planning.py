"""Capture, rules, re-scheduling, search, plans and their errors."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from autopar import (
    Cluster,
    Plan,
    apply,
    measure_operators,
    models,
    planner,
    profile,
    search,
    search_presets,
    trace,
    track,
)
from autopar.capture import fake_tensors
from autopar.errors import CaptureError, InfeasibleError, PlanMismatchError, ProblemError
from autopar.placement import P, Q, R, divides, format_layout, local_shape, parse_layout
from autopar.planner import PlanFrontier, mini_parallelism
from autopar.resharding import plan_steps, steps_between
from autopar.rules import configurations, supported_operators
from autopar.schedule import Schedule
from autopar.space import SearchSpace

CLUSTER = Cluster.preset("loopback-cpu")


@pytest.fixture(scope="module")
def mlp_graph():
    return trace(*models.mlp())


@pytest.mark.parametrize("name", sorted(models.FACTORIES))
def test_every_model_is_captured_and_searched(name):
    graph = trace(*models.FACTORIES[name](**models.SMALL_SIZES[name]))
    frontier = search(graph, CLUSTER, eps=0.01)
    assert len(frontier) > 3
    for plan in (frontier[0], frontier[-1]):
        assert plan.predicted.memory_bytes <= 1.25 * plan.memory  # copies of re-scheduling are not in the bound
        assert plan.seconds == pytest.approx(frontier.seconds[0 if plan is frontier[0] else -1])


def test_models_larger_than_memory_are_captured():
    with fake_tensors():
        model, batch = models.gpt(layers=1, width=12288, heads=96, vocabulary=50304, length=2048, batch=64)
    assert trace(model, batch).num_parameters > 3e9


def test_unsupported_operators_are_all_listed_with_lines():
    class Odd(nn.Module):
        def forward(self, x):
            return torch.cumsum(torch.linalg.det(x), 0).sum()

    with pytest.raises(CaptureError) as raised:
        trace(Odd(), (torch.randn(4, 3, 3),))
    assert "linalg_det" in str(raised.value)
    assert f"{__file__}, line" in str(raised.value)


def test_a_step_without_scalar_loss_is_refused():
    with pytest.raises(CaptureError, match=r"shapes \[\(2, 3\)\]; expected one scalar"):
        trace(nn.Linear(4, 3), (torch.randn(2, 4),))
    graph = trace(nn.Linear(4, 3), (torch.randn(2, 4), torch.randn(2, 3)), loss=nn.functional.mse_loss)
    assert [parameter.target for parameter in graph.parameters] == ["weight", "bias"]


def test_layouts_round_trip_and_nested_shards():
    for layout in itertools.product((R, Q, P, 0, 1), repeat=2):
        assert parse_layout(format_layout(layout)) == layout
    assert local_shape((8, 6), (0, 0), (2, 4)) == (1, 6)
    assert not divides((8, 6), (1, 1), (2, 4))


def test_every_re_scheduling_ends_at_its_target():
    forms = (R, Q, P, 0, 1)
    for source, target in itertools.product(itertools.product(forms, repeat=2), repeat=2):
        steps = plan_steps(source, target)
        if any(to == P != form for form, to in zip(source, target, strict=True)):
            assert steps is None
            continue
        assert steps is not None
        assert (steps[-1].after if steps else source) == target


def test_without_gradient_a_partial_gradient_costs_nothing():
    assert steps_between((R,), (Q,), (4,), (2,), has_gradient=False) == ()
    assert len(steps_between((R,), (Q,), (4,), (2,), has_gradient=True)) == 1


def test_indivisible_shapes_have_no_split():
    graph = trace(nn.Linear(5, 7), (torch.randn(3, 5), torch.randn(3, 7)), loss=nn.functional.mse_loss)
    linear = next(operator for operator in graph.operators if operator.kind == "linear")
    assert len(configurations(linear, (2,))) == 1
    assert len(supported_operators()) >= 60


def test_more_memory_is_never_slower_and_budgets_hold(mlp_graph):
    frontier = search(mlp_graph, CLUSTER)
    assert frontier.exact
    assert (np.diff(frontier.memory) > 0).all()
    assert (np.diff(frontier.seconds) < 0).all()
    budget = float(frontier.memory[2])
    assert frontier.mini_time(budget).memory == budget
    with pytest.raises(InfeasibleError, match=r"least memory of any plan is .* most of it for network"):
        frontier.mini_time(1.0)


def test_search_equals_enumeration_of_the_smallest_space():
    """The space's own cost tables, enumerated: nothing of the frontier algebra is used."""
    graph = trace(nn.Linear(4, 4, bias=False), (torch.randn(2, 4), torch.randn(2, 4)), loss=nn.functional.mse_loss)
    problem = SearchSpace(graph, (2,), CLUSTER).problem()
    choices = itertools.product(*(range(problem.num_choices(node)) for node in range(problem.num_nodes)))
    costs = sorted(cost for cost in map(problem.cost, choices) if np.isfinite(cost).all())
    expected = []
    for memory, seconds in costs:
        if not expected or seconds < expected[-1][1]:
            expected.append((memory, seconds))
    found = track(problem)
    np.testing.assert_allclose(found.memory, [m for m, _ in expected])
    np.testing.assert_allclose(found.seconds, [s for _, s in expected], rtol=1e-9)


def test_presets_are_never_better_than_the_frontier():
    graph = trace(*models.mlp(width=64, hidden=256, batch=64))
    frontier = search(graph, CLUSTER, max_levels=100)
    plans = search_presets(graph, CLUSTER)
    assert set(plans) == {"data", "fsdp", "tensor"}
    for plan in plans.values():
        assert frontier[-1].seconds <= plan.seconds * (1 + 1e-9)
        assert frontier.memory[0] <= plan.memory
        assert plan.predicted.memory_bytes <= 1.25 * plan.memory  # copies of re-scheduling are not in the bound
    assert plans["data"].parameters["network.0.weight"].stored == "R"
    assert plans["fsdp"].parameters["network.0.weight"].drop


def test_plan_is_saved_explained_and_compared(mlp_graph, tmp_path):
    frontier = search(mlp_graph, CLUSTER)
    plan = frontier[0]
    loaded = Plan.load(plan.save(tmp_path / "plan.json"))
    assert loaded == plan
    assert "network.0.weight: stored" in plan.explain()
    assert plan.diff(loaded) == ""
    assert plan.diff(frontier[-1])
    frontier.save(tmp_path / "frontier.json")
    again = PlanFrontier.load(tmp_path / "frontier.json")
    assert again[0] == plan


def test_a_plan_for_something_else_is_refused(mlp_graph):
    plan = search(mlp_graph, CLUSTER)[0]
    model, batch = models.mlp(hidden=32)
    with pytest.raises(PlanMismatchError, match="does not fit the plan"):
        apply(model, plan, trace(model, batch))
    with pytest.raises(PlanMismatchError, match="group has 1 ranks; expected 2"):
        apply(models.mlp()[0], plan, mlp_graph)
    with pytest.raises(PlanMismatchError, match="torch_version"):
        Plan.from_dict({**plan.to_dict(), "torch_version": "1.0"}).check(mlp_graph)
    operators = dict(plan.operators)
    name = next(iter(operators))
    operators[name] = type(operators[name])("linear", "", ("S(7)",) * len(operators[name].inputs), "R", "")
    with pytest.raises(PlanMismatchError, match="no valid configuration"):
        Schedule.of(mlp_graph, plan.mesh, operators, plan.parameters)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda graph: search(graph, CLUSTER, meshes=[(3,)]), r"mesh \(3,\) has 3 places; expected num_devices=2"),
        (lambda graph: search(graph, CLUSTER, meshes="some"), "meshes='some' is not valid"),
        (lambda graph: search(graph, CLUSTER, constraints={"x": "R"}), r"constraints name \['x'\]"),
        (lambda graph: trace(*models.mlp(), optimizer="lion"), "optimizer='lion' is not known"),
        (lambda graph: Cluster.preset("loopback-cpu", 0), "num_devices=0"),
        (lambda graph: parse_layout("T(1)"), r"placement 'T\(1\)' is not known"),
    ],
)
def test_bad_arguments_are_refused(mlp_graph, call, message):
    with pytest.raises(ProblemError, match=message):
        call(mlp_graph)


def test_a_graph_too_entangled_for_a_mesh_is_left_out_or_refused(monkeypatch):
    graph = trace(*models.lstm())
    monkeypatch.setattr(planner, "_MAX_CELLS", 2000)
    with pytest.raises(ProblemError, match=r"on mesh \(2, 2\) one elimination would hold"):
        search(graph, Cluster.preset("loopback-cpu", 4), [(2, 2)])
    frontier = search(graph, Cluster.preset("loopback-cpu", 4), eps=0.05, max_levels=1)
    assert not frontier.exact
    assert {plan.mesh for plan in (frontier[0], frontier[-1])} == {(4,)}


def test_steps_of_a_recurrence_are_planned_alike():
    graph = trace(*models.lstm(length=4))
    frontier = search(graph, Cluster.preset("loopback-cpu", 2), eps=0.05, max_levels=1)
    assert frontier.exact
    for plan in (frontier[0], frontier[-1]):
        steps = [plan.operators[o.name] for o in graph.operators if o.kind == "linear" and len(o.inputs) == 2]
        assert len(steps) == 3
        assert len({(step.inputs, step.output) for step in steps}) == 1


def test_constraints_fix_storage(mlp_graph):
    frontier = search(mlp_graph, CLUSTER, constraints={"network.0.weight": "S(0)"})
    for index in range(len(frontier)):
        assert frontier[index].parameters["network.0.weight"].stored == "S(0)"


def test_fewest_devices_equals_trying_each():
    graph = trace(*models.mlp(width=64, hidden=512, batch=16))
    cluster = Cluster.preset("loopback-cpu", 4)
    frontiers = profile(graph, cluster, range(1, 5))
    for budget in np.geomspace(frontiers[4].memory[0], frontiers[1].memory[0], 5):
        plan = mini_parallelism(graph, cluster, memory=float(budget))
        fitting = [count for count in range(1, 5) if frontiers[count].memory[0] <= budget]
        assert np.prod(plan.mesh) == min(fitting)
    with pytest.raises(InfeasibleError, match="not feasible on up to 4 devices"):
        mini_parallelism(graph, cluster, memory=1.0)


def test_measured_operators_replace_estimates(mlp_graph, tmp_path):
    measured = measure_operators(mlp_graph, CLUSTER, repeats=1)
    assert len(measured.operator_seconds) > 5
    slow = replace(measured, operator_seconds=dict.fromkeys(measured.operator_seconds, 1.0))
    assert search(mlp_graph, slow)[-1].predicted.compute_seconds > 4
    assert Cluster.load(slow.save(tmp_path / "cluster.json")) == slow
