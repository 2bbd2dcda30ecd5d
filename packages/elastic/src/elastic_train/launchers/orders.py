"""Orders of workers, which a controller or a leader leaves in the store and a launcher carries out."""

from __future__ import annotations

import time

from elastic_train.stores.base import Store

__all__ = ["OrderBook"]

_LEASE_SECONDS, _RENEW_SECONDS = 30.0, 10.0


class OrderBook:
    """A launcher's part in the orders of a job.

    Args:
        store: The job's store.
        job_id: Name of the job.
        launcher: Name of this launcher.

    >>> from elastic_train.stores import MemoryStore
    >>> store = MemoryStore()
    >>> _ = store.put("job/order/1", {"count": 2, "replaces": ""})
    >>> OrderBook(store, "job", "w").take()
    [(2, '')]
    """

    def __init__(self, store: Store, job_id: str, launcher: str):
        self._store, self._job_id = store, job_id
        self._key, self._renew_at = f"{job_id}/launcher/{launcher}", 0.0

    def take(self) -> list[tuple[int, str]]:
        """Take the orders that nobody else has taken, as pairs of how many workers and whom one replaces."""
        now = time.monotonic()
        if now > self._renew_at:  # its readers come seldom, and each write keeps workers from writing
            self._store.put(self._key, {}, None, _LEASE_SECONDS)
            self._renew_at = now + _RENEW_SECONDS
        return [
            (entry.value["count"], entry.value["replaces"])
            for key, entry in self._store.scan(f"{self._job_id}/order/").items()
            if self._store.delete(key, entry.version)
        ]

    def close(self) -> None:
        """Say that nobody carries out orders any more."""
        self._store.delete(self._key)
