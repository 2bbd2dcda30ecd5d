"""Plans written as calls of torch's own parallel APIs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar import Cluster, export_calls, models, search_presets, trace
from autopar.errors import PlanMismatchError
from autopar.plan import ParameterPlan

CLUSTER = Cluster.preset("loopback-cpu")


@pytest.fixture(scope="module")
def graph():
    return trace(*models.mlp(width=64, hidden=256, batch=64))


@pytest.fixture(scope="module")
def presets(graph):
    return search_presets(graph, CLUSTER)


def test_usual_schemes_are_the_calls_of_their_name(graph, presets):
    assert 'replicate(model, device_mesh=mesh["axis0"])' in export_calls(presets["data"], graph).text
    sharded = export_calls(presets["fsdp"], graph)
    assert 'fully_shard(model, mesh=mesh["axis0"], reshard_after_forward=True)' in sharded.text
    tensor = export_calls(presets["tensor"], graph).text
    assert '"network.0": ColwiseParallel(' in tensor or '"network.3": RowwiseParallel(' in tensor


def test_exported_calls_are_python_and_say_what_they_leave_out(graph, presets):
    for plan in presets.values():
        found = export_calls(plan, graph)
        compile(found.text, "plan", "exec")
        assert all(" over axis0" in line for line in found.left_out)


def test_a_convolution_split_by_channels_has_no_call():
    graph = trace(*models.vgg16(image=32, shrink=16, hidden=32, classes=8, batch=8))
    plan = search_presets(graph, CLUSTER, names=("data",))["data"]
    by_channels = plan.parameters | {"network.0.weight": ParameterPlan("S(0)", "S(0)", False)}
    left_out = export_calls(replace(plan, parameters=by_channels), graph).left_out
    assert any(line.startswith("network.0.weight") and "no equivalent call" in line for line in left_out)


def test_a_plan_for_another_model_is_refused(presets):
    with pytest.raises(PlanMismatchError, match="does not fit the plan"):
        export_calls(presets["data"], trace(*models.mlp()))
