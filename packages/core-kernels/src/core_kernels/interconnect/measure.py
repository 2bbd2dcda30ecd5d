"""Measures an interconnect: collectives over all ranks, copies and gathers in memory, rates of a few kernels.

Repeats are interleaved (every operation and size once a round) and the median is kept, so that a slow moment of the
machine spoils one repeat of everything instead of all repeats of one thing. A collective costs what its slowest rank
waits. Sizes grow until one operation would take too large a share of the time budget.

Shapers and some networks let a burst pass at full speed before they slow down, a few milliseconds' worth of their rate.
So sizes grow at least until an operation takes longer than that, and the largest size is also sent three times in a
row: what the second and third add is the steady cost, and the curve goes on with that slope.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from core_kernels.comm import Group, Recv, Send
from core_kernels.interconnect.curve import Curve, Link
from core_kernels.interconnect.hosts import exchange_partners, hosts_of, shape_of
from core_kernels.interconnect.model import COLLECTIVES, Interconnect

__all__ = ["machine_facts", "measure_interconnect"]

_SIZES = [2**10, 2**14, 2**17, 2**19, 2**21, 2**23]
_FIRST_LARGE_BYTES = 2**17
_LONGER_THAN_A_BURST_SECONDS = 5e-3
_IN_A_ROW = 3
_COPY_SIZES = [2**12, 2**17, 2**22, 2**25]
_ROW_BYTES = 512


def measure_interconnect(group: Group, group_shape: str | None = None, budget_seconds: float = 12.0) -> Interconnect:
    """Measure on the ranks of ``group`` and return the same result on every rank.

    Args:
        group: The ranks; a group of one measures memory and kernels only.
        group_shape: Name of the shape, ``"HxR"``; read from the ranks' host names when left out.
        budget_seconds: About how long to measure, at least one second.

    Collective: all ranks of ``group``.
    """
    budget_seconds = max(1.0, budget_seconds)
    hosts = hosts_of(group, group_shape)
    shape = group_shape or shape_of(hosts)
    measured = _measure_collectives(group, hosts, 0.6 * budget_seconds) if group.size > 1 else {}
    # One rank at a time: ranks that share memory bandwidth would otherwise measure each other.
    found: Any = None
    if group.rank == 0:
        found = _measure_local(group.device, 0.25 * budget_seconds), _measure_rates(0.15 * budget_seconds)
    local, rates = group.broadcast_object(found, tag="calibrate")
    collectives = {name: curve for name, curve in measured.items() if name in COLLECTIVES}
    return Interconnect(
        name="measured",
        assumption=f"measured on {group.size} rank(s) over {group.backend}, medians of interleaved repeats",
        group_shape=shape,
        machine=group.broadcast_object(machine_facts(group.backend), tag="calibrate"),
        curves={**({shape: collectives} if collectives else {}), "local": local},
        links={name: _steady_link(curve) for name, curve in measured.items() if name not in COLLECTIVES},
        rates=rates,
    )


def machine_facts(backend: str = "gloo") -> dict[str, Any]:
    """Return what tells machines apart: processor, cores, memory, accelerators, torch and backend."""
    import psutil

    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "processor": _processor_name(),
        "num_cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "devices": devices,
        "system": platform.system(),
        "torch": torch.__version__,
        "backend": backend,
    }


def _processor_name() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _measure_collectives(group: Group, hosts: list[int], budget_seconds: float) -> dict[str, Curve]:
    """Return a curve of every collective, and of exchanges over ``local`` and ``network`` links where there are any."""
    inside, across = (exchange_partners(hosts, across=across) for across in (False, True))
    names = [*COLLECTIVES, *(["local"] if inside else []), *(["network"] if across else [])]
    partners = {"local": inside, "network": across, "send_recv": across or inside}
    calls: dict[tuple[str, int], Callable[[], Any]] = {}
    spent, share = 0.0, budget_seconds / 60
    for name in names:
        for num_bytes in _SIZES:
            call = _call(group, name, num_bytes, partners.get(name, {}).get(group.rank))
            seconds = _probe(group, call)
            calls[name, num_bytes] = call
            spent += seconds
            is_long = num_bytes >= _FIRST_LARGE_BYTES and seconds > _LONGER_THAN_A_BURST_SECONDS
            if is_long and 4 * seconds > share:  # the next size would take too long
                break
        calls[name, _IN_A_ROW * num_bytes] = lambda call=call: [call() for _ in range(_IN_A_ROW)]
        spent += _IN_A_ROW * seconds
    repeats = max(3, min(15, int(budget_seconds / max(2 * spent, 1e-3))))
    samples: dict[tuple[str, int], list[float]] = {key: [] for key in calls}
    for _ in range(repeats):
        for key, call in calls.items():
            samples[key].append(_slowest(group, call))
    medians = {key: statistics.median(values) for key, values in samples.items()}
    return {
        name: Curve.fit([b for n, b in medians if n == name], [s for (n, _), s in medians.items() if n == name])
        for name in names
    }


def _probe(group: Group, call: Callable[[], Any]) -> float:
    """Return about what a call takes: connected, warm, and the best of three where it is short."""
    _slowest(group, call)
    seconds = _slowest(group, call)
    if seconds < 10 * _LONGER_THAN_A_BURST_SECONDS:  # the same on all ranks
        seconds = min(seconds, _slowest(group, call), _slowest(group, call))
    return seconds


def _slowest(group: Group, call: Callable[[], Any]) -> float:
    """Return the seconds of one call on the slowest rank, the same number on all ranks."""
    group.barrier("calibrate")
    begin = time.perf_counter()
    call()
    _synchronize(group.device)
    took = torch.tensor([time.perf_counter() - begin], dtype=torch.float64, device=group.device)
    return group.all_reduce(took, "max", tag="calibrate").item()


def _call(group: Group, name: str, num_bytes: int, partner: int | None) -> Callable[[], Any]:
    """Return a call that moves ``num_bytes`` in the sense of :meth:`Interconnect.seconds`.

    Args:
        group: The ranks.
        name: A collective, or ``local`` or ``network`` for an exchange.
        num_bytes: How much.
        partner: With whom this rank exchanges, both ways at once; ``None`` for a rank that watches.
    """
    others, size = group.size - 1, group.size
    share = max(1, num_bytes // 4 // others)
    whole = torch.zeros(max(1, num_bytes // 4), device=group.device)
    if name == "all_reduce":
        return lambda: group.all_reduce(whole, tag="calibrate", out=whole)
    if name == "broadcast":
        return lambda: group.broadcast(whole, tag="calibrate")
    if name == "all_gather":
        block = torch.zeros(share, device=group.device)
        return lambda: group.all_gather_v(block, counts=[share] * size, tag="calibrate")
    blocks = torch.zeros(share * size, device=group.device)
    counts = [share] * size
    if name == "reduce_scatter":
        return lambda: group.reduce_scatter_v(blocks, counts, tag="calibrate")
    if name == "all_to_all":
        return lambda: group.all_to_all_v(blocks, counts, counts, tag="calibrate")
    if partner is None:
        return lambda: None
    incoming = torch.empty_like(whole)
    return lambda: group.send_recv([Send(whole, partner), Recv(incoming, partner)], tag="calibrate")


def _measure_local(device: torch.device, budget_seconds: float) -> dict[str, Curve]:
    """Measure copies and row gathers in this process."""
    calls: dict[tuple[str, int], Callable[[], Any]] = {}
    for num_bytes in _COPY_SIZES:
        source, target = torch.zeros(num_bytes, dtype=torch.uint8), torch.zeros(num_bytes, dtype=torch.uint8)
        calls["host_copy", num_bytes] = lambda source=source, target=target: target.copy_(source)
        num_rows = max(1, num_bytes // _ROW_BYTES)
        table = torch.zeros(4 * num_rows, _ROW_BYTES // 4, device=device)
        index = torch.randint(0, len(table), (num_rows,), device=device)
        out = torch.empty(num_rows, _ROW_BYTES // 4, device=device)
        calls["row_gather", num_bytes] = lambda t=table, i=index, o=out: torch.index_select(t, 0, i, out=o)
        if device.type == "cuda":
            pinned, on_device = source.pin_memory(), torch.zeros(num_bytes, dtype=torch.uint8, device=device)
            calls["host_to_device", num_bytes] = lambda a=pinned, b=on_device: b.copy_(a, non_blocking=True)
            calls["device_to_host", num_bytes] = lambda a=pinned, b=on_device: a.copy_(b, non_blocking=True)
    medians = _time_interleaved(calls, device, budget_seconds)
    return {
        name: Curve.fit([b for n, b in medians if n == name], [s for (n, _), s in medians.items() if n == name])
        for name in dict.fromkeys(name for name, _ in calls)
    }


def _measure_rates(budget_seconds: float) -> dict[str, float]:
    """Measure rates of the kernels that planners price, on the CPU, with the threads this process has."""
    from core_kernels import ops
    from core_kernels.graph import Graph

    generator = torch.Generator().manual_seed(0)
    num_nodes, num_edges, width = 20_000, 200_000, 64
    graph = Graph.from_edge_index(torch.randint(0, num_nodes, (2, num_edges), generator=generator), num_nodes)
    x = torch.rand(num_nodes, width, generator=generator)
    seeds = torch.arange(4096)
    ids = torch.randint(0, num_nodes, (num_edges,), generator=generator)
    matrix, index = torch.rand(512, 512, generator=generator), torch.randint(0, num_nodes, (50_000,))
    calls: dict[tuple[str, int], Callable[[], Any]] = {
        ("spmm_bytes_per_second", num_edges * width * 4): lambda: ops.spmm(graph, x),
        ("sample_edges_per_second", 4096 * 5): lambda: ops.sample_neighbors(graph, seeds, 5),
        ("relabel_ids_per_second", num_edges): lambda: ops.unique_relabel(seeds, ids),
        ("gather_bytes_per_second", len(index) * width * 4): lambda: ops.gather(x, index),
        ("matmul_flops_per_second", 2 * 512**3): lambda: matrix @ matrix,
    }
    medians = _time_interleaved(calls, torch.device("cpu"), budget_seconds)
    return {name: amount / medians[name, amount] for name, amount in medians}


def _time_interleaved(
    calls: dict[tuple[str, int], Callable[[], Any]], device: torch.device, budget_seconds: float
) -> dict[tuple[str, int], float]:
    samples: dict[tuple[str, int], list[float]] = {key: [] for key in calls}
    for call in calls.values():
        call()
    end = time.perf_counter() + budget_seconds
    while len(next(iter(samples.values()))) < 3 or (
        time.perf_counter() < end and len(next(iter(samples.values()))) < 25
    ):
        for key, call in calls.items():
            _synchronize(device)
            begin = time.perf_counter()
            call()
            _synchronize(device)
            samples[key].append(time.perf_counter() - begin)
    return {key: statistics.median(values) for key, values in samples.items()}


def _steady_link(curve: Curve) -> Link:
    """Return the straight line of exchanges: the latency of the smallest, the rate between the two largest."""
    seconds = max(curve.seconds[-1] - curve.seconds[-2], 1e-9)
    return Link(curve.seconds[0], (curve.num_bytes[-1] - curve.num_bytes[-2]) / seconds)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
