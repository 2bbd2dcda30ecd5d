"""Pipelines over gloo ranks equal one device: losses, parameters, optimiser state, and every message predicted."""

from __future__ import annotations

import functools

import pytest
import torch

import autopar.pipeline.execution as execution
from autopar import Cluster, apply, models, pipeline, search, trace
from autopar.errors import PlanMismatchError
from autopar.pipeline.verification import train_pipeline
from autopar.verification import train_steps
from core_kernels.comm import Group
from core_kernels.testing import RankPool

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(400)]

SIZES = {
    "gpt": {"layers": 2, "width": 16, "vocabulary": 32, "dropout": 0.1, "tied": True, "batch": 4},
    "mlp_mixer": {"blocks": 2, "width": 16, "image": 16, "patch": 4, "batch": 4, "classes": 8},
    "vgg16": {"image": 32, "shrink": 16, "hidden": 32, "classes": 8, "batch": 4, "dropout": 0.5},
}
TOLERANCE = 1e-10


@pytest.fixture(scope="module")
def pool():
    with RankPool(4, timeout_seconds=60.0) as pool:
        yield pool


@pytest.fixture(scope="module")
def pair():
    with RankPool(2, timeout_seconds=60.0) as pool:
        yield pool


def make(name):
    torch.manual_seed(0)
    model, batch = models.FACTORIES[name](**SIZES[name])
    return model.double(), tuple(x.double() if x.is_floating_point() else x for x in batch)


@functools.cache
def one_device(name):
    model, batch = make(name)
    graph = trace(model, batch)
    plan = search(graph, Cluster.preset("loopback-cpu", 1)).mini_time()
    return graph, *train_steps(apply(model, plan, graph, Group.single()), batch, 3)[:2]


def plan_for(name, num_stages, count):
    cluster = Cluster.preset("loopback-cpu", num_stages)
    graph = one_device(name)[0]
    return pipeline.search(graph, cluster, [count], num_stages, sub_meshes=[1], eps=0.5).mini_time()


def train(group, name, plans):
    found = []
    model, batch = make(name)
    graph = trace(model, batch)
    for plan in plans:
        staged = pipeline.apply(model, plan, graph, group)
        found.append((*train_pipeline(staged, batch, 3), staged.predicted_messages()))
    return found


def largest_error(results, losses, expected):
    error, seen = 0.0, set()
    for found, state, _, _ in results:
        error = max(error, *(abs(a - b) for a, b in zip(found, losses, strict=True)))
        seen |= set(state)
        for name, value in state.items():
            error = max(error, float((value - expected[name]).abs().max()))
    assert seen == set(expected)
    return error


def assert_equal(pool, name, num_stages, counts):
    plans = [plan_for(name, num_stages, count) for count in counts]
    _, losses, expected = one_device(name)
    ranks = pool.run(train, name, plans, deadline_seconds=300)
    for plan, results in zip(plans, zip(*ranks, strict=True), strict=True):
        assert largest_error(results, losses, expected) < TOLERANCE, plan.explain()
        for place, (_, _, counted, predicted) in enumerate(results):
            assert counted == predicted, (place, plan.explain())
        sent = [counted.get("activations", {}).get("sent_bytes", 0) for _, _, counted, _ in results]
        assert sent == [plan.num_micro_batches * stage.sent_bytes for stage in plan.stages]


@pytest.mark.slow  # ranks of their own import torch once more; four stages cover the same code
@pytest.mark.parametrize("name", sorted(SIZES))
def test_two_stages_equal_one_device(pair, name):
    assert_equal(pair, name, 2, [1, 2, 4])


@pytest.mark.parametrize("name", sorted(SIZES))
def test_four_stages_equal_one_device(pool, name):
    assert_equal(pool, name, 4, [1, 2, 4])


def apply_to_a_part(group, plan):
    part = group.subgroup([group.rank // 2 * 2, group.rank // 2 * 2 + 1])
    model, batch = make("mlp_mixer")
    try:
        pipeline.apply(model, plan, trace(model, batch), part)
    except PlanMismatchError as error:
        return str(error)
    return ""


def test_a_group_that_torch_does_not_know_is_refused(pool):
    messages = pool.run(apply_to_a_part, plan_for("mlp_mixer", 2, 2))
    assert all("a process group that torch.distributed knows" in message for message in messages)


def train_with_lost_ties(group, name, plans):
    """The twin: stages that do not add the gradients of a parameter they share must show."""
    add_tied = execution.PipelineModule._add_tied
    execution.PipelineModule._add_tied = lambda self, before: None
    try:
        return train(group, name, plans)
    finally:
        execution.PipelineModule._add_tied = add_tied


def test_gradients_of_tied_parameters_matter(pool):
    plan = plan_for("gpt", 4, 2)
    assert list(plan.tied) == ["head.weight"]
    ranks = pool.run(train_with_lost_ties, "gpt", [plan])
    _, losses, expected = one_device("gpt")
    assert largest_error([result[0] for result in ranks], losses, expected) > 1e-6
