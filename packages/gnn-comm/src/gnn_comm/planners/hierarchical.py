"""Plan trees in two levels: between hosts, then inside each host.

Flat planning looks at every pair of devices for every chunk, which stops paying beyond a few hosts. Here (1) every
host becomes one device of a small topology, and trees are grown between hosts and started in waves; (2) every crossing
chooses its gateways, see :mod:`gnn_comm.planners.crossings`; (3) inside each host, rows fan out from where they are,
beside the traffic that the first two steps put on the host's links.

A row still crosses the network once per host at most. What is lost against flat planning is the joint choice of
gateways and fan-out.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain

import numpy as np
import torch

from core_kernels.topology import Topology
from gnn_comm.planners.chunks import Chunks, split_classes
from gnn_comm.planners.crossings import Crossings, cross_hosts, group_units
from gnn_comm.planners.forest import TreeProblem
from gnn_comm.planners.spst import grow_forest, spread_forest
from gnn_comm.requests import RequestClasses
from gnn_comm.transfers import Transfers, transfers_of_chunks

__all__ = ["plan_by_hosts"]

_NUM_UNITS = 6000
_NUM_HOST_CHUNKS = 4000
_FAN_OUT_DEPTH = 2


def plan_by_hosts(
    requests: RequestClasses, topology: Topology, row_bytes: int, latency_seconds: float, seed: int = 0
) -> Transfers:
    """Plan trees between hosts, then inside each.

    Args:
        requests: Which rows must travel.
        topology: The machine.
        row_bytes: Bytes of one row.
        latency_seconds: Cost of one more stage.
        seed: Of the random orders.

    Returns:
        The messages.
    """
    units = split_classes(requests, _NUM_UNITS)
    between, edges = _between_hosts(units, topology, row_bytes, latency_seconds, seed)
    num_stages = int(edges[1].max()) + 1 if len(edges[1]) else 0
    crossed = cross_hosts(units, topology, between, edges, num_stages, row_bytes)
    found = [crossed.edges]
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:  # the compiled part runs without the interpreter lock
        hosts = range(len(topology.hosts))
        fan_out = partial(_fan_out, units, topology, crossed, row_bytes, latency_seconds, seed)
        found += chain.from_iterable(threads.map(fan_out, hosts))
    columns = [np.concatenate(column) for column in zip(*found, strict=True)]
    return transfers_of_chunks(units, *_without_repeats(columns, crossed.needs))


def _without_repeats(edges: list[np.ndarray], needs: np.ndarray) -> tuple[np.ndarray, ...]:
    """Keep the first arrival of each unit at each device, and drop relays that then pass nothing on."""
    unit, stage, sender, receiver = edges
    num_devices = needs.shape[1]
    arrival = unit * num_devices + receiver
    order = np.argsort(arrival * (stage.max(initial=0) + 1) + stage, kind="stable")
    first = np.ones(len(order), bool)
    first[1:] = arrival[order[1:]] != arrival[order[:-1]]
    kept = np.sort(order[first])
    while True:
        wanted = needs.copy()
        wanted[unit[kept], sender[kept]] = True
        useful = wanted[unit[kept], receiver[kept]]
        if useful.all():
            return unit[kept], stage[kept], sender[kept], receiver[kept]
        kept = kept[useful]


def _between_hosts(units: Chunks, topology: Topology, row_bytes: int, latency_seconds: float, seed: int):
    """Grow trees between hosts; return the groups of units and the trees' edges over groups."""
    host_of = topology.host_of_device
    away = np.zeros((len(units), len(topology.hosts)), np.uint8)
    unit_of_need = np.repeat(np.arange(len(units)), np.diff(units.need_indptr))
    away[unit_of_need, host_of[units.need]] = 1
    home = host_of[units.source]
    away[np.arange(len(units)), home] = 0
    travelling = np.flatnonzero(away.any(axis=1))
    key = np.concatenate([away[travelling], home[travelling, None].astype(np.uint16).view(np.uint8)], axis=1)
    groups = group_units(key, units.num_rows, travelling, _NUM_HOST_CHUNKS)
    need = away[groups.first()].astype(bool)
    need_indptr = np.concatenate([[0], np.cumsum(need.sum(axis=1))]).astype(np.int64)
    release = np.zeros(len(need), np.int64)
    num_bytes = groups.num_rows * float(row_bytes)
    root = home[groups.first()]
    problem = TreeProblem(topology.between_hosts(), root, release, need_indptr, np.nonzero(need)[1], num_bytes)
    return groups, spread_forest(problem, latency_seconds, seed).edges()


def _fan_out(
    units: Chunks, topology: Topology, crossed: Crossings, row_bytes: int, latency_seconds: float, seed: int, host: int
) -> list[tuple[np.ndarray, ...]]:
    """Grow trees inside one host from the device where each row is; return their edges over units."""
    holder, ready = crossed.holder[:, host], crossed.ready[:, host]
    devices = np.array(topology.hosts[host], np.int64)
    local = np.full(topology.num_devices, -1, np.int64)
    local[devices] = np.arange(len(devices))
    unit_of_need = np.repeat(np.arange(len(units)), np.diff(units.need_indptr))
    inside = (local[units.need] >= 0) & ~crossed.has_arrived(unit_of_need, units.need)
    need = np.zeros((len(units), len(devices)), np.uint8)
    need[unit_of_need[inside], local[units.need[inside]]] = 1
    busy = np.flatnonzero(need.any(axis=1))
    if len(busy) == 0:
        return []
    start = np.stack([local[holder[busy]], ready[busy]], axis=1).astype(np.uint16)
    groups = group_units(
        np.concatenate([need[busy], start.view(np.uint8)], axis=1), units.num_rows, busy, _NUM_HOST_CHUNKS
    )
    first = groups.first()
    number = topology.nodes[devices[0]].host
    links = [
        k
        for k, a in enumerate(topology.links)
        if topology.nodes[a.source].host == topology.nodes[a.target].host == number
    ]
    shared = [len(topology.links) + k for k, g in enumerate(topology.groups) if set(g.links) & set(links)]
    wanted = need[first].astype(bool)
    problem = TreeProblem(
        topology.host_topology(host),
        local[holder[first]],
        ready[first],
        np.concatenate([[0], np.cumsum(wanted.sum(axis=1))]).astype(np.int64),
        np.nonzero(wanted)[1],
        groups.num_rows * float(row_bytes),
        crossed.loads[:, links + shared],
    )
    chunk, stage, sender, receiver = grow_forest(problem, latency_seconds, seed, depth=_FAN_OUT_DEPTH).edges()
    unit, position = groups.expand(chunk)
    return [(unit, stage[position], devices[sender[position]], devices[receiver[position]])]
