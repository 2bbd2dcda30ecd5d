"""Draw a topology as text: one tree per host, and the table of pairs.

The table has one cell per ordered pair: the slowest technology on its route and the bandwidth in GB/s, or ``-`` where
there is no route.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from core_kernels.topology.model import Topology

__all__ = ["draw", "pair_table"]


def draw(topology: Topology) -> str:
    """Draw each host with its nodes and the cables that leave each node.

    >>> from core_kernels.topology import cluster
    >>> print(draw(cluster([1, 1], 1e9, 1e8)))
    topology cluster: 2 devices, 2 hosts
    host 0
      h0.D0      -- h0.switch (LOCAL 1 GB/s)
      h0.switch  == h0.D0 (LOCAL 1 GB/s), network (UPLINK 0.1 GB/s)
    host 1
      h1.D0      -- h1.switch (LOCAL 1 GB/s)
      h1.switch  == h1.D0 (LOCAL 1 GB/s), network (UPLINK 0.1 GB/s)
    between hosts
      network    == h0.switch (UPLINK 0.1 GB/s), h1.switch (UPLINK 0.1 GB/s)
    """
    plural = "s" if len(topology.hosts) != 1 else ""
    lines = [f"topology {topology.name}: {topology.num_devices} devices, {len(topology.hosts)} host{plural}"]
    leaving: dict[int, list[str]] = {}
    for link in topology.links:
        cell = f"{topology.nodes[link.target].name} ({link.kind} {_gigabytes(link.bytes_per_second)} GB/s)"
        leaving.setdefault(link.source, []).append(cell)
    width = max(len(node.name) for node in topology.nodes) + 1
    hosts = sorted({node.host for node in topology.nodes if node.host is not None})
    for host in [*hosts, None]:
        members = [index for index, node in enumerate(topology.nodes) if node.host == host]
        if members:
            lines.append("between hosts" if host is None else f"host {host}")
        for index in members:
            node = topology.nodes[index]
            mark = "--" if node.kind == "device" else "=="
            lines.append(f"  {node.name:<{width}} {mark} {', '.join(leaving.get(index, ['nothing']))}")
    for group in topology.groups:
        names = ", ".join(topology.resource_names[k] for k in group.links)
        lines.append(f"shared {group.name}: {_gigabytes(group.bytes_per_second)} GB/s over {names}")
    return "\n".join(lines)


def pair_table(topology: Topology) -> tuple[list[str], list[list[str]]]:
    """Return column titles and rows of the table of pairs.

    >>> from core_kernels.topology import Topology
    >>> columns, rows = pair_table(Topology.preset("dgx1"))
    >>> columns[:3], rows[0][:3]
    (['from \\\\ to', 'GPU0', 'GPU1'], ['GPU0', 'X', 'NV2 48'])
    """
    names = [node.name for node in topology.nodes[: topology.num_devices]]
    rows = []
    for i, name in enumerate(names):
        row = [name]
        for j in range(topology.num_devices):
            if i == j:
                row.append("X")
            elif not topology.is_reachable(i, j):
                row.append("-")
            else:
                slowest = min((topology.links[k] for k in topology.route(i, j)), key=lambda a: a.bytes_per_second)
                row.append(f"{slowest.kind} {_gigabytes(topology.bytes_per_second(i, j))}")
        rows.append(row)
    return ["from \\ to", *names], rows


def _gigabytes(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.3g}"
