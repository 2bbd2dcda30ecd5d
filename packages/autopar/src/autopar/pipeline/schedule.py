"""The 1F1B schedule: who works on what in which order, how long a step takes, how many micro-batches are in flight.

Stage ``s`` of ``S`` runs ``min(m, S - s)`` forward passes ahead, then alternates one backward and one forward pass.
With fewer micro-batches than stages, every stage runs all forward passes first, as torch does then. :func:`simulate`
plays the order event by event; :func:`bound_seconds` is the closed form that the search minimises. Symbols: f, b
seconds of one micro-batch on a stage, c, g seconds its activation and its gradient travel to and from the next
stage::

    sum_s (f + c + b + g) + (m - 1) (max_s (f + c) + max_s (b + g))

In random tests it was never below the simulated time; it equals it for equal stages without transfers. The usual
``sum (f + b) + (m - 1) max (f + b)`` is not: stages whose ratio of f to b differs can take a quarter longer.

Source: PipeDream-Flush / 1F1B as in Megatron-LM; slicing of the first micro-batches from AutoPipe (CLUSTER 2022).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.errors import ProblemError

__all__ = ["Simulation", "bound_seconds", "in_flight", "simulate", "stage_order"]


def in_flight(stage: int, num_stages: int, num_micro_batches: int) -> int:
    """Return how many micro-batches a stage holds saved activations of at once.

    >>> [in_flight(stage, 4, 8) for stage in range(4)], [in_flight(stage, 4, 2) for stage in range(4)]
    ([4, 3, 2, 1], [2, 2, 2, 2])
    """
    if num_micro_batches < num_stages:
        return num_micro_batches
    return num_stages - stage


def stage_order(stage: int, num_stages: int, num_micro_batches: int) -> list[tuple[str, int]]:
    """Return the passes of one stage in order: ``("F" or "B", micro-batch)``.

    >>> "".join(kind + str(index) for kind, index in stage_order(1, 3, 4))
    'F0F1B0F2B1F3B2B3'
    """
    ahead = in_flight(stage, num_stages, num_micro_batches)
    order = [("F", index) for index in range(ahead)]
    for index in range(num_micro_batches):
        order.append(("B", index))
        if ahead + index < num_micro_batches:
            order.append(("F", ahead + index))
    return order


@dataclass(frozen=True)
class Simulation:
    """One step, played.

    Attributes:
        seconds: From the first forward to the last backward pass.
        startup_seconds: Until the last stage begins.
        busy_seconds: Per stage, seconds at work.
        peak_in_flight: Per stage, most micro-batches held between their forward and backward pass.
    """

    seconds: float
    startup_seconds: float
    busy_seconds: tuple[float, ...]
    peak_in_flight: tuple[int, ...]

    @property
    def bubble(self) -> float:
        """Share of all stages' time in which they wait."""
        whole = self.seconds * len(self.busy_seconds)
        return 1 - sum(self.busy_seconds) / whole if whole else 0.0


def simulate(
    forward: Sequence[float],
    backward: Sequence[float],
    num_micro_batches: int,
    send: Sequence[float] = (),
    send_back: Sequence[float] = (),
    num_sliced: int = 0,
) -> Simulation:
    """Play one step, transfers beside the work; a link carries one transfer after another in each direction.

    Args:
        forward: Seconds of one micro-batch per stage, forward.
        backward: The same, backward.
        num_micro_batches: How many the batch is cut into.
        send: Seconds from each stage but the last to the next; none when left out.
        send_back: Seconds of the gradient on the same way back.
        num_sliced: The first so many micro-batches run forward in two halves, so that later stages start earlier.

    Returns:
        What happened.

    Raises:
        ProblemError: Lists of different lengths, negative seconds, or counts out of range.

    >>> simulate([1, 1], [2, 2], 4).seconds
    15.0
    >>> simulate([1, 1], [2, 2], 4, num_sliced=1).startup_seconds
    0.5
    """
    num_stages = len(forward)
    send = list(send) or [0.0] * (num_stages - 1)
    send_back = list(send_back) or [0.0] * (num_stages - 1)
    _check(forward, backward, num_micro_batches, send, send_back, num_sliced)
    orders = [_sliced(stage_order(s, num_stages, num_micro_batches), num_sliced) for s in range(num_stages)]
    arrived: dict[tuple, float] = {}
    place, held, peak = ([0] * num_stages for _ in range(3))
    free: list[list[float]] = [[0.0] * num_stages for _ in range(2)]  # when a link can carry on, per direction
    now, clock = [0.0] * num_stages, [0.0] * num_stages
    startup = 0.0
    moving = True
    while moving:
        moving = False
        for stage in range(num_stages):
            while place[stage] < len(orders[stage]):
                work = orders[stage][place[stage]]
                kind, _, part = work
                waits_for = _source(stage, work, num_stages, num_sliced)
                if waits_for is not None and waits_for not in arrived:
                    break
                begin = max(now[stage], arrived[waits_for] if waits_for is not None else 0.0)
                if stage == num_stages - 1 and place[stage] == 0:
                    startup = begin
                seconds = (forward if kind == "F" else backward)[stage] * (0.5 if part >= 0 else 1.0)
                now[stage] = begin + seconds
                clock[stage] += seconds
                place[stage] += 1
                if kind == "F":
                    held[stage] += part != 0
                    peak[stage] = max(peak[stage], held[stage])
                else:
                    held[stage] -= 1
                _deliver(stage, work, now[stage], num_stages, send, send_back, free, arrived)
                moving = True
    return Simulation(float(max(now)), float(startup), tuple(map(float, clock)), tuple(peak))


def _sliced(order: list[tuple[str, int]], num_sliced: int) -> list[tuple[str, int, int]]:
    """Write sliced forward passes as two halves, 0 and 1; -1 stands for a whole pass."""
    found = []
    for kind, index in order:
        halves = (0, 1) if kind == "F" and index < num_sliced else (-1,)
        found += [(kind, index, half) for half in halves]
    return found


def _source(stage: int, work: tuple[str, int, int], num_stages: int, num_sliced: int) -> tuple | None:
    """Return the arrival a pass waits for."""
    kind, index, part = work
    if kind == "F":
        return (stage, kind, index, part) if stage else None
    if stage < num_stages - 1:
        return stage, kind, index, -1
    return stage, "done", index, 1 if index < num_sliced else -1


def _deliver(
    stage: int, work: tuple[str, int, int], end: float, num_stages: int, send: Sequence[float],
    send_back: Sequence[float], free: list[list[float]], arrived: dict[tuple, float],
) -> None:  # fmt: skip
    kind, index, part = work
    if kind == "F":
        arrived[stage, "done", index, part] = end
        if stage < num_stages - 1:
            seconds = send[stage] * (0.5 if part >= 0 else 1.0)
            free[0][stage] = max(free[0][stage], end) + seconds
            arrived[stage + 1, kind, index, part] = free[0][stage]
    elif stage:
        free[1][stage] = max(free[1][stage], end) + send_back[stage - 1]
        arrived[stage - 1, kind, index, part] = free[1][stage]


def bound_seconds(
    forward: Sequence[float],
    backward: Sequence[float],
    num_micro_batches: int,
    send: Sequence[float] = (),
    send_back: Sequence[float] = (),
) -> float:
    """Return the closed form of a step's time, never below :func:`simulate`; arguments as there.

    >>> bound_seconds([1, 1], [2, 2], 4), bound_seconds([3, 1], [2, 2], 4) >= simulate([3, 1], [2, 2], 4).seconds
    (15.0, True)
    """
    away = [*(list(send) or [0.0] * (len(forward) - 1)), 0.0]
    back = [*(list(send_back) or [0.0] * (len(forward) - 1)), 0.0]
    _check(forward, backward, num_micro_batches, away[:-1], back[:-1], 0)
    ahead = [f + c for f, c in zip(forward, away, strict=True)]
    behind = [b + g for b, g in zip(backward, back, strict=True)]
    return float(sum(ahead) + sum(behind) + (num_micro_batches - 1) * (max(ahead) + max(behind)))


def _check(
    forward: Sequence[float], backward: Sequence[float], num_micro_batches: int, send: Sequence[float],
    send_back: Sequence[float], num_sliced: int,
) -> None:  # fmt: skip
    lengths = [len(forward), len(backward), len(send) + 1, len(send_back) + 1]
    if not forward or len(set(lengths)) > 1:
        raise ProblemError(
            f"forward, backward, send and send_back have lengths {[*lengths[:2], len(send), len(send_back)]}; expected "
            "S, S, S-1 and S-1 for S stages; give one number per stage and per boundary"
        )
    if any(not seconds >= 0 for seconds in (*forward, *backward, *send, *send_back)):
        raise ProblemError("seconds of a stage are negative or NaN; expected at least 0 each; check the measurements")
    if num_micro_batches < 1 or not 0 <= num_sliced <= num_micro_batches:
        raise ProblemError(
            f"num_micro_batches={num_micro_batches} and num_sliced={num_sliced} are not valid: expected at least 1, "
            "and 0 to num_micro_batches; cut the batch into at least one part"
        )
