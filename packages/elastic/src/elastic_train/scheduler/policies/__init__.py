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
from elastic_train.scheduler.simulator import Policy

__all__ = [
    "POLICIES",
    "ElasticSimple",
    "ElasticTiresias",
    "Fifo",
    "Goodput",
    "ProbabilisticLending",
    "StrictQuota",
    "Tiresias",
    "policy",
]

POLICIES: dict[str, Callable[..., Policy]] = {
    kind.name: kind
    for kind in (Fifo, Tiresias, ElasticTiresias, ElasticSimple, Goodput, StrictQuota, ProbabilisticLending)
}


def policy(name: str, **settings: Any) -> Policy:
    """Make a policy by name.

    Args:
        name: One of ``POLICIES``.
        **settings: Arguments of that policy's class.

    Raises:
        InputError: No policy has this name.

    >>> policy("fifo").name
    'fifo'
    """
    if name not in POLICIES:
        raise input_error("policy", name, f"one of {', '.join(sorted(POLICIES))}", "choose one of them")
    return POLICIES[name](**settings)
