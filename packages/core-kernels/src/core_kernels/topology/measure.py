"""Measure the topology between running ranks: latency, bandwidth, and which transfers share a link.

Every ordered pair exchanges a small and two larger messages; the time of the small one is the latency, the slope
between the larger ones, both above what a shaped link lets pass in a burst, the bandwidth. Then pairs transfer at once,
and what they reach together says what they share: all transfers out of a rank, all into a rank, and all across from
one set of ranks to the rest. A capacity clearly below the sum of its members becomes a :class:`ContentionGroup`.

Ranks whose mutual bandwidth is clearly above that to the others form a host.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import numpy as np
import torch

from core_kernels.comm import Group, Recv, Send
from core_kernels.topology.model import ContentionGroup, Link, Node, Topology

__all__ = ["hosts_by_bandwidth", "measure_topology"]

_SMALL_BYTES = 64
_SHARED_BELOW = 0.7
"""Transfers share a link when together they reach less than this part of the sum of what each reaches alone."""
_HOST_GAP = 3.0
"""Bandwidths of one host lie within this factor; a larger step between sorted bandwidths separates hosts."""


def measure_topology(group: Group, large_bytes: int = 1 << 20, repeats: int = 3) -> Topology:
    """Measure the ranks of a group.

    Args:
        group: The ranks; rank ``r`` becomes device ``r``.
        large_bytes: Size of the large messages.
        repeats: Times each measurement is taken; the median counts.

    Returns:
        The same topology on every rank.

    Collective: all ranks.

    Cost: ``P^2`` ping-pongs and ``2 P`` simultaneous transfers for ``P`` ranks.
    """
    size = group.size
    latency, rate = np.zeros((size, size)), np.zeros((size, size))
    for a in range(size):
        for b in range(size):
            if a != b:
                small = _one_way(group, [(a, b)], _SMALL_BYTES, repeats)
                half = _one_way(group, [(a, b)], large_bytes // 2, repeats)
                whole = _one_way(group, [(a, b)], large_bytes, repeats)
                latency[a, b] = small
                rate[a, b] = 0.5 * large_bytes / max(whole - half, 1e-9) if whole > half else large_bytes / whole
    hosts = hosts_by_bandwidth(np.minimum(rate, rate.T))
    links, place = [], {}
    for a in range(size):
        for b in range(size):
            if a != b:
                place[(a, b)] = len(links)
                links.append(Link(a, b, "MEASURED", float(rate[a, b]), float(latency[a, b])))
    groups = []
    for name, pairs in _candidates(size, hosts):
        together = len(pairs) * large_bytes / _one_way(group, pairs, large_bytes, repeats)
        if len(pairs) > 1 and together < _SHARED_BELOW * sum(rate[a, b] for a, b in pairs):
            groups.append(ContentionGroup(name, tuple(place[pair] for pair in pairs), float(together)))
    nodes = tuple(Node(f"rank{r}", "device", hosts[r]) for r in range(size))
    return Topology(f"measured{size}", nodes, tuple(links), tuple(groups), source="measured between ranks")


def hosts_by_bandwidth(rate: np.ndarray) -> list[int]:
    """Group ranks into hosts by a clear step in their mutual bandwidth.

    Args:
        rate: ``[P, P]`` bytes per second, symmetric; the diagonal is ignored.

    Returns:
        Host of each rank; one host where there is no clear step.

    >>> fast, slow = 9.0, 1.0
    >>> hosts_by_bandwidth(np.array([[0, fast, slow], [fast, 0, slow], [slow, slow, 0]]))
    [0, 0, 1]
    """
    size = len(rate)
    values = np.sort(rate[np.triu_indices(size, 1)])
    if len(values) < 2:
        return [0] * size
    steps = values[1:] / np.maximum(values[:-1], 1e-300)
    if steps.max() < _HOST_GAP:
        return [0] * size
    limit = values[int(steps.argmax()) + 1]
    host = list(range(size))
    for a in range(size):
        for b in range(a + 1, size):
            if rate[a, b] >= limit:
                host = [host[a] if h == host[b] else h for h in host]
    numbers = {h: k for k, h in enumerate(dict.fromkeys(host))}
    return [numbers[h] for h in host]


def _candidates(size: int, hosts: Sequence[int]) -> list[tuple[str, list[tuple[int, int]]]]:
    """List sets of transfers that may share a link: out of a rank, into a rank, out of a host, into a host."""
    pairs = [(a, b) for a in range(size) for b in range(size) if a != b]
    found = []
    for r in range(size):
        found.append((f"out of rank{r}", [pair for pair in pairs if pair[0] == r]))
        found.append((f"into rank{r}", [pair for pair in pairs if pair[1] == r]))
    if len(set(hosts)) > 1:
        across = [(a, b) for a, b in pairs if hosts[a] != hosts[b]]
        for host in sorted(set(hosts)):
            found.append((f"out of host{host}", [pair for pair in across if hosts[pair[0]] == host]))
            found.append((f"into host{host}", [pair for pair in across if hosts[pair[1]] == host]))
    return found


def _one_way(group: Group, pairs: Sequence[tuple[int, int]], num_bytes: int, repeats: int) -> float:
    """Return the median seconds until the slowest of some simultaneous transfers has arrived."""
    times = []
    for _ in range(repeats + 1):
        data = {pair: torch.zeros(num_bytes, dtype=torch.uint8, device=group.device) for pair in pairs}
        batch = [Recv(data[pair], pair[0]) for pair in pairs if pair[1] == group.rank]
        batch += [Send(data[pair], pair[1]) for pair in pairs if pair[0] == group.rank]
        group.barrier("topology.measure")
        start = time.perf_counter()
        if batch:
            group.send_recv(batch, "topology.measure")
        # A sender is done when its bytes are with the transport: the time that counts is the receivers'.
        took = time.perf_counter() - start if any(pair[1] == group.rank for pair in pairs) else 0.0
        longest = torch.tensor([took], dtype=torch.float64, device=group.device)
        times.append(group.all_reduce(longest, op="max", tag="topology.measure").item())
    return statistics.median(times[1:])
