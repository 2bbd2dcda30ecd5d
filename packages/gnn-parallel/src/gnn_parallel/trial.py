"""Lets the strategies that a plan finds close run some real steps, keeps the fastest, and scales the predictions.

A cost model is right on average; where two predictions differ by less than its error, measuring is cheaper than
modelling better. The steps use the plan's own batches and leave the model as it was. Strategies take turns on the same
batches, until paired differences tell the two best apart or the budget is spent. What steps took over what was
predicted for them also corrects the predictions of the strategies that were not tried: much of a model's error is
common to all, since they share processor and upper layers.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from core_kernels.comm import Group
from gnn_parallel.dry_run import half_width
from gnn_parallel.engine import Batch, Engine
from gnn_parallel.errors import PlanMismatchError, input_error
from gnn_parallel.plan import Candidate, Plan
from gnn_parallel.profile import left_as_it_is

__all__ = ["MODEL_ERROR", "are_apart", "contenders", "try_strategies"]

MODEL_ERROR = 0.3
"""Predictions closer than this share of the best one do not decide by themselves."""

_MOST_CONTENDERS, _FEWEST_STEPS = 3, 2
_WARM_STEPS = 2
"""Steps' worth of time that an engine's first, untimed step takes: it warms up, and prepares what is ahead."""

_MOST_CORRECTED = 3.0
"""Largest factor by which a trial corrects what was predicted of strategies that were not tried."""

_FALLEN_BEHIND = 1.15
"""A strategy whose quickest step takes so many times the quickest of all is not tried further."""


def contenders(plan: Plan) -> list[Candidate]:
    """Return the best prediction and those that are closer to it than the model is right, the best first."""
    ranked = sorted((c for c in plan.candidates if not c.reason), key=lambda c: c.predicted_seconds)
    limit = (1 + plan.model_error) * ranked[0].predicted_seconds
    return [c for c in ranked if c.predicted_seconds <= limit][:_MOST_CONTENDERS]


def try_strategies(
    plan: Plan, model: nn.Module, group: Group, num_steps: int = 8, budget_seconds: float = math.inf
) -> Plan:
    """Run the most promising strategies for some steps and return the plan with the fastest.

    Args:
        plan: A plan with its data.
        model: The model; left as it is.
        group: The ranks.
        num_steps: Most timed steps of each strategy; fewer where it falls behind or is told apart earlier.
        budget_seconds: Longest time to spend. Where it does not allow the fewest steps of the two best, only the best
            one is tried, to scale predictions; where not even that, the plan is returned as it is.

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
    tried = _affordable(plan, budget_seconds)
    if not tried:
        return plan
    engines = []
    for candidate in tried:
        chosen = replace(plan, strategy=candidate.strategy, num_hosts=candidate.num_hosts)
        engines.append(Engine(chosen.with_data(data), model, group))
    with left_as_it_is(model):
        seconds = _Heats(engines, data.train_ids if data.seeds is None else data.seeds).run(num_steps, budget_seconds)
    for engine in engines:
        engine.close()
    typical = [_typical(steps) for steps in seconds]
    winner = tried[typical.index(min(typical))]
    took = torch.tensor([time.perf_counter() - started], dtype=torch.float64)
    settled = _calibrate(plan, dict(zip([(c.strategy, c.num_hosts) for c in tried], typical, strict=True)))
    return replace(
        settled,
        strategy=winner.strategy,
        num_hosts=winner.num_hosts,
        trial_seconds=float(group.all_reduce(took, op="max", tag="planning")),
    ).with_data(data)


def are_apart(first: list[float], second: list[float]) -> bool:
    """Return whether the 95 % interval of the mean difference of paired samples excludes zero.

    >>> are_apart([1.0, 1.1, 0.9], [2.0, 2.1, 1.9]), are_apart([1.0, 2.0, 1.0], [2.0, 1.0, 2.0])
    (True, False)
    """
    differences = [b - a for a, b in zip(first, second, strict=False)]
    return len(differences) > 1 and abs(statistics.mean(differences)) > half_width(differences)


def _typical(steps: list[float]) -> float:
    """Return the mean of the quicker half: other load on the machine only ever adds."""
    return statistics.mean(sorted(steps)[: (len(steps) + 1) // 2])


def _affordable(plan: Plan, budget_seconds: float) -> list[Candidate]:
    """Return the contenders for whose fewest steps the budget is enough: the best one alone, at least two, or none."""
    tried = contenders(plan)
    while tried:
        round_seconds = sum(c.predicted_seconds for c in tried) / plan.steps_per_epoch
        if (_WARM_STEPS + _FEWEST_STEPS) * round_seconds <= budget_seconds:
            return tried
        tried = tried[:-1]
    return tried


class _Heats:
    """Lets engines take turns, so that a slow moment hits them all, and drops those that fall behind.

    Args:
        engines: One per strategy.
        items: Seeds or pairs trained on.
    """

    def __init__(self, engines: list[Engine], items: Tensor):
        self.engines, self.loaders = engines, [_endless(engine, items) for engine in engines]
        self.optimizer = torch.optim.Adam(engines[0].model.parameters(), lr=0.0)  # one model in all engines
        self.seconds: list[list[float]] = [[] for _ in engines]
        self.active = list(range(len(engines)))
        self.spent_seconds = 0.0

    def run(self, num_steps: int, budget_seconds: float) -> list[list[float]]:
        """Return per engine the seconds of its steps on the slowest rank, the same on every rank."""
        self._round()  # warms up
        for step in range(num_steps):
            before = self.spent_seconds
            for number, value in self._round().items():
                self.seconds[number].append(value)
            round_seconds = self.spent_seconds - before
            if step + 1 < _FEWEST_STEPS:
                continue
            self._drop_slow()
            if self.spent_seconds + round_seconds > budget_seconds or self._is_clear():
                break
        return self.seconds

    def _round(self) -> dict[int, float]:
        """Run one step of every engine that is still tried; returns their seconds."""
        started = time.perf_counter()
        mine = {number: self._time_step(self.engines[number], self.loaders[number]) for number in self.active}
        numbers = torch.tensor([*mine.values(), time.perf_counter() - started], dtype=torch.float64)
        *slowest, elapsed = self.engines[0].group.all_reduce(numbers, op="max", tag="planning").tolist()
        self.spent_seconds += elapsed
        return dict(zip(mine, slowest, strict=True))

    def _time_step(self, engine: Engine, loader: Iterator[Batch]) -> float:
        """Return the seconds of computing one batch and preparing another, in the background or not."""
        engine.group.barrier()
        started = time.perf_counter()
        batch = next(loader)
        self.optimizer.zero_grad()
        engine.backward(engine(batch).square().mean())
        self.optimizer.step()
        engine.settle()
        return time.perf_counter() - started

    def _drop_slow(self) -> None:
        limit = _FALLEN_BEHIND * min(min(self.seconds[number]) for number in self.active)
        self.active = [number for number in self.active if min(self.seconds[number]) <= limit]

    def _is_clear(self) -> bool:
        if len(self.active) == 1:
            return len(self.seconds[self.active[0]]) > _FEWEST_STEPS
        best, second = sorted(self.active, key=lambda number: _typical(self.seconds[number]))[:2]
        return len(self.seconds[best]) > _FEWEST_STEPS and are_apart(self.seconds[best], self.seconds[second])


def _calibrate(plan: Plan, measured: dict[tuple[str, int], float]) -> Plan:
    """Set predictions of strategies that were tried to what was measured, and scale those of the others.

    What links take was measured before and is the same for all; of the rest, the common ratio is taken over.
    """
    steps, ratios = plan.steps_per_epoch, []
    for key, seconds in measured.items():
        candidate = plan.candidate(*key)
        rest = candidate.predicted_seconds - _on_links(candidate)
        found = seconds * steps - _on_links(candidate)
        ratios.append(min(max(found / rest, 1 / _MOST_CORRECTED), _MOST_CORRECTED) if rest else 1.0)
    common = math.exp(statistics.mean(map(math.log, ratios)))
    candidates = []
    for candidate in plan.candidates:
        took = measured.get((candidate.strategy, candidate.num_hosts), 0.0)
        seconds = took * steps if took else _scaled(candidate, common)
        by_term = candidate.seconds
        if not candidate.reason:
            by_term = {t: s * seconds / max(candidate.predicted_seconds, 1e-12) for t, s in by_term.items()}
        candidates.append(replace(candidate, seconds=by_term, predicted_seconds=seconds, measured_step_seconds=took))
    fewer = tuple(replace(c, predicted_seconds=_scaled(c, common)) for c in plan.fewer_ranks)
    return replace(plan, candidates=tuple(candidates), fewer_ranks=fewer, calibration=common)


def _on_links(candidate: Candidate) -> float:
    return min(candidate.link_seconds, candidate.predicted_seconds)


def _scaled(candidate: Candidate, ratio: float) -> float:
    if candidate.reason:
        return candidate.predicted_seconds
    return _on_links(candidate) + ratio * (candidate.predicted_seconds - _on_links(candidate))


def _endless(engine: Engine, items: Tensor) -> Iterator[Batch]:
    for epoch in itertools.count():
        yield from engine.loader(items, epoch=epoch)
