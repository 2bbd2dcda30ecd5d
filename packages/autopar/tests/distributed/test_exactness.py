"""Applied plans against one device: parameters, optimiser state, losses, collectives."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor

import autopar.local_operators as local_operators
from autopar import Cluster, apply, models, search, trace
from autopar.errors import VerificationError
from autopar.verification import compare_steps, train_steps, verify
from core_kernels.comm import Group
from core_kernels.testing import RankPool

# Four ranks import the whole export machinery of torch at first use: seconds on an idle machine, minutes on a busy one.
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def pool():
    with RankPool(4, timeout_seconds=60.0) as pool:
        yield pool


def plans_of(name, mesh, count, dtype=torch.float64):
    size = int(torch.tensor(mesh).prod())
    frontier = search(trace(*models.small(name, dtype)), Cluster.preset("loopback-cpu", size), [mesh])
    places = {round(i * (len(frontier) - 1) / max(1, count - 1)) for i in range(count)}
    return [frontier[place] for place in sorted(places)]


def compare_plans(group, name, plans, dtype, losses, expected):
    """Train under each plan; every rank compares its own parts with one device."""
    model, batch = models.small(name, dtype)
    graph = trace(model, batch)
    return [compare_steps(apply(model, plan, graph, group), batch, losses, expected) for plan in plans]


def train_single(name, dtype=torch.float64):
    model, batch = models.small(name, dtype)
    graph = trace(model, batch)
    plan = search(graph, Cluster.preset("loopback-cpu", 1)).mini_time()
    losses, state, _ = train_steps(apply(model, plan, graph, Group.single()), batch, 3)
    return losses, state


def assert_equal_to_single(pool, name, mesh, count, dtype=torch.float64, tolerance=1e-10):
    plans = plans_of(name, mesh, count, dtype)
    for found in pool.run(compare_plans, name, plans, dtype, *train_single(name, dtype), deadline_seconds=300):
        for plan, compared in zip(plans, found, strict=True):
            assert compared.largest_error < tolerance, (compared, plan.explain())
            assert compared.collectives_match, plan.explain()


@pytest.mark.parametrize("name", ["gpt", "mlp", "wide_resnet"])
def test_plans_equal_one_device_on_two_axes(pool, name):
    assert_equal_to_single(pool, name, (2, 2), 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh"), [(name, mesh) for name in sorted(models.SMALL_SIZES) for mesh in ((4,), (2, 2))]
)
def test_many_plans_equal_one_device(pool, name, mesh):
    assert_equal_to_single(pool, name, mesh, 8)


def test_float32_plans_equal_one_device(pool):
    assert_equal_to_single(pool, "mlp", (4,), 3, torch.float32, 1e-5)


def test_one_device_equals_the_plain_module():
    model, batch = models.small("wide_resnet")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    found, state = train_single("wide_resnet")
    assert found == losses
    for name, value in {**dict(model.named_parameters()), **dict(model.named_buffers())}.items():
        torch.testing.assert_close(state[name], value.detach(), rtol=0, atol=0)


def compare_with_wrong_bias(group, *args):
    """The twin: a bias added by every rank to a partial sum must show."""
    apply_once = local_operators._Once.apply
    local_operators._Once.apply = staticmethod(lambda x, is_first: apply_once(x, True))
    try:
        return compare_plans(group, *args)
    finally:
        local_operators._Once.apply = apply_once


def test_a_broken_rule_is_seen(pool):
    plans = [plan for plan in plans_of("gpt", (4,), 12) if any(o.output == "P(sum)" and len(o.inputs) == 3 for o in plan.operators.values())]  # fmt: skip  # noqa: E501
    assert plans
    single = train_single("gpt")
    results = pool.run(compare_with_wrong_bias, "gpt", plans[:1], torch.float64, *single, deadline_seconds=300)
    assert max(found[0].largest_error for found in results) > 1e-6


def test_a_wrong_copy_on_one_rank_is_seen(pool):
    losses, expected = train_single("mlp")
    name = next(key for key in expected if key.endswith("bias"))
    expected[name] = expected[name] + 1e-6
    results = pool.run(compare_plans, "mlp", plans_of("mlp", (4,), 2), torch.float64, losses, expected)
    for found in results:
        for compared in found:
            assert compared.worst == name
            assert 0.9e-6 < compared.largest_error < 1.1e-6


def save_and_load(group, plan):
    model, batch = models.small("mlp")
    graph = trace(model, batch)
    parallel = apply(model, plan, graph, group)
    state = parallel.state_dict()
    names = list(state) == list(model.state_dict())
    distributed = all(isinstance(value, DTensor) for value in state.values())
    whole = all(torch.equal(value.full_tensor(), model.state_dict()[name]) for name, value in state.items())
    other, _ = models.small("mlp", seed=1)
    again = apply(model, plan, graph, group)
    again.load_state_dict(other.state_dict())
    loaded = all(torch.equal(value, other.state_dict()[name]) for name, value in again.full_tensors().items())
    again.load_state_dict(state)
    restored = all(torch.equal(value, model.state_dict()[name]) for name, value in again.full_tensors().items())
    return names, distributed, whole, loaded, restored


def test_state_dict_is_distributed_and_takes_full_tensors(pool):
    plan = plans_of("mlp", (2, 2), 2)[0]
    assert all(all(result) for result in pool.run(save_and_load, plan))


@pytest.mark.slow
def test_verify_passes_and_a_tight_tolerance_fails():
    graph = trace(*models.gpt())
    plan = search(graph, Cluster.preset("loopback-cpu")).min_memory()
    found = verify("autopar.models:gpt", plan)
    assert found.collectives_match
    with pytest.raises(VerificationError, match="differ by"):
        verify("autopar.models:gpt", plan, tolerance=0.0)
