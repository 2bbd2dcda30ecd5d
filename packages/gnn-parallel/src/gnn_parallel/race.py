"""Lets the strategies that a plan finds close run a few real steps, and keeps the fastest.

A cost model is right on average; where two predictions differ by less than its error, measuring is cheaper than
modelling better. The steps use the plan's own batches and leave the model as it was.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace

import torch
from torch import nn

from core_kernels.comm import Group
from gnn_parallel.engine import Engine
from gnn_parallel.errors import input_error
from gnn_parallel.plan import Plan
from gnn_parallel.profile import left_as_it_is

__all__ = ["race_strategies"]


def race_strategies(
    plan: Plan, model: nn.Module, group: Group, num_steps: int = 3, within: float = 1.5, max_strategies: int = 3
) -> Plan:
    """Measure the most promising strategies and return the plan with the fastest.

    Args:
        plan: A plan with its data.
        model: The model; left as it is.
        group: The ranks.
        num_steps: Steps of each strategy on the clock; one more warms up.
        within: Race strategies predicted to take at most this many times the best prediction.
        max_strategies: Race at most this many.

    Returns:
        The plan with ``measured_step_seconds`` of those that raced, and the fastest as its strategy.

    Collective: all ranks; they return equal plans.
    """
    if num_steps < 1:
        raise input_error("num_steps", num_steps, "at least 1", "pass the number of steps to time")
    data = plan.data
    assert data is not None
    ranked = sorted((c for c in plan.candidates if not c.reason), key=lambda c: c.predicted_seconds)
    limit = within * ranked[0].predicted_seconds
    names = [c.strategy for c in ranked if c.predicted_seconds <= limit][:max_strategies]
    engines = {}
    for name in names:
        contender = replace(plan, strategy=name).bind(data.graph, data.features, data.partition, data.seeds)
        engines[name] = Engine(contender, model, group)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    with left_as_it_is(model):
        for step in range(num_steps + 1):  # step 0 warms up; strategies take turns
            for name, engine in engines.items():
                elapsed = _time_step(engine, step)
                if step:
                    seconds[name].append(elapsed)
    medians = torch.tensor([statistics.median(seconds[name]) for name in names], dtype=torch.float64)
    medians = group.all_reduce(medians, op="max", tag="planning").tolist()
    measured = dict(zip(names, medians, strict=True))
    candidates = tuple(replace(c, measured_step_seconds=measured.get(c.strategy, 0.0)) for c in plan.candidates)
    raced = replace(plan, strategy=min(measured, key=measured.get), candidates=candidates)
    return raced.bind(data.graph, data.features, data.partition, data.seeds)


def _time_step(engine: Engine, step: int) -> float:
    engine.group.barrier()
    started = time.perf_counter()
    batch = engine.batch_at(engine.data.train_ids, step)
    engine.backward(engine(batch).square().mean())
    return time.perf_counter() - started
