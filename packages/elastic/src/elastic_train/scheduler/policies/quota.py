"""Policies for groups with quotas: strict quota, and lending by prediction (PPS).

With a strict quota a group uses its own GPUs only. Lending lets a waiting job of one group run on the idle quota of
another, to completion and without preemption, when the owner is unlikely to miss them. Groups' histories predict: from
the durations of past jobs, how long the borrower will run and how many GPUs of the owner come back meanwhile; from
arrivals, how many GPUs the owner will ask for. Both sums are taken as normal:

    lend k GPUs  if  idle - (m + z * s) >= k

    m, s  mean and deviation of (GPUs newly asked for - GPUs given back) within the borrower's predicted run
    z     quantile of the normal law for the accepted risk

Source: the abstract of the PPS paper on probabilistic prediction for scheduling; the formulas are our reconstruction.
"""

from __future__ import annotations

from statistics import NormalDist

import numpy as np

from elastic_train.errors import input_error
from elastic_train.scheduler.jobs import JobTable, Workload

__all__ = ["ProbabilisticLending", "StrictQuota", "proportional_quotas"]

_HISTORY = 2_000


def proportional_quotas(workload: Workload, num_gpus: int) -> np.ndarray:
    """Return a quota per group in proportion to the GPU time it asks for, each at least its largest job.

    >>> from elastic_train.scheduler.traces import Workload
    >>> one = np.array([1, 1]); curves = np.array([[0.0, 1.0]])
    >>> jobs = Workload(0.0 * one, np.array([3.0, 1.0]), one, one, one, 0 * one, curves, np.array([0, 1]))
    >>> proportional_quotas(jobs, 8).tolist()
    [6, 2]
    """
    num_groups = int(workload.group.max()) + 1
    gpu_seconds = np.bincount(workload.group, workload.alone_seconds() * workload.requested, num_groups)
    least = np.zeros(num_groups, dtype=np.int64)
    np.maximum.at(least, workload.group, workload.requested)
    if least.sum() > num_gpus:
        expected = f"at least {least.sum()}, the largest jobs of all groups"
        raise input_error("num_gpus", num_gpus, expected, "enlarge the cluster or merge groups")
    quota = least + np.floor((num_gpus - least.sum()) * gpu_seconds / gpu_seconds.sum()).astype(np.int64)
    wanted = num_gpus * gpu_seconds / gpu_seconds.sum()
    if (wanted >= least).all():
        quota = np.floor(wanted).astype(np.int64)
    quota[int(np.argmax(gpu_seconds))] += num_gpus - int(quota.sum())
    return quota


def _start_within(jobs: JobTable, given: np.ndarray, free: np.ndarray) -> list[int]:
    """Start waiting jobs, FIFO within each group, on the group's free GPUs; returns each group's first left waiting."""
    waiting = np.flatnonzero(given == 0)
    groups = jobs.group[waiting]
    heads = []
    for group in np.unique(groups):
        mine = waiting[groups == group]
        num_fitting = int(np.searchsorted(np.cumsum(jobs.requested[mine]), free[group], side="right"))
        given[mine[:num_fitting]] = jobs.requested[mine[:num_fitting]]
        if num_fitting < len(mine):
            heads.append(int(mine[num_fitting]))
    return sorted(heads)


class StrictQuota:
    """FIFO within each group, on the group's own GPUs, run to completion.

    Args:
        quotas: GPUs of each group; their sum is at most the size of the cluster.
    """

    name = "strict-quota"

    def __init__(self, quotas: np.ndarray):
        self.quotas = np.asarray(quotas, dtype=np.int64)

    def decide(self, jobs: JobTable, num_gpus: int) -> np.ndarray:
        """Return the requested GPUs for running jobs, then for the earliest of each group that fit its quota."""
        given = jobs.allocated.copy()
        used = np.bincount(jobs.group, given, len(self.quotas)).astype(np.int64)
        _start_within(jobs, given, self.quotas - used)
        return given

    def observe(self, group: np.ndarray, gpus: np.ndarray, seconds: np.ndarray) -> None:
        """Learn nothing."""


class ProbabilisticLending:
    """Strict quota plus lending of idle GPUs when the owner is unlikely to need them.

    Args:
        quotas: GPUs of each group.
        risk: Accepted probability that the owner asks for more than is left.
        min_history: Ended jobs of a group before its durations are trusted.
    """

    name = "pps"

    def __init__(self, quotas: np.ndarray, risk: float = 0.02, min_history: int = 20):
        if not 0 < risk < 0.5:
            raise input_error("risk", risk, "a probability in (0, 0.5)", "use 0.02")
        self.quotas = np.asarray(quotas, dtype=np.int64)
        self._z = NormalDist().inv_cdf(1.0 - risk)
        self._min_history = min_history
        num_groups = len(self.quotas)
        self._durations: list[list[float]] = [[] for _ in range(num_groups)]
        self._sorted: list[np.ndarray] = [np.zeros(0) for _ in range(num_groups)]
        self._arrivals = np.zeros((num_groups, 3))  # jobs, GPUs, squared GPUs
        self._last_id = -1
        self._lent_by: dict[int, np.ndarray] = {}

    def observe(self, group: np.ndarray, gpus: np.ndarray, seconds: np.ndarray) -> None:
        """Add ended jobs to the history of their groups."""
        for index, duration in zip(group, seconds, strict=True):
            history = self._durations[index]
            history.append(float(duration))
            del history[:-_HISTORY]
        for index in np.unique(group):
            self._sorted[index] = np.sort(self._durations[index])

    def decide(self, jobs: JobTable, num_gpus: int) -> np.ndarray:
        """Return the requested GPUs: running jobs, own jobs within what is not lent, then borrowers."""
        self._count_arrivals(jobs)
        given = jobs.allocated.copy()
        running = {int(job) for job in jobs.ids[given > 0]}
        self._lent_by = {job: lent for job, lent in self._lent_by.items() if job in running}
        lent = sum(self._lent_by.values(), np.zeros(len(self.quotas), dtype=np.int64))
        is_own = np.array([int(job) not in self._lent_by for job in jobs.ids], dtype=bool)
        used = np.bincount(jobs.group[is_own], given[is_own], len(self.quotas)).astype(np.int64)
        is_waiting = given == 0
        heads = _start_within(jobs, given, self.quotas - used - lent)
        used += np.bincount(jobs.group[is_waiting], given[is_waiting], len(self.quotas)).astype(np.int64)
        self._lend(jobs, given, used, lent, heads)
        return given

    def _count_arrivals(self, jobs: JobTable) -> None:
        new = jobs.ids > self._last_id
        if new.any():
            self._last_id = int(jobs.ids.max())
            gpus = jobs.requested[new].astype(np.float64)
            for column, weight in enumerate((np.ones_like(gpus), gpus, gpus**2)):
                self._arrivals[:, column] += np.bincount(jobs.group[new], weight, len(self.quotas))

    def _lend(self, jobs: JobTable, given: np.ndarray, used: np.ndarray, lent: np.ndarray, heads: list[int]) -> None:
        """Let the first waiting job of each group borrow, together from those who can spare most."""
        for job in heads:
            group, gpus = int(jobs.group[job]), int(jobs.requested[job])
            if len(self._durations[group]) < self._min_history:
                continue
            own_free = max(int(self.quotas[group] - used[group] - lent[group]), 0)
            spare = self._spare(jobs, given, used, lent, float(self._sorted[group].mean()))
            spare[group] = own_free
            if spare.sum() < gpus:
                continue
            taken, missing = np.zeros_like(spare), gpus
            for lender in [group, *np.argsort(-spare, kind="stable")]:
                if lender != group or not taken[group]:
                    part = min(missing, int(spare[lender]))
                    taken[lender] += part
                    missing -= part
            given[job] = gpus
            lent += taken
            self._lent_by[int(jobs.ids[job])] = taken

    def _spare(
        self, jobs: JobTable, given: np.ndarray, used: np.ndarray, lent: np.ndarray, horizon: float
    ) -> np.ndarray:
        """Return the GPUs each group can lend for ``horizon`` seconds at the accepted risk; 0 while its jobs wait."""
        elapsed = max(jobs.now_seconds, 1.0)
        _, gpus, squares = self._arrivals.T * (horizon / elapsed)
        mean, variance = gpus.copy(), squares.copy()
        runs = np.flatnonzero(given > 0)
        age = jobs.now_seconds - np.minimum(jobs.first_start_seconds[runs], jobs.now_seconds)
        for group in np.unique(jobs.group[runs]):
            history, mine = self._sorted[group], jobs.group[runs] == group
            if len(history) < self._min_history:
                continue
            ended_by_age = np.searchsorted(history, age[mine], side="right")
            ended_by_then = np.searchsorted(history, age[mine] + horizon, side="right")
            ends = (ended_by_then - ended_by_age) / np.maximum(len(history) - ended_by_age, 1)
            held = given[runs[mine]]
            mean[group] -= (held * ends).sum()
            variance[group] += (held**2 * ends * (1 - ends)).sum()
        idle = self.quotas - used - lent
        spare = np.floor(np.minimum(idle, idle - (mean + self._z * np.sqrt(variance)))).astype(np.int64)
        waiting = np.unique(jobs.group[given == 0])
        spare[waiting] = 0
        return np.maximum(spare, 0)
