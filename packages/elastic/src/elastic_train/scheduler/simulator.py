"""A trace-driven simulator of a GPU cluster under a scheduling policy.

Time advances in rounds. At each round the jobs that have come are shown to the policy, which answers with a number of
GPUs for each; until the next round jobs progress along their scaling curves and end at their exact times. A job whose
number of GPUs changes makes no progress for ``rescale_seconds``, one that starts or resumes for ``start_seconds``: the
first is what stop-free scaling makes small. Rounds without active jobs are skipped.

Callers may not assume anything about placement: jobs are taken to be packed on as few hosts as possible. Columns are
numpy arrays over the active jobs, so a round costs a few dozen array operations whatever the number of jobs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from elastic_train.errors import input_error
from elastic_train.scheduler.jobs import JobTable, Workload

__all__ = ["Cluster", "Outcome", "Policy", "simulate"]


@dataclass(frozen=True)
class Cluster:
    """A cluster and what changes cost on it.

    Attributes:
        num_gpus: GPUs.
        rescale_seconds: Time a running job loses when its number of GPUs changes.
        start_seconds: Time between getting GPUs and the first step.
        round_seconds: Time between two decisions.
    """

    num_gpus: int
    rescale_seconds: float = 30.0
    start_seconds: float = 30.0
    round_seconds: float = 60.0

    def __post_init__(self) -> None:
        costs = (self.rescale_seconds, self.start_seconds)
        is_finite = np.isfinite([self.round_seconds, *costs]).all()
        if self.num_gpus < 1 or not is_finite or self.round_seconds <= 0 or min(costs) < 0:
            raise input_error(
                "cluster", self, "num_gpus >= 1, round_seconds > 0, costs >= 0, all finite", "correct the cluster"
            )


class Policy(Protocol):
    """What decides how many GPUs each job gets; used by the simulator and by a live controller alike."""

    name: str

    def decide(self, jobs: JobTable, num_gpus: int) -> np.ndarray:
        """Return the GPUs of each active job, int64; 0 makes it wait. The sum may not pass ``num_gpus``."""
        ...

    def observe(self, group: np.ndarray, gpus: np.ndarray, seconds: np.ndarray) -> None:
        """Hear of jobs that ended: their groups, GPUs asked for, and seconds they ran."""
        ...


@dataclass
class Outcome:
    """What happened to each job, and to the cluster in each round.

    Attributes:
        policy: Name of the policy.
        completion_seconds: From submission to end, per job.
        wait_seconds: From submission to the first start, per job.
        slowdown: Completion time over the time alone on the GPUs asked for, per job.
        num_rescales: Changes of running jobs, all together.
        num_preemptions: Running jobs that were made to wait.
        group: Group of each job.
        timeline: float64 ``[num_rounds, 4]``: seconds, GPUs in use, jobs running, jobs waiting.
        num_gpus: GPUs of the cluster.
        arrivals_end_seconds: When the last job came.
    """

    policy: str
    completion_seconds: np.ndarray
    wait_seconds: np.ndarray
    slowdown: np.ndarray
    num_rescales: int
    num_preemptions: int
    group: np.ndarray
    timeline: np.ndarray
    num_gpus: int
    arrivals_end_seconds: float

    def utilization(self) -> float:
        """Return the share of GPU time in use while jobs arrive."""
        times = np.minimum(self.timeline[:, 0], self.arrivals_end_seconds)
        lengths = np.diff(times, append=self.arrivals_end_seconds)
        total = self.num_gpus * max(self.arrivals_end_seconds, 1e-9)
        return float((lengths * self.timeline[:, 1]).sum() / total)

    def fairness(self) -> float:
        """Return Jain's index of the slowdowns: 1 when all jobs are slowed alike, ``1 / num_jobs`` at worst."""
        return float(self.slowdown.sum() ** 2 / (len(self.slowdown) * (self.slowdown**2).sum()))

    def wait_percentile(self, percentile: float = 95.0) -> dict[int, float]:
        """Return a percentile of the waiting time of each group."""
        return {
            int(group): float(np.percentile(self.wait_seconds[self.group == group], percentile))
            for group in np.unique(self.group)
        }

    def summary(self) -> dict[str, Any]:
        """Return the figures that are compared, as plain values."""
        jct = self.completion_seconds
        return {
            "policy": self.policy,
            "num_jobs": len(jct),
            "mean_completion_seconds": float(jct.mean()),
            "median_completion_seconds": float(np.median(jct)),
            "p95_completion_seconds": float(np.percentile(jct, 95)),
            "p95_wait_seconds": float(np.percentile(self.wait_seconds, 95)),
            "utilization": self.utilization(),
            "fairness": self.fairness(),
            "num_rescales": self.num_rescales,
            "num_preemptions": self.num_preemptions,
        }


@dataclass
class _State:
    """Columns of all jobs that change while the simulation runs."""

    remaining: np.ndarray
    allocated: np.ndarray
    blocked_until: np.ndarray
    attained: np.ndarray
    first_start: np.ndarray
    finish: np.ndarray
    num_rescales: int = 0
    num_preemptions: int = 0
    timeline: list[tuple[float, float, float, float]] = field(default_factory=list)


def simulate(workload: Workload, policy: Policy, cluster: Cluster) -> Outcome:
    """Run a workload under a policy.

    Args:
        workload: The jobs.
        policy: The policy; a fresh one, as policies may learn.
        cluster: The cluster.

    Returns:
        The outcome; the same for the same arguments.

    Raises:
        InputError: A job cannot run on the cluster, or the policy hands out more GPUs than there are.

    Cost: a few dozen array operations over the active jobs per round.
    """
    too_big = np.flatnonzero(workload.requested > cluster.num_gpus)
    if len(too_big):
        job = int(too_big[0])
        expected = f"at most {cluster.num_gpus} GPUs, the size of the cluster"
        raise input_error(f"job {job}", int(workload.requested[job]), expected, "enlarge the cluster")
    n = workload.num_jobs
    zeros = np.zeros(n)
    state = _State(
        workload.work.copy(),
        np.zeros(n, dtype=np.int64),
        zeros.copy(),
        zeros.copy(),
        np.full(n, np.inf),
        np.full(n, np.inf),
    )
    active = np.zeros(0, dtype=np.int64)
    arrived, now = 0, 0.0
    while arrived < n or len(active):
        if not len(active):
            rounds = np.ceil(workload.submit_seconds[arrived] / cluster.round_seconds)
            now = max(now, float(rounds) * cluster.round_seconds)
        end = int(np.searchsorted(workload.submit_seconds, now, side="right"))
        active = np.concatenate([active, np.arange(arrived, end)])
        arrived = end
        jobs = _view(workload, state, active, now)
        _apply(policy, jobs, policy.decide(jobs, cluster.num_gpus), state, cluster)
        active = _advance(workload, policy, state, active, now, cluster.round_seconds)
        now += cluster.round_seconds
    completion = state.finish - workload.submit_seconds
    return Outcome(
        policy.name,
        completion,
        state.first_start - workload.submit_seconds,
        completion / workload.alone_seconds(),
        state.num_rescales,
        state.num_preemptions,
        workload.group,
        np.array(state.timeline),
        cluster.num_gpus,
        float(workload.submit_seconds[-1]),
    )


def _view(workload: Workload, state: _State, active: np.ndarray, now: float) -> JobTable:
    return JobTable(
        now_seconds=now,
        ids=active,
        submit_seconds=workload.submit_seconds[active],
        requested=workload.requested[active],
        min_gpus=workload.min_gpus[active],
        max_gpus=workload.max_gpus[active],
        group=workload.group[active],
        curve=workload.curve[active],
        allocated=state.allocated[active],
        attained_gpu_seconds=state.attained[active],
        first_start_seconds=state.first_start[active],
        curves=workload.curves,
    )


def _apply(policy: Policy, jobs: JobTable, decision: np.ndarray, state: _State, cluster: Cluster) -> None:
    """Give jobs their GPUs and charge them for the change."""
    used = int(decision.sum())
    fits = (decision == 0) | ((decision >= jobs.min_gpus) & (decision <= jobs.max_gpus))
    if used > cluster.num_gpus or not fits.all():
        expected = f"at most {cluster.num_gpus} GPUs in all, each job within its limits"
        raise input_error(f"decision of {policy.name}", f"{used} GPUs", expected, "correct the policy")
    now, before, ids = jobs.now_seconds, jobs.allocated, jobs.ids
    is_started, is_rescaled = (before == 0) & (decision > 0), (before > 0) & (decision > 0) & (before != decision)
    state.blocked_until[ids[is_started]] = now + cluster.start_seconds
    rescaled = ids[is_rescaled]
    state.blocked_until[rescaled] = np.maximum(state.blocked_until[rescaled], now + cluster.rescale_seconds)
    state.first_start[ids[is_started]] = np.minimum(state.first_start[ids[is_started]], now)
    state.num_rescales += len(rescaled)
    state.num_preemptions += int(((before > 0) & (decision == 0)).sum())
    state.allocated[ids] = decision
    running = int((decision > 0).sum())
    state.timeline.append((now, used, running, len(jobs) - running))


def _advance(
    workload: Workload, policy: Policy, state: _State, active: np.ndarray, now: float, seconds: float
) -> np.ndarray:
    """Let the active jobs run for one round; returns those that have not ended."""
    gpus = state.allocated[active]
    speed = workload.curves[workload.curve[active], gpus]
    begin = np.clip(state.blocked_until[active], now, now + seconds)
    needed = np.full(len(active), np.inf)
    np.divide(state.remaining[active], speed, out=needed, where=speed > 0)
    is_done = (gpus > 0) & (begin + needed <= now + seconds)
    stop = np.where(is_done, begin + needed, now + seconds)
    state.remaining[active] -= (stop - begin) * speed
    state.attained[active] += (stop - now) * gpus
    done = active[is_done]
    if len(done):
        state.finish[done] = stop[is_done]
        state.allocated[done] = 0
        policy.observe(workload.group[done], workload.requested[done], state.finish[done] - state.first_start[done])
    return active[~is_done]
