"""Predicted memory against what is stored and what the allocator reports."""

from __future__ import annotations

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
        assert predicted.memory_bytes <= plan.memory
    assert predicted.backward_bytes < predicted.saved_bytes + predicted.working_bytes
