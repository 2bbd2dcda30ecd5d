"""A store in the memory of one process, with a clock that tests may set."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

from elastic_train.stores.base import Entry

__all__ = ["MemoryStore"]


class MemoryStore:
    """A store for tests and single-process jobs.

    Args:
        clock: Returns seconds; leases run by it.

    >>> store = MemoryStore()
    >>> store.put("a", {"x": 1}, expected=0), store.put("a", {"x": 2}, expected=0)
    (1, None)
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: dict[str, tuple[str, int, float]] = {}
        self._version = 0

    def get(self, key: str) -> Entry | None:
        """Return the entry of a key."""
        with self._lock:
            return self._live(key)

    def scan(self, prefix: str) -> dict[str, Entry]:
        """Return all entries under a prefix."""
        with self._lock:
            keys = sorted(key for key in self._entries if key.startswith(prefix))
            found = {key: self._live(key) for key in keys}
        return {key: entry for key, entry in found.items() if entry is not None}

    def put(
        self, key: str, value: dict[str, Any], expected: int | None = None, lease_seconds: float | None = None
    ) -> int | None:
        """Write a value if ``expected`` holds."""
        with self._lock:
            if not self._holds(key, expected):
                return None
            self._version += 1
            end = float("inf") if lease_seconds is None else self._clock() + lease_seconds
            self._entries[key] = (json.dumps(value), self._version, end)
            return self._version

    def delete(self, key: str, expected: int | None = None) -> bool:
        """Remove a key if ``expected`` holds."""
        with self._lock:
            if self._live(key) is None or not self._holds(key, expected):
                return False
            del self._entries[key]
            return True

    def close(self) -> None:
        """Do nothing."""

    def _live(self, key: str) -> Entry | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        text, version, end = entry
        if self._clock() >= end:
            del self._entries[key]
            return None
        return Entry(json.loads(text), version)

    def _holds(self, key: str, expected: int | None) -> bool:
        if expected is None:
            return True
        entry = self._live(key)
        return (entry.version if entry else 0) == expected
