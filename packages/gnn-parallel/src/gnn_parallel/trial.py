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
from dataclasses import replace

import torch
from torch import nn

from core_kernels.comm import Group
from gnn_parallel.dry_run import BUDGET_SHARE
from gnn_parallel.engine import Engine
from gnn_parallel.errors import PlanMismatchError, input_error
from gnn_parallel.plan import Candidate, Plan
from gnn_parallel.profile import left_as_it_is

__all__ = ["MODEL_ERROR", "contenders", "try_strategies"]

MODEL_ERROR = 0.3
"""Predictions closer than this share of the best one do not decide by themselves."""

_MOST_CONTENDERS, _FEWEST_STEPS = 3, 2


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
        num_steps: Most steps of each strategy; fewer, but at least 2, where they would take more than what counting
            has left of 5 % of an epoch.

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
    num_steps = _affordable_steps(plan, tried, num_steps)
    engines = []
    for candidate in tried:
        chosen = replace(plan, strategy=candidate.strategy, num_hosts=candidate.num_hosts)
        engines.append(Engine(chosen.with_data(data), model, group))
    seconds: list[list[float]] = [[] for _ in engines]
    items = data.train_ids if data.seeds is None else data.seeds
    with left_as_it_is(model):
        for step in range(num_steps):  # strategies take turns, so that a slow moment hits them all
            for engine, elapsed in zip(engines, seconds, strict=True):
                elapsed.append(_time_step(engine, items, step))
    for engine in engines:
        engine.close()
    # Other load on the machine only ever adds: the quickest step tells strategies apart, the median what a step takes.
    mine = torch.tensor([[min(s), statistics.median(s)] for s in seconds], dtype=torch.float64)
    quickest, typical = group.all_reduce(mine, op="max", tag="planning").T.tolist()
    trial_seconds = group.all_reduce(
        torch.tensor([time.perf_counter() - started], dtype=torch.float64), op="max", tag="planning"
    )
    winner = tried[quickest.index(min(quickest))]
    settled = _calibrate(plan, dict(zip([(c.strategy, c.num_hosts) for c in tried], typical, strict=True)))
    return replace(
        settled, strategy=winner.strategy, num_hosts=winner.num_hosts, trial_seconds=float(trial_seconds)
    ).with_data(data)


def _affordable_steps(plan: Plan, tried: list[Candidate], num_steps: int) -> int:
    spent = plan.counting_seconds / max(plan.predicted.predicted_seconds, 1e-9)
    left = max(0.0, BUDGET_SHARE - spent) * plan.steps_per_epoch
    return min(num_steps, max(_FEWEST_STEPS, int(left / len(tried))))


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


def _time_step(engine: Engine, items: torch.Tensor, step: int) -> float:
    engine.group.barrier()
    started = time.perf_counter()
    batch = engine.batch_at(items, step)
    engine.backward(engine(batch).square().mean())
    return time.perf_counter() - started
