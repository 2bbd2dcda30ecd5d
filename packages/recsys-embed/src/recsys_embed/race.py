"""Choosing the hot tier by trying: a few sizes take turns while training goes on, and the fastest stays.

Moving rows between tiers changes no value, so the steps of a race are ordinary training steps and nothing is lost. The
cost model says which sizes are worth a try; what it cannot know, such as ranks that share cores, the race sees. No tier
is always among the runners, and wins unless another is faster by two per cent.

Callers may not assume that a race on one machine holds on another, or that it is free: every runner moves its rows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from recsys_embed.collection import TieredEmbeddingBagCollection
from recsys_embed.errors import input_error
from recsys_embed.plan import Candidate, Plan
from recsys_embed.profile import AccessStats

__all__ = ["RaceResult", "choose_runners", "race_tiers"]

_MIN_GAIN, _HOPELESS = 0.02, 1.5
_SPACING = 4


@dataclass(frozen=True)
class RaceResult:
    """How a race ended.

    Attributes:
        plan: The winner's; the collection has its tiers.
        step_seconds: Fastest time of every size that ran, the slowest rank's.
    """

    plan: Plan
    step_seconds: dict[int, float]


def choose_runners(plan: Plan, worst: float = 1.5) -> list[int]:
    """Return sizes worth a try: none, the plan's choice, and every fourth size that is not predicted far too slow.

    Args:
        plan: A plan with candidates, of :func:`recsys_embed.plan_tiers` with ``hot="auto"``.
        worst: A size predicted to take more than this times the best does not run.
    """
    if not plan.candidates:
        return [plan.num_hot_rows]
    sizes = [c.num_hot_rows for c in plan.candidates]
    limit = worst * min(c.step_seconds for c in plan.candidates)
    rungs = max(1, round(math.log(max(sizes) + 1, _SPACING)))
    wanted = {max(sizes) // _SPACING**rung for rung in range(min(rungs, 5))}
    nearest = [min(plan.candidates, key=lambda c: abs(c.num_hot_rows - size)) for size in wanted]
    return sorted({0, plan.num_hot_rows} | {c.num_hot_rows for c in nearest if c.step_seconds <= limit})


def race_tiers(
    embeddings: TieredEmbeddingBagCollection,
    stats: AccessStats,
    plan: Plan,
    train: Callable[[], float | None],
    rounds: int = 3,
    runners: Sequence[int] | None = None,
) -> RaceResult:
    """Try sizes of the hot tier in turn and keep the fastest. Collective.

    Args:
        embeddings: The collection, in no pipeline.
        stats: The counts that the plan was made of, the same on every rank.
        plan: Says which sizes are worth a try.
        train: Trains some steps, always equally many, in a pipeline of its own; returns the seconds of a step, or None
            to have the whole call timed.
        rounds: Turns of every runner; one that takes half as long again as the fastest has no further turn.
        runners: Sizes to try; :func:`choose_runners` when None. The two sizes between the fastest and its neighbours
            run as well.

    Raises:
        InputError: No round.
        PipelineError: A pipeline is open.
    """
    if rounds < 1:
        raise input_error("rounds", rounds, "at least 1", "3 take turns")
    predicted = {c.num_hot_rows: c for c in plan.candidates}
    seconds: dict[int, float] = {}

    def run(sizes: Sequence[int]) -> None:
        for _ in range(rounds):
            limit = _HOPELESS * min(seconds.values(), default=math.inf)
            for size in [s for s in sizes if seconds.get(s, 0) <= limit or not s]:
                embeddings.retier(_plan_of(plan, stats, size, predicted.get(size)))
                seconds[size] = min(_time(embeddings, train), seconds.get(size, math.inf))

    first = sorted(set(runners if runners is not None else choose_runners(plan)) | {0})
    run(first)
    run(_between(first, min(first, key=lambda size: seconds[size])))
    winner = min(seconds, key=lambda size: seconds[size])
    gain = 1 - seconds[winner] / seconds[0]
    if gain < _MIN_GAIN:
        winner, why = 0, f"none: the best of {len(seconds)} sizes that ran was {100 * gain:.1f} % faster, below 2 %"
    else:
        why = f"the fastest of {len(seconds)} sizes that ran, {100 * gain:.1f} % faster than none"
    chosen = replace(_plan_of(plan, stats, winner, predicted.get(winner)), reason=why)
    embeddings.retier(chosen)
    return RaceResult(chosen, dict(sorted(seconds.items())))


def _between(sizes: Sequence[int], best: int) -> list[int]:
    """Return the sizes halfway (geometrically) between the best one and its neighbours."""
    place = sizes.index(best)
    around = [s for s in sizes[max(0, place - 1) : place + 2] if s != best and min(s, best) > 0]
    return sorted({math.isqrt(s * best) for s in around} - set(sizes))


def _plan_of(plan: Plan, stats: AccessStats, size: int, predicted: Candidate | None) -> Plan:
    by_row = [t for t in stats.tables if t.name not in plan.pooled]
    rows = stats.most_present(size, by_row) if size else {}
    return replace(plan, hot_rows=rows, chosen=predicted, reason="runs in a race")


def _time(embeddings: TieredEmbeddingBagCollection, train: Callable[[], float | None]) -> float:
    """Return the seconds of the slowest rank."""
    embeddings.group.barrier("race")
    begin = time.perf_counter()
    taken = train()
    own = time.perf_counter() - begin if taken is None else taken
    return embeddings.group.all_reduce(torch.tensor(own, dtype=torch.float64), "max", tag="race").item()
