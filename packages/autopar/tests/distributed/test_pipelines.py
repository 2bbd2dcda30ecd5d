"""Pipelines over gloo ranks equal one device: losses, parameters, optimiser state, and every message predicted."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.distributed.tensor import DTensor

import autopar.pipeline.boundary as boundary
import autopar.pipeline.execution as execution
from autopar import Cluster, apply, models, pipeline, search, trace
from autopar.errors import PlanMismatchError
from autopar.pipeline.verification import compare_pipeline
from autopar.verification import train_steps
from core_kernels.comm import Group
from core_kernels.testing import RankPool

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(400)]

SIZES = {
    "gpt": {
        "layers": 1,
        "width": 8,
        "heads": 2,
        "vocabulary": 16,
        "length": 4,
        "dropout": 0.1,
        "tied": True,
        "batch": 4,
    },
    "mlp_mixer": {"blocks": 1, "width": 8, "image": 8, "patch": 4, "batch": 4, "classes": 4},
    "vgg16": {"image": 32, "shrink": 32, "hidden": 8, "classes": 4, "batch": 4, "dropout": 0.5},
}
TOLERANCE = 1e-10


@pytest.fixture(scope="module")
def pool():
    with RankPool(4, timeout_seconds=60.0) as pool:
        yield pool


def make(name):
    torch.manual_seed(0)
    model, batch = models.FACTORIES[name](**SIZES[name])
    return model.double(), tuple(x.double() if x.is_floating_point() else x for x in batch)


@functools.cache
def traced(name):
    model, batch = make(name)
    return model, batch, trace(model, batch)


@functools.cache
def one_device(name):
    model, batch, graph = traced(name)
    plan = search(graph, Cluster.preset("loopback-cpu", 1)).mini_time()
    return train_steps(apply(model, plan, graph, Group.single()), batch, 3)[:2]


def plans_for(name, num_stages, count, sub_meshes=(1,), places=(-1,)):
    cluster = Cluster.preset("loopback-cpu", 4)
    found = pipeline.search(traced(name)[2], cluster, [count], num_stages, list(sub_meshes), eps=0.5)
    return [plan for plan in (found[place] for place in places) if plan.num_devices == 4]


def train(group, name, plans, losses, expected):
    model, batch, graph = traced(name)
    return [compare_pipeline(pipeline.apply(model, plan, graph, group), batch, losses, expected)[:2] for plan in plans]


def assert_equal(pool, name, plans):
    losses, expected = one_device(name)
    ranks = pool.run(train, name, plans, losses, expected, deadline_seconds=300)
    for plan, results in zip(plans, zip(*ranks, strict=True), strict=True):
        for rank, (compared, _) in enumerate(results):
            assert compared.largest_error < TOLERANCE, (rank, compared, plan.explain())
            assert compared.collectives_match, (rank, plan.explain())
        assert {name for _, names in results for name in names} == set(expected)


@pytest.mark.parametrize("name", sorted(SIZES))
def test_stages_of_one_device_equal_one_device(pool, name):
    assert_equal(pool, name, plans_for(name, 4, 2) + plans_for(name, 4, 4))


@pytest.mark.parametrize("name", sorted(SIZES))
def test_stages_of_two_devices_equal_one_device(pool, name):
    plans = plans_for(name, 2, 2, [2], (0, -1))
    assert plans
    assert all(len(stage.devices) == 2 for plan in plans for stage in plan.stages)
    assert_equal(pool, name, plans)


def test_unlike_stages_equal_one_device(pool):
    """One rank meets two, whatever the layouts; a stage of four devices needs no neighbour."""
    unlike = plans_for("gpt", 3, 4, [1, 2], (0, -1))
    assert {len(stage.devices) for plan in unlike for stage in plan.stages} == {1, 2}
    assert_equal(pool, "gpt", unlike + plans_for("gpt", 1, 2, [4]))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SIZES))
def test_many_pipelines_equal_one_device(pool, name):
    cases = [(2, 1, [2]), (2, 4, [2]), (3, 4, [1, 2]), (4, 1, [1]), (1, 4, [4])]
    for num_stages, count, sub_meshes in cases:
        assert_equal(pool, name, plans_for(name, num_stages, count, sub_meshes, (0, -1)))


def apply_to_a_part(group, plan):
    part = group.subgroup([group.rank // 2 * 2, group.rank // 2 * 2 + 1])
    model, _, graph = traced("mlp_mixer")
    try:
        pipeline.apply(model, plan, graph, part)
    except PlanMismatchError as error:
        return str(error)
    return ""


def test_a_group_that_torch_does_not_know_is_refused(pool):
    plan = pipeline.search(traced("mlp_mixer")[2], Cluster.preset("loopback-cpu", 2), [2], 2, [1], eps=0.5).mini_time()
    messages = pool.run(apply_to_a_part, plan)
    assert all("a process group that torch.distributed knows" in message for message in messages)


def save_and_load(group, plan):
    model, _, graph = traced("gpt")
    staged = pipeline.apply(model, plan, graph, group)
    state = staged.state_dict()
    whole = model.state_dict()
    distributed = all(isinstance(value, DTensor) for value in state.values())
    equal = all(torch.equal(value.full_tensor(), whole[name]) for name, value in state.items())
    shifted = {name: value + 1 for name, value in whole.items()}
    staged.load_state_dict(shifted, strict=False)
    loaded = all(torch.equal(value, shifted[name]) for name, value in staged.full_tensors().items())
    return distributed, equal, loaded


def test_state_dicts_of_stages_are_distributed_and_take_whole_tensors(pool):
    (plan,) = plans_for("gpt", 2, 2, [2], (0,))
    assert all(all(result) for result in pool.run(save_and_load, plan))


def train_broken(group, module, name, value, *arguments):
    """The twins: what each rule is broken to."""
    target = {"ties": execution.PipelineModule, "gather": boundary}[module]
    kept = getattr(target, name)
    setattr(target, name, value)
    try:
        return train(group, *arguments)
    finally:
        setattr(target, name, kept)


def forget_ties(self, before):
    pass


def gather_a_wrong_order(piece, side, groups, phase):
    return _gather(piece, side, groups, phase).flip(0)


_gather = boundary._gather


@pytest.mark.parametrize(
    ("module", "name", "value", "case"),
    [
        ("ties", "_add_tied", forget_ties, (4, 2, (1,))),
        ("gather", "_gather", gather_a_wrong_order, (2, 2, (2,))),
    ],
)
def test_a_broken_rule_is_seen(pool, module, name, value, case):
    plans = plans_for("gpt", *case)
    assert list(plans[0].tied) == ["head.weight"]
    ranks = pool.run(train_broken, module, name, value, "gpt", plans, *one_device("gpt"))
    assert max(found[0][0].largest_error for found in ranks) > 1e-6
