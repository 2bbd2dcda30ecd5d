"""Policies that give each job exactly the GPUs it asked for: FIFO and Tiresias.

FIFO runs jobs to completion in order of submission. Tiresias needs no knowledge of lengths: jobs that have had little
GPU time stand in a high queue, those past a threshold in lower ones, and a waiting job of a higher queue preempts.

Source: "Tiresias: A GPU Cluster Manager for Distributed Deep Learning" (NSDI 2019), discretised two-dimensional least
attained service. Where we differ: jobs that do not fit are passed over, so that smaller ones behind them may run.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from elastic_train.errors import input_error
from elastic_train.scheduler.jobs import JobTable

__all__ = ["Fifo", "Tiresias", "admit"]


def admit(demand: np.ndarray, order: np.ndarray, num_gpus: int, is_blocking: bool = False) -> np.ndarray:
    """Give jobs what they demand, in an order, while it fits.

    Args:
        demand: int64 ``[num_jobs]``, GPUs of each job.
        order: Positions of the jobs, first come first.
        num_gpus: GPUs to hand out.
        is_blocking: Stop at the first job that does not fit instead of passing it over.

    Returns:
        int64 ``[num_jobs]``, the demand or 0.

    >>> admit(np.array([3, 4, 1]), np.array([0, 1, 2]), 5).tolist()
    [3, 0, 1]
    >>> admit(np.array([3, 4, 1]), np.array([0, 1, 2]), 5, is_blocking=True).tolist()
    [3, 0, 0]
    """
    given = np.zeros(len(demand), dtype=np.int64)
    free = num_gpus
    while len(order) and free > 0:
        totals = np.cumsum(demand[order])
        num_fitting = int(np.searchsorted(totals, free, side="right"))
        taken = order[:num_fitting]
        given[taken] = demand[taken]
        free -= int(totals[num_fitting - 1]) if num_fitting else 0
        if is_blocking:
            break
        rest = order[num_fitting + 1 :]
        order = rest[demand[rest] <= free]
    return given


class Fifo:
    """First in, first out, run to completion, nobody overtakes."""

    name = "fifo"

    def decide(self, jobs: JobTable, num_gpus: int) -> np.ndarray:
        """Return the requested GPUs for the earliest jobs that fit; running jobs are the earliest ones."""
        return admit(jobs.requested, np.arange(len(jobs)), num_gpus, is_blocking=True)

    def observe(self, group: np.ndarray, gpus: np.ndarray, seconds: np.ndarray) -> None:
        """Learn nothing."""


class Tiresias:
    """Least attained service in queues, preemptive.

    Args:
        thresholds_gpu_seconds: GPU time after which a job falls to the next queue, ascending.
    """

    name = "tiresias"

    def __init__(self, thresholds_gpu_seconds: Sequence[float] = (3600.0, 16 * 3600.0)):
        self.thresholds = np.asarray(thresholds_gpu_seconds, dtype=np.float64)
        if (np.diff(self.thresholds) <= 0).any() or (self.thresholds <= 0).any():
            raise input_error("thresholds_gpu_seconds", thresholds_gpu_seconds, "ascending, above 0", "sort them")

    def queue_of(self, jobs: JobTable) -> np.ndarray:
        """Return the queue of each job; 0 is served first."""
        return np.searchsorted(self.thresholds, jobs.attained_gpu_seconds, side="right")

    def decide(self, jobs: JobTable, num_gpus: int) -> np.ndarray:
        """Return the requested GPUs for jobs in order of queue, then of submission."""
        order = np.argsort(self.queue_of(jobs), kind="stable")
        return admit(jobs.requested, order, num_gpus)

    def observe(self, group: np.ndarray, gpus: np.ndarray, seconds: np.ndarray) -> None:
        """Learn nothing."""
