"""Measure what the links between ranks of several hosts give while every rank uses them.

A link alone is faster than a link in use: both directions are busy during an exchange, many flows share an uplink
unevenly, and the processors that move the bytes are shared. So nothing here is measured pair by pair. Rates come
from all ranks sending at once, inside the hosts and then across them; latencies from a chain of small messages in
which every rank waits for one before it sends the next, as in the stages of a plan.

Callers may not assume nominal rates: a shaped link of 200 Mbit/s carries 0.956 of that as TCP payload at best.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch

from core_kernels.comm import Group, Recv, Send

__all__ = ["TCP_PAYLOAD_SHARE", "HostRates", "measure_hosts", "nominal_rates"]

TCP_PAYLOAD_SHARE = 1448 / 1514
"""Payload per byte on the wire: 1500-byte packets less IP, TCP and time-stamp headers, plus the Ethernet header."""

_TAG = "gnn_comm.calibrate"
_CHAIN_MESSAGES, _CHAIN_BYTES = 8, 4096
_TRANSFER_SECONDS = 0.4
_REPEATS = 5


@dataclass(frozen=True)
class HostRates:
    """Rates and latencies of hosts joined by uplinks.

    Attributes:
        local_bytes_per_second: Payload out of (and into) each rank while all ranks of its host do the same.
        link_bytes_per_second: Payload out of (and into) each host while all hosts do the same.
        local_latency_seconds: One stage of small messages inside hosts.
        link_latency_seconds: One stage of small messages across hosts.
    """

    local_bytes_per_second: float
    link_bytes_per_second: float
    local_latency_seconds: float = 0.0
    link_latency_seconds: float = 0.0

    def to_dict(self) -> dict[str, float]:
        """Return the JSON-able form."""
        return asdict(self)


def nominal_rates(local_rate_mbit: float, link_rate_mbit: float) -> HostRates:
    """Return the payload rates of shaped links as they would be with nothing else in the way.

    >>> round(nominal_rates(1000, 100).link_bytes_per_second / 1e6, 2)
    11.96
    """
    local, link = (rate * 1e6 / 8 * TCP_PAYLOAD_SHARE for rate in (local_rate_mbit, link_rate_mbit))
    return HostRates(local, link)


def measure_hosts(group: Group, host_of_rank: Sequence[int], nominal: HostRates) -> HostRates:
    """Measure rates and latencies with all ranks at work.

    Args:
        group: The ranks.
        host_of_rank: Host of each rank.
        nominal: Expected rates; they only size the messages, to about 0.4 s each.

    Returns:
        The same rates on every rank; what the hosts do not have (a second host, a second rank) keeps its nominal rate.

    Collective: all ranks.

    Cost: six transfers and six chains of each kind, about six seconds.
    """
    rank, hosts = group.rank, list(host_of_rank)
    same = [peer for peer in range(group.size) if peer != rank and hosts[peer] == hosts[rank]]
    other = [peer for peer in range(group.size) if hosts[peer] != hosts[rank]]
    sizes = [hosts.count(host) for host in sorted(set(hosts))]
    most_local = max(sizes) - 1
    # Every rank of a host sends to every rank elsewhere: that many messages cross the busiest uplink.
    most_across = max(size * (group.size - size) for size in sizes)
    found = nominal.to_dict()
    for kind, peers, messages in (("local", same, most_local), ("link", other, most_across)):
        if messages == 0:
            continue
        num_bytes = max(int(found[f"{kind}_bytes_per_second"] * _TRANSFER_SECONDS / messages), _CHAIN_BYTES)
        latency = _worst_median(group, lambda peers=peers: _chain(group, peers)) / _CHAIN_MESSAGES
        whole = _worst_median(group, lambda peers=peers, size=num_bytes: _swap(group, peers, size))
        found[f"{kind}_latency_seconds"] = latency
        found[f"{kind}_bytes_per_second"] = messages * num_bytes / max(whole - latency, 1e-6)
    return HostRates(**found)


def _worst_median(group: Group, run: Callable[[], None]) -> float:
    """Return the median over repeats of the slowest rank's seconds; the first run warms up."""
    times = []
    for _ in range(_REPEATS + 1):
        group.barrier(_TAG)
        start = time.perf_counter()
        run()
        took = torch.tensor([time.perf_counter() - start], dtype=torch.float64, device=group.device)
        times.append(group.all_reduce(took, op="max", tag=_TAG).item())
    return statistics.median(times[1:])


def _swap(group: Group, peers: Sequence[int], num_bytes: int) -> None:
    """Send to and receive from all peers at once."""
    data = torch.zeros(num_bytes, dtype=torch.uint8, device=group.device)
    rooms = [torch.empty_like(data) for _ in peers]
    batch: list[Send | Recv] = [Recv(room, peer) for room, peer in zip(rooms, peers, strict=True)]
    if peers:
        group.send_recv([*batch, *(Send(data, peer) for peer in peers)], _TAG)


def _chain(group: Group, peers: Sequence[int]) -> None:
    """Run several stages of small messages, each after the one before has arrived."""
    for _ in range(_CHAIN_MESSAGES):
        _swap(group, peers, _CHAIN_BYTES)
