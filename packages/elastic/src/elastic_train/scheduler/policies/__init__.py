"""Scheduling policies: plain objects that turn the active jobs into a number of GPUs for each.

``policy("elastic-tiresias")`` makes one by name; ``POLICIES`` lists the names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from elastic_train.errors import input_error
from elastic_train.scheduler.policies.elastic import ElasticSimple, ElasticTiresias, Goodput
from elastic_train.scheduler.policies.quota import ProbabilisticLending, StrictQuota
from elastic_train.scheduler.policies.rigid import Fifo, Tiresias
from elastic_train.scheduler.policies.stages import CoBranch, ShortestCriticalPath, StageFifo
from elastic_train.scheduler.simulator import Policy

__all__ = [
    "POLICIES",
    "STAGED_POLICIES",
    "CoBranch",
    "ElasticSimple",
    "ElasticTiresias",
    "Fifo",
    "Goodput",
    "ProbabilisticLending",
    "ShortestCriticalPath",
    "StageFifo",
    "StrictQuota",
    "Tiresias",
    "policy",
]

POLICIES: dict[str, Callable[..., Policy]] = {
    kind.name: kind
    for kind in (Fifo, Tiresias, ElasticTiresias, ElasticSimple, Goodput, StrictQuota, ProbabilisticLending)
}

# They hand out slots to stages of jobs, see elastic_train.scheduler.staged.
STAGED_POLICIES: dict[str, Callable[..., Any]] = {
    kind.name: kind for kind in (StageFifo, ShortestCriticalPath, CoBranch)
}


def policy(name: str, **settings: Any) -> Any:
    """Make a policy by name.

    Args:
        name: One of ``POLICIES``, or of ``STAGED_POLICIES`` for jobs of stages.
        **settings: Arguments of that policy's class.

    Raises:
        InputError: No policy has this name.

    >>> policy("fifo").name
    'fifo'
    """
    known = POLICIES | STAGED_POLICIES
    if name not in known:
        raise input_error("policy", name, f"one of {', '.join(sorted(known))}", "choose one of them")
    return known[name](**settings)
