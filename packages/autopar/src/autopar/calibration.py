"""Collectives as a training step issues them: one after another, not alone after a pause.

A link that was idle lets a burst pass at once, and a collective measured alone gets that burst as a present. In a step
the next collective follows soon, so every size is timed in a row here and the first few calls, which use the burst up,
do not count. The curves take the place of the interconnect's own.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from core_kernels.interconnect import Curve, Interconnect

if TYPE_CHECKING:
    from core_kernels.comm import Group

__all__ = ["measure_steady"]

_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
_SIZES = (2**10, 2**14, 2**16, 2**18, 2**20, 2**22)
# Bytes that pass before the clock starts: more than switches and shapers let pass in a burst.
_BURST_BYTES = 1 << 20
_MOST_CALLS = 24


def measure_steady(group: Group, interconnect: Interconnect, budget_seconds: float = 10.0) -> Interconnect:
    """Return an interconnect whose collectives are those of a busy link.

    Args:
        group: The ranks, those the interconnect was measured on.
        interconnect: What :meth:`core_kernels.interconnect.Interconnect.measure` found.
        budget_seconds: About how long to measure.

    Collective: all ranks of ``group``.
    """
    if group.size == 1:
        return interconnect
    shape = interconnect.group_shape
    curves: dict[str, Curve] = {}
    for name in _COLLECTIVES:
        end = time.perf_counter() + budget_seconds / len(_COLLECTIVES)
        sizes, seconds = [], []
        for num_bytes in _SIZES:
            expected = interconnect.seconds(name, num_bytes, shape)
            is_late = torch.tensor(float(time.perf_counter() + 4 * expected > end), device=group.device)
            if len(sizes) > 2 and group.all_reduce(is_late, "max", tag="calibrate").item():
                break
            sizes.append(num_bytes)
            seconds.append(_seconds_in_a_row(group, name, num_bytes))
        curves[name] = Curve.fit(sizes, seconds)
    known = dict(interconnect.curves)
    known[shape] = {**known.get(shape, {}), **curves}
    return replace(interconnect, curves=known)


def _seconds_in_a_row(group: Group, name: str, num_bytes: int) -> float:
    """Return the median of calls that follow each other, on the slowest rank."""
    call = _call(group, name, num_bytes)
    num_first = min(_MOST_CALLS, max(1, _BURST_BYTES // num_bytes))
    num_timed = max(2, num_first // 2)
    group.barrier("calibrate")
    times = []
    for _ in range(num_first + num_timed):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    took = torch.tensor(statistics.mean(times[num_first:]), dtype=torch.float64, device=group.device)
    return group.all_reduce(took, "max", tag="calibrate").item()


def _call(group: Group, name: str, num_bytes: int) -> Callable[[], Any]:
    """Return a call that moves ``num_bytes`` in the sense of ``Interconnect.seconds``, as the executor makes it."""
    size = group.size
    if name == "all_reduce":
        whole = torch.zeros(max(1, num_bytes // 4), device=group.device)
        return lambda: group.all_reduce(whole, tag="calibrate")
    share = max(1, num_bytes // 4 // (size - 1))
    counts = [share] * size
    if name == "all_gather":
        block = torch.zeros(share, device=group.device)
        return lambda: group.all_gather_v(block, counts=counts, tag="calibrate")
    blocks = torch.zeros(share * size, device=group.device)
    if name == "reduce_scatter":
        return lambda: group.reduce_scatter_v(blocks, counts, tag="calibrate")
    return lambda: group.all_to_all_v(blocks, counts, counts, tag="calibrate")
