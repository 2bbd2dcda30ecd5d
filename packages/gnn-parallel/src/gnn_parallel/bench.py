"""Times every strategy on a job, interleaved, and compares the planner's choice with the fastest."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from core_kernels import PartitionBook
from core_kernels.comm import Group
from core_kernels.datasets import GraphData
from gnn_parallel.clock import TERMS
from gnn_parallel.engine import Engine
from gnn_parallel.exchange import TAGS
from gnn_parallel.plan import Plan
from gnn_parallel.training import TrainJob, load_dataset, make_plan, settle_terms

__all__ = ["bench_on_rank", "time_strategies"]


def bench_on_rank(
    group: Group, job: TrainJob, partition: PartitionBook, num_steps: int, num_rounds: int
) -> dict[str, Any]:
    """Time every strategy; returns predicted and measured seconds per step, bytes, and the regret of the choice."""
    data = load_dataset(job.dataset, job.dtype)
    return time_strategies(group, job, data, make_plan(job, data, partition, group), num_steps, num_rounds)


def time_strategies(
    group: Group, job: TrainJob, data: GraphData, plan: Plan, num_steps: int, num_rounds: int
) -> dict[str, Any]:
    """Time every strategy that can run.

    Args:
        group: The ranks.
        job: The job.
        data: Its data.
        plan: Its plan.
        num_steps: Steps per strategy and round.
        num_rounds: Rounds; strategies take turns, the median step counts.

    Collective: all ranks.
    """
    names = [candidate.strategy for candidate in plan.candidates if not candidate.reason]
    engines = {name: Engine(_with_strategy(plan, name), job.make_model(data), group) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    terms = {name: dict.fromkeys(TERMS, 0.0) for name in names}
    sent = dict.fromkeys(names, 0.0)
    for round_number in range(num_rounds + 1):  # round 0 warms up
        for name, engine in engines.items():
            before = sum(group.counters.sent(tag) for tag in TAGS)
            engine.clock.take()
            steps = _time_steps(engine, data, num_steps, epoch=round_number)
            settled = settle_terms(group, engine.clock.take(), sum(steps))
            if round_number:
                seconds[name] += steps
                for term in TERMS:
                    terms[name][term] += settled[term] / len(steps) / num_rounds
                sent[name] += (sum(group.counters.sent(tag) for tag in TAGS) - before) / len(steps) / num_rounds
    cells = {}
    for name in names:
        total = group.all_reduce(torch.tensor([sent[name]], dtype=torch.float64), tag="report")
        median = torch.tensor([statistics.median(seconds[name])], dtype=torch.float64)
        cells[name] = {
            "predicted_step_seconds": plan.candidate(name).predicted_seconds / plan.steps_per_epoch,
            "measured_step_seconds": float(group.all_reduce(median, op="max", tag="report")),
            "predicted_seconds": {t: s / plan.steps_per_epoch for t, s in plan.candidate(name).seconds.items()},
            "measured_seconds": terms[name],
            "step_bytes": float(total),
        }
    fastest = min(cells, key=lambda name: cells[name]["measured_step_seconds"])
    best = cells[fastest]["measured_step_seconds"]
    errors = [abs(c["predicted_step_seconds"] / c["measured_step_seconds"] - 1) for c in cells.values()]
    return {
        "strategies": cells,
        "chosen": plan.strategy,
        "fastest": fastest,
        "regret": cells[plan.strategy]["measured_step_seconds"] / best if plan.strategy in cells else math.inf,
        "gdp_ratio": cells["gdp"]["measured_step_seconds"] / best,
        "median_prediction_error": statistics.median(errors),
    }


def _with_strategy(plan: Plan, strategy: str) -> Plan:
    data = plan.data
    assert data is not None
    return replace(plan, strategy=strategy).bind(data.graph, data.features, data.partition, data.seeds)


def _time_steps(engine: Engine, data: GraphData, num_steps: int, epoch: int) -> list[float]:
    optimizer = torch.optim.Adam(engine.model.parameters(), lr=1e-3)
    seconds = []
    engine.group.barrier()
    start = time.perf_counter()
    for batch in engine.loader(engine.data.train_ids, data.labels, epoch):
        optimizer.zero_grad()
        engine.backward(F.cross_entropy(engine(batch), batch.y))
        optimizer.step()
        now = time.perf_counter()
        seconds.append(now - start)
        start = now
        if len(seconds) == num_steps:
            break
    return seconds
