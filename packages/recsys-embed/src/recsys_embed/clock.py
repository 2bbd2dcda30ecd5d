"""Seconds that a step waits for communication, by kind: the part that pre-fetching did not hide."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

__all__ = ["Clock"]


class Clock:
    """Adds up waiting time.

    >>> clock = Clock()
    >>> clock.seconds("rows")
    0.0
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)

    def wait(self, kind: str, handle: Any) -> Any:
        """Wait for a handle and add the time to a kind."""
        begin = time.perf_counter()
        result = handle.wait()
        self._seconds[kind] += time.perf_counter() - begin
        return result

    def seconds(self, kind: str | None = None) -> float:
        """Return the seconds of one kind, or of all."""
        return sum(self._seconds.values()) if kind is None else self._seconds.get(kind, 0.0)

    def snapshot(self) -> dict[str, float]:
        """Return seconds by kind."""
        return dict(sorted(self._seconds.items()))

    def reset(self) -> None:
        """Start again from 0."""
        self._seconds.clear()
