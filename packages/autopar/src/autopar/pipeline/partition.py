"""The cut of a chain into stages on devices in a row, exact under the bound of :mod:`autopar.pipeline.schedule`.

Stages take consecutive units and consecutive devices. With a limit on the slowest stage, dynamic programming from the
last stage on finds the least sum of stage times; the number of stages behind a stage is then known, and with it how
many micro-batches it holds. Lowering the limit below the slowest stage of each solution visits every trade of sum
against maximum that could be best, so the result is exact; a limit above which nothing can win ends the search from
above.

With t seconds of one micro-batch and c of a transfer to the next stage (one direction), a stage adds ``t + 2 c`` to
the sum and counts ``t + 3 c`` as slowest: for backward passes that take twice the forward, this is the schedule's
bound.

Source: the outer loop of Alpa (OSDI 2022, section 5), over stages, sub-meshes and the slowest stage. We differ: stage
costs are frontiers, not numbers; the memory of micro-batches in flight follows from the number of stages behind;
devices may differ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit

__all__ = ["Cut", "Row", "cut_chain"]

# Limits are differences of sums: rounding must not shut out the best cut.
_SLACK = 1 + 1e-9


@dataclass(frozen=True, eq=False)
class Row:
    """Devices in the order in which stages take them.

    Attributes:
        sizes: Numbers of devices a stage may have.
        kinds: int32 [devices, sizes]: which cost table holds for a stage of that size that begins there, -1 for none.
        crosses: bool [devices + 1]: whether a boundary between two stages there lies between hosts.
        send_seconds: float64 [sizes, units + 1, 2]: one direction of a transfer before each unit, from a stage of that
            size, inside a host and between hosts.
    """

    sizes: tuple[int, ...]
    kinds: np.ndarray
    crosses: np.ndarray
    send_seconds: np.ndarray


@dataclass(frozen=True)
class Cut:
    """Stages in order.

    Attributes:
        seconds: The bound of the step's time.
        bounds: Units at which stages begin, and the end.
        devices: First device of each stage.
        sizes: Number of devices of each stage.
    """

    seconds: float
    bounds: tuple[int, ...]
    devices: tuple[int, ...]
    sizes: tuple[int, ...]


def cut_chain(
    times: np.ndarray,
    flights: np.ndarray,
    row: Row,
    num_micro_batches: int,
    num_stages: tuple[int, int],
    least_sum: float = 0.0,
    known: float = math.inf,
) -> Cut | None:
    """Return the best cut.

    Args:
        times: float64 [kinds, flights, units, units + 1] seconds of one micro-batch of a run as a stage; infinite where
            it does not fit.
        flights: int64 [stages + 1]: which of the second axis holds for a stage, by the stages from it to the end.
        row: The devices.
        num_micro_batches: Micro-batches of a step.
        num_stages: Fewest and most stages.
        least_sum: A lower bound of the sum of all stage times.
        known: Only cuts faster than this are of interest.

    Returns:
        The cut, or ``None`` when there is none, or none faster than ``known``.

    Cost: per limit tried O(stages x units x devices x sizes x length of a stage).
    """
    rest = num_micro_batches - 1
    # The least of all longer runs: where it is above the limit, none of them needs a look.
    floors = np.minimum.accumulate(times[..., ::-1], -1)[..., ::-1]
    arguments = (times, floors, flights, np.array(row.sizes), row.kinds, row.crosses, row.send_seconds, *num_stages)
    best: tuple[float, Any] = (known, None)
    limit = _first_limit(arguments, times, rest, known, least_sum)
    while limit >= 0:
        found = _solve(arguments, limit)
        if found is None:
            break
        total, slowest, stages = found
        if total + rest * slowest < best[0]:
            best = (total + rest * slowest, stages)
        # Whatever is slower somewhere than `ceiling` is slower as a whole.
        ceiling = (best[0] - least_sum) / rest * _SLACK if rest else -1.0
        limit = min(np.nextafter(slowest, -np.inf), ceiling)
    if best[1] is None:
        return None
    units, devices, sizes = (tuple(int(x) for x in column) for column in zip(*best[1], strict=True))
    ends = (*units[1:], times.shape[2])
    return Cut(float(best[0]), (units[0], *ends), devices, sizes)


def _first_limit(arguments: tuple, times: np.ndarray, rest: int, known: float, least_sum: float) -> float:
    """Return a limit above which no cut is best: from a first cut found at a low limit, where stages are short."""
    if not rest:
        return math.inf
    # Every unit lies in some stage: none is faster than the fastest run that covers it.
    floors = arguments[1].min((0, 1))
    covers = np.minimum.accumulate(floors, 0)[np.arange(times.shape[2]), np.arange(1, times.shape[2] + 1)]
    limit = float(covers.max())
    largest = float(times[np.isfinite(times)].max(initial=0.0)) * 4 + 4 * float(arguments[6].max(initial=0.0))
    if not math.isfinite(limit):
        return -1.0
    limit = max(limit, largest * 1e-9)
    ceiling = (known - least_sum) / rest
    while True:
        found = _solve(arguments, limit)
        if found is not None:
            return min(ceiling, (found[0] + rest * found[1] - least_sum) / rest) * _SLACK
        if limit >= largest:
            return -1.0
        limit = min(1.5 * limit, largest)


def _solve(arguments: tuple, limit: float) -> tuple[float, float, list[tuple[int, int, int]]] | None:
    """Return (sum, slowest, stages as (unit, device, size)) of least sum with no stage above the limit."""
    run: Any = _least_sums
    sums, next_unit, next_size = run(*arguments, limit)
    times, _, flights, sizes, kinds, crosses, send, fewest, most = arguments
    reached = sums[fewest : most + 1, 0]
    if not np.isfinite(reached).any():
        return None
    count, device = np.unravel_index(int(np.argmin(reached)), reached.shape)
    count, device, unit = int(count) + fewest, int(device), 0
    total, slowest, stages = float(sums[count, 0, device]), 0.0, []
    while count:
        stop, size = int(next_unit[count, unit, device]), int(next_size[count, unit, device])
        after = device + int(sizes[size])
        seconds = times[kinds[device, size], flights[count], unit, stop]
        moved = send[size, stop, int(crosses[after])] if stop < times.shape[2] else 0.0
        slowest = max(slowest, float(seconds + 3 * moved))
        stages.append((unit, device, int(sizes[size])))
        count, unit, device = count - 1, stop, after
    return total, slowest, stages


@njit(cache=True, nogil=True)
def _least_sums(times, floors, flights, sizes, kinds, crosses, send, fewest, most, limit):
    """Fill per (stages left, first unit, first device) the least sum and the first stage's end and size.

    Devices may stay unused behind the last stage, and before the first: its device is read off the table.
    """
    num_units, num_devices = times.shape[2], kinds.shape[0]
    sums = np.full((most + 1, num_units + 1, num_devices + 1), np.inf)
    next_unit = np.zeros((most + 1, num_units + 1, num_devices + 1), np.int32)
    next_size = np.zeros((most + 1, num_units + 1, num_devices + 1), np.int32)
    sums[0, num_units] = 0.0
    for count in range(1, most + 1):
        flight = flights[count]
        for unit in range(num_units - count + 1):
            for device in range(num_devices):
                best, best_unit, best_size = np.inf, 0, 0
                for size in range(sizes.shape[0]):
                    kind = kinds[device, size]
                    after = device + sizes[size]
                    if kind < 0 or after > num_devices:
                        continue
                    for stop in range(unit + 1, num_units - count + 2):
                        floor = floors[kind, flight, unit, stop]
                        if floor > limit or floor == np.inf:
                            break
                        seconds = times[kind, flight, unit, stop]
                        behind = sums[count - 1, stop, after]
                        if behind == np.inf or seconds == np.inf:
                            continue
                        moved = send[size, stop, 1 if crosses[after] else 0] if stop < num_units else 0.0
                        if seconds + 3 * moved > limit:
                            continue
                        whole = behind + seconds + 2 * moved
                        if whole < best:
                            best, best_unit, best_size = whole, stop, size
                sums[count, unit, device] = best
                next_unit[count, unit, device] = best_unit
                next_size[count, unit, device] = best_size
    return sums, next_unit, next_size
