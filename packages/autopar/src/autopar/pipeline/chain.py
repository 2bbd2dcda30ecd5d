"""Frontiers of every run of consecutive units: what a stage may cost, wherever it begins and ends.

A stage is a run of units on one sub-mesh. All its units share a *variant*: the shape of the mesh and the layout of
activations between units. Per variant the frontier of a run is the product of its units' frontiers, built by halves;
runs of equal units, such as repeated layers, are built once. With m micro-batches in the batch and k of them in flight,
a stage's memory is::

    sum over units (states + k saved) + largest working set + m (bytes received + bytes of the gradient received)

The last term is what ``torch.distributed.pipelining`` allocates: a buffer per micro-batch for each value that comes in.

Thinning (``eps``) spends ``(1 + eps) ** (1 / levels)`` at each of the levels of halving.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.errors import ProblemError
from autopar.pipeline.runs import fastest_that_fit, multiply_runs

__all__ = ["Chain", "StagePoint"]


@dataclass(frozen=True)
class StagePoint:
    """The stage chosen for a run under a budget.

    Attributes:
        seconds: Of one micro-batch; infinite where nothing fits.
        memory: Bytes of a device.
        variant: Which variant.
        points: Point of each unit under it.
    """

    seconds: float
    memory: float
    variant: int
    points: tuple[int, ...]


class Chain:
    """Units in a row, with their frontiers on one sub-mesh.

    Args:
        points: Per variant and unit float64 [points, 3], (states, saved, seconds) as in
            :class:`autopar.pipeline.stage_space.UnitFrontier`; ``None`` where a variant cannot run a unit.
        working: Per variant and unit, bytes of the largest working set.
        boundary_bytes: Per variant, bytes of one micro-batch that one device holds of the value before each unit and
            after the last, ``num_units + 1`` numbers; 0 at both ends.
        num_micro_batches: Micro-batches of a step.
        eps: Thinning of the frontiers.
        classes: Per unit something that is equal for units with equal arguments; all differ when left out.
    """

    def __init__(
        self,
        points: Sequence[Sequence[np.ndarray | None]],
        working: Sequence[Sequence[float]],
        boundary_bytes: Sequence[Sequence[float]],
        num_micro_batches: int,
        eps: float = 0.0,
        classes: Sequence[Hashable] | None = None,
    ):
        self.points, self.num_units = points, len(points[0]) if points else 0
        if not self.num_units or any(len(row) != self.num_units for row in points):
            raise ProblemError(
                f"points describe {[len(row) for row in points]} units per variant; expected the same number of at "
                "least 1 in each; give every variant all units"
            )
        levels = max(1, math.ceil(math.log2(self.num_units)) + 1)
        self._ratio = (1 + eps) ** (1 / levels)
        self.run_ids, examples = _number_runs(list(classes) if classes is not None else list(range(self.num_units)))
        self._halves = np.array([self._halve(start, stop) for start, stop in examples], np.int64)
        # Short runs first, so that halves are there when a run is made of them.
        self._order = np.argsort([stop - start for start, stop in examples], kind="stable")
        self._fixed = np.array([
            [
                max(row[start:stop]) + num_micro_batches * (bounds[start] + bounds[stop])
                for start, stop in examples
            ]
            for row, bounds in zip(working, boundary_bytes, strict=True)
        ])  # fmt: skip
        self._tables: dict[tuple[int, int], tuple[np.ndarray, ...]] = {}

    def _halve(self, start: int, stop: int) -> tuple[int, int]:
        """Return the runs a run is made of; of one unit, minus one minus its number."""
        if stop - start == 1:
            return -1 - start, 0
        middle = (start + stop) // 2
        return int(self.run_ids[start, middle]), int(self.run_ids[middle, stop])

    def _table(self, variant: int, num_in_flight: int) -> tuple[np.ndarray, ...]:
        """Return (offsets, memory, seconds, origin) of all runs under one variant."""
        key = variant, num_in_flight
        if key not in self._tables:
            units = [np.zeros((0, 3)) if unit is None else unit for unit in self.points[variant]]
            starts = np.cumsum([0, *map(len, units)])
            multiply: Any = multiply_runs
            costs = np.concatenate(units)
            memory = costs[:, 0] + num_in_flight * costs[:, 1]
            self._tables[key] = multiply(self._halves, self._order, starts, memory, costs[:, 2].copy(), self._ratio)
        return self._tables[key]

    def times(self, num_in_flight: int, memory: float) -> np.ndarray:
        """Return float64 [units, units + 1] seconds of the fastest stage of every run that fits, infinite without."""
        values = np.full(len(self._halves), np.inf)
        search: Any = fastest_that_fit
        for variant in range(len(self.points)):
            first, last, sizes, seconds, _ = self._table(variant, num_in_flight)
            values = np.minimum(values, search(first, last, sizes, seconds, memory - self._fixed[variant]))
        return np.append(values, np.inf)[self.run_ids]

    def at(self, start: int, stop: int, num_in_flight: int, memory: float) -> StagePoint:
        """Return the fastest stage of a run that fits, the one with least memory among equals."""
        run, best = int(self.run_ids[start, stop]), (math.inf, math.inf, -1, -1)
        for variant in range(len(self.points)):
            first, last, sizes, seconds, _ = self._table(variant, num_in_flight)
            fixed = float(self._fixed[variant, run])
            place = int(np.searchsorted(sizes[first[run] : last[run]], memory - fixed, side="right")) - 1
            if place >= 0:
                place += int(first[run])
                best = min(best, (float(seconds[place]), float(sizes[place]) + fixed, variant, place))
        if best[2] < 0:
            return StagePoint(math.inf, math.inf, -1, ())
        return StagePoint(*best[:3], tuple(self._units_of(best[2], num_in_flight, run, best[3])))

    def _units_of(self, variant: int, num_in_flight: int, run: int, place: int) -> list[int]:
        """Walk back from a point of a run to the point of each unit."""
        first, _, _, _, origin = self._table(variant, num_in_flight)
        one, other = (int(number) for number in self._halves[run])
        if one < 0:
            return [int(origin[place, 0])]
        left = self._units_of(variant, num_in_flight, one, int(first[one] + origin[place, 0]))
        return left + self._units_of(variant, num_in_flight, other, int(first[other] + origin[place, 1]))

    def fixed_bytes(self, variant: int, start: int, stop: int) -> float:
        """Return what a stage holds beside states and saved values: its working set and torch's receive buffers."""
        return float(self._fixed[variant, self.run_ids[start, stop]])

    def least_memory(self, num_in_flight: int = 1) -> np.ndarray:
        """Return float64 [units] the least memory of every unit as a stage of its own."""
        least = np.full(self.num_units, np.inf)
        for variant in range(len(self.points)):
            first, last, sizes, _, _ = self._table(variant, num_in_flight)
            for unit in range(self.num_units):
                run = self.run_ids[unit, unit + 1]
                if last[run] > first[run]:
                    least[unit] = min(least[unit], sizes[first[run]] + self._fixed[variant, run])
        return least

    def least_seconds(self) -> np.ndarray:
        """Return float64 [units] the least seconds of each, whatever memory it needs."""
        rows = [
            [points[:, 2].min() for points in unit if points is not None] for unit in zip(*self.points, strict=True)
        ]
        return np.array([min(row, default=math.inf) for row in rows])


def _number_runs(classes: list[Hashable]) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """Return int32 [units, units + 1] with equal numbers for runs of equal units, and one example of each."""
    num_units = len(classes)
    numbers = np.full((num_units, num_units + 1), -1, np.int32)
    known: dict[tuple[int, Hashable], int] = {}
    examples: list[tuple[int, int]] = []
    for start in range(num_units):
        last = -1
        for stop in range(start + 1, num_units + 1):
            last = known.setdefault((last, classes[stop - 1]), len(known))
            numbers[start, stop] = last
            if last == len(examples):
                examples.append((start, stop))
    return numbers, examples
