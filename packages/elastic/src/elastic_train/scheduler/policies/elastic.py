"""Policies that change the size of running jobs: elastic-simple, elastic-Tiresias and goodput.

All three end in the same greedy step: GPUs go, one at a time, to the job with the largest marginal gain. Gains are the
differences of the scaling curve, made non-increasing (a later GPU cannot be worth more than the one before it), so that
handing out one by one equals taking the largest gains over all jobs at once, which is one partial sort.

Source: "Elastic Deep Learning in Multi-Tenant GPU Clusters", the compaction rule (R1) and the expansion rule (R2) on
top of Tiresias; "Pollux" (OSDI 2021) for maximising a power mean of speed-ups. Where we differ: the batch is fixed, so
goodput is throughput; a running job is resized only where the gain passes ``min_gain``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from elastic_train.scheduler.jobs import JobTable
from elastic_train.scheduler.policies.rigid import Tiresias, admit

__all__ = ["ElasticSimple", "ElasticTiresias", "Goodput", "expand"]


def expand(jobs: JobTable, given: np.ndarray, num_free: int, value: np.ndarray, min_gain: float = 0.0) -> np.ndarray:
    """Hand free GPUs to the jobs that gain most by them.

    Args:
        jobs: The active jobs.
        given: GPUs each has already; jobs with 0 are passed over.
        num_free: GPUs to hand out.
        value: float64 ``[num_curves, widest + 1]``, worth of each number of GPUs for each kind of job.
        min_gain: Smallest worth of one GPU.

    Returns:
        ``given`` plus what was handed out.
    """
    wider = np.flatnonzero((given > 0) & (given < jobs.max_gpus))
    if num_free <= 0 or not len(wider):
        return given
    counts = np.minimum(jobs.max_gpus[wider] - given[wider], num_free)
    owner = np.repeat(np.arange(len(wider)), counts)
    offset = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    kind, gpus = jobs.curve[wider][owner], given[wider][owner] + offset + 1
    gains = _running_minimum(value[kind, gpus] - value[kind, gpus - 1], owner)
    if len(gains) > num_free:
        # The earlier job wins a tie, and within a job the earlier GPU: positions break ties.
        smallest = np.partition(gains, len(gains) - num_free)[len(gains) - num_free]
        better, equal = np.flatnonzero(gains > smallest), np.flatnonzero(gains == smallest)
        best = np.concatenate([better, equal[: num_free - len(better)]])
    else:
        best = np.arange(len(gains))
    best = best[gains[best] > min_gain]
    result = given.copy()
    result[wider] += np.bincount(owner[best], minlength=len(wider))
    return result


def _running_minimum(values: np.ndarray, segment: np.ndarray) -> np.ndarray:
    """Return the running minimum within each segment; segments are numbered in ascending order."""
    # Lowering each segment below the ones before makes the minimum start anew at its first value.
    drop = segment * float(np.ptp(values) + 1.0)
    return np.minimum.accumulate(values - drop) + drop


def relative_speed(curves: np.ndarray) -> np.ndarray:
    """Return the curves in units of the speed on one GPU."""
    return curves / curves[:, 1:2]


class _Greedy:
    """Compaction and expansion around an order of jobs."""

    name = ""

    def __init__(self, min_gain: float = 0.2, min_pending: int = 1, keep_gain: float = 0.5):
        self.min_gain, self.min_pending, self.keep_gain = min_gain, min_pending, keep_gain

    def observe(self, group: np.ndarray, gpus: np.ndarray, seconds: np.ndarray) -> None:
        """Learn nothing."""

    def resize(self, jobs: JobTable, order: np.ndarray, may_shrink: np.ndarray, num_gpus: int) -> np.ndarray:
        """Admit jobs in an order; shrink some to admit more (R1), or let jobs use what is idle (R2)."""
        given = admit(jobs.requested, order, num_gpus)
        value = relative_speed(jobs.curves)
        if int((given == 0).sum()) >= self.min_pending:
            efficient = np.where(may_shrink, self._efficient_size(jobs, value), jobs.requested)
            given = admit(efficient, order, num_gpus)
        free = num_gpus - int(given.sum())
        # A job that does not fit starts on what is left, and so does not leave it idle.
        for job in order[given[order] == 0]:
            if free < jobs.min_gpus[job]:
                break
            given[job] = min(free, int(jobs.requested[job]))
            free -= int(given[job])
        return expand(jobs, given, free, value, self.min_gain)

    def _efficient_size(self, jobs: JobTable, value: np.ndarray) -> np.ndarray:
        """Return, up to the request, the GPUs of each job that bring at least ``keep_gain`` each."""
        gains = np.minimum.accumulate(np.diff(value, axis=1), axis=1)
        size = (gains >= self.keep_gain).sum(axis=1)[jobs.curve]
        return np.clip(size, jobs.min_gpus, jobs.requested)


class ElasticTiresias(_Greedy):
    """Tiresias with compaction and expansion.

    Args:
        thresholds_gpu_seconds: As for :class:`Tiresias`.
        min_gain: Least speed-up, in one-GPU speeds, that an idle GPU must bring.
        min_pending: Waiting jobs from which on jobs below the top queue are shrunk.
        keep_gain: A GPU of a running job that brings less is given up for a waiting one.
    """

    name = "elastic-tiresias"

    def __init__(
        self,
        thresholds_gpu_seconds: Sequence[float] = (3600.0, 16 * 3600.0),
        min_gain: float = 0.2,
        min_pending: int = 1,
        keep_gain: float = 0.5,
    ):
        super().__init__(min_gain, min_pending, keep_gain)
        self._tiresias = Tiresias(thresholds_gpu_seconds)

    def decide(self, jobs: JobTable, num_gpus: int) -> np.ndarray:
        """Return GPUs in order of queue; jobs below the top queue may be shrunk to admit others."""
        queue = self._tiresias.queue_of(jobs)
        return self.resize(jobs, np.argsort(queue, kind="stable"), queue > 0, num_gpus)


class ElasticSimple(_Greedy):
    """FIFO with compaction and expansion: any job may be shrunk to admit those that wait."""

    name = "elastic-simple"

    def decide(self, jobs: JobTable, num_gpus: int) -> np.ndarray:
        """Return GPUs in order of submission."""
        return self.resize(jobs, np.arange(len(jobs)), np.ones(len(jobs), dtype=bool), num_gpus)


class Goodput:
    """Maximise the harmonic mean of speed-ups: each job one GPU first, then where the mean gains most."""

    name = "goodput"

    def decide(self, jobs: JobTable, num_gpus: int) -> np.ndarray:
        """Return GPUs for as many jobs as there are GPUs, the earliest first."""
        given = admit(jobs.min_gpus, np.arange(len(jobs)), num_gpus)
        with np.errstate(divide="ignore"):
            value = -1.0 / relative_speed(jobs.curves)
        value[:, 0] = value[:, 1]
        return expand(jobs, given, num_gpus - int(given.sum()), value, min_gain=1e-3)

    def observe(self, group: np.ndarray, gpus: np.ndarray, seconds: np.ndarray) -> None:
        """Learn nothing."""
