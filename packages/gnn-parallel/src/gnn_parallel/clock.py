"""Wall time of a step, split into the five terms that plans predict and reports show.

``sample`` draws neighbours and relabels, ``shuffle`` moves ids and activations between ranks (both directions),
``load`` reads input features, ``reduce`` sums gradients over ranks, ``compute`` is the rest of the step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["TERMS", "TermClock"]

TERMS = ("sample", "load", "shuffle", "compute", "reduce")


class TermClock:
    """Accumulates seconds per term; time inside an inner term is not counted to the outer one.

    >>> clock = TermClock()
    >>> with clock("compute"):
    ...     with clock("shuffle"):
    ...         pass
    >>> sorted(clock.seconds) == sorted(TERMS)
    True
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(TERMS, 0.0)
        self._inner: list[float] = []

    @contextmanager
    def __call__(self, term: str) -> Iterator[None]:
        """Count the time of the ``with`` block to ``term``."""
        start = time.perf_counter()
        self._inner.append(0.0)
        try:
            yield
        finally:
            elapsed = time.perf_counter() - start
            self.seconds[term] += elapsed - self._inner.pop()
            if self._inner:
                self._inner[-1] += elapsed

    def take(self) -> dict[str, float]:
        """Return the seconds per term since the last call and start again from zero."""
        taken = self.seconds
        self.seconds = dict.fromkeys(TERMS, 0.0)
        return taken
