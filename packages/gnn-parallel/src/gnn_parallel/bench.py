"""Times every strategy on a job, interleaved, and compares the planner's choice with the fastest."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from core_kernels import PartitionBook
from core_kernels.comm import Group
from gnn_parallel.clock import TERMS, settle_terms
from gnn_parallel.engine import Batch, Engine
from gnn_parallel.exchange import TAGS
from gnn_parallel.jobs import LabelledGraph, TrainJob, make_plan
from gnn_parallel.plan import Plan
from gnn_parallel.training import batch_loss
from gnn_parallel.trial import are_apart

__all__ = ["StrategyRunner", "bench_on_rank", "time_strategies"]

_FIRST_ROUNDS, _MOST_ROUNDS = 3, 3
"""Rounds of all strategies; and how many times the rounds asked for are run to tell the two best apart."""

_FAR_BEHIND = 1.5
"""Strategies that take so many times as long as the fastest need no better measurement."""


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
        num_rounds: Rounds; strategies take turns. Up to three times as many where the chosen strategy and the fastest
            are not told apart by then.

    Collective: all ranks.
    """
    names = [c.strategy for c in plan.candidates if not c.reason and c.num_hosts == 1]
    race = _Race(
        group, {name: StrategyRunner(job, data, _with_strategy(plan, name), group) for name in names}, num_steps
    )
    race.run(plan.strategy, num_rounds)
    cells = {}
    for name, runner in race.runners.items():
        candidate, steps = plan.candidate(name), plan.steps_per_epoch
        moved = runner.moved_bytes / runner.num_steps
        busiest = group.all_reduce(moved.max(0).values, op="max", tag="report")
        cells[name] = {
            "predicted_step_seconds": candidate.predicted_seconds / steps,
            "modelled_step_seconds": candidate.modelled_seconds / steps,
            "measured_step_seconds": statistics.median(race.seconds[name]),
            "predicted_seconds": {t: s / steps for t, s in candidate.seconds.items()},
            "measured_seconds": {term: s / runner.num_steps for term, s in runner.terms.items()},
            "step_bytes": float(group.all_reduce(moved[0].sum(), tag="report")),
            "link_bytes": float(busiest.sum()),  # of the busiest link, one kind of traffic after the other
            "num_rounds": len(race.seconds[name]),
        }
        runner.engine.close()
    return {"strategies": cells, **_judge(plan, cells)}


class StrategyRunner:
    """One strategy's engine with its loss and optimizer, on an endless run of batches.

    Args:
        job: The job.
        data: Its data.
        plan: A plan with data.
        group: The ranks.
    """

    def __init__(self, job: TrainJob, data: LabelledGraph, plan: Plan, group: Group):
        self.data, self.engine = data, Engine(plan, job.make_model(data), group)
        self.optimizer = torch.optim.Adam(self.engine.model.parameters(), lr=1e-3)
        self.batches = self._endless()
        self.terms = dict.fromkeys(TERMS, 0.0)
        self.moved_bytes = torch.zeros(2, len(TAGS), dtype=torch.float64)
        self.num_steps = 0

    def _endless(self) -> Iterator[Batch]:
        for epoch in itertools.count():
            yield from self.engine.loader(self.data.train_ids, self.data.labels, epoch)

    def run(self, num_steps: int, is_counted: bool) -> float:
        """Run some steps, to the end of what runs in the background; returns the seconds of a step."""
        engine, group = self.engine, self.engine.group
        before = _moved_bytes(group)
        engine.clock.take()
        group.barrier()
        start = time.perf_counter()
        for _ in range(num_steps):
            batch = next(self.batches)
            self.optimizer.zero_grad()
            engine.backward(batch_loss(batch, engine(batch)))
            self.optimizer.step()
        engine.settle()
        elapsed = time.perf_counter() - start
        settled = settle_terms(group, engine.clock.take(), elapsed)
        if is_counted:
            self.num_steps += num_steps
            self.moved_bytes += _moved_bytes(group) - before
            for term in TERMS:
                self.terms[term] += settled[term]
        return elapsed / num_steps


class _Race:
    """Runners that take turns, so that a slow moment hits them all, until chosen and fastest are told apart."""

    def __init__(self, group: Group, runners: dict[str, StrategyRunner], num_steps: int):
        self.group, self.runners, self.num_steps = group, runners, num_steps
        self.seconds: dict[str, list[float]] = {name: [] for name in runners}

    def run(self, chosen: str, num_rounds: int) -> None:
        """Run the rounds; strategies far behind take part in the first three only."""
        for runner in self.runners.values():
            runner.run(self.num_steps, is_counted=False)
        for number in range(_MOST_ROUNDS * num_rounds):
            best = self._fastest()
            active = list(self.runners)
            if number >= num_rounds:
                active = [chosen, best]
                if chosen == best or chosen not in self.runners or self._are_apart(chosen, best):
                    return
            elif number >= _FIRST_ROUNDS:
                limit = _FAR_BEHIND * statistics.median(self.seconds[best])
                active = [n for n in active if n == chosen or statistics.median(self.seconds[n]) <= limit]
            mine = [self.runners[name].run(self.num_steps, is_counted=True) for name in active]
            slowest = self.group.all_reduce(torch.tensor(mine, dtype=torch.float64), op="max", tag="report").tolist()
            for name, seconds in zip(active, slowest, strict=True):
                self.seconds[name].append(seconds)

    def _fastest(self) -> str:
        return min(self.seconds, key=lambda name: statistics.median(self.seconds[name] or [math.inf]))

    def _are_apart(self, first: str, second: str) -> bool:
        num_rounds = min(len(self.seconds[first]), len(self.seconds[second]))
        return are_apart(self.seconds[first][-num_rounds:], self.seconds[second][-num_rounds:])


def _moved_bytes(group: Group) -> Tensor:
    """Return what this rank has sent and received, ``[2, tags]``."""
    counters = group.counters
    moved = [[counters.sent(tag) for tag in TAGS], [counters.received(tag) for tag in TAGS]]
    return torch.tensor(moved, dtype=torch.float64)


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
