"""The search for pipelines: every layout of hosts, number of micro-batches, cut and sub-mesh; one frontier.

Outermost stand *settings*: a layout of the hosts and a number of micro-batches. For a setting, every unit is searched
on every sub-mesh (:mod:`~autopar.pipeline.stage_space`), stages get their frontiers (:mod:`~autopar.pipeline.chain`),
and a budget of memory makes of every possible stage a number, so that the best cut can be found
(:mod:`~autopar.pipeline.partition`). The frontier is swept from its fast end: the budget is lowered below the memory
of the last plan until nothing fits. A setting is looked at again only when its last time, which can only have grown,
is still below the best of the others.

Source: Alpa's outer loop (OSDI 2022), AutoPipe's sub-layer units, with frontiers of stages in place of single plans.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from autopar.cluster import Cluster
from autopar.errors import InfeasibleError, ProblemError
from autopar.graph import Graph
from autopar.pipeline.costs import StageCosts, flights_counted
from autopar.pipeline.hosts import Host, Placement, host_orders, place_devices, read_hosts
from autopar.pipeline.partition import Cut, Row
from autopar.pipeline.plan import PipelineFrontier
from autopar.pipeline.setting import Setting
from autopar.pipeline.units import find_units

__all__ = ["search"]

_MOST_STAGES = 64
_MOST_COUNTS = 8
_SPREADS = (1, 2, 4)


def search(
    graph: Graph,
    cluster: Cluster,
    micro_batches: Sequence[int] | None = None,
    num_stages: int | None = None,
    sub_meshes: Sequence[int] | None = None,
    hosts: Sequence[Host] | None = None,
    eps: float = 0.05,
    max_units: int = 256,
) -> PipelineFrontier:
    """Find the frontier of step time and memory of the fullest device over pipelines.

    Args:
        graph: Captured step of the whole batch, from :func:`autopar.trace`.
        cluster: The devices.
        micro_batches: Numbers of micro-batches to try; powers of two that divide the batch when left out.
        num_stages: Number of stages; any, up to 64 and to the number of micro-batches, when left out.
        sub_meshes: Numbers of devices a stage may have; powers of two inside a host and over hosts when left out.
        hosts: Hosts whose devices differ; all alike, as the cluster says, when left out.
        eps: Share of memory given up for speed of search; 0 for the exact frontier of this space.
        max_units: Places to cut at, at most; with more, neighbours are joined.

    Returns:
        The frontier; its points are :class:`PipelinePlan`. A pipeline of one stage is a plan without pipeline, so the
        frontier holds those too. ``seconds`` is the bound of the schedule, never below its simulation.

    Raises:
        ProblemError: An argument that does not fit the graph or the cluster.
        InfeasibleError: No device can hold its stage.

    >>> from autopar import Cluster, models, trace
    >>> graph = trace(*models.gpt(layers=2, batch=8))
    >>> frontier = search(graph, Cluster.preset("loopback-cpu", 2), micro_batches=[4])
    >>> sorted({plan.num_stages for plan in frontier.points})
    [1, 2]
    """
    _check(eps, num_stages, sub_meshes, cluster)
    units = find_units(graph, max_units)
    if num_stages is not None and num_stages > min(len(units), cluster.num_devices):
        raise ProblemError(
            f"num_stages={num_stages} is more than the step or the cluster has room for: expected at most "
            f"{min(len(units), cluster.num_devices)}, with {len(units)} units and {cluster.num_devices} devices; ask "
            "for fewer"
        )
    all_hosts = read_hosts(cluster, hosts)
    costs = StageCosts(graph, cluster, units, math.sqrt(1 + eps) - 1)
    settings = _settings(costs, all_hosts, micro_batches, num_stages, sub_meshes)
    if not settings:
        raise ProblemError(
            f"sub_meshes={list(sub_meshes or [])} with micro_batches={list(micro_batches or [])} leave nothing to "
            "search: expected sizes that divide a host, or whole hosts, and at least one number of micro-batches; "
            "leave them out for the usual ones"
        )
    plans = _sweep(settings, math.sqrt(1 + eps) if eps else 1.0)
    if not plans:
        least = min(setting.least_memory() for setting in settings)
        raise InfeasibleError(
            f"no pipeline fits: some stage needs at least {least:g} bytes of a device, and memory_bytes are "
            f"{sorted({host.memory_bytes for host in all_hosts})}; use more devices, more micro-batches or a smaller "
            "batch"
        )

    def plan_at(index: int) -> Any:
        memory, seconds, setting, cut, budget = plans[index]
        return setting.plan(memory, seconds, cut, budget)

    return PipelineFrontier([plan[0] for plan in plans], [plan[1] for plan in plans], plan_at, exact=eps == 0)


def _check(eps: float, num_stages: int | None, sub_meshes: Sequence[int] | None, cluster: Cluster) -> None:
    if not (math.isfinite(eps) and eps >= 0):
        raise ProblemError(f"eps={eps} is not valid: expected a number of at least 0; use 0 for the exact frontier")
    if num_stages is not None and num_stages < 1:
        raise ProblemError(f"num_stages={num_stages} is not valid: expected at least 1; leave it out for any number")
    for size in sub_meshes or ():
        if not 1 <= size <= cluster.num_devices:
            raise ProblemError(
                f"sub_meshes holds {size}; expected numbers from 1 to num_devices={cluster.num_devices}; leave it "
                "out for the usual ones"
            )


def _settings(
    costs: StageCosts,
    hosts: list[Host],
    micro_batches: Sequence[int] | None,
    num_stages: int | None,
    sizes: Sequence[int] | None,
) -> list[Setting]:
    """Return every setting of a search."""
    counts = list(micro_batches) if micro_batches is not None else _default_counts(costs, num_stages)
    found = []
    for spread in (h for h in _SPREADS if len(hosts) % h == 0):
        for order in host_orders(hosts):
            placement = place_devices(hosts, order, spread, sizes)
            if placement is not None:
                found += [made for count in counts for made in _settings_of(costs, placement, count, num_stages)]
    return found


def _default_counts(costs: StageCosts, num_stages: int | None) -> list[int]:
    """Return powers of two that divide the batch and that every operator can run in."""
    shape = next((o.output.shape for o in costs.graph.operators if o.kind == "input"), ())
    batch = shape[0] if shape else 1
    counts = [2**power for power in range(batch.bit_length()) if batch % 2**power == 0]
    counts = [count for count in counts if num_stages is None or count >= num_stages] or counts[-1:]
    found = []
    for count in counts[:_MOST_COUNTS]:
        try:
            costs.parts(count)
        except ProblemError:
            continue
        found.append(count)
    return found or [1]


def _settings_of(costs: StageCosts, placement: Placement, count: int, num_stages: int | None) -> list[Setting]:
    """Return the settings of one layout and number of micro-batches: without and with a pipeline."""
    most = min(len(costs.units), len(placement.device_ids), _MOST_STAGES)
    ranges = [(1, 1), (2, min(most, count))] if num_stages is None else [(num_stages, num_stages)]
    row = Row(placement.sizes, placement.kinds, placement.crosses, costs.send_seconds(placement, count))
    found = []
    for fewest, last in ranges:
        if last < fewest:
            continue
        flights = [0, *(flights_counted(stages, count) for stages in range(1, last + 1))]
        if count < fewest:  # as torch runs it then, all forward passes first
            flights = [0, *[count] * last]
        chains = [costs.chain(sub_mesh, count, min(most, count)) for sub_mesh in placement.sub_meshes]
        once = costs.tied_seconds(placement) if last > 1 else 0.0
        found.append(Setting(costs, placement, chains, row, count, (fewest, last), flights, once))
    return found


def _sweep(settings: list[Setting], ratio: float) -> list[tuple[float, float, Setting, Cut, float]]:
    """Return (memory, seconds, setting, cut, budget) of the frontier, memory ascending."""
    found: list[tuple[float, float, Setting, Cut, float]] = []
    budget = math.inf
    while True:
        best, chosen = math.inf, None
        for setting in sorted(settings, key=lambda s: s.lower):
            if setting.lower >= best:
                break
            cut = setting.cut(budget, best)
            if cut is None:
                setting.lower = best
                continue
            setting.lower = cut.seconds + setting.once_seconds
            if setting.lower < best:
                best, chosen = setting.lower, (setting, cut)
        if chosen is None:
            break
        setting, cut = chosen
        memory = setting.memory_of(cut, budget)
        while found and found[-1][1] >= best:
            found.pop()
        found.append((memory, best, setting, cut, budget))
        budget = memory / ratio if ratio > 1 else float(np.nextafter(memory, 0.0))
    return found[::-1]
