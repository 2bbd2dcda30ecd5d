"""Wall time of a step, split into the five terms that plans predict and reports show.

``sample`` draws neighbours and relabels, ``shuffle`` moves ids and activations between ranks (both directions),
``load`` reads input features, ``reduce`` sums gradients over ranks, ``compute`` is the rest of the step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from core_kernels.comm import Group

__all__ = ["TERMS", "TermClock", "settle_terms"]

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


def settle_terms(group: Group, terms: dict[str, float], elapsed: float) -> dict[str, float]:
    """Return seconds by term over all ranks.

    Args:
        group: The ranks.
        terms: Of this rank.
        elapsed: What it took as a whole.

    A collective's own time is that of the rank that came last; others spend the difference waiting for that rank to
    compute, so it counts as compute.
    """
    mine = torch.tensor([*terms.values(), elapsed], dtype=torch.float64)
    average = dict(zip([*TERMS, "total"], (group.all_reduce(mine, tag="report") / group.size).tolist(), strict=True))
    least = dict(zip(TERMS, group.all_reduce(mine, op="min", tag="report").tolist()[:-1], strict=True))
    settled = {term: least[term] if term in ("shuffle", "reduce") else average[term] for term in TERMS}
    settled["compute"] = average["total"] - sum(seconds for term, seconds in settled.items() if term != "compute")
    return settled
