"""Jobs of stages: a simulator in which a stage waits for the stages before it.

A job is a graph of stages. A stage has an amount of work and a number of slots (workers, GPUs, executors) that it can
use at most; it runs when all stages it comes after have ended, and as fast as it has slots. Stages that run side by
side and meet in a later one are branches: the later stage waits for the slowest of them, so slots that end a branch
early buy nothing.

Time goes from event to event, that is from one arrival or end of a stage to the next; at each the policy hands out the
slots. Callers may not assume anything about data that travels between stages: it is part of a stage's work.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from elastic_train.errors import input_error

__all__ = [
    "ReadyStage", "Stage", "StagedJob", "StagedOutcome", "StagedPolicy", "random_staged", "read_staged",
    "simulate_staged",
]  # fmt: skip


@dataclass(frozen=True)
class Stage:
    """One stage of a job.

    Attributes:
        work: Seconds that it takes on one slot.
        max_slots: Most slots it can use.
        after: Numbers of the stages of its job that must have ended; all smaller than its own.
    """

    work: float
    max_slots: int
    after: tuple[int, ...] = ()


@dataclass(frozen=True)
class StagedJob:
    """A job of stages.

    Attributes:
        name: Its name.
        submit_seconds: When it comes.
        stages: Its stages, each after those it waits for.
    """

    name: str
    submit_seconds: float
    stages: tuple[Stage, ...]

    def __post_init__(self) -> None:
        if not self.stages:
            raise input_error(f"job {self.name}", "no stages", "at least one", "give it a stage")
        for number, stage in enumerate(self.stages):
            where = f"job {self.name}, stage {number}"
            if not (stage.work > 0 and np.isfinite(stage.work) and stage.max_slots >= 1):
                raise input_error(where, stage, "work above 0 and at least one slot", "correct the stage")
            if any(not 0 <= before < number for before in stage.after):
                raise input_error(
                    where, stage.after, f"numbers below {number}", "list stages after those they wait for"
                )

    def tails(self) -> list[float]:
        """Return, per stage, the seconds of the longest path behind it when each stage has all slots it can use."""
        tails = [0.0] * len(self.stages)
        for stage in reversed(range(len(self.stages))):
            own = tails[stage] + self.stages[stage].work / self.stages[stage].max_slots
            for before in self.stages[stage].after:
                tails[before] = max(tails[before], own)
        return tails

    def alone_seconds(self) -> float:
        """Return how long the job takes with all slots it can use."""
        return max(t + s.work / s.max_slots for t, s in zip(self.tails(), self.stages, strict=True) if not s.after)


@dataclass(frozen=True)
class ReadyStage:
    """A stage that can run now, as a policy sees it.

    Attributes:
        job: Number of its job, in order of submission.
        submit_seconds: When the job came.
        remaining: Seconds on one slot that are left.
        max_slots: Most slots it can use.
        tail_seconds: Longest path behind it.
    """

    job: int
    submit_seconds: float
    remaining: float
    max_slots: int
    tail_seconds: float

    @property
    def path_seconds(self) -> float:
        """Seconds to the end of the job along this stage, at full speed."""
        return self.remaining / self.max_slots + self.tail_seconds


class StagedPolicy(Protocol):
    """What hands out slots to stages."""

    name: str

    def decide(self, ready: Sequence[ReadyStage], num_slots: int) -> list[int]:
        """Return the slots of each stage: within its limit, in all at most ``num_slots``, above 0 for at least one."""
        ...


@dataclass
class StagedOutcome:
    """What happened to each job.

    Attributes:
        policy: Name of the policy.
        completion_seconds: From submission to end, per job.
        slowdown: The same over the time with all slots it can use.
        timeline: float64 ``[num_events, 4]``: seconds, slots in use, stages running, stages waiting.
        num_slots: Slots there are.
    """

    policy: str
    completion_seconds: np.ndarray
    slowdown: np.ndarray
    timeline: np.ndarray
    num_slots: int

    def summary(self) -> dict[str, Any]:
        """Return the figures that are compared, as plain values."""
        times, used = self.timeline[:, 0], self.timeline[:, 1]
        spans = np.diff(times)
        total = max(self.num_slots * float(spans.sum()), 1e-9)
        return {
            "policy": self.policy,
            "num_jobs": len(self.completion_seconds),
            "mean_completion_seconds": float(self.completion_seconds.mean()),
            "p95_completion_seconds": float(np.percentile(self.completion_seconds, 95)),
            "utilization": float((spans * used[:-1]).sum() / total),
            "fairness": float(self.slowdown.sum() ** 2 / (len(self.slowdown) * (self.slowdown**2).sum())),
        }


class _Progress:
    """What is left of the jobs that have come."""

    def __init__(self, jobs: Sequence[StagedJob]):
        self.jobs = jobs
        self.tails = [job.tails() for job in jobs]
        self.remaining = [[stage.work for stage in job.stages] for job in jobs]
        self.ended: list[set[int]] = [set() for _ in jobs]
        self.active: list[int] = []

    def ready(self) -> list[tuple[int, int]]:
        """Return the stages that can run, as pairs of job and stage."""
        return [
            (job, number)
            for job in self.active
            for number, stage in enumerate(self.jobs[job].stages)
            if number not in self.ended[job] and self.ended[job].issuperset(stage.after)
        ]

    def view(self, place: tuple[int, int]) -> ReadyStage:
        job, stage = place
        limit = self.jobs[job].stages[stage].max_slots
        when, left = self.jobs[job].submit_seconds, self.remaining[job][stage]
        return ReadyStage(job, when, left, limit, self.tails[job][stage])

    def advance(self, places: Sequence[tuple[int, int]], slots: Sequence[int], seconds: float) -> list[int]:
        """Let stages run for a time; returns the jobs that have ended."""
        done = []
        for (job, stage), given in zip(places, slots, strict=True):
            self.remaining[job][stage] -= given * seconds
            if given and self.remaining[job][stage] <= 1e-9 * self.jobs[job].stages[stage].work:
                self.ended[job].add(stage)
                if len(self.ended[job]) == len(self.jobs[job].stages):
                    done.append(job)
        self.active = [job for job in self.active if job not in done]
        return done


def simulate_staged(jobs: Iterable[StagedJob], policy: StagedPolicy, num_slots: int) -> StagedOutcome:
    """Run jobs of stages under a policy.

    Args:
        jobs: The jobs.
        policy: The policy.
        num_slots: Slots there are.

    Raises:
        InputError: No jobs, no slots, or a decision that cannot be.

    >>> from elastic_train.scheduler.policies import policy
    >>> job = StagedJob("a", 0.0, (Stage(8.0, 4), Stage(4.0, 4, (0,))))
    >>> simulate_staged([job], policy("cobranch"), 4).completion_seconds.tolist()
    [3.0]
    """
    ordered = sorted(jobs, key=lambda job: job.submit_seconds)
    if not ordered or num_slots < 1:
        raise input_error("jobs, num_slots", (len(ordered), num_slots), "at least one of each", "check the trace")
    state, finish = _Progress(ordered), np.zeros(len(ordered))
    timeline: list[tuple[float, float, float, float]] = []
    now, arrived = ordered[0].submit_seconds, 0
    while arrived < len(ordered) or state.active:
        while arrived < len(ordered) and ordered[arrived].submit_seconds <= now:
            state.active.append(arrived)
            arrived += 1
        places = state.ready()
        views = [state.view(place) for place in places]
        slots = _checked(policy, views, num_slots) if places else []
        timeline.append((now, sum(slots), sum(map(bool, slots)), len(slots) - sum(map(bool, slots))))
        ends = [view.remaining / given for view, given in zip(views, slots, strict=True) if given]
        until = ordered[arrived].submit_seconds - now if arrived < len(ordered) else float("inf")
        seconds = min([*ends, until])
        now += seconds
        finish[state.advance(places, slots, seconds)] = now
    timeline.append((now, 0, 0, 0))
    completion = finish - [job.submit_seconds for job in ordered]
    slowdown = completion / [job.alone_seconds() for job in ordered]
    return StagedOutcome(policy.name, completion, slowdown, np.array(timeline), num_slots)


def _checked(policy: StagedPolicy, ready: Sequence[ReadyStage], num_slots: int) -> list[int]:
    slots = policy.decide(ready, num_slots)
    fits = len(slots) == len(ready) and all(0 <= s <= r.max_slots for s, r in zip(slots, ready, strict=True))
    if not fits or not 0 < sum(slots) <= num_slots:
        expected = f"one number per stage within its limit, above 0 and at most {num_slots} in all"
        raise input_error(f"decision of {policy.name}", slots, expected, "correct the policy")
    return slots


def read_staged(path: str | Path) -> list[StagedJob]:
    """Read jobs of stages: a JSON list of ``{"name", "submit_seconds", "stages": [{"work", "max_slots", "after"}]}``.

    Raises:
        InputError: The file holds something else.
    """
    try:
        return [
            StagedJob(
                str(job["name"]), float(job["submit_seconds"]),
                tuple(Stage(float(s["work"]), int(s["max_slots"]), tuple(s.get("after", ()))) for s in job["stages"]),
            )
            for job in json.loads(Path(path).read_text())
        ]  # fmt: skip
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
        found = f"{type(error).__name__}: {error}"
        raise input_error(str(path), found, "a JSON list of jobs with stages", "see read_staged") from error


def random_staged(num_jobs: int, num_slots: int, load: float = 0.8, seed: int = 0) -> list[StagedJob]:
    """Make jobs that split into branches, join and split again.

    Args:
        num_jobs: Jobs to make.
        num_slots: Slots of the cluster that the arrivals are set for.
        load: Work that comes per second, over the slots.
        seed: Of the random numbers; the same seed gives the same jobs.
    """
    rng = np.random.default_rng(seed)
    graphs = []
    for _ in range(num_jobs):
        stages, last = [Stage(float(rng.lognormal(3.0, 1.0)), int(rng.integers(1, 9)))], (0,)
        for _ in range(int(rng.integers(1, 4))):
            heads = []
            for _ in range(int(rng.integers(2, 5))):
                before = last
                for _ in range(int(rng.integers(1, 3))):
                    stages.append(Stage(float(rng.lognormal(4.0, 1.2)), int(rng.integers(2, 17)), before))
                    before = (len(stages) - 1,)
                heads.append(len(stages) - 1)
            stages.append(Stage(float(rng.lognormal(3.0, 1.0)), int(rng.integers(1, 9)), tuple(heads)))
            last = (len(stages) - 1,)
        graphs.append(tuple(stages))
    total = sum(stage.work for stages in graphs for stage in stages)
    times = np.sort(rng.uniform(0, total / (load * num_slots), num_jobs))
    return [StagedJob(f"job-{i}", float(times[i] - times[0]), stages) for i, stages in enumerate(graphs)]
