"""Routings played against strategies: what every step takes, how even the devices are, how many bytes move.

``plain`` keeps experts where they are; ``shadow`` sees the routing of the step and copies the busiest experts to all
devices, as FasterMoE does; ``planned`` is :class:`ExpertPlanner`, which has seen only the steps before and pays for
moved homes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.errors import ProblemError
from autopar.experts.layer import ExpertLayer, StepCost, plain_placement
from autopar.experts.planner import ExpertPlanner
from autopar.experts.search import shadow_experts

__all__ = ["STRATEGIES", "Report", "simulate"]

STRATEGIES = ("plain", "shadow", "planned")


@dataclass(frozen=True)
class Report:
    """What a strategy cost over all steps.

    Attributes:
        seconds: Mean step, moves of homes included.
        slowest_seconds: Slowest step.
        balance: Mean over steps of the busiest device's tokens over the mean device's.
        exchange_bytes: Mean bytes of tokens that move in a step.
        transfer_bytes: Mean bytes of replicas and their gradients.
        moved_seconds: Part of ``seconds`` spent on moving homes.
        num_replicas: Mean number of replicas.
    """

    seconds: float
    slowest_seconds: float
    balance: float
    exchange_bytes: float
    transfer_bytes: float
    moved_seconds: float
    num_replicas: float


def simulate(
    layer: ExpertLayer,
    routings: Any,
    strategies: Sequence[str] = STRATEGIES,
    decay: float = 0.5,
    moves_homes: bool = True,
    every: int = 1,
) -> dict[str, Report]:
    """Play routings under each strategy.

    Args:
        layer: Sizes and machine.
        routings: [steps, experts, devices] tokens, recorded or from :func:`autopar.experts.zipf_counts`.
        strategies: Some of ``"plain"``, ``"shadow"`` and ``"planned"``.
        decay: As in :class:`ExpertPlanner`.
        moves_homes: As there.
        every: As there.

    Returns:
        Per strategy what it cost.

    Raises:
        ProblemError: Routings of another shape, or an unknown strategy.

    >>> from autopar import Cluster
    >>> from autopar.experts import zipf_counts
    >>> layer = ExpertLayer.feed_forward(Cluster.preset("loopback-cpu", 2), width=64, hidden=64)
    >>> found = simulate(layer, zipf_counts(4, 4, 2, 4000, exponent=1.5))
    >>> found["planned"].balance <= found["plain"].balance
    True
    """
    steps = np.asarray(routings)
    if steps.ndim != 3 or not len(steps):
        raise ProblemError(
            f"routings have shape {steps.shape}; expected [steps, experts, devices] with at least one step; stack "
            "the counts of steps"
        )
    unknown = [name for name in strategies if name not in STRATEGIES]
    if unknown:
        raise ProblemError(f"strategies hold {unknown}; expected some of {', '.join(STRATEGIES)}; choose among those")
    plain = plain_placement(steps.shape[1], layer.cluster.num_devices)
    found = {}
    for name in strategies:
        planner = ExpertPlanner(layer, steps.shape[1], decay, moves_homes, every)
        costs: list[tuple[StepCost, float, int]] = []
        for counts in steps:
            placement = plain if name == "plain" else planner.placement
            if name == "shadow":
                placement = shadow_experts(layer, counts)
            costs.append((layer.cost(counts, placement), planner.moved_seconds, placement.num_replicas))
            if name == "planned":
                planner.update(counts)
        found[name] = _report(costs)
    return found


def _report(costs: list[tuple[StepCost, float, int]]) -> Report:
    took = [cost.seconds + moved for cost, moved, _ in costs]

    def mean(values: list[Any]) -> float:
        return float(np.mean(values))

    return Report(
        seconds=mean(took),
        slowest_seconds=max(took),
        balance=mean([cost.balance for cost, _, _ in costs]),
        exchange_bytes=mean([cost.exchange_bytes for cost, _, _ in costs]),
        transfer_bytes=mean([cost.transfer_bytes for cost, _, _ in costs]),
        moved_seconds=mean([moved for _, moved, _ in costs]),
        num_replicas=mean([replicas for _, _, replicas in costs]),
    )
