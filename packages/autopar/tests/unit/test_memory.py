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
