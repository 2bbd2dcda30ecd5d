"""Predicted memory against what is stored and what the allocator reports."""

from __future__ import annotations

import numpy as np

from autopar import Cluster, apply, models, search, trace
from autopar.memory import peak_step_bytes, stored_bytes


def test_stored_bytes_are_predicted_and_the_peak_is_near():
    model, batch = models.mlp(width=512, hidden=2048, classes=64, batch=64)
    graph = trace(model, batch)
    plan = search(graph, Cluster.preset("loopback-cpu", 1)).mini_time()
    parallel = apply(model, plan, graph)
    assert stored_bytes(parallel) == (plan.predicted.parameter_bytes, plan.predicted.buffer_bytes)
    measured = peak_step_bytes(parallel, batch)
    assert measured > 2 * plan.predicted.parameter_bytes + plan.predicted.optimizer_bytes
    assert abs(plan.predicted.memory_bytes / measured - 1) < 0.05


def test_what_backward_has_let_go_of_is_not_counted():
    graph = trace(*models.mlp_mixer(blocks=2, width=32, image=32, patch=8, batch=8, classes=8))
    frontier = search(graph, Cluster.preset("loopback-cpu"), eps=0.02, max_levels=1)
    for plan in (frontier[0], frontier[-1]):
        predicted = plan.predicted
        assert 0 < predicted.backward_bytes <= predicted.saved_bytes + predicted.working_bytes
    assert predicted.backward_bytes < predicted.saved_bytes + predicted.working_bytes


def test_a_budget_holds_for_the_predicted_peak():
    """Copies that re-scheduling makes are in the prediction only; a plan whose copies do not fit is passed over."""
    frontier = search(trace(*models.mlp_mixer(blocks=2, width=32, image=32, patch=8, batch=8, classes=8)), Cluster.preset("loopback-cpu"))  # fmt: skip  # noqa: E501
    budgets = np.linspace(frontier.memory[0], frontier.memory[-1], 8)[2:]
    chosen = [frontier.mini_time(budget) for budget in budgets]
    assert all(plan.predicted.memory_bytes <= budget for plan, budget in zip(chosen, budgets, strict=True))
    assert any(plan.predicted.memory_bytes > plan.memory for plan in frontier.points)
