"""Planners to compare with: straight messages, a ring, staging through host memory.

``p2p`` sends every copy straight from its owner in one stage. ``ring`` passes rows along a cycle of fast links until
the last device in need has them. ``swap`` stages rows in the memory of each host, kept by the host's first device: a
row enters the memory of its own host, from there the memory of every host in need, from there the devices
(NeuGraph's way, carried over to several hosts).
"""

from __future__ import annotations

import numpy as np

from core_kernels.topology import Topology, UnreachablePairError
from gnn_comm.planners.chunks import Chunks

__all__ = ["TreeEdges", "plan_p2p", "plan_ring", "plan_swap"]

TreeEdges = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def plan_p2p(chunks: Chunks, topology: Topology) -> TreeEdges:
    """Send every copy straight from its owner, in one stage.

    Raises:
        UnreachablePairError: Some pair has no route.
    """
    chunk = np.repeat(np.arange(len(chunks)), np.diff(chunks.need_indptr))
    sender, receiver = chunks.source[chunk], chunks.need
    _check_routes(topology, sender, receiver)
    return chunk, np.zeros(len(chunk), np.int64), sender, receiver


def plan_ring(chunks: Chunks, topology: Topology) -> TreeEdges:
    """Pass rows along a cycle through all devices until the last device in need has them."""
    cycle = _fast_cycle(topology)
    place = np.argsort(cycle)
    num_devices = topology.num_devices
    chunk = np.repeat(np.arange(len(chunks)), np.diff(chunks.need_indptr))
    steps = np.zeros(len(chunks), np.int64)
    np.maximum.at(steps, chunk, (place[chunks.need] - place[chunks.source[chunk]]) % num_devices)
    hop_chunk = np.repeat(np.arange(len(chunks)), steps)
    stage = np.arange(len(hop_chunk)) - np.repeat(np.cumsum(steps) - steps, steps)
    at = (place[chunks.source[hop_chunk]] + stage) % num_devices
    return hop_chunk, stage, cycle[at], cycle[(at + 1) % num_devices]


def plan_swap(chunks: Chunks, topology: Topology) -> TreeEdges:
    """Stage every row in host memory: owner to its host's memory, to the memories in need, to the devices in need."""
    keeper = np.array([host[0] for host in topology.hosts], np.int64)
    host_of = topology.host_of_device
    found: list[tuple[int, int, int, int]] = []
    for c in range(len(chunks)):
        source = int(chunks.source[c])
        home = int(keeper[host_of[source]])
        needs = [int(v) for v in chunks.need[chunks.need_indptr[c] : chunks.need_indptr[c + 1]]]
        has = {source}
        if home not in has:
            found.append((c, 0, source, home))
            has.add(home)
        for memory in sorted({int(keeper[host_of[v]]) for v in needs} - has):
            found.append((c, 1, home, memory))
            has.add(memory)
        found += [(c, 2, int(keeper[host_of[v]]), v) for v in needs if v not in has]
    table = np.array(found, np.int64).reshape(-1, 4)
    _check_routes(topology, table[:, 2], table[:, 3])
    return table[:, 0], table[:, 1], table[:, 2], table[:, 3]


def _fast_cycle(topology: Topology) -> np.ndarray:
    """Order the devices so that neighbours are fast: nearest neighbour, then reversals while they help."""
    num_devices = topology.num_devices
    rate = np.zeros((num_devices, num_devices))
    for i in range(num_devices):
        for j in range(num_devices):
            if i != j and topology.is_reachable(i, j):
                rate[i, j] = topology.bytes_per_second(i, j)
    cycle = [0]
    while len(cycle) < num_devices:
        rest = [v for v in range(num_devices) if v not in cycle]
        cycle.append(max(rest, key=lambda v: (rate[cycle[-1], v], -v)))

    def slowness(order: list[int]) -> tuple[float, float]:
        hops = [rate[order[k], order[(k + 1) % num_devices]] for k in range(num_devices)]
        return (-min(hops), -sum(hops))

    improved = num_devices > 3
    while improved:
        improved = False
        for i in range(1, num_devices - 1):
            for j in range(i + 1, num_devices):
                turned = cycle[:i] + cycle[i : j + 1][::-1] + cycle[j + 1 :]
                if slowness(turned) < slowness(cycle):
                    cycle, improved = turned, True
    order = np.array(cycle, np.int64)
    if num_devices > 1:
        _check_routes(topology, order, np.roll(order, -1))
    return order


def _check_routes(topology: Topology, sender: np.ndarray, receiver: np.ndarray) -> None:
    pairs = np.unique(np.stack([sender, receiver]), axis=1) if len(sender) else np.zeros((2, 0), np.int64)
    for i, j in pairs.T:
        if not topology.is_reachable(int(i), int(j)):
            names = topology.nodes[int(i)].name, topology.nodes[int(j)].name
            raise UnreachablePairError(
                f"{names[0]} cannot reach {names[1]} straight in topology {topology.name!r}; expected a route for "
                "every pair that talks; choose planner='spst', which may relay, or add the missing link"
            )
