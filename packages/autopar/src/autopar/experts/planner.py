"""Placements that follow the routing: planned from the steps before, changed when that pays.

Before each step the planner expects what the last steps brought, and searches the best placement for it. Replicas
cost only while they are used, so they change freely; homes carry optimiser state, so a change of homes must earn its
move over the steps for which routing will stay alike, a number read off how fast past steps became unlike each other.

Source: Pro-Prophet's planner from locality, rebuilt from its abstract; the horizon is ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from autopar.errors import ProblemError
from autopar.experts.layer import ExpertLayer, Placement, StepCost, plain_placement
from autopar.experts.search import place_experts
from autopar.experts.statistics import expected_counts, similarity
from core_kernels.console import format_bytes, format_seconds
from core_kernels.plan import PlanDocument

__all__ = ["ExpertPlan", "ExpertPlanner", "plan"]

_LONGEST_HORIZON = 1000.0


@dataclass(frozen=True)
class ExpertPlan(PlanDocument):
    """Where the experts of a layer live, and what a step is predicted to cost.

    Attributes:
        num_devices: Number of devices.
        placement: Homes and replicas.
        predicted: A step under it.
        plain: The same step under plain expert parallelism.
    """

    schema: ClassVar[str] = "autopar.expert_plan"
    version: ClassVar[int] = 1

    num_devices: int
    placement: Placement
    predicted: StepCost
    plain: StepCost

    def explain(self) -> str:
        """Return what the plan does, in words."""
        p, q = self.predicted, self.plain
        lines = [
            f"{len(self.placement.homes)} experts on {self.num_devices} devices: {format_seconds(p.seconds)} per step, "
            f"{format_seconds(q.seconds)} without replicas; balance {p.balance:.2f} instead of {q.balance:.2f}",
            f"  tokens: {format_bytes(p.exchange_bytes)} instead of {format_bytes(q.exchange_bytes)}, "
            f"{format_seconds(p.exchange_seconds)}; experts at work {format_seconds(p.compute_seconds)}; replicas "
            f"{format_bytes(p.transfer_bytes)}, {format_seconds(p.transfer_seconds)}",
        ]
        for device in range(self.num_devices):
            at_home = [str(e) for e, home in enumerate(self.placement.homes) if home == device]
            copies = [str(e) for e, places in enumerate(self.placement.replicas) if device in places]
            lines.append(
                f"  device {device}: experts {', '.join(at_home) or 'none'}; replicas {', '.join(copies) or 'none'}"
            )
        return "\n".join(lines)

    def diff(self, other: ExpertPlan) -> str:
        """Return the experts that live elsewhere in another plan, a line each."""
        pairs = zip(
            self.placement.homes, self.placement.replicas, other.placement.homes, other.placement.replicas, strict=True
        )
        return "\n".join(
            f"expert {expert}: home {a}, replicas {list(b)} | home {c}, replicas {list(d)}"
            for expert, (a, b, c, d) in enumerate(pairs)
            if (a, b) != (c, d)
        )


def plan(layer: ExpertLayer, counts: Any, moves_homes: bool = True, method: str = "auto") -> ExpertPlan:
    """Return the best placement for given token counts as a plan.

    Args:
        layer: Sizes and machine.
        counts: [experts, devices] tokens of a step, recorded or from :func:`expected_counts`.
        moves_homes: Whether experts may live elsewhere than plain expert parallelism puts them.
        method: As in :func:`place_experts`.

    >>> from autopar import Cluster
    >>> layer = ExpertLayer.feed_forward(Cluster.preset("loopback-cpu", 2), width=8, hidden=8)
    >>> found = plan(layer, [[4000, 4000], [10, 10]])
    >>> found.predicted.seconds < found.plain.seconds
    True
    """
    counts = layer.check(counts)
    placement = place_experts(layer, counts, moves_homes=moves_homes, method=method)
    plain = layer.cost(counts, plain_placement(*counts.shape))
    return ExpertPlan(counts.shape[1], placement, layer.cost(counts, placement), plain)


class ExpertPlanner:
    """A placement that follows the routing of one layer.

    Args:
        layer: Sizes and machine.
        num_experts: Experts of the layer.
        decay: Weight of a step against the one after it, for what is expected.
        moves_homes: Whether experts may change their home.
        every: Steps between two searches.

    Attributes:
        placement: The placement for the next step.
        moved_seconds: What the last change of homes took; 0 when homes stayed.
    """

    def __init__(
        self, layer: ExpertLayer, num_experts: int, decay: float = 0.5, moves_homes: bool = True, every: int = 1
    ):
        if every < 1:
            raise ProblemError(
                f"every={every} is not valid: expected at least 1 step; use 1 to search before every step"
            )
        self.layer, self.decay, self.moves_homes, self.every = layer, decay, moves_homes, every
        self.placement = plain_placement(num_experts, layer.cluster.num_devices)
        self.moved_seconds = 0.0
        self._history: list[np.ndarray] = []
        self._unlike: list[float] = []
        self._steps = 0

    def update(self, counts: Any) -> Placement:
        """Take the counts [experts, devices] of the step just done and return the placement for the next."""
        counts = self.layer.check(counts)
        if self._history:
            self._unlike = [*self._unlike, 1 - similarity(self._history[-1], counts)][-16:]
        self._history = [*self._history, counts][-16:]
        self._steps += 1
        self.moved_seconds = 0.0
        if (self._steps - 1) % self.every == 0:
            self._search(expected_counts(self._history, self.decay))
        return self.placement

    def horizon(self) -> float:
        """Return for about how many steps routing stays alike: until half of the tokens go elsewhere."""
        if not self._unlike:
            return 1.0
        change = float(np.mean(self._unlike))
        return min(_LONGEST_HORIZON, 0.5 / change) if change else _LONGEST_HORIZON

    def _search(self, expected: np.ndarray) -> None:
        staying = place_experts(self.layer, expected, self.placement, moves_homes=False)
        if not self.moves_homes:
            self.placement = staying
            return
        moving = place_experts(self.layer, expected, self.placement)
        gain = self.layer.cost(expected, staying).seconds - self.layer.cost(expected, moving).seconds
        price = self.layer.moving_seconds(self.placement, moving)
        if gain * self.horizon() > price:
            self.placement, self.moved_seconds = moving, price
        else:
            self.placement = staying
