"""Devices in the order in which stages take them: sub-meshes inside hosts and over hosts, unlike devices, shared links.

A *layout* of the hosts is an order of them and a spread h: the devices of every stage lie on h hosts. With h = 1 the
stage's own collectives stay inside a host and activations cross between hosts; with larger h neighbouring stages
share their hosts, so activations stay inside and the collectives of a stage cross, in competition with those of the
other stages there: each gets its share of the host's link. Which is better depends on bytes, so the planner tries
all.

Unlike devices (*classes*) differ in speed and memory. A stage has devices of one class; every order of the classes'
hosts is tried while there are few, contiguous classes otherwise.

Source: stage-to-server mapping against contention after AutoPipe-H, unlike devices after HPH; both read from
abstracts only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.cluster import Cluster
from autopar.errors import ProblemError
from core_kernels.interconnect import Link

__all__ = ["Host", "Placement", "SubMesh", "host_orders", "place_devices", "read_hosts", "stage_cluster"]

_MOST_ORDERS = 24


@dataclass(frozen=True)
class Host:
    """Devices that share a host.

    Attributes:
        num_devices: How many.
        speed: Rate of computing and of memory, as a multiple of the cluster's.
        memory_bytes: Memory of one device; infinite when unknown.
    """

    num_devices: int
    speed: float = 1.0
    memory_bytes: float = math.inf

    def __post_init__(self) -> None:
        if self.num_devices < 1 or not self.speed > 0 or not self.memory_bytes > 0:
            raise ProblemError(
                f"{self} is not valid: expected num_devices of at least 1, positive speed and memory_bytes; leave "
                "out what is not known"
            )


@dataclass(frozen=True)
class SubMesh:
    """What a stage may run on: devices of one class over some hosts, with a share of each host's link."""

    host: Host
    num_devices: int
    num_hosts: int
    sharing: int


@dataclass(frozen=True, eq=False)
class Placement:
    """Devices in a row.

    Attributes:
        spread: Hosts that the devices of a stage lie on.
        sizes: Numbers of devices a stage may have.
        sub_meshes: What the numbers in ``kinds`` stand for.
        kinds: int32 [devices, sizes] sub-mesh of a stage that begins there, -1 for none.
        crosses: bool [devices + 1] whether a boundary there lies between hosts.
        device_ids: Per place in the row the number of the device, hosts as the user listed them.
    """

    spread: int
    sizes: tuple[int, ...]
    sub_meshes: tuple[SubMesh, ...]
    kinds: np.ndarray
    crosses: np.ndarray
    device_ids: tuple[int, ...]

    def devices(self, first: int, size: int) -> tuple[int, ...]:
        """Return the numbers of a stage's devices."""
        return tuple(sorted(self.device_ids[first : first + size]))


def read_hosts(cluster: Cluster, hosts: Sequence[Host] | None) -> list[Host]:
    """Return the hosts of a cluster; those given must have as many devices.

    Raises:
        ProblemError: They have not.
    """
    if hosts is None:
        memory = cluster.memory_bytes or math.inf
        per_host = cluster.devices_per_host if "network" in cluster.interconnect.links else cluster.num_devices
        full, rest = divmod(cluster.num_devices, per_host)
        return [Host(per_host, 1.0, memory)] * full + ([Host(rest, 1.0, memory)] if rest else [])
    total = sum(host.num_devices for host in hosts)
    if total != cluster.num_devices:
        raise ProblemError(
            f"hosts have {total} devices; expected num_devices={cluster.num_devices} of the cluster; list every "
            "host, or resize the cluster"
        )
    return list(hosts)


def host_orders(hosts: Sequence[Host]) -> list[tuple[int, ...]]:
    """Return the orders of hosts worth trying, as positions in the list.

    >>> host_orders([Host(1), Host(1), Host(1, speed=2.0)])
    [(0, 1, 2), (0, 2, 1), (2, 0, 1)]
    """
    classes = list(dict.fromkeys(hosts))
    members = {kind: [place for place, host in enumerate(hosts) if host == kind] for kind in classes}
    counts = [len(members[kind]) for kind in classes]
    number = math.factorial(len(hosts)) // math.prod(math.factorial(count) for count in counts)
    if number <= _MOST_ORDERS:
        patterns = list(_arrangements([classes.index(host) for host in hosts]))
    else:
        blocks = itertools.islice(itertools.permutations(range(len(classes))), _MOST_ORDERS)
        patterns = [[kind for kind in block for _ in range(counts[kind])] for block in blocks]
    orders = []
    for pattern in patterns:
        left = {kind: iter(members[classes[kind]]) for kind in range(len(classes))}
        orders.append(tuple(next(left[kind]) for kind in pattern))
    return orders


def _arrangements(kinds: list[int]) -> list[list[int]]:
    """Return the distinct arrangements of a list with repetitions, the sorted one first."""
    if not kinds:
        return [[]]
    found = []
    for kind in sorted(set(kinds)):
        rest = list(kinds)
        rest.remove(kind)
        found += [[kind, *arrangement] for arrangement in _arrangements(rest)]
    return found


def place_devices(
    hosts: Sequence[Host], order: Sequence[int], spread: int, sizes: Sequence[int] | None = None
) -> Placement | None:
    """Lay out devices in a row.

    Args:
        hosts: All hosts.
        order: The order in which stages take them.
        spread: Hosts that the devices of a stage lie on.
        sizes: Numbers of devices a stage may have; powers of two and all of the largest host when left out.

    Returns:
        The row, or ``None`` when the hosts cannot be grouped so.

    >>> row = place_devices([Host(2), Host(2)], (0, 1), 1)
    >>> row.sizes, row.crosses.tolist(), row.kinds.tolist()
    ((1, 2, 4), [False, False, True, False, False], [[0, 1, 2], [0, -1, -1], [0, 1, -1], [0, -1, -1]])
    """
    ordered = [hosts[place] for place in order]
    starts = np.cumsum([0, *(host.num_devices for host in hosts)])
    total = int(starts[-1])
    uniform = len({host.num_devices for host in hosts}) == 1
    if spread > 1 and (not uniform or len(hosts) % spread):
        return None
    groups = [ordered[place : place + spread] for place in range(0, len(ordered), spread)]
    wanted = tuple(sorted(set(sizes or _default_sizes(hosts, spread))))
    fitting = tuple(size for size in wanted if size % spread == 0 and size <= total)
    if not fitting or any(len(set(group)) > 1 for group in groups):
        return None
    group_starts = np.cumsum([0, *(sum(host.num_devices for host in group) for group in groups)])
    sub_meshes: list[SubMesh] = []
    kinds = np.full((total, len(fitting)), -1, np.int32)
    for column, size in enumerate(fitting):
        for number, group in enumerate(groups):
            for sub_mesh, first in _stages_in_group(groups, number, int(group_starts[number]), size, spread):
                if sub_mesh not in sub_meshes:
                    sub_meshes.append(sub_mesh)
                kinds[first, column] = sub_meshes.index(sub_mesh)
            del group
    crosses = np.zeros(total + 1, bool)
    crosses[group_starts[1:-1]] = True
    ids: list[int] = []
    for place in range(0, len(order), spread):
        members = [int(starts[host]) for host in order[place : place + spread]]
        ids += [start + index for index in range(hosts[order[place]].num_devices) for start in members]
    return Placement(spread, fitting, tuple(sub_meshes), kinds, crosses, tuple(ids))


def _stages_in_group(
    groups: list[list[Host]], number: int, first: int, size: int, spread: int
) -> list[tuple[SubMesh, int]]:
    """Return the stages of one size that begin in a group of hosts, with where they begin."""
    host = groups[number][0]
    whole = sum(member.num_devices for member in groups[number])
    if size <= whole:
        if whole % size or (size // spread) == 0 or host.num_devices % (size // spread):
            return []
        sub_mesh = SubMesh(host, size, spread, host.num_devices // (size // spread) if spread > 1 else 1)
        return [(sub_mesh, first + offset) for offset in range(0, whole, size)]
    count = size // whole
    following = [member for group in groups[number : number + count] for member in group]
    if size % whole or len(following) != count * spread or len(set(following)) > 1:
        return []
    return [(SubMesh(host, size, count * spread, 1), first)]


def _default_sizes(hosts: Sequence[Host], spread: int) -> list[int]:
    largest = max(host.num_devices for host in hosts)
    sizes = {2**power for power in range(largest.bit_length()) if largest % 2**power == 0} | {largest}
    sizes = {size * spread for size in sizes}
    sizes |= {largest * count for count in range(1, len(hosts) + 1) if count & (count - 1) == 0 and count % spread == 0}
    return sorted(sizes)


def stage_cluster(cluster: Cluster, sub_mesh: SubMesh) -> Cluster:
    """Return the cluster that a stage sees: its devices, their speed, its share of the hosts' links."""
    interconnect = cluster.interconnect
    if sub_mesh.sharing > 1 and "network" in interconnect.links:
        link = interconnect.links["network"]
        slower = Link(link.latency_seconds, link.bytes_per_second / sub_mesh.sharing)
        interconnect = replace(interconnect, links={**interconnect.links, "network": slower})
    speed = sub_mesh.host.speed
    return replace(
        cluster,
        num_devices=sub_mesh.num_devices,
        devices_per_host=max(1, sub_mesh.num_devices // sub_mesh.num_hosts),
        interconnect=interconnect,
        flops_per_second=cluster.flops_per_second * speed,
        bytes_per_second=cluster.bytes_per_second * speed,
        launch_seconds=cluster.launch_seconds / speed,
        operator_seconds={key: seconds / speed for key, seconds in cluster.operator_seconds.items()},
    )
