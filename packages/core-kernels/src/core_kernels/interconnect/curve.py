"""Seconds as a function of bytes: measured curves and straight lines."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from core_kernels.errors import argument_error

__all__ = ["Curve", "Link"]


@dataclass(frozen=True)
class Curve:
    """A monotone piecewise-linear function from bytes to seconds.

    Attributes:
        num_bytes: Where it was measured, increasing.
        seconds: What was measured there, never decreasing.

    Below the first point it is constant (the latency), above the last it goes on with the last slope.

    >>> curve = Curve((1000, 2000, 4000), (1.0, 2.0, 6.0))
    >>> [curve.at(b) for b in (0, 1000, 1500, 3000, 8000)]
    [1.0, 1.0, 1.5, 4.0, 14.0]
    """

    num_bytes: tuple[float, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in zip(self.num_bytes, self.num_bytes[1:], strict=False))
        monotone = all(a <= b for a, b in zip(self.seconds, self.seconds[1:], strict=False))
        if not self.num_bytes or len(self.num_bytes) != len(self.seconds) or not rising or not monotone:
            expected = "equally many increasing num_bytes and non-decreasing seconds, at least one of each"
            raise argument_error("curve", (self.num_bytes, self.seconds), expected, "use Curve.fit on raw measurements")

    @classmethod
    def fit(cls, num_bytes: Sequence[float], seconds: Sequence[float]) -> Curve:
        """Make a curve of noisy measurements: sorted by bytes, lowered to the least at any larger size.

        Noise only ever adds time, so of two sizes out of order the smaller one was disturbed.

        >>> Curve.fit([200, 100], [1.0, 1.5]).seconds
        (1.0, 1.0)
        """
        pairs = sorted(zip(num_bytes, seconds, strict=True))
        lowered = list(accumulate((float(s) for _, s in reversed(pairs)), min))
        return cls(tuple(float(b) for b, _ in pairs), tuple(reversed(lowered)))

    def at(self, num_bytes: float) -> float:
        """Return the seconds for a number of bytes, of any size."""
        if num_bytes <= self.num_bytes[0] or len(self.num_bytes) == 1:
            return self.seconds[0]
        right = min(bisect_right(self.num_bytes, num_bytes), len(self.num_bytes) - 1)
        x0, x1 = self.num_bytes[right - 1], self.num_bytes[right]
        y0, y1 = self.seconds[right - 1], self.seconds[right]
        return y0 + (y1 - y0) * (num_bytes - x0) / (x1 - x0)


@dataclass(frozen=True)
class Link:
    """A latency and a rate: ``latency_seconds + num_bytes / bytes_per_second``.

    >>> Link(1e-3, 1e6).at(2000)
    0.003
    """

    latency_seconds: float
    bytes_per_second: float

    def __post_init__(self) -> None:
        if self.latency_seconds < 0 or not self.bytes_per_second > 0:
            raise argument_error("link", self, "latency of at least 0 and a positive rate", "check the units")

    def at(self, num_bytes: float) -> float:
        """Return the seconds for a number of bytes."""
        return self.latency_seconds + num_bytes / self.bytes_per_second
