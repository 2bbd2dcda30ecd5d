"""Choose where rows leave and enter hosts, stage by stage.

A crossing goes from a gateway of one host to a gateway of another. The gateway out is a device that has the row, or any
other device of the host, which then gets it one stage before; the gateway in is a device in need of the row, or any
other, which then passes it on. Each crossing takes the pair whose route is least loaded so far, a detour inside a host
counted with the seconds it adds. So where every device has a network card of its own all cards carry about the same
bytes, however unevenly owners and readers are spread.

A crossing that would fill a link beyond an even share of what is left waits for the next stage, where more gateways are
open to it; the last stage takes the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit

from core_kernels.topology import Topology, UnreachablePairError
from gnn_comm.planners.chunks import Chunks, ragged_arange

__all__ = ["Crossings", "UnitGroups", "cross_hosts", "group_units"]

_NEVER = np.iinfo(np.int16).max
_SLACK = 1.02
_MAX_DETOUR_DEVICES = 64
"""Beyond, rows leave from devices that have them and land on readers only: looking at all pairs takes too long."""


@dataclass(frozen=True)
class UnitGroups:
    """Units that are alike, cut into chunks: ``units[indptr[c] : indptr[c + 1]]`` form chunk ``c``."""

    units: np.ndarray
    indptr: np.ndarray
    num_rows: np.ndarray

    def first(self) -> np.ndarray:
        """Return one unit of each chunk."""
        return self.units[self.indptr[:-1]]

    def expand(self, chunk: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the units of each given chunk, and the position in ``chunk`` each came from."""
        sizes = np.diff(self.indptr)[chunk]
        units = self.units[np.repeat(self.indptr[chunk], sizes) + ragged_arange(sizes)]
        return units, np.repeat(np.arange(len(chunk)), sizes)


@dataclass(frozen=True)
class Crossings:
    """Rows brought into every host that needs them.

    Args:
        edges: Unit, stage, sender and receiver of every transfer so far, int64.
        needs: bool ``[num_units, num_devices]``.
        holder: int64 ``[num_units, num_hosts]``; device from which the unit fans out in the host, or -1.
        ready: int64 ``[num_units, num_hosts]``; first stage in which the holder may send.
        arrived: int16 ``[num_units, num_devices]``; first stage in which the device may send the unit.
        loads: float64 ``[num_stages, num_resources]`` in seconds.
    """

    edges: tuple[np.ndarray, ...]
    needs: np.ndarray
    holder: np.ndarray
    ready: np.ndarray
    arrived: np.ndarray
    loads: np.ndarray

    def has_arrived(self, unit: np.ndarray, device: np.ndarray) -> np.ndarray:
        """Say which units are at which devices already."""
        return self.arrived[unit, device] != _NEVER


def group_units(key: np.ndarray, num_rows: np.ndarray, units: np.ndarray, num_chunks: int) -> UnitGroups:
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
    return UnitGroups(units[order], indptr, np.add.reduceat(rows, first) if len(first) else rows)


def cross_hosts(
    units: Chunks,
    topology: Topology,
    between: UnitGroups,
    edges: tuple[np.ndarray, ...],
    num_stages: int,
    row_bytes: int,
) -> Crossings:
    """Turn edges between hosts into transfers between devices.

    Args:
        units: What travels.
        topology: The machine.
        between: Groups of units, the chunks of ``edges``.
        edges: Chunk, stage, sending and receiving host of every edge between hosts.
        num_stages: Stages of those edges.
        row_bytes: Bytes of one row.
    """
    num_devices, num_hosts = topology.num_devices, len(topology.hosts)
    needs = np.zeros((len(units), num_devices), bool)
    needs[np.repeat(np.arange(len(units)), np.diff(units.need_indptr)), units.need] = True
    holder = np.full((len(units), num_hosts), -1, np.int64)
    holder[np.arange(len(units)), topology.host_of_device[units.source]] = units.source
    ready = np.zeros(holder.shape, np.int64)
    arrived = np.full((len(units), num_devices), _NEVER, np.int16)
    arrived[np.arange(len(units)), units.source] = 0
    # Postponed rows that only pass a host need stages beyond the planned ones: one per host at most.
    most_stages = num_stages + num_hosts
    loads = np.zeros((most_stages, len(topology.resource_bytes_per_second)))
    members = np.full((num_hosts, max(len(host) for host in topology.hosts)), -1, np.int64)
    for number, host in enumerate(topology.hosts):
        members[number, : len(host)] = host
    chunk, stage, from_host, to_host = edges
    unit, position = between.expand(chunk)
    planned, source, target = stage[position], from_host[position], to_host[position]
    num_bytes = units.num_rows * float(row_bytes)
    # Large units first: small ones then fill what is left uneven.
    waiting = np.argsort(-num_bytes[unit], kind="stable")
    found = []
    out_rate, in_rate = _uplink_rates(topology)
    routes, seconds_per_byte = topology.routes, 1.0 / topology.resource_bytes_per_second
    num_used, is_sent = 0, np.zeros(len(unit), bool)
    detours = num_devices <= _MAX_DETOUR_DEVICES
    for k in range(most_stages if len(unit) else 0):
        num_left = max(num_stages - k, 1)
        left = num_bytes[unit[waiting]]
        sending = np.bincount(source[waiting], left, num_hosts)
        receiving = np.bincount(target[waiting], left, num_hosts)
        busiest = max((sending / out_rate).max(), (receiving / in_rate).max())
        most_seconds = _SLACK * busiest / num_left if num_left > 1 else np.inf
        now = waiting if num_left == 1 else waiting[planned[waiting] <= k]
        transfers, sent = np.zeros((2 * len(now), 4), np.int64), np.zeros(len(now), bool)
        count = _choose_gateways(
            k, most_seconds, detours, unit[now], source[now], target[now], needs, members, num_bytes,
            routes.indptr, routes.items, routes.reachable, seconds_per_byte, loads, holder, ready, arrived,
            transfers, sent,
        )  # fmt: skip
        found.append(transfers[:count])
        num_used = k + 1
        is_sent[now[sent]] = True
        waiting = waiting[~is_sent[waiting]]
        if len(waiting) == 0:
            break
    if len(waiting):
        a, b = source[waiting[0]], target[waiting[0]]
        raise UnreachablePairError(
            f"no device of host {a} has a route to host {b} in topology {topology.name!r}; expected a link between "
            "them, or over a network; add the missing link"
        )
    table = np.concatenate(found) if found else np.zeros((0, 4), np.int64)
    return Crossings(tuple(table.T), needs, holder, ready, arrived, loads[:num_used])


def _uplink_rates(topology: Topology) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes per second out of and into each host, over all its links together."""
    place = {topology.nodes[host[0]].host: number for number, host in enumerate(topology.hosts)}
    out_rate, in_rate = np.zeros(len(place)), np.zeros(len(place))
    for link in topology.links:
        a, b = topology.nodes[link.source].host, topology.nodes[link.target].host
        if a != b:
            if a in place:
                out_rate[place[a]] += link.bytes_per_second
            if b in place:
                in_rate[place[b]] += link.bytes_per_second
    # A host without links of its own sends nothing; an infinite rate keeps its share at zero.
    return np.where(out_rate > 0, out_rate, np.inf), np.where(in_rate > 0, in_rate, np.inf)


@njit(cache=True, nogil=True)
def _choose_gateways(
    k, most, detours, unit, source, target, needs, members, num_bytes, route_ptr, route_item, reachable,
    seconds_per_byte, loads, holder, ready, arrived, transfers, sent,
):  # fmt: skip
    """Send what fits into stage ``k``; fill ``transfers`` and ``sent`` and return the number of transfers."""
    P = needs.shape[1]
    count = 0
    for m in range(len(unit)):
        u = unit[m]
        root = holder[u, source[m]]
        if root < 0 or ready[u, source[m]] > k:
            continue
        best_out, best_in, best_peak, best_cost, best_sum = -1, -1, np.inf, np.inf, np.inf
        has_reader = False
        for v in members[target[m]]:
            has_reader |= v >= 0 and needs[u, v]
        for s in members[source[m]]:
            if s < 0:
                continue
            is_there = arrived[u, s] <= k
            if not is_there and not detours:
                continue
            if not is_there and (
                k == 0 or ready[u, source[m]] > k - 1 or arrived[u, s] != _NEVER or not reachable[root * P + s]
            ):
                continue
            out_peak, out_extra = 0.0, 0.0
            if not is_there:
                for e in range(route_ptr[root * P + s], route_ptr[root * P + s + 1]):
                    spent = num_bytes[u] * seconds_per_byte[route_item[e]]
                    out_peak = max(out_peak, loads[k - 1, route_item[e]] + spent)
                    out_extra = max(out_extra, spent)
                if needs[u, s]:
                    out_extra = 0.0
            for v in members[target[m]]:
                if v < 0 or not reachable[s * P + v]:
                    continue
                if has_reader and not needs[u, v] and not detours:
                    continue
                peak, total = out_peak, 0.0
                for e in range(route_ptr[s * P + v], route_ptr[s * P + v + 1]):
                    after = loads[k, route_item[e]] + num_bytes[u] * seconds_per_byte[route_item[e]]
                    peak, total = max(peak, after), total + after
                in_extra = 0.0
                if has_reader and not needs[u, v]:
                    in_extra = np.inf
                    for w in members[target[m]]:
                        if w >= 0 and needs[u, w] and reachable[v * P + w]:
                            slowest = 0.0
                            for e in range(route_ptr[v * P + w], route_ptr[v * P + w + 1]):
                                slowest = max(slowest, num_bytes[u] * seconds_per_byte[route_item[e]])
                            in_extra = min(in_extra, slowest)
                cost = peak + out_extra + in_extra
                if cost < best_cost or (cost == best_cost and total < best_sum):
                    best_out, best_in, best_peak, best_cost, best_sum = s, v, peak, cost, total
        if best_out < 0 or best_peak > most:
            continue
        if arrived[u, best_out] > k:
            for e in range(route_ptr[root * P + best_out], route_ptr[root * P + best_out + 1]):
                loads[k - 1, route_item[e]] += num_bytes[u] * seconds_per_byte[route_item[e]]
            transfers[count] = np.array([u, k - 1, root, best_out])
            count += 1
            arrived[u, best_out] = k
        for e in range(route_ptr[best_out * P + best_in], route_ptr[best_out * P + best_in + 1]):
            loads[k, route_item[e]] += num_bytes[u] * seconds_per_byte[route_item[e]]
        transfers[count] = np.array([u, k, best_out, best_in])
        count += 1
        arrived[u, best_in] = k + 1
        holder[u, target[m]] = best_in
        ready[u, target[m]] = k + 1
        sent[m] = True
    return count
