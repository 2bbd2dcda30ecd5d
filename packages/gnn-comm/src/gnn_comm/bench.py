"""Measure plans on shaped hosts: real ranks, real sockets, slow links of a chosen rate.

The exchange is run straight (``p2p``), as planned, and as one ``all_to_all`` of copied rows, forward and backward,
with the schemes interleaved; seconds are the median over repeats of the slowest rank. Bytes over the slow links are
what the kernel counted on the hosts' uplinks. The prediction comes from the same topology the plans were made for:
rates and latencies measured just before, on the same links, with every rank at work (:mod:`gnn_comm.calibration`).
All schemes run over the same links with the same settings.
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
from core_kernels.comm import Group
from core_kernels.console import progress
from core_kernels.graph import Graph
from core_kernels.topology import Topology, cluster
from gnn_comm.calibration import HostRates, measure_hosts, nominal_rates
from gnn_comm.communicator import Communicator
from gnn_comm.partitioning import Partition, partition
from gnn_comm.plan import Plan
from gnn_comm.planner import plan

__all__ = ["PAPER_SAVING", "bench_hosts", "everyone_needs", "shaped_topology"]

PAPER_SAVING = 0.775
"""Average share of communication time that DGCL saved over straight messages, as its abstract says."""

SCHEMES = ("p2p", "planned", "all_to_all")
_in_rank: dict[str, Any] = {}  # state that stays in a rank between runs


def shaped_topology(hosts: Sequence[int], rates: HostRates) -> Topology:
    """Describe hosts with these rates and latencies as a topology."""
    name = "x".join(map(str, (len(hosts), hosts[0]))) if len(set(hosts)) == 1 else "+".join(map(str, hosts))
    # A local route has two links, one across hosts four: device, switch, network, switch, device.
    local = rates.local_latency_seconds / 2
    across = max(rates.link_latency_seconds / 2 - local, 0.0)
    return cluster(hosts, rates.local_bytes_per_second, rates.link_bytes_per_second, local, across, f"shaped {name}")


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
        ``hosts``, the nominal rates, ``measured`` rates and latencies, ``results``, and over all of them
        ``average_saving`` (share of the time of straight messages), ``average_saving_model`` and
        ``average_saving_limit`` (of a plan at the lower bound). Each result has ``payload_bytes`` and for ``forward``
        and ``backward`` the keys ``<scheme>_seconds``, ``<scheme>_predicted_seconds``, ``ratio_measured`` and
        ``ratio_model`` (straight over planned), ``slow_link_bytes`` and ``slow_link_bytes_minimum``.
    """
    from core_kernels.testing import ShapedHosts

    results = []
    with (
        ShapedHosts(hosts, link_rate_mbit, local_rate_mbit, timeout_seconds=120.0) as machine,
        progress(f"shaped hosts {'+'.join(map(str, hosts))}", 1 + len(payload_bytes)) as advance,
    ):
        nominal = nominal_rates(local_rate_mbit, link_rate_mbit)
        measured = machine.run(measure_hosts, machine.host_of_rank, nominal)[0]
        topology = shaped_topology(hosts, measured)
        advance()
        for payload in payload_bytes:
            graph, parts = everyone_needs(sum(hosts), max(1, payload // (4 * width)))
            split = partition(graph, topology, "given", parts=parts)
            results.append(_bench_payload(machine, split, topology, payload, width, repeats, planner, schemes))
            advance()
    return {
        "hosts": list(hosts),
        "local_rate_mbit": local_rate_mbit,
        "link_rate_mbit": link_rate_mbit,
        "measured": measured.to_dict(),
        "results": results,
        **_savings(results),
    }


def _savings(results: list[dict[str, Any]]) -> dict[str, float]:
    """Average the share of time saved over payloads and directions: measured, predicted, at the lower bound."""
    entries = [result[direction] for result in results for direction in ("forward", "backward")]
    return {
        "average_saving": statistics.mean(1 - 1 / entry["ratio_measured"] for entry in entries),
        "average_saving_model": statistics.mean(1 - 1 / entry["ratio_model"] for entry in entries),
        "average_saving_limit": statistics.mean(
            1 - entry["lower_bound_seconds"] / entry["p2p_predicted_seconds"] for entry in entries
        ),
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
        entry["lower_bound_seconds"] = float(plans["planned"].lower_bound())
        entry["slow_link_bytes"] = counted // repeats
        entry["slow_link_bytes_minimum"] = minimum
        result[direction] = entry
    return result


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
