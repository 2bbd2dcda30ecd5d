"""Choosing the hot tier by trying: a few sizes take turns while training goes on, and the fastest stays.

Moving rows between tiers changes no value, so the steps of a race are ordinary training steps and nothing is lost. The
cost model says which sizes are worth a try: its best tier, the largest that it finds about as good, neighbours by
factors of two, and none. Sizes that paired intervals show to be slower than the leader drop out, and round by round the
field narrows to the two best and none; the race ends when nothing is left to decide, at the latest after
``rounds`` rounds or ``max_seconds``. A tie goes to no tier: another size stays only if it is faster by one per cent in
the mean, and no more than two per cent slower at the far end of its interval. Where turns are too uneven to say that,
the plan counts as a second witness: the mean of the turns and the prediction must both speak for a tier.

Callers may not assume that a race on one machine holds on another, or that it is free: every runner moves its rows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from recsys_embed.collection import TieredEmbeddingBagCollection
from recsys_embed.contest import Contest, Ratio
from recsys_embed.errors import input_error
from recsys_embed.plan import Candidate, Plan
from recsys_embed.profile import AccessStats

__all__ = ["RaceResult", "choose_runners", "race_tiers", "take_turn"]

_MIN_GAIN, _MAX_LOSS = 0.01, 0.02
_HOPELESS = (2.0, 1.5, 1.3)  # times the leader, after one, two and three rounds
_MIN_ROUNDS = 4
_MOST_TIERS = (6, 5, 3, 2)  # that go on after one, two, three and more rounds
_ABOUT_AS_GOOD, _FACTOR, _APART, _LEAST_ROWS = 1.03, 2, 1.5, 8


@dataclass(frozen=True)
class RaceResult:
    """How a race ended.

    Attributes:
        plan: The winner's; the collection has its tiers.
        step_seconds: Median of the turns of every size that ran, the slowest rank's.
        against_none: Every size's seconds over those without a tier, with the interval the decision was made on.
        num_rounds: Rounds until it was decided, or the limit was reached.
        seconds: What the race took, moving rows and training together.
    """

    plan: Plan
    step_seconds: dict[int, float]
    against_none: dict[int, Ratio] = field(default_factory=dict)
    num_rounds: int = 0
    seconds: float = 0.0


def choose_runners(plan: Plan, worst: float = 1.5) -> list[int]:
    """Return sizes worth a try: none, the choice, the best tier, the largest about as good, and neighbours of both.

    Args:
        plan: A plan with candidates, of :func:`recsys_embed.plan_tiers` with ``hot="auto"``.
        worst: A size predicted to take more than this times the best does not run.
    """
    tiers = [c for c in plan.candidates if c.num_hot_rows]
    if not tiers:
        return sorted({0, plan.num_hot_rows})
    limit = worst * min(c.step_seconds for c in plan.candidates)
    best = min(tiers, key=lambda c: c.step_seconds)
    top = max(c.num_hot_rows for c in tiers if c.step_seconds <= _ABOUT_AS_GOOD * best.step_seconds)
    middle, largest = best.num_hot_rows, max(c.num_hot_rows for c in tiers)
    kept = [plan.num_hot_rows] if plan.num_hot_rows else []
    for size in (top, middle, top // _FACTOR, middle * _FACTOR, top // _FACTOR**2, middle // _FACTOR):
        is_new = all(max(size, other) >= _APART * min(size, other) for other in kept)
        if is_new and min(_LEAST_ROWS, largest) <= size <= largest and _predicted(tiers, size).step_seconds <= limit:
            kept.append(size)
    return sorted({0, *kept})


def race_tiers(
    embeddings: TieredEmbeddingBagCollection,
    stats: AccessStats,
    plan: Plan,
    train: Callable[[], float | None],
    rounds: int = 12,
    runners: Sequence[int] | None = None,
    max_seconds: float = math.inf,
) -> RaceResult:
    """Try sizes of the hot tier in turn and keep the fastest. Collective.

    Args:
        embeddings: The collection, in no pipeline.
        stats: The counts that the plan was made of, the same on every rank.
        plan: Says which sizes are worth a try.
        train: Trains some steps, always equally many, in a pipeline of its own; returns the seconds of a step, or None
            to have the whole call timed. Its first call is not counted.
        rounds: Most turns of every runner; few leave wide intervals, which speak for none.
        runners: Sizes to try; :func:`choose_runners` when None.
        max_seconds: No round begins after this.

    Returns:
        The winner, and what was measured.

    Raises:
        InputError: No round, a size beyond the tables, or ``train`` returned what are no seconds, on any rank.
        PipelineError: A pipeline is open.

    Cost: at most ``rounds`` times as many turns as there are runners; fewer when losers drop out.
    """
    if rounds < 1:
        raise input_error("rounds", rounds, "at least 1", "12 is a good limit")
    alive = sorted(set(runners if runners is not None else choose_runners(plan)) | {0})
    most = sum(t.num_embeddings for t in stats.tables if t.name not in plan.pooled)
    if not 0 <= alive[0] <= alive[-1] <= most:
        raise input_error("runners", alive, f"sizes from 0 to {most}, the rows that can be hot", "leave out the others")
    plans = {size: _plan_of(plan, stats, size) for size in alive}
    contest, taken = Contest(), 0.0
    if len(alive) > 1:
        taken = take_turn(embeddings, plans[0], train)[1]  # loads code; not counted
    while len(contest.rounds) < rounds and taken < max_seconds and len(alive) > 1:
        seconds: dict[int, float] = {}
        for size in alive if len(contest.rounds) % 2 == 0 else alive[::-1]:
            seconds[size], whole = take_turn(embeddings, plans[size], train)
            taken += whole
        contest.add(seconds)
        alive = _drop_losers(contest, alive)
        if _is_decided(contest, alive):
            break
    winner, why = _judge(contest, alive, len(plans) - 1, plan.num_hot_rows > 0)
    chosen = replace(plans[winner], reason=why)
    embeddings.retier(chosen)
    ratios = {size: contest.ratio(size, 0, len(alive) - 1) for size in plans if contest.rounds}
    return RaceResult(chosen, contest.medians(), ratios, len(contest.rounds), taken)


def _drop_losers(contest: Contest, alive: list[int]) -> list[int]:
    """Return who goes on: no tier, and the best of the sizes that are not known to be slower than the leader."""
    leader, number = contest.fastest(alive), len(contest.rounds)
    behind = {size: contest.ratio(size, leader, len(alive) - 1) for size in alive if size}
    kept = [
        size
        for size, ratio in behind.items()
        if (ratio.low <= 1 if number >= _MIN_ROUNDS else ratio.mean <= _HOPELESS[number - 1])
    ]
    kept.sort(key=lambda size: behind[size].mean)
    return [0, *sorted(kept[: _MOST_TIERS[min(number, len(_MOST_TIERS)) - 1]])]


def _is_decided(contest: Contest, alive: list[int]) -> bool:
    """Whether more rounds cannot change who wins by more than the least gain."""
    tiers = [size for size in alive if size]
    if len(contest.rounds) < _MIN_ROUNDS or not tiers:
        return not tiers
    gains = {size: contest.ratio(0, size, len(tiers)) for size in tiers}
    if all(gain.high < 1 + _MIN_GAIN for gain in gains.values()):
        return True
    leader = contest.fastest(tiers)
    close = [contest.ratio(size, leader, len(tiers)) for size in tiers]
    return gains[leader].low > 1 and all(ratio.high < 1 + 2 * _MIN_GAIN for ratio in close)


def _judge(contest: Contest, alive: list[int], num_tiers: int, plan_has_tier: bool) -> tuple[int, str]:
    """Return the winner and why."""
    tiers = [size for size in alive if size]
    if not tiers or len(contest.rounds) < 2:
        return 0, f"none: all of {num_tiers} sizes that ran were slower" if num_tiers else "none: nothing else ran"
    leader = contest.fastest(tiers)
    gain = contest.ratio(0, leader, len(tiers))
    shown = f"none takes {100 * (gain.mean - 1):.1f} % longer [{100 * (gain.low - 1):.1f}, {100 * (gain.high - 1):.1f}]"
    if gain.mean >= 1 + _MIN_GAIN and gain.low > 1 - _MAX_LOSS:
        return leader, f"the fastest of {num_tiers} sizes that ran: {shown}"
    if gain.mean >= 1 + _MIN_GAIN and gain.high > 1 + _MAX_LOSS and plan_has_tier and gain.num_rounds >= _MIN_ROUNDS:
        return leader, f"the fastest of {num_tiers} sizes that ran in the mean, as the plan predicts: {shown}"
    return 0, f"none: the best of {num_tiers} sizes that ran is not surely faster: {shown}"


def _predicted(candidates: Sequence[Candidate], size: int) -> Candidate:
    return min(candidates, key=lambda c: abs(c.num_hot_rows - size))


def _plan_of(plan: Plan, stats: AccessStats, size: int) -> Plan:
    by_row = [t for t in stats.tables if t.name not in plan.pooled]
    rows = stats.most_present(size, by_row) if size else {}
    predicted = next((c for c in plan.candidates if c.num_hot_rows == size), None)
    return replace(plan, hot_rows=rows, chosen=predicted, reason="runs in a race")


def take_turn(
    embeddings: TieredEmbeddingBagCollection, plan: Plan, train: Callable[[], float | None]
) -> tuple[float, float]:
    """Train with a plan; return the seconds of a step and of the whole turn, of the slowest rank each. Collective."""
    embeddings.group.barrier("race")
    begin = time.perf_counter()
    embeddings.retier(plan)
    start = time.perf_counter()
    step = train()
    stop = time.perf_counter()
    seconds = stop - start if step is None else float(step)
    own = torch.tensor([seconds if 0 < seconds < math.inf else math.inf, stop - begin], dtype=torch.float64)
    slowest = embeddings.group.all_reduce(own, "max", tag="race").tolist()
    if slowest[0] == math.inf:  # the same on all ranks
        raise input_error("train()", seconds, "seconds above 0 on every rank", "return the time of a step, or None")
    return slowest[0], slowest[1]
