"""Leader election by a lease in the store.

Whoever finds no leader writes itself under a lease and leads until it fails to renew. The version of that first write
is the epoch: every later leader has a higher one, and the generation record remembers the highest it has seen, so that
a leader that was paused and wakes up is refused (see :mod:`elastic_train.generation`). A leader gives up by its own
clock after two thirds of the lease without a renewal, before anyone else may take over.

Source: "Elastic Deep Learning in Multi-Tenant GPU Clusters", leader election without a central master. Where we differ:
epochs, which the paper does not describe.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from elastic_train.stores.base import Store

__all__ = ["Election"]


class Election:
    """One worker's part in electing a leader.

    Args:
        store: The job's store.
        key: Key of the leader's lease.
        worker: Id of this worker.
        lease_seconds: How long a leader that does not renew stays leader.
        clock: This worker's monotonic clock.

    Attributes:
        epoch: Fencing number while this worker leads, else 0.

    >>> from elastic_train.stores import MemoryStore
    >>> store = MemoryStore()
    >>> first, second = (Election(store, "leader", name) for name in "ab")
    >>> first.campaign(), second.campaign(), second.leader()
    (True, False, 'a')
    """

    def __init__(
        self,
        store: Store,
        key: str,
        worker: str,
        lease_seconds: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._store, self._key, self._worker = store, key, worker
        self._lease_seconds, self._clock = lease_seconds, clock
        self._version, self._renewed = 0, float("-inf")
        self.epoch = 0

    @property
    def is_leader(self) -> bool:
        """Whether this worker may still act as leader, by its own clock."""
        return self.epoch > 0 and self._clock() - self._renewed < self._lease_seconds * 2 / 3

    def leader(self) -> str | None:
        """Return the worker that leads."""
        entry = self._store.get(self._key)
        return entry.value["worker"] if entry else None

    def campaign(self) -> bool:
        """Renew the lease when leading, else try to take it; returns whether this worker leads now."""
        begin = self._clock()
        if self.epoch:
            value = {"worker": self._worker, "epoch": self.epoch}
            version = self._store.put(self._key, value, self._version, self._lease_seconds)
            if version is not None:
                self._version, self._renewed = version, begin
                return True
            self.epoch = 0
        if self._store.get(self._key) is not None:  # reading is cheap, and this is asked many times a second
            return False
        version = self._store.put(self._key, {"worker": self._worker, "epoch": 0}, 0, self._lease_seconds)
        if version is None:
            return False
        self.epoch, self._version, self._renewed = version, version, begin
        return True

    def depose(self, worker: str) -> bool:
        """Remove the lease of a leader that is known to be dead; returns whether it was still there."""
        entry = self._store.get(self._key)
        return bool(entry and entry.value["worker"] == worker and self._store.delete(self._key, entry.version))

    def resign(self) -> None:
        """Give the lease back, so that another worker may lead at once."""
        if self.epoch:
            self._store.delete(self._key, self._version)
        self.epoch = 0
