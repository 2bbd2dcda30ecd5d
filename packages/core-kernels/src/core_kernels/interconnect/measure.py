"""Measures an interconnect: collectives over all ranks, copies and gathers in memory, rates of a few kernels.

Repeats are interleaved (every operation and size once a round) and the median is kept, so that a slow moment of the
machine spoils one repeat of everything instead of all repeats of one thing. A collective costs what its slowest rank
waits. Sizes grow until one operation would take too large a share of the time budget.
"""

from __future__ import annotations

import math
import os
import platform
import socket
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from core_kernels.comm import Group, Recv, Send
from core_kernels.interconnect.curve import Curve, Link
from core_kernels.interconnect.model import COLLECTIVES, Interconnect

__all__ = ["machine_facts", "measure_interconnect"]

_SIZES = [2**10, 2**14, 2**17, 2**20, 2**23]
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
    shape = group_shape or _shape_of(group)
    curves = {shape: _measure_collectives(group, 0.6 * budget_seconds)} if group.size > 1 else {}
    # One rank at a time: ranks that share memory bandwidth would otherwise measure each other.
    found: Any = None
    if group.rank == 0:
        found = _measure_local(group.device, 0.25 * budget_seconds), _measure_rates(0.15 * budget_seconds)
    local, rates = group.broadcast_object(found, tag="calibrate")
    return Interconnect(
        name="measured",
        assumption=f"measured on {group.size} rank(s) over {group.backend}, medians of interleaved repeats",
        group_shape=shape,
        machine=group.broadcast_object(machine_facts(group.backend), tag="calibrate"),
        curves={**curves, "local": local},
        links=_links_of(shape, curves.get(shape, {})),
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


def _shape_of(group: Group) -> str:
    hosts = group.all_gather_object(socket.gethostname(), tag="calibrate")
    num_hosts = len(set(hosts))
    return f"{num_hosts}x{math.ceil(group.size / num_hosts)}"


def _measure_collectives(group: Group, budget_seconds: float) -> dict[str, Curve]:
    calls: dict[tuple[str, int], Callable[[], Any]] = {}
    spent, share = 0.0, budget_seconds / 60
    for collective in COLLECTIVES:
        for num_bytes in _SIZES:
            call = _collective_call(group, collective, num_bytes)
            _slowest(group, call)  # connects and warms up
            seconds = _slowest(group, call)
            calls[collective, num_bytes] = call
            spent += seconds
            if num_bytes >= _SIZES[2] and 8 * seconds > share:  # the next size would take too long
                break
    repeats = max(3, min(15, int(budget_seconds / max(2 * spent, 1e-3))))
    samples: dict[tuple[str, int], list[float]] = {key: [] for key in calls}
    for _ in range(repeats):
        for key, call in calls.items():
            samples[key].append(_slowest(group, call))
    medians = {key: statistics.median(values) for key, values in samples.items()}
    return {
        collective: Curve.fit(
            [b for name, b in medians if name == collective],
            [s for (name, _), s in medians.items() if name == collective],
        )
        for collective in COLLECTIVES
    }


def _slowest(group: Group, call: Callable[[], Any]) -> float:
    """Return the seconds of one call on the slowest rank, the same number on all ranks."""
    group.barrier("calibrate")
    begin = time.perf_counter()
    call()
    _synchronize(group.device)
    took = torch.tensor([time.perf_counter() - begin], dtype=torch.float64, device=group.device)
    return group.all_reduce(took, "max", tag="calibrate").item()


def _collective_call(group: Group, collective: str, num_bytes: int) -> Callable[[], Any]:
    """Return a call that moves ``num_bytes`` in the sense of :meth:`Interconnect.seconds`."""
    others, rank, size = group.size - 1, group.rank, group.size
    share = max(1, num_bytes // 4 // others)
    whole = torch.zeros(max(1, num_bytes // 4), device=group.device)
    if collective == "all_reduce":
        return lambda: group.all_reduce(whole, tag="calibrate", out=whole)
    if collective == "broadcast":
        return lambda: group.broadcast(whole, tag="calibrate")
    if collective == "all_gather":
        block = torch.zeros(share, device=group.device)
        return lambda: group.all_gather_v(block, counts=[share] * size, tag="calibrate")
    blocks = torch.zeros(share * size, device=group.device)
    counts = [share] * size
    if collective == "reduce_scatter":
        return lambda: group.reduce_scatter_v(blocks, counts, tag="calibrate")
    if collective == "all_to_all":
        return lambda: group.all_to_all_v(blocks, counts, counts, tag="calibrate")
    # Neighbours 0-1, 2-3, ... send both ways; an odd last rank watches.
    partner = rank ^ 1
    if partner >= size:
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


def _links_of(shape: str, curves: dict[str, Curve]) -> dict[str, Link]:
    """Return the straight line of point-to-point messages, for shapes that were not measured."""
    curve = curves.get("send_recv")
    if curve is None:
        return {}
    seconds = max(curve.seconds[-1] - curve.seconds[0], 1e-9)
    rate = (curve.num_bytes[-1] - curve.num_bytes[0]) / seconds
    # Neighbouring ranks share a host unless every host has one rank.
    return {"network" if shape.endswith("x1") else "local": Link(curve.seconds[0], rate)}


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
