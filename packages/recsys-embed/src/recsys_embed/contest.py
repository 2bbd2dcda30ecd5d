"""Which of several ways is faster, from turns taken one after the other: paired comparison, with intervals.

In a round every way has one turn, so that a slow moment of the machine falls on all of them; ways are compared by the
ratio of their seconds in the rounds that both took part in. The interval of a ratio is Student's, on logarithms.

Callers may not assume that the fastest of many ways is as fast as its own turns say: the best of equals is the
luckiest. Ask for intervals with as many ``comparisons`` as there were ways, and measure again in rounds that chose
nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

__all__ = ["Contest", "Ratio"]


@dataclass(frozen=True)
class Ratio:
    """Seconds of one way over those of another.

    Attributes:
        mean: Geometric mean over rounds.
        low: Lower end of the interval, 0 when there are fewer than two rounds.
        high: Upper end, infinite when there are fewer than two rounds.
        num_rounds: Rounds that both took part in.
    """

    mean: float
    low: float
    high: float
    num_rounds: int

    @property
    def is_settled(self) -> bool:
        """Whether the interval leaves out 1: one of the two is faster."""
        return self.low > 1 or self.high < 1

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


class Contest:
    """Seconds of ways, named by integers, round by round.

    Args:
        confidence: Of every interval, over all its comparisons together.

    >>> contest = Contest()
    >>> for noise in (1.0, 1.3, 0.9, 1.1):
    ...     contest.add({0: 1.0 * noise, 8: 0.8 * noise})
    >>> contest.ratio(8, 0).high < 0.81
    True
    """

    def __init__(self, confidence: float = 0.95):
        self.confidence = confidence
        self.rounds: list[dict[int, float]] = []

    def add(self, seconds: Mapping[int, float]) -> None:
        """Add a round."""
        self.rounds.append(dict(seconds))

    def turns(self, way: int) -> list[float]:
        """Return the seconds of every turn of a way."""
        return [r[way] for r in self.rounds if way in r]

    def medians(self) -> dict[int, float]:
        """Return the median seconds of every way, by ascending way."""
        ways = sorted({way for r in self.rounds for way in r})
        return {way: statistics.median(self.turns(way)) for way in ways}

    def ratio(self, way: int, other: int, comparisons: int = 1) -> Ratio:
        """Compare two ways.

        Args:
            way: The one above the line.
            other: The one below.
            comparisons: How many comparisons the confidence has to cover together (Bonferroni's rule).
        """
        logs = [math.log(r[way] / r[other]) for r in self.rounds if way in r and other in r]
        if not logs:
            return Ratio(math.nan, 0.0, math.inf, 0)
        mean = statistics.fmean(logs)
        if len(logs) < 2 or way == other:
            exact = way == other
            return Ratio(math.exp(mean), float(exact), 1.0 if exact else math.inf, len(logs))
        tail = (1 - self.confidence) / 2 / max(comparisons, 1)
        reach = _student(len(logs) - 1, 1 - tail) * statistics.stdev(logs) / math.sqrt(len(logs))
        return Ratio(math.exp(mean), math.exp(mean - reach), math.exp(mean + reach), len(logs))

    def regret(self, choice: int, reference: int = 0) -> Ratio:
        """Compare a choice with the best of all ways.

        The mean is cross-fitted: the best is found in the even rounds and compared in the odd ones, and the other way
        around, since the best of one set of rounds looks better in them than it is. The interval covers the comparisons
        with all other ways together and is never below 1.
        """
        others = sorted({way for r in self.rounds for way in r} - {choice})
        if not others:
            return Ratio(1.0, 1.0, 1.0, len(self.rounds))
        logs = []
        for finds, compares in ((0, 1), (1, 0)):
            best = self.part(finds, 2).fastest([choice, *others], reference)
            logs.append(math.log(self.part(compares, 2).ratio(choice, best).mean))
        pairs = [self.ratio(choice, way, len(others)) for way in others]
        low, high = (max(1.0, max(getattr(pair, end) for pair in pairs)) for end in ("low", "high"))
        return Ratio(max(1.0, math.exp(statistics.fmean(logs))), low, high, len(self.rounds))

    def fastest(self, ways: Iterable[int], reference: int = 0) -> int:
        """Return the way with the least mean ratio to a reference that took part in every round."""
        means = {way: self.ratio(way, reference).mean for way in ways}
        return min((way for way in means if not math.isnan(means[way])), key=lambda way: means[way])

    def part(self, start: int, step: int) -> Contest:
        """Return the contest of every ``step``-th round from ``start`` on."""
        cut = Contest(self.confidence)
        cut.rounds = self.rounds[start::step]
        return cut


def _student(degrees: int, probability: float) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(degrees, probability))
