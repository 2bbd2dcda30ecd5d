"""Routes between devices over the physical links, and the flow between sets of devices.

Routes are kept as one CSR over ordered pairs: resources of pair ``(i, j)`` stand at ``indptr[i * P + j]``. Planners
read these arrays directly; nothing is recomputed per row.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from core_kernels.topology.model import Topology

__all__ = ["Routes", "find_routes", "max_flow"]


@dataclass(frozen=True)
class Routes:
    """Routes of all ordered pairs of devices.

    Args:
        num_devices: Number P of devices.
        indptr: int64 ``[P * P + 1]``; start of each pair's resources.
        items: int64; links of the pair in order, then the groups those links belong to.
        num_links: int64 ``[P * P]``; how many items of the pair are links.
        reachable: bool ``[P * P]``; pairs without a route have no items.
    """

    num_devices: int
    indptr: np.ndarray
    items: np.ndarray
    num_links: np.ndarray
    reachable: np.ndarray

    def is_reachable(self, source: int, target: int) -> bool:
        """Say whether the pair has a route."""
        return bool(self.reachable[source * self.num_devices + target])

    def resources(self, source: int, target: int) -> np.ndarray:
        """Return the resources (links, then groups) that the pair's transfers occupy."""
        pair = source * self.num_devices + target
        return self.items[self.indptr[pair] : self.indptr[pair + 1]]

    def links(self, source: int, target: int) -> tuple[int, ...]:
        """Return the links of the route in order."""
        pair = source * self.num_devices + target
        return tuple(int(k) for k in self.resources(source, target)[: self.num_links[pair]])


def find_routes(topology: Topology) -> Routes:
    """Find the route of every ordered pair: direct link, else fewest links without devices, else widest."""
    leaving = defaultdict(list)
    for index, link in enumerate(topology.links):
        leaving[link.source].append(index)
    groups_of_link = defaultdict(list)
    for index, group in enumerate(topology.groups):
        for link in group.links:
            groups_of_link[link].append(len(topology.links) + index)
    num_devices = topology.num_devices
    items: list[int] = []
    indptr, num_links, reachable = [0], [], []
    for source in range(num_devices):
        paths = _paths_from(topology, leaving, source)
        for target in range(num_devices):
            path = paths.get(target)
            groups = [] if path is None else list(dict.fromkeys(g for k in path for g in groups_of_link[k]))
            items += [*(path or []), *groups]
            indptr.append(len(items))
            num_links.append(len(path or []))
            reachable.append(path is not None)
    int64 = np.int64
    return Routes(
        num_devices,
        np.array(indptr, int64),
        np.array(items, int64),
        np.array(num_links, int64),
        np.array(reachable, bool),
    )


def _paths_from(topology: Topology, leaving: dict[int, list[int]], source: int) -> dict[int, list[int]]:
    """Search layer by layer; within a layer the widest way to a node wins, then the lowest link index."""
    best: dict[int, tuple[float, list[int]]] = {source: (float("inf"), [])}
    layer = [source]
    while layer:
        found: dict[int, tuple[float, list[int]]] = {}
        for node in layer:
            width, path = best[node]
            for index in leaving[node]:
                link = topology.links[index]
                if link.target in best:
                    continue
                reach = min(width, link.bytes_per_second)
                if link.target not in found or reach > found[link.target][0]:
                    found[link.target] = (reach, [*path, index])
        best.update(found)
        layer = [node for node in found if topology.nodes[node].kind != "device"]
    return {node: path for node, (_, path) in best.items() if node < topology.num_devices}


def max_flow(topology: Topology, sources: list[int], targets: list[int]) -> float:
    """Compute the maximum flow in bytes per second; groups bound it through a node each of their links passes.

    A contention group is modelled only where all its links leave or all enter one node (or it is ignored, which can
    only raise the flow, so bounds built on it stay valid).
    """
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import maximum_flow

    num_nodes = len(topology.nodes)
    first, last = num_nodes, num_nodes + 1
    capacities: dict[tuple[int, int], float] = defaultdict(float)
    detour, size = _group_nodes(topology, num_nodes + 2, capacities)
    for index, link in enumerate(topology.links):
        ends = detour.get(index, (link.source, link.target))
        capacities[ends] += link.bytes_per_second
    total = sum(link.bytes_per_second for link in topology.links)
    for device in sources:
        capacities[(first, device)] = total
    for device in targets:
        capacities[(device, last)] = total
    # scipy's maximum flow is integral in int32: scale the largest finite capacity to 2^20.
    scale = 2**20 / max(link.bytes_per_second for link in topology.links)
    ends = np.array(list(capacities), np.int64)
    values = np.minimum(np.round(np.array(list(capacities.values())) * scale), 2**30).astype(np.int32)
    graph = csr_array((values, (ends[:, 0], ends[:, 1])), shape=(size, size)).astype(np.int32)
    return float(maximum_flow(graph, first, last).flow_value) / scale


def _group_nodes(topology: Topology, size: int, capacities: dict) -> tuple[dict[int, tuple[int, int]], int]:
    """Route the links of a group with one common end through an extra edge of the group's capacity."""
    detour: dict[int, tuple[int, int]] = {}
    for group in topology.groups:
        links = [topology.links[k] for k in group.links]
        if any(k in detour for k in group.links):
            continue
        if len({link.source for link in links}) == 1:
            capacities[(links[0].source, size)] = group.bytes_per_second
            detour |= {k: (size, topology.links[k].target) for k in group.links}
            size += 1
        elif len({link.target for link in links}) == 1:
            capacities[(size, links[0].target)] = group.bytes_per_second
            detour |= {k: (topology.links[k].source, size) for k in group.links}
            size += 1
    return detour, size
