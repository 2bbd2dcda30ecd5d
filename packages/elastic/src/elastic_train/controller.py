"""The outside view of a job: what it is doing, and wishes for more, fewer or other workers.

A controller needs the store only. It never changes membership itself: ``scale_in`` leaves wishes that workers read;
``scale_out`` and ``migrate`` leave orders for the job's launcher, which starts processes. The leader does the rest.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from elastic_train.coordinator import Member
from elastic_train.errors import JobStateError, input_error
from elastic_train.generation import GenerationLog
from elastic_train.stores import Store, open_store

__all__ = ["Controller", "ProfilePoint"]

_TIMED_STEPS = 8


class ProfilePoint(NamedTuple):
    """Throughput of a job at one number of workers.

    Attributes:
        num_workers: Workers.
        samples_per_second: Samples of all workers per second.
        efficiency: Samples per second and worker, over that at the fewest workers measured.
    """

    num_workers: int
    samples_per_second: float
    efficiency: float


class Controller:
    """Watches and steers one job.

    Args:
        store: Address of the job's store, or the store itself.
        job_id: Name of the job.
        token: The job's token, see :func:`elastic_train.stores.find_token`.
    """

    def __init__(self, store: str | Store, job_id: str, token: str | None = None):
        self._store = open_store(store, token) if isinstance(store, str) else store
        self._job = job_id
        self._log = GenerationLog(self._store, f"{job_id}/generation", "controller")

    @classmethod
    def of_job(cls, store: str, job_id: str, token: str | None = None) -> Controller:
        """Open the controller of a job that is there already.

        Args:
            store: Address of the job's store.
            job_id: Name of the job.
            token: The job's token.

        Raises:
            InputError: The store is a folder that does not exist.
            JobStateError: The store knows nothing of such a job.
        """
        if store.startswith("file://") and not Path(store.removeprefix("file://")).is_dir():
            raise input_error("store", store, "the folder of a job's store", "correct the address")
        found = cls(store, job_id, token)
        keys = found._store.scan("")
        if not any(key.startswith(f"{job_id}/") for key in keys):
            found.close()
            jobs = sorted(key.removesuffix("/generation") for key in keys if key.endswith("/generation"))
            raise JobStateError(
                f"store {store!r} has no job {job_id!r}: expected one of {jobs}; name it with --job, or start it first"
            )
        return found

    def status(self) -> dict[str, Any]:
        """Return generation, leader, throughput, how often a sample counts, and every worker with its phase."""
        newest, leader = self._log.read(), self._store.get(f"{self._job}/leader")
        workers = self.members()
        running = [m for m in workers.values() if m.phase == "running" and m.num_timed]
        return {
            "job": self._job,
            "generation": newest.number if newest else 0,
            "status": newest.status if newest else "waiting",
            "members": list(newest.members) if newest else [],
            "leader": leader.value["worker"] if leader else None,
            "step": max((m.step for m in running), default=0),
            "samples_per_second": median(m.samples_per_second for m in running) if running else 0.0,
            "data": next((m.data for m in workers.values() if m.data), ""),
            "workers": {worker: member.phase for worker, member in workers.items()},
        }

    def members(self) -> dict[str, Member]:
        """Return the record of every worker that the store knows, by its id."""
        entries = self._store.scan(f"{self._job}/member/").values()
        return {entry.value["worker"]: Member(**entry.value) for entry in entries}

    def scale_out(self, num_workers: int) -> None:
        """Order more workers, which join in one switch.

        Raises:
            InputError: Fewer than one.
            JobStateError: No launcher is there to start them.
        """
        if num_workers < 1:
            raise input_error("num_workers", num_workers, "at least 1", "use scale_in to shrink")
        self._order(num_workers, "")

    def scale_in(self, workers: Sequence[str] | int) -> list[str]:
        """Ask workers to leave at the end of a step.

        Args:
            workers: Their ids, or how many of those that joined last, where the processes of a replica count as one.

        Returns:
            Their ids.

        Raises:
            JobStateError: The job has no such worker.
            InputError: Nobody would be left.
        """
        members = self.status()["members"]
        if isinstance(workers, int):
            replicas = self._replicas(members)
            if not 1 <= workers < len(replicas):
                most = len(replicas) - 1
                expected = f"between 1 and {most}, fewer than all {most + 1}" if most > 0 else "a job of 2 or more"
                raise input_error("workers", workers, expected, "leave one at work")
            leavers = [worker for replica in replicas[-workers:] for worker in replica]
        else:
            leavers = list(workers)
        unknown = sorted(set(leavers) - set(members))
        if unknown:
            raise JobStateError(f"job {self._job!r} has no workers {unknown}: expected among {members}; name others")
        if len(set(leavers)) >= len(members):
            raise input_error("workers", leavers, f"fewer than all {len(members)}", "leave one at work")
        for worker in leavers:
            self._store.put(f"{self._job}/leave/{worker}", {})
        return leavers

    def migrate(self, worker: str) -> None:
        """Order a fresh worker in the place of another; both change in one switch.

        Raises:
            JobStateError: The job has no such worker, or no launcher.
        """
        members = self.status()["members"]
        if worker not in members:
            raise JobStateError(f"job {self._job!r} has no worker {worker!r}: expected one of {members}; name another")
        self._order(1, worker)

    def profile(self, min_workers: int, max_workers: int, timeout_seconds: float = 120.0) -> list[ProfilePoint]:
        """Measure the throughput of the running job from ``max_workers`` down to ``min_workers``.

        Shrinking is cheap, so the job grows once and then shrinks step by step; it stays at ``min_workers``.

        Args:
            min_workers: Fewest workers, at least 1.
            max_workers: Most workers.
            timeout_seconds: Longest wait for one size.

        Returns:
            One point per number of workers, ascending.

        Raises:
            JobStateError: A size was not reached in time.
        """
        if not 1 <= min_workers <= max_workers:
            raise input_error("min_workers", min_workers, f"between 1 and max_workers={max_workers}", "correct them")
        rates = {}
        for size in range(max_workers, min_workers - 1, -1):
            self._reach(size, timeout_seconds)
            rates[size] = self.status()["samples_per_second"]
        unit = rates[min_workers] / min_workers
        return [ProfilePoint(size, rate, rate / size / unit) for size, rate in sorted(rates.items())]

    def close(self) -> None:
        """Close the store."""
        self._store.close()

    def _replicas(self, members: Sequence[str]) -> list[list[str]]:
        """Return the members, those together that come and go as one."""
        records, replicas = self.members(), {}
        for worker in members:
            name = records[worker].replica if worker in records else ""
            replicas.setdefault(name or worker, []).append(worker)
        return list(replicas.values())

    def _order(self, count: int, replaces: str) -> None:
        if not self._store.scan(f"{self._job}/launcher/"):
            raise JobStateError(
                f"job {self._job!r} has no launcher: expected elastic-train run or LocalJob.wait at work; start "
                "workers with elastic-train add"
            )
        self._store.put(f"{self._job}/order/{secrets.token_hex(8)}", {"count": count, "replaces": replaces})

    def _reach(self, size: int, timeout_seconds: float) -> None:
        """Bring the job to a size and wait until every worker has timed some steps of it."""
        present = len(self._replicas(self.status()["members"]))
        if present > size:
            self.scale_in(present - size)
        elif present < size:
            self.scale_out(size - present)
        deadline = time.monotonic() + timeout_seconds
        while True:
            newest, workers = self._log.read(), self.members()
            if newest is not None and newest.status == "commit" and len(self._replicas(newest.members)) == size:
                timed = [workers[w].num_timed for w in newest.members if w in workers]
                if len(timed) == len(newest.members) and min(timed) >= _TIMED_STEPS:
                    return
            if time.monotonic() > deadline:
                raise JobStateError(
                    f"job {self._job!r} has not run {_TIMED_STEPS} steps with {size} workers: expected within "
                    f"{timeout_seconds:g} s; see its status, limits and launcher"
                )
            time.sleep(0.05)
