"""Lower bounds on the seconds of any exchange.

Split the devices into S and the rest. Every row owned in S and needed outside must leave S at least once, so no plan
is faster than those rows' bytes over the largest flow from S to the rest. The bound is the largest over splits: all
of them up to 12 devices; beyond, all splits inside each host, single devices, sockets, and all unions of hosts (up
to 10 hosts; beyond, single hosts).

Callers may not assume that the bound can be reached: it ignores that a stage must end before rows are passed on.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import numpy as np

from core_kernels.topology import Topology
from gnn_comm.requests import RequestClasses

__all__ = ["CutBound", "cut_lower_bound"]

_MAX_ENUMERATED = 12
_MAX_HOST_UNIONS = 10
_flow_of_split: dict[tuple[str, frozenset[int]], float] = {}


class CutBound(float):
    """Seconds no plan can beat, with the devices ``sources`` whose outgoing rows cause them."""

    sources: tuple[int, ...]

    def __new__(cls, seconds: float, sources: tuple[int, ...]):  # noqa: D102 (described by the class)
        value = super().__new__(cls, seconds)
        value.sources = sources
        return value

    def __reduce__(self):
        return CutBound, (float(self), self.sources)


def cut_lower_bound(requests: RequestClasses, topology: Topology, row_bytes: int) -> CutBound:
    """Return the largest cut bound for rows of ``row_bytes`` bytes.

    Args:
        requests: Which rows must travel.
        topology: The machine.
        row_bytes: Bytes of one row.

    Cost: one maximum flow per split (kept per topology), one pass over the classes, 64 devices at a time, per split.
    """
    best = CutBound(0.0, ())
    readers = _as_words(requests.needs)
    fingerprint = topology.fingerprint()
    everyone = frozenset(range(topology.num_devices))
    for split in _splits(topology):
        inside = np.zeros(topology.num_devices, bool)
        inside[list(split)] = True
        leaves = np.zeros(requests.num_classes, bool)
        for word, outside in zip(readers, _as_words(~inside[None])[:, 0], strict=True):
            leaves |= (word & outside) != 0
        rows = int(requests.num_rows[leaves & inside[requests.source]].sum())
        if rows == 0:
            continue
        flow = _flow_of_split.get((fingerprint, split))
        if flow is None:
            flow = topology.max_flow(split, everyone - split)
            _flow_of_split[(fingerprint, split)] = flow
        seconds = rows * row_bytes / flow if flow > 0 else float("inf")
        if seconds > best:
            best = CutBound(seconds, tuple(sorted(split)))
    return best


def _as_words(sets: np.ndarray) -> np.ndarray:
    """Pack rows of a bool table into bits; return uint64 ``[num_words, num_rows]``."""
    num_words = -(-sets.shape[1] // 64)
    packed = np.zeros((len(sets), 8 * num_words), np.uint8)
    packed[:, : -(-sets.shape[1] // 8)] = np.packbits(sets, axis=1)
    return np.ascontiguousarray(packed.view(np.uint64).T)


def _splits(topology: Topology) -> Iterator[frozenset[int]]:
    """List the splits to look at, each as the set that sends."""
    devices = range(topology.num_devices)
    if topology.num_devices <= _MAX_ENUMERATED:
        yield from _subsets(devices, topology.num_devices - 1)
        return
    everyone, seen = frozenset(devices), set()
    groups: list[frozenset[int]] = [frozenset({d}) for d in devices]
    groups += [frozenset(socket) for socket in topology.sockets]
    for host in topology.hosts:
        if len(host) <= 8 and len(topology.hosts) <= 4:
            groups += _subsets(host, len(host))
    hosts = [frozenset(host) for host in topology.hosts]
    unions = (
        _subsets(range(len(hosts)), len(hosts) - 1)
        if len(hosts) <= _MAX_HOST_UNIONS
        else [{k} for k in range(len(hosts))]
    )
    groups += [frozenset().union(*(hosts[k] for k in union)) for union in unions]
    for group in groups:
        for split in (group, everyone - group):
            if split and split != everyone and split not in seen:
                seen.add(split)
                yield split


def _subsets(items, largest: int) -> Iterator[frozenset[int]]:
    for size in range(1, largest + 1):
        for subset in combinations(items, size):
            yield frozenset(subset)
