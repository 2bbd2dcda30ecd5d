"""Plan trees in two levels: between hosts, then inside each host.

Flat planning looks at every pair of devices for every chunk, which stops paying beyond a few hosts. Here (1) every
host becomes one device of a small topology, and trees are grown between hosts and started in waves; (2) stage by
stage, each row that enters a host lands on one of the devices there that need it, the one whose route is least
loaded so far; (3) inside each host, rows fan out from where they are, beside the traffic that the first two steps
put on the host's links.

A row still crosses the network once per host at most. What is lost against flat planning is the joint choice of
landing and fan-out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit

from core_kernels.topology import Topology
from gnn_comm.planners.chunks import Chunks, ragged_arange, split_classes
from gnn_comm.planners.forest import TreeProblem
from gnn_comm.planners.spst import grow_forest, spread_forest
from gnn_comm.requests import RequestClasses
from gnn_comm.transfers import Transfers, transfers_of_chunks

__all__ = ["plan_by_hosts"]

_NUM_UNITS = 6000
_NUM_HOST_CHUNKS = 4000
_FAN_OUT_DEPTH = 2


@dataclass(frozen=True)
class _Groups:
    """Units that are alike, cut into chunks: ``units[indptr[c] : indptr[c + 1]]`` form chunk ``c``."""

    units: np.ndarray
    indptr: np.ndarray
    num_rows: np.ndarray

    def first(self) -> np.ndarray:
        return self.units[self.indptr[:-1]]

    def expand(self, chunk: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the units of each given chunk, and the position in ``chunk`` each came from."""
        sizes = np.diff(self.indptr)[chunk]
        units = self.units[np.repeat(self.indptr[chunk], sizes) + ragged_arange(sizes)]
        return units, np.repeat(np.arange(len(chunk)), sizes)


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
    loads = np.zeros((num_stages, len(topology.resource_bytes_per_second)))
    holder = np.full((len(units), len(topology.hosts)), -1, np.int64)
    holder[np.arange(len(units)), topology.host_of_device[units.source]] = units.source
    ready = np.zeros(holder.shape, np.int64)
    found = _land(units, topology, between, edges, holder, ready, loads, row_bytes)
    for host in range(len(topology.hosts)):
        found += _fan_out(units, topology, host, holder, ready, loads, row_bytes, latency_seconds, seed)
    columns = [np.concatenate(column) if column else np.zeros(0, np.int64) for column in zip(*found, strict=True)]
    return transfers_of_chunks(units, *(columns or [np.zeros(0, np.int64)] * 4))


def _group(key: np.ndarray, num_rows: np.ndarray, units: np.ndarray, num_chunks: int) -> _Groups:
    """Put units of equal key together and cut each group into chunks of about equal rows."""
    key = np.ascontiguousarray(key)
    group = np.unique(key.view(f"V{key.shape[1] * key.itemsize}").ravel(), return_inverse=True)[1]
    # Shuffled, so that every chunk mixes the units (and so the devices) of its group.
    order = np.random.default_rng(0).permutation(len(units))
    order = order[np.argsort(group[order], kind="stable")]
    group, rows = group[order], num_rows[units[order]]
    ends = np.cumsum(rows)
    starts_group = np.ones(len(group), bool)
    starts_group[1:] = group[1:] != group[:-1]
    base = np.maximum.accumulate(np.where(starts_group, ends - rows, 0))
    size = max(1, -(-int(rows.sum()) // num_chunks))
    piece = (ends - rows - base) // size
    starts = starts_group.copy()
    starts[1:] |= piece[1:] != piece[:-1]
    first = np.flatnonzero(starts)
    indptr = np.append(first, len(group)).astype(np.int64)
    return _Groups(units[order], indptr, np.add.reduceat(rows, first) if len(first) else rows)


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
    groups = _group(key, units.num_rows, travelling, _NUM_HOST_CHUNKS)
    need = away[groups.first()].astype(bool)
    need_indptr = np.concatenate([[0], np.cumsum(need.sum(axis=1))]).astype(np.int64)
    release = np.zeros(len(need), np.int64)
    num_bytes = groups.num_rows * float(row_bytes)
    root = home[groups.first()]
    problem = TreeProblem(topology.between_hosts(), root, release, need_indptr, np.nonzero(need)[1], num_bytes)
    return groups, spread_forest(problem, latency_seconds, seed).edges()


def _land(units, topology, between, edges, holder, ready, loads, row_bytes) -> list[tuple[np.ndarray, ...]]:
    """Turn edges between hosts into edges between devices, stage by stage; fill ``holder``, ``ready`` and ``loads``."""
    chunk, stage, from_host, to_host = edges
    routes, found = topology.routes, []
    members = np.full((len(topology.hosts), max(len(host) for host in topology.hosts)), -1, np.int64)
    for number, host in enumerate(topology.hosts):
        members[number, : len(host)] = host
    seconds = units.num_rows * float(row_bytes)
    for k in range(len(loads)):
        now = np.flatnonzero(stage == k)
        unit, position = between.expand(chunk[now])
        source_host, target_host = from_host[now][position], to_host[now][position]
        sender = holder[unit, source_host]
        # Large units first: small ones then fill what is left uneven.
        order = np.argsort(-seconds[unit], kind="stable")
        landing = np.empty(len(unit), np.int64)
        _choose_landings(
            order, unit, sender, target_host, units.need_indptr, units.need, topology.host_of_device, members, seconds,
            routes.indptr, routes.items, 1.0 / topology.resource_bytes_per_second, loads[k], landing,
        )  # fmt: skip
        holder[unit, target_host] = landing
        ready[unit, target_host] = k + 1
        found.append((unit, np.full(len(unit), k), sender, landing))
    return found


@njit(cache=True, nogil=True)
def _choose_landings(
    order, unit, sender, target_host, need_ptr, need, host_of, members, num_bytes, route_ptr, route_item,
    seconds_per_byte, load, landing,
):  # fmt: skip
    P = len(host_of)
    for m in order:
        u, s, host = unit[m], sender[m], target_host[m]
        best, best_cost, best_sum = -1, np.inf, np.inf
        for attempt in range(2):
            # First the devices in need; if there is none, the host only relays and any device will do.
            count = need_ptr[u + 1] - need_ptr[u] if attempt == 0 else members.shape[1]
            for k in range(count):
                v = need[need_ptr[u] + k] if attempt == 0 else members[host, k]
                if v < 0 or host_of[v] != host:
                    continue
                cost, total, pair = 0.0, 0.0, s * P + v
                for e in range(route_ptr[pair], route_ptr[pair + 1]):
                    r = route_item[e]
                    after = load[r] + num_bytes[u] * seconds_per_byte[r]
                    cost, total = max(cost, after), total + after
                if cost < best_cost or (cost == best_cost and total < best_sum):
                    best, best_cost, best_sum = v, cost, total
            if best >= 0:
                break
        landing[m] = best
        pair = s * P + best
        for e in range(route_ptr[pair], route_ptr[pair + 1]):
            load[route_item[e]] += num_bytes[u] * seconds_per_byte[route_item[e]]


def _fan_out(units, topology, host, holder, ready, loads, row_bytes, latency_seconds, seed):
    """Grow trees inside one host from the device where each row is; return their edges over units."""
    devices = np.array(topology.hosts[host], np.int64)
    local = np.full(topology.num_devices, -1, np.int64)
    local[devices] = np.arange(len(devices))
    unit_of_need = np.repeat(np.arange(len(units)), np.diff(units.need_indptr))
    inside = (local[units.need] >= 0) & (holder[unit_of_need, host] != units.need)
    need = np.zeros((len(units), len(devices)), np.uint8)
    need[unit_of_need[inside], local[units.need[inside]]] = 1
    busy = np.flatnonzero(need.any(axis=1))
    if len(busy) == 0:
        return []
    start = np.stack([local[holder[busy, host]], ready[busy, host]], axis=1).astype(np.uint16)
    groups = _group(np.concatenate([need[busy], start.view(np.uint8)], axis=1), units.num_rows, busy, _NUM_HOST_CHUNKS)
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
        local[holder[first, host]],
        ready[first, host],
        np.concatenate([[0], np.cumsum(wanted.sum(axis=1))]).astype(np.int64),
        np.nonzero(wanted)[1],
        groups.num_rows * float(row_bytes),
        loads[:, links + shared],
    )
    chunk, stage, sender, receiver = grow_forest(problem, latency_seconds, seed, depth=_FAN_OUT_DEPTH).edges()
    unit, position = groups.expand(chunk)
    return [(unit, stage[position], devices[sender[position]], devices[receiver[position]])]
