"""Lets the strategies that a plan finds close run a few real steps, keeps the fastest, and scales the predictions.

A cost model is right on average; where two predictions differ by less than its error, measuring is cheaper than
modelling better. The steps use the plan's own batches and leave the model as it was. What they took over what was
predicted for them also corrects the predictions of the strategies that were not tried: much of a model's error is
common to all, since they share processor, links and upper layers.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from core_kernels.comm import Group
from gnn_parallel.dry_run import BUDGET_SHARE
from gnn_parallel.engine import Batch, Engine
from gnn_parallel.errors import PlanMismatchError, input_error
from gnn_parallel.plan import Candidate, Plan
from gnn_parallel.profile import left_as_it_is

__all__ = ["MODEL_ERROR", "contenders", "try_strategies"]

MODEL_ERROR = 0.3
"""Predictions closer than this share of the best one do not decide by themselves."""

_MOST_CONTENDERS, _FEWEST_STEPS = 3, 2
_FALLEN_BEHIND = 1.15
"""A strategy whose quickest step takes so many times the quickest of all is not tried further."""


def contenders(plan: Plan) -> list[Candidate]:
    """Return the best prediction and those that are closer to it than the model is right, the best first."""
    ranked = sorted((c for c in plan.candidates if not c.reason), key=lambda c: c.predicted_seconds)
    limit = (1 + plan.model_error) * ranked[0].predicted_seconds
    return [c for c in ranked if c.predicted_seconds <= limit][:_MOST_CONTENDERS]


def try_strategies(plan: Plan, model: nn.Module, group: Group, num_steps: int = 3) -> Plan:
    """Run the most promising strategies for some steps and return the plan with the fastest.

    Args:
        plan: A plan with its data.
        model: The model; left as it is.
        group: The ranks.
        num_steps: Most steps of each strategy; fewer, but at least 2, where it falls behind, and where all steps
            together would take more than what counting has left of 5 % of an epoch.

    Returns:
        The plan with ``measured_step_seconds`` of those that were tried, the fastest as its strategy, and predictions
        scaled by what was measured.

    Raises:
        InputError: ``num_steps`` is less than 1.
        PlanMismatchError: The plan has no data.

    Collective: all ranks; they return equal plans.
    """
    if num_steps < 1:
        raise input_error("num_steps", num_steps, "at least 1", "pass the number of steps to time")
    data = plan.data
    if data is None:
        raise PlanMismatchError(
            "the plan has no data; expected a bound plan; call plan.bind(graph, features, partition)"
        )
    started = time.perf_counter()
    tried = contenders(plan)
    engines = []
    for candidate in tried:
        chosen = replace(plan, strategy=candidate.strategy, num_hosts=candidate.num_hosts)
        engines.append(Engine(chosen.with_data(data), model, group))
    items = data.train_ids if data.seeds is None else data.seeds
    with left_as_it_is(model):
        seconds = _run_heats(engines, items, num_steps, _affordable_steps(plan))
    for engine in engines:
        engine.close()
    quickest = [min(steps) for steps in seconds]
    winner = tried[quickest.index(min(quickest))]
    # The first step also warms up, and other load on the machine only ever adds: the quickest step tells strategies
    # apart, the lower median is what a step takes.
    typical = [statistics.median_low(steps) for steps in seconds]
    took = torch.tensor([time.perf_counter() - started], dtype=torch.float64)
    settled = _calibrate(plan, dict(zip([(c.strategy, c.num_hosts) for c in tried], typical, strict=True)))
    return replace(
        settled,
        strategy=winner.strategy,
        num_hosts=winner.num_hosts,
        trial_seconds=float(group.all_reduce(took, op="max", tag="planning")),
    ).with_data(data)


def _affordable_steps(plan: Plan) -> int:
    """Return the steps, of all strategies together, that counting has left of its share of an epoch."""
    spent = plan.counting_seconds / max(plan.predicted.predicted_seconds, 1e-9)
    return int(max(0.0, BUDGET_SHARE - spent) * plan.steps_per_epoch)


def _run_heats(engines: list[Engine], items: torch.Tensor, num_steps: int, budget: int) -> list[list[float]]:
    """Let engines take turns, so that a slow moment hits them all, and drop those that fall behind.

    Returns:
        Per engine the seconds of its steps on the slowest rank, the same on every rank.
    """
    seconds: list[list[float]] = [[] for _ in engines]
    active, loaders = list(range(len(engines))), [engine.loader(items) for engine in engines]
    for step in range(min(num_steps, engines[0].plan.steps_per_epoch)):
        if step >= _FEWEST_STEPS and sum(map(len, seconds)) + len(active) > budget:
            break
        elapsed = torch.tensor([_time_step(engines[number], loaders[number]) for number in active], dtype=torch.float64)
        for number, value in zip(active, engines[0].group.all_reduce(elapsed, op="max", tag="planning"), strict=True):
            seconds[number].append(float(value))
        if step + 1 >= _FEWEST_STEPS:
            limit = _FALLEN_BEHIND * min(min(seconds[number]) for number in active)
            active = [number for number in active if min(seconds[number]) <= limit]
        if len(active) == 1 and step + 1 > _FEWEST_STEPS:
            break
    return seconds


def _calibrate(plan: Plan, measured: dict[tuple[str, int], float]) -> Plan:
    """Scale predictions: of those tried to what was measured, of the others by the common ratio."""
    steps, ratios = plan.steps_per_epoch, {}
    for key, seconds in measured.items():
        predicted = plan.candidate(*key).predicted_seconds
        ratios[key] = seconds * steps / predicted if predicted else 1.0
    common = math.exp(statistics.mean(math.log(max(ratio, 1e-9)) for ratio in ratios.values()))
    candidates = []
    for candidate in plan.candidates:
        key = (candidate.strategy, candidate.num_hosts)
        ratio = ratios.get(key, common)
        scaled = {term: seconds * ratio for term, seconds in candidate.seconds.items()}
        total = candidate.predicted_seconds if candidate.reason else sum(scaled.values())
        took = measured.get(key, 0.0)
        candidates.append(replace(candidate, seconds=scaled, predicted_seconds=total, measured_step_seconds=took))
    fewer = tuple(replace(c, predicted_seconds=c.predicted_seconds * common) for c in plan.fewer_ranks)
    return replace(plan, candidates=tuple(candidates), fewer_ranks=fewer, calibration=common)


def _time_step(engine: Engine, loader: Iterator[Batch]) -> float:
    engine.group.barrier()
    started = time.perf_counter()
    batch = next(loader)
    engine.backward(engine(batch).square().mean())
    return time.perf_counter() - started
