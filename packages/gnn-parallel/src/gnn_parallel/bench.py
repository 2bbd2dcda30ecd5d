"""Times every strategy on a job, interleaved, and compares the planner's choice with the fastest."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from core_kernels import PartitionBook
from core_kernels.comm import Group
from gnn_parallel.clock import TERMS
from gnn_parallel.engine import Engine
from gnn_parallel.exchange import TAGS
from gnn_parallel.jobs import LabelledGraph, TrainJob, make_plan
from gnn_parallel.plan import Plan
from gnn_parallel.training import batch_loss, settle_terms

__all__ = ["bench_on_rank", "time_strategies", "typical_seconds"]


def bench_on_rank(
    group: Group, job: TrainJob, partition: PartitionBook, num_steps: int, num_rounds: int
) -> dict[str, Any]:
    """Time every strategy; returns predicted and measured seconds per step, bytes, and the regret of the choice."""
    data = job.load()
    return time_strategies(group, job, data, make_plan(job, data, partition, group), num_steps, num_rounds)


def time_strategies(
    group: Group, job: TrainJob, data: LabelledGraph, plan: Plan, num_steps: int, num_rounds: int
) -> dict[str, Any]:
    """Time every strategy that can run.

    Args:
        group: The ranks.
        job: The job.
        data: Its data.
        plan: Its plan.
        num_steps: Steps per strategy and round.
        num_rounds: Rounds; strategies take turns.

    Collective: all ranks.
    """
    names = [c.strategy for c in plan.candidates if not c.reason and c.num_hosts == 1]
    engines = {name: Engine(_with_strategy(plan, name), job.make_model(data), group) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    terms = {name: dict.fromkeys(TERMS, 0.0) for name in names}
    moved = {name: torch.zeros(2, len(TAGS), dtype=torch.float64) for name in names}
    for round_number in range(num_rounds + 1):  # round 0 warms up
        for name, engine in engines.items():
            before = _moved_bytes(group)
            engine.clock.take()
            steps = _time_steps(engine, data, num_steps, epoch=round_number)
            settled = settle_terms(group, engine.clock.take(), sum(steps))
            if round_number:
                seconds[name] += steps
                for term in TERMS:
                    terms[name][term] += settled[term] / len(steps) / num_rounds
                moved[name] += (_moved_bytes(group) - before) / len(steps) / num_rounds
    cells = {}
    for name in names:
        candidate, steps = plan.candidate(name), plan.steps_per_epoch
        busiest = group.all_reduce(moved[name].max(0).values, op="max", tag="report")
        cells[name] = {
            "predicted_step_seconds": candidate.predicted_seconds / steps,
            "modelled_step_seconds": candidate.modelled_seconds / steps,
            "measured_step_seconds": typical_seconds(group, seconds[name]),
            "predicted_seconds": {t: s / steps for t, s in candidate.seconds.items()},
            "measured_seconds": terms[name],
            "step_bytes": float(group.all_reduce(moved[name][0].sum(), tag="report")),
            "link_bytes": float(busiest.sum()),  # of the busiest link, one kind of traffic after the other
        }
    return {"strategies": cells, **_judge(plan, cells)}


def _moved_bytes(group: Group) -> Tensor:
    """Return what this rank has sent and received, ``[2, tags]``."""
    counters = group.counters
    moved = [[counters.sent(tag) for tag in TAGS], [counters.received(tag) for tag in TAGS]]
    return torch.tensor(moved, dtype=torch.float64)


def typical_seconds(group: Group, steps: list[float]) -> float:
    """Return what a step takes, on the rank that takes longest: the mean of the quicker half of the steps.

    Other load on the machine only ever adds, so the slower half says more about the machine than about a strategy.
    """
    quicker = sorted(steps)[: max(1, (len(steps) + 1) // 2)]
    mine = torch.tensor([statistics.mean(quicker)], dtype=torch.float64)
    return float(group.all_reduce(mine, op="max", tag="report"))


def _judge(plan: Plan, cells: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return how good the choice and the predictions were; ``modelled`` is what the model alone would have done."""
    measured = {name: cell["measured_step_seconds"] for name, cell in cells.items()}
    fastest = min(measured, key=lambda name: measured[name])
    modelled = min(cells, key=lambda name: cells[name]["modelled_step_seconds"])
    errors = {name: abs(c["predicted_step_seconds"] / measured[name] - 1) for name, c in cells.items()}
    modelled_errors = {name: abs(c["modelled_step_seconds"] / measured[name] - 1) for name, c in cells.items()}
    best = measured[fastest]
    return {
        "chosen": plan.strategy,
        "modelled": modelled,
        "fastest": fastest,
        "regret": measured[plan.strategy] / best if plan.strategy in measured else math.inf,
        "modelled_regret": measured[modelled] / best,
        "gdp_ratio": measured["gdp"] / best,
        "prediction_errors": errors,
        "modelled_errors": modelled_errors,
        "median_prediction_error": statistics.median(errors.values()),
        "modelled_error": statistics.median(modelled_errors.values()),
    }


def _with_strategy(plan: Plan, strategy: str) -> Plan:
    data = plan.data
    assert data is not None
    return replace(plan, strategy=strategy, num_hosts=1).with_data(data)


def _time_steps(engine: Engine, data: LabelledGraph, num_steps: int, epoch: int) -> list[float]:
    optimizer = torch.optim.Adam(engine.model.parameters(), lr=1e-3)
    seconds = []
    engine.group.barrier()
    start = time.perf_counter()
    for batch in engine.loader(engine.data.train_ids, data.labels, epoch):
        optimizer.zero_grad()
        engine.backward(batch_loss(batch, engine(batch)))
        optimizer.step()
        now = time.perf_counter()
        seconds.append(now - start)
        start = now
        if len(seconds) == num_steps:
            break
    return seconds
