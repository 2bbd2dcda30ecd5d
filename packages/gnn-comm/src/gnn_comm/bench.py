"""Measure plans on shaped hosts: real ranks, real sockets, slow links of a chosen rate.

The exchange is run straight (``p2p``), as planned, and as one ``all_to_all`` of copied rows, forward and backward,
with the schemes interleaved; seconds are the median over repeats of the slowest rank. Bytes over the slow links are
what the kernel counted on the hosts' uplinks. The prediction comes from the same topology the plan was made for:
link rates times the share TCP leaves to payload, and latencies measured with small messages before.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from core_kernels import ops
from core_kernels.comm import Group, Recv, Send
from core_kernels.graph import Graph
from core_kernels.topology import Topology, cluster
from gnn_comm.communicator import Communicator
from gnn_comm.partitioning import Partition, partition
from gnn_comm.plan import Plan
from gnn_comm.planner import plan

__all__ = ["TCP_PAYLOAD_SHARE", "bench_hosts", "everyone_needs", "shaped_topology"]

TCP_PAYLOAD_SHARE = 1448 / 1514
"""Payload per byte on the wire: 1500-byte packets less IP, TCP and time-stamp headers, plus the Ethernet header."""

SCHEMES = ("p2p", "planned", "all_to_all")
_LATENCY_MESSAGE_BYTES = 4096
_in_rank: dict[str, Any] = {}  # state that stays in a rank between runs


def shaped_topology(
    hosts: Sequence[int],
    local_rate_mbit: float,
    link_rate_mbit: float,
    local_latency_seconds: float = 0.0,
    link_latency_seconds: float = 0.0,
) -> Topology:
    """Describe shaped hosts as a topology with payload rates."""
    local, link = (rate * 1e6 / 8 * TCP_PAYLOAD_SHARE for rate in (local_rate_mbit, link_rate_mbit))
    name = "x".join(map(str, (len(hosts), hosts[0]))) if len(set(hosts)) == 1 else "+".join(map(str, hosts))
    return cluster(hosts, local, link, local_latency_seconds / 2, link_latency_seconds / 2, f"shaped {name}")


def everyone_needs(num_parts: int, rows_per_part: int) -> tuple[Graph, np.ndarray]:
    """Build a graph in which every vertex is read by every other part; return it with the part of each vertex."""
    vertex = np.arange(num_parts * rows_per_part)
    part, row = vertex // rows_per_part, vertex % rows_per_part
    sources = np.repeat(vertex, num_parts - 1)
    shift = np.tile(np.arange(1, num_parts), len(vertex))
    targets = (np.repeat(part, num_parts - 1) + shift) % num_parts * rows_per_part + np.repeat(row, num_parts - 1)
    return Graph.from_edge_index(torch.from_numpy(np.stack([sources, targets])), len(vertex)), part


def bench_hosts(
    hosts: Sequence[int],
    local_rate_mbit: float,
    link_rate_mbit: float,
    payload_bytes: Sequence[int],
    width: int = 256,
    repeats: int = 3,
    planner: str = "auto",
    schemes: Sequence[str] = SCHEMES,
) -> dict[str, Any]:
    """Run the benchmark on shaped hosts.

    Args:
        hosts: Ranks of each host.
        local_rate_mbit: Rate of each rank's link inside its host.
        link_rate_mbit: Rate of each host's uplink.
        payload_bytes: Bytes of own rows per rank, one result each.
        width: Values (float32) per row.
        repeats: Timed exchanges per scheme and direction; one more warms up.
        planner: Planner to compare with straight messages.
        schemes: Schemes to run.

    Returns:
        ``{"hosts", "local_rate_mbit", "link_rate_mbit", "results": [...]}``; each result has ``payload_bytes`` and for
        ``forward`` and ``backward`` the keys ``<scheme>_seconds``, ``<scheme>_predicted_seconds``, ``ratio_measured``
        and ``ratio_model`` (straight over planned), ``slow_link_bytes`` and ``slow_link_bytes_minimum``.
    """
    from core_kernels.testing import ShapedHosts

    results = []
    with ShapedHosts(hosts, link_rate_mbit, local_rate_mbit, timeout_seconds=120.0) as machine:
        local, link = _worst(machine.run(_latencies, machine.host_of_rank))
        topology = shaped_topology(hosts, local_rate_mbit, link_rate_mbit, local, link)
        for payload in payload_bytes:
            graph, parts = everyone_needs(sum(hosts), max(1, payload // (4 * width)))
            split = partition(graph, topology, "given", parts=parts)
            results.append(_bench_payload(machine, split, topology, payload, width, repeats, planner, schemes))
    return {
        "hosts": list(hosts),
        "local_rate_mbit": local_rate_mbit,
        "link_rate_mbit": link_rate_mbit,
        "local_latency_seconds": local,
        "link_latency_seconds": link,
        "results": results,
    }


def _bench_payload(
    machine: Any,
    split: Partition,
    topology: Topology,
    payload: int,
    width: int,
    repeats: int,
    planner: str,
    schemes: Sequence[str],
) -> dict[str, Any]:
    plans = {"p2p": plan(split, topology, "p2p", width), "planned": plan(split, topology, planner, width)}
    result: dict[str, Any] = {"payload_bytes": payload, "planner": plans["planned"].planner}
    result["num_stages"] = plans["planned"].transfers.num_stages
    minimum = split.report(topology)["between_host_rows"] * 4 * width
    with tempfile.TemporaryDirectory() as folder:
        split.save(folder)
        for name, made in plans.items():
            made.save(Path(folder) / f"{name}.npz")
        machine.run(_prepare, folder, width)
    for direction in ("forward", "backward"):
        seconds: dict[str, list[float]] = {scheme: [] for scheme in schemes}
        counted = 0
        for repeat in range(repeats + 1):
            for scheme in schemes:
                before = sum(host["sent_bytes"] for host in machine.link_bytes())
                took = max(machine.run(_timed, scheme, direction))
                if repeat == 0:
                    continue
                seconds[scheme].append(took)
                if scheme == "planned":
                    counted += sum(host["sent_bytes"] for host in machine.link_bytes()) - before
        entry: dict[str, Any] = {f"{scheme}_seconds": statistics.median(seconds[scheme]) for scheme in schemes}
        for name, made in plans.items():
            entry[f"{name}_predicted_seconds"] = made.estimate(direction=direction).seconds
        entry["ratio_measured"] = entry["p2p_seconds"] / entry["planned_seconds"]
        entry["ratio_model"] = entry["p2p_predicted_seconds"] / entry["planned_predicted_seconds"]
        entry["slow_link_bytes"] = counted // repeats
        entry["slow_link_bytes_minimum"] = minimum
        result[direction] = entry
    return result


def _worst(measured: list[tuple[float, float]]) -> tuple[float, float]:
    return max(a for a, _ in measured), max(b for _, b in measured)


def _latencies(group: Group, host_of_rank: Sequence[int]) -> tuple[float, float]:
    """Measure half round trips with small messages: to a rank of this host, and to one of another."""
    found = [0.0, 0.0]
    for a in range(group.size):
        same = [b for b in range(group.size) if b != a and host_of_rank[b] == host_of_rank[a]]
        other = [b for b in range(group.size) if host_of_rank[b] != host_of_rank[a]]
        for kind, peers in enumerate((same, other)):
            if peers and group.rank in (a, peers[0]):
                found[kind] = max(found[kind], _half_round_trip(group, a, peers[0]))
        group.barrier()
    return found[0], found[1]


def _half_round_trip(group: Group, a: int, b: int, repeats: int = 7) -> float:
    data, times = torch.zeros(_LATENCY_MESSAGE_BYTES, dtype=torch.uint8), []
    for _ in range(repeats):
        start = time.perf_counter()
        for sender in (a, b):
            other = b if group.rank == a else a
            group.send_recv([Send(data, other) if group.rank == sender else Recv(data, other)], "gnn_comm.probe")
        times.append((time.perf_counter() - start) / 2)
    return statistics.median(times)


def _prepare(group: Group, folder: str, width: int) -> None:
    """Load the plans into this rank and make its rows and gradients."""
    for communicator in _in_rank.get("communicators", {}).values():
        communicator.close()
    split = Partition.load(folder)
    found = {}
    for name in ("p2p", "planned"):
        made = Plan.load(Path(folder) / f"{name}.npz", split)
        found[name] = Communicator(made, group, validate=group.rank == 0)
    any_one = found["p2p"]
    generator = torch.Generator().manual_seed(group.rank)
    _in_rank["communicators"] = found
    _in_rank["rows"] = torch.randn(any_one.num_local, width, generator=generator)
    _in_rank["gradient"] = torch.randn(any_one.num_rows, width, generator=generator)
    _in_rank["copies"] = _Copies(any_one)


class _Copies:
    """The usual way: copy every row once per reader and exchange all copies in one ``all_to_all``."""

    def __init__(self, straight: Communicator):
        self.group, self.layout = straight.group, straight.layout
        by_peer = {message.peer: message.index for message in self.layout.sends}
        empty = torch.zeros(0, dtype=torch.int64)
        self.sent = torch.cat([by_peer.get(peer, empty) for peer in range(self.group.size)])
        self.send_counts = [len(by_peer.get(peer, empty)) for peer in range(self.group.size)]
        from_peer = {message.peer: message.index for message in self.layout.receives}
        self.received = torch.cat([from_peer.get(peer, empty) for peer in range(self.group.size)])
        self.recv_counts = [len(from_peer.get(peer, empty)) for peer in range(self.group.size)]

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out = rows.new_empty((self.layout.num_rows, rows.shape[1]))
        out[: len(rows)] = rows
        got, _ = self.group.all_to_all_v(ops.pack_rows(rows, self.sent), self.send_counts, self.recv_counts)
        return ops.unpack_rows(out, self.received, got)

    def backward(self, gradient: torch.Tensor) -> torch.Tensor:
        packed = ops.pack_rows(gradient, self.received)
        got, _ = self.group.all_to_all_v(packed, self.recv_counts, self.send_counts)
        return gradient[: self.layout.num_local] + ops.scatter_add(got, self.sent, self.layout.num_local)


def _timed(group: Group, scheme: str, direction: str) -> float:
    """Run one exchange and return its seconds on this rank, from a common start."""
    rows, gradient = _in_rank["rows"], _in_rank["gradient"]
    if scheme == "all_to_all":
        copies = _in_rank["copies"]
        run = (lambda: copies.forward(rows)) if direction == "forward" else (lambda: copies.backward(gradient))
    else:
        communicator = _in_rank["communicators"][scheme]
        run = (
            (lambda: communicator._gather(rows)) if direction == "forward" else (lambda: communicator._return(gradient))
        )
    group.barrier()
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
