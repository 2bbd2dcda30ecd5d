"""Which worker holds the others up.

All workers of a step end it together, so the time of a step says nothing about who is slow. Workers therefore time
their own part, from getting a batch to waiting for the others, and publish a running mean. A worker is a straggler when
its mean is a chosen number of times the median of the others, over enough steps of the present generation.
"""

from __future__ import annotations

from statistics import median

from elastic_train.coordinator import Member

__all__ = ["find_straggler"]


def find_straggler(members: dict[str, Member], ratio: float = 1.2, min_steps: int = 10) -> str | None:
    """Return the slowest worker if it is a straggler.

    Args:
        members: The members.
        ratio: Times the median from which a worker counts as slow, above 1.
        min_steps: Steps that every worker must have timed.

    >>> pace = {"a": 1.0, "b": 1.1, "c": 2.0}
    >>> find_straggler({w: Member(w, "running", compute_seconds=s, num_timed=20) for w, s in pace.items()})
    'c'
    """
    running = [m for m in members.values() if m.phase == "running" and m.num_timed >= min_steps]
    if len(running) < 2 or any(m.phase == "running" and m.num_timed < min_steps for m in members.values()):
        return None
    slowest = max(running, key=lambda m: (m.compute_seconds, m.worker))
    middle = median(m.compute_seconds for m in running if m.worker != slowest.worker)
    return slowest.worker if slowest.compute_seconds > ratio * middle else None
