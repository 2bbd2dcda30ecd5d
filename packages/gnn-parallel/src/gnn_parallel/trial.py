"""Lets the strategies of a plan run some real steps, keeps the fastest, and predicts what was measured.

A cost model is right on average; where two predictions differ by less than its error, measuring is cheaper than
modelling better. The steps use the plan's own batches and leave the model as it was. A *burst* is a few steps as
training takes them, batches prepared ahead, to the end of what runs in the background; strategies take turns by bursts,
until paired differences tell the two best apart, or the two are alike, or the budget is spent.

The budget is a share of what the epochs asked for take, by the quickest steps *measured* so far: nothing is started
that is not expected to fit into the rest, making engines and filling them with batches included. So the best prediction
is tried first, and dearer ones only while they leave half of the rest to the race. What could not be tried is predicted
by the model, times what steps took over what was predicted: much of a model's error is common to all strategies.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from core_kernels.comm import Group
from gnn_parallel.clock import TERMS, settle_terms
from gnn_parallel.dry_run import half_width
from gnn_parallel.engine import Batch, Engine
from gnn_parallel.errors import PlanMismatchError, input_error
from gnn_parallel.plan import Candidate, Plan
from gnn_parallel.profile import left_as_it_is

__all__ = ["Entry", "are_apart", "try_strategies"]

_BURST_STEPS, _MOST_TRIED = 2, 4
_MARGIN = 0.8
"""Of the budget; what is left over is for steps that turn out quicker in training than any burst of the trial."""

_DOUBT = 1.5
"""How many times a prediction a step is taken to last before any has been measured."""

_FALLEN_BEHIND = 1.2
"""A strategy that takes so many times as long as the fastest is not tried further after two bursts."""

_FAR_BEHIND = 2.0
"""One that takes so many times as long in its first burst gives its memory back at once."""

_FEWEST_PAIRS, _ALIKE = 5, 0.02
"""Bursts of the two best that decide; and the share of a step within which they are alike."""

_MOST_CORRECTED = 3.0
"""Largest factor by which a trial corrects what was predicted of strategies that were not tried."""


def try_strategies(
    plan: Plan, model: nn.Module, group: Group, num_steps: int = 32, budget_share: float = math.inf
) -> Plan:
    """Run strategies for some steps and return the plan with the fastest.

    Args:
        plan: A plan with its data.
        model: The model; left as it is.
        group: The ranks.
        num_steps: Most timed steps of each strategy; fewer where it falls behind or is told apart earlier.
        budget_share: Most that counting and trying may take together, as a share of ``plan.num_epochs`` epochs. Where
            it does not allow the fewest steps of the best prediction, the plan is returned as it is.

    Returns:
        The plan with ``measured_step_seconds`` of those that were tried, the fastest as its strategy, and predictions
        set to or scaled by what was measured.

    Raises:
        InputError: ``num_steps`` is less than 1.
        PlanMismatchError: The plan has no data.

    Collective: all ranks; they return equal plans.
    """
    if num_steps < 1:
        raise input_error("num_steps", num_steps, "at least 1", "pass the number of steps to time")
    if plan.data is None:
        raise PlanMismatchError(
            "the plan has no data; expected a bound plan; call plan.bind(graph, features, partition)"
        )
    trial = _Trial(plan, model, group, budget_share)
    with left_as_it_is(model):
        trial.run(-(-num_steps // _BURST_STEPS))
    if not trial.entries:
        return plan
    winner = min(trial.entries, key=lambda entry: entry.step_seconds).candidate
    return replace(
        _calibrate(plan, trial.entries),
        strategy=winner.strategy,
        num_hosts=winner.num_hosts,
        trial_seconds=trial.spent_seconds,
    ).with_data(plan.data)


def are_apart(first: list[float], second: list[float]) -> bool:
    """Return whether the 95 % interval of the mean difference of paired samples excludes zero.

    >>> are_apart([1.0, 1.1, 0.9], [2.0, 2.1, 1.9]), are_apart([1.0, 2.0, 1.0], [2.0, 1.0, 2.0])
    (True, False)
    """
    differences = [b - a for a, b in zip(first, second, strict=False)]
    return len(differences) > 1 and abs(statistics.mean(differences)) > half_width(differences)


@dataclass
class Entry:
    """A strategy in a trial.

    Attributes:
        candidate: What was predicted of it.
        bursts: Seconds of a step, of every burst.
        terms: Seconds by term over all bursts.
    """

    candidate: Candidate
    bursts: list[float] = field(default_factory=list)
    terms: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TERMS, 0.0))

    @property
    def step_seconds(self) -> float:
        """What a step takes: the median, since other work on the machine spoils single bursts."""
        return statistics.median(self.bursts)

    def is_behind(self, best_seconds: float) -> bool:
        """Whether even its quickest burst was far slower than a step of the best; delays only ever add."""
        return min(self.bursts) > _FALLEN_BEHIND * best_seconds


class _Trial:
    """Admits strategies to a race as far as the budget goes.

    Args:
        plan: The plan.
        model: The model.
        group: The ranks.
        budget_share: Of the epochs the plan is for.

    Attributes:
        entries: What was tried, in the order of predictions.
        spent_seconds: Of the slowest rank, so far.
    """

    def __init__(self, plan: Plan, model: nn.Module, group: Group, budget_share: float):
        self.plan, self.model, self.group, self.budget_share = plan, model, group, budget_share
        self.optimizer = torch.optim.Adam(model.parameters(), lr=0.0)  # one model in all engines
        self.entries: list[Entry] = []
        self.spent_seconds = 0.0
        self._runners: dict[int, tuple[Engine, Iterator[Batch]]] = {}
        self._started = time.perf_counter()

    def run(self, num_bursts: int) -> None:
        """Try what the budget allows."""
        candidates = sorted((c for c in self.plan.candidates if not c.reason), key=lambda c: c.predicted_seconds)
        for candidate in candidates[:_MOST_TRIED]:
            if not self._admit(candidate):
                break  # the others are dearer
            self._retire(_FAR_BEHIND)
        self._race(num_bursts)
        self._retire(0.0)
        self._note(0.0)

    def _admit(self, candidate: Candidate) -> bool:
        """Make an engine and time its first burst, if that fits into half of what is left, or all for the first."""
        plan = self.plan
        step_seconds = candidate.predicted_seconds / plan.steps_per_epoch
        cost = (1 + plan.look_ahead + _BURST_STEPS) * self._correction() * step_seconds
        if cost > self._left(step_seconds) * (0.5 if self.entries else 1.0):
            return False
        entry = self._enter(candidate)
        self._burst(entry, 1, is_counted=False)  # warms up, and prepares what is ahead
        self._burst(entry)
        self.entries.append(entry)
        return True

    def _enter(self, candidate: Candidate) -> Entry:
        """Make an engine for a strategy."""
        plan, entry = self.plan, Entry(candidate)
        assert plan.data is not None
        chosen = replace(plan, strategy=candidate.strategy, num_hosts=candidate.num_hosts)
        engine = Engine(chosen.with_data(plan.data), self.model, self.group)
        items = plan.data.train_ids if plan.data.seeds is None else plan.data.seeds
        self._runners[id(entry)] = engine, _endless(engine, items)
        return entry

    def _retire(self, limit: float) -> None:
        """Give back the engines of entries that take more than so many times as long as the best."""
        best = min((entry.step_seconds for entry in self.entries), default=0.0)
        for entry in self.entries:
            if entry.step_seconds > limit * best and id(entry) in self._runners:
                self._runners.pop(id(entry))[0].close()

    def _race(self, num_bursts: int) -> None:
        """Let those that have not fallen behind take turns."""
        while self.entries:
            best = min(entry.step_seconds for entry in self.entries)
            going = [e for e in self.entries if id(e) in self._runners and len(e.bursts) < num_bursts]
            going = [e for e in going if len(e.bursts) < 2 or not e.is_behind(best)]
            if not going or self._is_clear():
                return
            for entry in going:
                if _BURST_STEPS * entry.step_seconds > self._left(best):
                    return
                self._burst(entry)

    def _is_clear(self) -> bool:
        """Whether the two best are told apart, or are alike."""
        ranked = sorted(self.entries, key=lambda entry: entry.step_seconds)[:2]
        if len(ranked[0].bursts) < _FEWEST_PAIRS:
            return False
        if len(ranked) == 1 or ranked[1].is_behind(ranked[0].step_seconds):
            return True
        first, second = (entry.bursts for entry in ranked)
        differences = [b - a for a, b in zip(first, second, strict=False)]
        if len(differences) < _FEWEST_PAIRS:
            return False
        return are_apart(first, second) or half_width(differences) < _ALIKE * ranked[0].step_seconds

    def _correction(self) -> float:
        """Return what steps took over what was predicted of them, at most."""
        ratios = [
            entry.step_seconds * self.plan.steps_per_epoch / entry.candidate.predicted_seconds
            for entry in self.entries
            if entry.candidate.predicted_seconds
        ]
        return max(ratios, default=_DOUBT)

    def _left(self, step_seconds: float) -> float:
        """Return the seconds that may still be spent, by the quickest burst, or by a prediction before there is any."""
        if math.isinf(self.budget_share):
            return math.inf
        plan = self.plan
        best = min((min(entry.bursts) for entry in self.entries), default=step_seconds)
        whole = _MARGIN * self.budget_share * plan.num_epochs * plan.steps_per_epoch * best
        return whole - plan.counting_seconds - self.spent_seconds

    def _burst(self, entry: Entry, num_steps: int = _BURST_STEPS, is_counted: bool = True) -> None:
        """Run some steps of an entry, to the end of what runs in the background."""
        engine, batches = self._runners[id(entry)]
        engine.clock.take()
        self.group.barrier()
        started = time.perf_counter()
        for _ in range(num_steps):
            batch = next(batches)
            self.optimizer.zero_grad()
            engine.backward(engine(batch).square().mean())
            with engine.clock("compute"):
                self.optimizer.step()
        engine.settle()
        elapsed = time.perf_counter() - started
        slowest = self._note(elapsed)
        if is_counted:
            entry.bursts.append(slowest / num_steps)
            for term, seconds in settle_terms(self.group, engine.clock.take(), elapsed).items():
                entry.terms[term] += seconds

    def _note(self, elapsed: float) -> float:
        """Note what has been spent so far; returns the longest of what ranks took for something."""
        mine = torch.tensor([elapsed, time.perf_counter() - self._started], dtype=torch.float64)
        slowest, self.spent_seconds = self.group.all_reduce(mine, op="max", tag="planning").tolist()
        return slowest


def _calibrate(plan: Plan, entries: list[Entry]) -> Plan:
    """Set predictions of strategies that were tried to what was measured, and scale those of the others.

    What links take was measured before and is the same for all; of the rest, the common ratio is taken over.
    """
    steps = plan.steps_per_epoch
    measured = {(e.candidate.strategy, e.candidate.num_hosts): e for e in entries}
    ratios = [_ratio(entry, steps) for entry in entries]
    common = math.exp(statistics.mean(map(math.log, ratios)))
    candidates = []
    for candidate in plan.candidates:
        entry = measured.get((candidate.strategy, candidate.num_hosts))
        if entry is None:
            candidates.append(_scaled(candidate, common))
            continue
        seconds = entry.step_seconds * steps
        share = seconds / max(sum(entry.terms.values()), 1e-12)
        by_term = {term: share * value for term, value in entry.terms.items()}
        candidates.append(
            replace(candidate, seconds=by_term, predicted_seconds=seconds, measured_step_seconds=entry.step_seconds)
        )
    fewer = tuple(_scaled(candidate, common) for candidate in plan.fewer_ranks)
    return replace(plan, candidates=tuple(candidates), fewer_ranks=fewer, calibration=common)


def _ratio(entry: Entry, steps: int) -> float:
    """Return what a strategy took over what was predicted, both without what links take."""
    on_links = _on_links(entry.candidate)
    predicted, found = entry.candidate.predicted_seconds - on_links, entry.step_seconds * steps - on_links
    return min(max(found / predicted, 1 / _MOST_CORRECTED), _MOST_CORRECTED) if predicted else 1.0


def _scaled(candidate: Candidate, ratio: float) -> Candidate:
    """Return a candidate whose predictions, what links take left out, are a number of times as long."""
    if candidate.reason:
        return candidate
    on_links, before = _on_links(candidate), candidate.predicted_seconds
    after = on_links + ratio * (before - on_links)
    by_term = {term: seconds * after / max(before, 1e-12) for term, seconds in candidate.seconds.items()}
    return replace(candidate, seconds=by_term, predicted_seconds=after)


def _on_links(candidate: Candidate) -> float:
    return min(candidate.link_seconds, candidate.predicted_seconds)


def _endless(engine: Engine, items: Tensor) -> Iterator[Batch]:
    for epoch in itertools.count():
        yield from engine.loader(items, epoch=epoch)
