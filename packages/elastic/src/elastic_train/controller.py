"""The outside view of a job: what it is doing, and wishes for more or fewer workers.

A controller needs the store only. It never changes membership itself: it leaves wishes that the job's leader follows.
New workers are started by a launcher; ``scale_in`` names workers that should leave at the end of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from elastic_train.errors import JobStateError, input_error
from elastic_train.generation import GenerationLog
from elastic_train.stores import Store, open_store

__all__ = ["Controller"]


class Controller:
    """Watches and steers one job.

    Args:
        store: Address of the job's store, or the store itself.
        job_id: Name of the job.
    """

    def __init__(self, store: str | Store, job_id: str):
        self._store = open_store(store) if isinstance(store, str) else store
        self._job = job_id
        self._log = GenerationLog(self._store, f"{job_id}/generation")

    def status(self) -> dict[str, Any]:
        """Return the newest generation, the leader, and every worker with its phase."""
        newest, leader = self._log.read(), self._store.get(f"{self._job}/leader")
        members = self._store.scan(f"{self._job}/member/")
        return {
            "job": self._job,
            "generation": newest.number if newest else 0,
            "status": newest.status if newest else "waiting",
            "members": list(newest.members) if newest else [],
            "leader": leader.value["worker"] if leader else None,
            "workers": {entry.value["worker"]: entry.value["phase"] for entry in members.values()},
        }

    def scale_in(self, workers: Sequence[str]) -> None:
        """Ask workers to leave at the end of a step.

        Raises:
            JobStateError: The job has no such worker.
            InputError: Nobody would be left.
        """
        members = self.status()["members"]
        unknown = sorted(set(workers) - set(members))
        if unknown:
            raise JobStateError(f"job {self._job!r} has no workers {unknown}: expected among {members}; name others")
        if len(set(workers)) >= len(members):
            raise input_error("workers", list(workers), f"fewer than all {len(members)}", "leave one at work")
        for worker in workers:
            self._store.put(f"{self._job}/leave/{worker}", {})

    def close(self) -> None:
        """Close the store."""
        self._store.close()
