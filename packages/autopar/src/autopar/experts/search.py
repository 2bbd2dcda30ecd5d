"""The best placement of experts for given token counts: exact where that is possible, by descent elsewhere.

The exact search decides one expert after another, those with most tokens first. Loads only grow, so what a partial
placement costs already, with the mean of all tokens as the least the busiest device computes, bounds every completion
from below; branches that cannot beat the best are left. Descent changes one expert at a time, or swaps the homes of
two, as long as that helps, from plain expert parallelism and from full shadowing; so it is never worse than either.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from autopar.errors import InfeasibleError, ProblemError
from autopar.experts.layer import ExpertLayer, Loads, Placement, plain_placement

__all__ = ["place_experts", "shadow_experts"]

Choice = tuple[int, tuple[int, ...]]
_MOST_EXACT = 1 << 18
_FASTER = 1 - 1e-12


def place_experts(
    layer: ExpertLayer, counts: Any, current: Placement | None = None, moves_homes: bool = True, method: str = "auto"
) -> Placement:
    """Return the placement with the least predicted time.

    Args:
        layer: Sizes and machine.
        counts: [experts, devices] tokens expected on each device for each expert.
        current: Where experts live now; plain expert parallelism when left out.
        moves_homes: Whether experts may change their home.
        method: ``"exact"``, ``"descent"``, or ``"auto"``: exact while there are few combinations.

    Returns:
        A placement never slower, as predicted, than ``current`` without its replicas.

    Raises:
        ProblemError: Counts of another shape, or an unknown method.
        InfeasibleError: The experts do not fit the devices.

    >>> from autopar import Cluster
    >>> layer = ExpertLayer(Cluster.preset("loopback-cpu", 2), 256, 1024, 1e-6)
    >>> place_experts(layer, [[90, 90], [0, 1]]).replicas
    ((1,), ())
    """
    counts = layer.check(counts)
    current = current or plain_placement(*counts.shape)
    if len(current.homes) != len(counts) or method not in ("auto", "exact", "descent"):
        raise ProblemError(
            f"method={method!r} and a placement of {len(current.homes)} experts do not fit counts of {len(counts)} "
            "experts: expected exact, descent or auto, and one home per expert; pass both for the same layer"
        )
    start = _settle(layer, Placement(current.homes, ((),) * len(counts)), counts.shape[1])
    options = counts.shape[1] * 2 ** (counts.shape[1] - 1) if moves_homes else 2 ** (counts.shape[1] - 1)
    best = _descend(layer, counts, start, moves_homes)
    shadowed = shadow_experts(layer, counts, start)
    best = min(
        best, _descend(layer, counts, shadowed, moves_homes), key=lambda p: layer.seconds(layer.loads(counts, p))
    )
    if method == "exact" or (method == "auto" and options ** len(counts) <= _MOST_EXACT):
        return _Exact(layer, counts, start, moves_homes).improve(best)
    return best


def shadow_experts(layer: ExpertLayer, counts: Any, current: Placement | None = None) -> Placement:
    """Return full shadowing: the busiest experts are copied to all devices as long as that is faster.

    Source: FasterMoE (PPoPP 2022), its dynamic shadowing.
    """
    counts = layer.check(counts)
    best = current or plain_placement(*counts.shape)
    seconds = layer.seconds(layer.loads(counts, best))
    for expert in np.argsort(-counts.sum(1), kind="stable"):
        others = tuple(d for d in range(counts.shape[1]) if d != best.homes[expert])
        tried = _with_choice(best, int(expert), (best.homes[expert], others))
        took = layer.seconds(layer.loads(counts, tried))
        if not _fits(layer, tried, counts.shape[1]) or took >= seconds * _FASTER:
            break
        best, seconds = tried, took
    return best


def _with_choice(placement: Placement, expert: int, choice: Choice) -> Placement:
    homes, replicas = list(placement.homes), list(placement.replicas)
    homes[expert], replicas[expert] = choice
    return Placement(tuple(homes), tuple(replicas))


def _fits(layer: ExpertLayer, placement: Placement, num_devices: int) -> bool:
    return layer.capacity is None or int(placement.held(num_devices).max()) <= layer.capacity


def _settle(layer: ExpertLayer, placement: Placement, num_devices: int) -> Placement:
    """Refuse experts that fit nowhere."""
    if not _fits(layer, placement, num_devices):
        held = int(placement.held(num_devices).max())
        raise InfeasibleError(
            f"capacity={layer.capacity} experts a device do not hold {len(placement.homes)} experts on {num_devices} "
            f"devices: one has {held} homes; expected at most {layer.capacity}; use more devices or memory"
        )
    return placement


def _descend(layer: ExpertLayer, counts: np.ndarray, start: Placement, moves_homes: bool) -> Placement:
    """Change one expert, or swap two homes, while that is faster."""
    parts = [layer.loads_of(*row) for row in zip(counts, start.homes, start.replicas, strict=True)]
    best, total = start, layer.loads(counts, start)
    seconds, improved = layer.seconds(total), True
    order = [int(expert) for expert in np.argsort(-counts.sum(1), kind="stable")]
    while improved:
        improved = False
        for expert in order:
            rest = _without(total, parts[expert])
            for choice in _choices(counts[expert], best.homes[expert], moves_homes):
                tried = _with_choice(best, expert, choice)
                if choice == (best.homes[expert], best.replicas[expert]) or not _fits(layer, tried, counts.shape[1]):
                    continue
                part = layer.loads_of(counts[expert], *choice)
                took = layer.seconds(rest + part)
                if took < seconds * _FASTER:
                    best, seconds, improved = tried, took, True
                    parts[expert], total = part, rest + part
        for one, other in itertools.combinations(order, 2) if moves_homes else ():
            if best.homes[one] == best.homes[other] or best.replicas[one] or best.replicas[other]:
                continue
            swapped = (
                layer.loads_of(counts[one], best.homes[other], ()),
                layer.loads_of(counts[other], best.homes[one], ()),
            )
            tried_total = _without(_without(total, parts[one]), parts[other]) + swapped[0] + swapped[1]
            took = layer.seconds(tried_total)
            if took < seconds * _FASTER:
                homes = best.homes[other], best.homes[one]
                best = _with_choice(_with_choice(best, one, (homes[0], ())), other, (homes[1], ()))
                parts[one], parts[other] = swapped
                total, seconds, improved = tried_total, took, True
    return best


def _without(total: Loads, part: Loads) -> Loads:
    return Loads(*(a - b for a, b in zip(vars(total).values(), vars(part).values(), strict=True)))


def _choices(counts: np.ndarray, home: int, moves_homes: bool) -> list[Choice]:
    """Return choices worth trying: replicas where most of the expert's tokens are, for every home."""
    found: list[Choice] = []
    for place in range(len(counts)) if moves_homes else [home]:
        others = [int(d) for d in np.argsort(-counts, kind="stable") if d != place]
        found += [(place, tuple(sorted(others[:number]))) for number in range(len(others) + 1)]
    return found


class _Exact:
    """Branch and bound over the choices of all experts."""

    def __init__(self, layer: ExpertLayer, counts: np.ndarray, start: Placement, moves_homes: bool):
        self.layer, self.counts, self.num_devices = layer, counts, counts.shape[1]
        self.order = [int(expert) for expert in np.argsort(-counts.sum(1), kind="stable")]
        self.mean = float(counts.sum()) / self.num_devices
        self.options: list[list[tuple[Choice, Loads]]] = []
        for expert in self.order:
            homes: Sequence[int] = range(self.num_devices) if moves_homes else [start.homes[expert]]
            choices = [
                (home, replicas)
                for home in homes
                for number in range(self.num_devices)
                for replicas in itertools.combinations([d for d in range(self.num_devices) if d != home], number)
            ]
            self.options.append([(choice, layer.loads_of(counts[expert], *choice)) for choice in choices])

    def improve(self, best: Placement) -> Placement:
        """Return the best of all placements; ``best`` itself when none is faster."""
        self.best, self.seconds = best, self.layer.seconds(self.layer.loads(self.counts, best))
        nothing = np.zeros(self.num_devices, np.int64)
        self._branch(0, Loads(*[nothing] * 5), nothing, [])
        return self.best

    def _branch(self, depth: int, loads: Loads, held: np.ndarray, chosen: list[Choice]) -> None:
        if depth == len(self.order):
            self.seconds = self.layer.seconds(loads)
            pairs = dict(zip(self.order, chosen, strict=True))
            choices = [pairs[expert] for expert in range(len(self.order))]
            self.best = Placement(tuple(c[0] for c in choices), tuple(c[1] for c in choices))
            return
        for choice, part in self.options[depth]:
            now = held.copy()
            now[[choice[0], *choice[1]]] += 1
            if self.layer.capacity is not None and int(now.max()) > self.layer.capacity:
                continue
            total = loads + part
            if self.layer.seconds(total, self.mean) < self.seconds * _FASTER:
                self._branch(depth + 1, total, now, [*chosen, choice])
