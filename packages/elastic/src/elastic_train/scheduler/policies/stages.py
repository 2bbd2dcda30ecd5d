"""Policies for jobs of stages: first in first out, shortest critical path, and coBranch.

The first two give each stage all slots it can use, in their order of jobs. Where branches of a job meet in a later
stage, that wastes slots: a short branch ends early and the join waits for the longest one all the same. coBranch
schedules the branches of a job together: the longest gets all it can use, each other one just enough slots to be done
when the longest is. What that saves goes to other jobs; only what nobody else needs is handed back.

    allowed time of a branch  =  longest path of the job now - path behind the branch
    slots of a branch         =  remaining work / allowed time, rounded up

Source: of coBranch ("co-scheduled branches" of staged jobs) only the abstract was known to us. That branches are
scheduled together, and what it is compared with (first in first out, shortest critical path), is the abstract's; the
formulas above, the order of jobs by their longest path and the second round are our reconstruction. Where we know that
we differ: it also schedules the transfers between stages, which are part of a stage's work here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from elastic_train.scheduler.staged import ReadyStage

__all__ = ["CoBranch", "ShortestCriticalPath", "StageFifo"]


def _by_job(ready: Sequence[ReadyStage]) -> dict[int, list[int]]:
    """Return the positions of each job's stages, the longest path first."""
    jobs: dict[int, list[int]] = {}
    for position in sorted(range(len(ready)), key=lambda p: (-ready[p].path_seconds, p)):
        jobs.setdefault(ready[position].job, []).append(position)
    return jobs


def _fill(ready: Sequence[ReadyStage], order: Sequence[int], slots: list[int], free: int) -> list[int]:
    """Give stages all they can use, in an order."""
    for position in order:
        more = min(ready[position].max_slots - slots[position], free)
        slots[position] += more
        free -= more
    return slots


class StageFifo:
    """Jobs in order of submission."""

    name = "stage-fifo"

    def decide(self, ready: Sequence[ReadyStage], num_slots: int) -> list[int]:
        """Return all slots a stage can use, for the stages of the earliest jobs."""
        jobs = _by_job(ready)
        return _fill(ready, [p for job in sorted(jobs) for p in jobs[job]], [0] * len(ready), num_slots)


class ShortestCriticalPath:
    """Jobs in order of the longest path that is left of them, the shortest first."""

    name = "critical-path"

    def decide(self, ready: Sequence[ReadyStage], num_slots: int) -> list[int]:
        """Return all slots a stage can use, for the stages of the jobs with the shortest paths."""
        return _fill(ready, _shortest_first(ready), [0] * len(ready), num_slots)


def _shortest_first(ready: Sequence[ReadyStage]) -> list[int]:
    jobs = _by_job(ready)
    order = sorted(jobs, key=lambda job: (ready[jobs[job][0]].path_seconds, job))
    return [position for job in order for position in jobs[job]]


class CoBranch:
    """Jobs in order of the longest path; the branches of a job get what they need to end together."""

    name = "cobranch"

    def decide(self, ready: Sequence[ReadyStage], num_slots: int) -> list[int]:
        """Return just enough slots for each branch, then what is left to whoever can use it."""
        order, slots, free = _shortest_first(ready), [0] * len(ready), num_slots
        longest: dict[int, float] = {}
        for position in order:
            stage = ready[position]
            allowed = longest.setdefault(stage.job, stage.path_seconds) - stage.tail_seconds
            # A hair of slack keeps rounding errors from costing a slot.
            needed = min(max(math.ceil(stage.remaining / allowed * (1 - 1e-9)), 1), stage.max_slots)
            slots[position] = min(needed, free)
            free -= slots[position]
        return _fill(ready, order, slots, free)
