"""Which host each rank is on, for the shape of a group and for what its links are.

Ranks that share a kernel and a network namespace talk over loopback: they are on one host. Containers, and namespaces
behind shaped links, are hosts of their own, although their host names may be equal. The environment variable
``SEXTET_HOST`` overrules this, for ranks with a namespace each on one host.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Sequence
from pathlib import Path

from core_kernels.comm import Group

__all__ = ["exchange_partners", "host_id", "hosts_of", "shape_of"]


def host_id() -> str:
    """Return what tells the host of this process apart from other hosts.

    >>> host_id() == host_id()
    True
    """
    named = os.environ.get("SEXTET_HOST")
    if named:
        return named
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.stat("/proc/self/ns/net").st_ino
    except OSError:  # not Linux
        return socket.gethostname()
    return f"{socket.gethostname()}/{boot}/{namespace}"


def hosts_of(group: Group, group_shape: str | None = None) -> list[int]:
    """Return the host number of every rank, hosts in the order of their first rank.

    Args:
        group: The ranks.
        group_shape: ``"HxR"`` as the caller names it; believed when ``H * R`` is the size of the group.

    Collective: all ranks of ``group``.
    """
    named = group_shape.split("x") if group_shape else []
    if len(named) == 2 and all(part.isdigit() for part in named) and math.prod(map(int, named)) == group.size:
        return [rank // int(named[1]) for rank in range(group.size)]
    ids = group.all_gather_object(host_id(), tag="calibrate")
    number_of = {name: number for number, name in enumerate(dict.fromkeys(ids))}
    return [number_of[name] for name in ids]


def shape_of(hosts: Sequence[int]) -> str:
    """Return ``"HxR"`` for ranks on these hosts; R is the mean, rounded up, where hosts differ.

    >>> shape_of([0, 0, 1, 1]), shape_of([0, 0, 1, 1, 1, 1])
    ('2x2', '2x3')
    """
    num_hosts = len(set(hosts))
    return f"{num_hosts}x{math.ceil(len(hosts) / num_hosts)}"


def exchange_partners(hosts: Sequence[int], across: bool) -> dict[int, int]:
    """Return the partner of every rank that takes part in an exchange over one kind of link.

    Across hosts the first ranks of hosts 0 and 1, 2 and 3, ... exchange, so that nobody else loads their links; inside
    hosts the first two ranks of each.

    >>> exchange_partners([0, 0, 1, 1], across=True), exchange_partners([0, 0, 1, 1], across=False)
    ({0: 2, 2: 0}, {0: 1, 1: 0, 2: 3, 3: 2})
    """
    ranks_of = {host: [rank for rank, at in enumerate(hosts) if at == host] for host in dict.fromkeys(hosts)}
    if across:
        firsts = [ranks[0] for ranks in ranks_of.values()]
        pairs = list(zip(firsts[::2], firsts[1::2], strict=False))
    else:
        pairs = [(ranks[0], ranks[1]) for ranks in ranks_of.values() if len(ranks) > 1]
    return {a: b for pair in pairs for a, b in (pair, pair[::-1])}
