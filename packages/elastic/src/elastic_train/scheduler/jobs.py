"""What a scheduler knows of jobs: how long they are, how they scale, and which of them are active.

A :class:`Workload` is a table of jobs in order of submission, one numpy array per column, with a scaling curve per kind
of job. A :class:`JobTable` is what a policy sees at one moment: the active jobs, without their remaining work, which no
scheduler can know. The live controller and the simulator both hand policies a ``JobTable``.

Source: the columns follow "Elastic Deep Learning in Multi-Tenant GPU Clusters" (throughput profiles per worker count)
and "Pollux: Co-adaptive Cluster Scheduling for Goodput-Optimized Deep Learning" (traces of mixed applications).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from elastic_train.errors import input_error

__all__ = ["JobTable", "Workload", "amdahl_curve"]


def amdahl_curve(max_gpus: int, serial_share: float = 0.02) -> np.ndarray:
    """Return the speed at 0 to ``max_gpus`` GPUs of a job of which a share does not scale.

    Args:
        max_gpus: Last entry of the curve.
        serial_share: Share of the one-GPU step that stays, in ``[0, 1]``.

    Returns:
        float64 ``[max_gpus + 1]``, in units of the speed on one GPU.

    >>> amdahl_curve(4, serial_share=0.0).tolist()
    [0.0, 1.0, 2.0, 3.0, 4.0]
    """
    gpus = np.arange(1, max_gpus + 1)
    return np.concatenate([[0.0], 1.0 / (serial_share + (1.0 - serial_share) / gpus)])


@dataclass(frozen=True)
class Workload:
    """Jobs in order of submission.

    Attributes:
        submit_seconds: float64 ``[num_jobs]``, ascending, the first at 0.
        work: float64 ``[num_jobs]``, amount of work in the unit of the job's curve times seconds.
        requested: int64 ``[num_jobs]``, GPUs its owner asked for.
        min_gpus: int64 ``[num_jobs]``, fewest GPUs it runs on.
        max_gpus: int64 ``[num_jobs]``, most GPUs it can use.
        curve: int64 ``[num_jobs]``, row of ``curves``.
        curves: float64 ``[num_curves, widest + 1]``, speed at each number of GPUs; past ``max_gpus`` never read.
        group: int64 ``[num_jobs]``, the owner's group.
        names: Job names.
        group_names: Name of each group.
    """

    submit_seconds: np.ndarray
    work: np.ndarray
    requested: np.ndarray
    min_gpus: np.ndarray
    max_gpus: np.ndarray
    curve: np.ndarray
    curves: np.ndarray
    group: np.ndarray
    names: list[str] = field(default_factory=list)
    group_names: list[str] = field(default_factory=lambda: ["all"])

    def __post_init__(self) -> None:
        if len(self.submit_seconds) == 0:
            raise input_error("workload", "no jobs", "at least one job", "check the trace file")
        for name, column in (("submit_seconds", self.submit_seconds), ("work", self.work)):
            if not np.isfinite(column).all():
                at = int(np.argmin(np.isfinite(column)))
                raise input_error(f"{name} of job {at}", float(column[at]), "a finite number", "correct the job")
        backwards = np.flatnonzero(np.diff(self.submit_seconds) < 0)
        if len(backwards):
            before, after = self.submit_seconds[backwards[0] : backwards[0] + 2].tolist()
            raise input_error(
                "submit_seconds", f"{after} after {before}", "ascending times", "sort the jobs by submission"
            )
        fits = (self.min_gpus >= 1) & (self.min_gpus <= self.requested) & (self.requested <= self.max_gpus)
        if not fits.all() or self.max_gpus.max() >= self.curves.shape[1]:
            at = int(np.argmin(fits))
            limits = (int(self.min_gpus[at]), int(self.requested[at]), int(self.max_gpus[at]))
            expected = f"1 <= min <= requested <= max < {self.curves.shape[1]}, the length of the curves"
            raise input_error("min, requested, max", limits, expected, "correct the job's limits")

    @property
    def num_jobs(self) -> int:
        """Number of jobs."""
        return len(self.submit_seconds)

    def alone_seconds(self) -> np.ndarray:
        """Return how long each job runs alone on the GPUs it asked for, without any overhead."""
        return self.work / self.curves[self.curve, self.requested]

    def gpu_seconds(self) -> float:
        """Return the GPU time of all jobs when each runs on the GPUs it asked for."""
        return float((self.alone_seconds() * self.requested).sum())

    def at_load(self, factor: float) -> Workload:
        """Return the same jobs arriving ``factor`` times as fast."""
        if not 0 < factor < float("inf"):
            raise input_error("factor", factor, "a finite number above 0", "use 1.0 for the trace as it is")
        return replace(self, submit_seconds=self.submit_seconds / factor)

    def first(self, num_jobs: int) -> Workload:
        """Return the first ``num_jobs`` jobs."""
        columns = {name: getattr(self, name)[:num_jobs] for name in (*_PER_JOB, "submit_seconds", "names")}
        return replace(self, **columns)

    def repeated(self, num_jobs: int, num_gpus: int, load: float = 0.8) -> Workload:
        """Return ``num_jobs`` jobs, the trace over and over, arriving so that they ask for ``load`` of a cluster.

        Args:
            num_jobs: Jobs to make.
            num_gpus: GPUs of the cluster the arrivals are set for.
            load: GPU time asked for per GPU time there is, while jobs arrive.
        """
        copies = -(-num_jobs // self.num_jobs)
        span = float(self.submit_seconds[-1]) + 1.0
        index = np.tile(np.arange(self.num_jobs), copies)[:num_jobs]
        times = self.submit_seconds[index] + span * (np.arange(num_jobs) // self.num_jobs)
        columns = {name: getattr(self, name)[index] for name in _PER_JOB}
        many = replace(self, submit_seconds=times, names=[self.names[i] for i in index], **columns)
        return many.at_load(load * num_gpus * float(times[-1]) / many.gpu_seconds())


_PER_JOB = ("work", "requested", "min_gpus", "max_gpus", "curve", "group")


@dataclass
class JobTable:
    """The active jobs at one moment, in order of submission; all columns have one entry per active job.

    Attributes:
        now_seconds: The moment.
        ids: Number of each job in its workload.
        submit_seconds: When it came.
        requested: GPUs asked for.
        min_gpus: Fewest GPUs.
        max_gpus: Most GPUs.
        group: Group of the owner.
        curve: Row of ``curves``.
        allocated: GPUs it has now, 0 while it waits.
        attained_gpu_seconds: GPU time it has had.
        first_start_seconds: When it started first, ``inf`` when it never did.
        curves: Speed of each kind of job at each number of GPUs.
    """

    now_seconds: float
    ids: np.ndarray
    submit_seconds: np.ndarray
    requested: np.ndarray
    min_gpus: np.ndarray
    max_gpus: np.ndarray
    group: np.ndarray
    curve: np.ndarray
    allocated: np.ndarray
    attained_gpu_seconds: np.ndarray
    first_start_seconds: np.ndarray
    curves: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)
