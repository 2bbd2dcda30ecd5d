"""Well-known machines, and clusters of equal hosts, as topologies.

The rates are nominal payload rates of each technology, written once in :data:`NOMINAL_GB_PER_SECOND`; measure the
machine (:func:`core_kernels.topology.measure_topology`) when the numbers matter. Planners never read this table: they
read the topology they are given.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from core_kernels.errors import argument_error
from core_kernels.topology.model import Link, Node, Topology

__all__ = ["NOMINAL_GB_PER_SECOND", "PRESETS", "cluster", "preset"]

NOMINAL_GB_PER_SECOND = {
    "NV1": 24.0,  # one second-generation NVLink, one direction
    "NV2": 48.0,  # two of them bonded
    "NV12": 240.0,  # twelve third-generation links into an NVSwitch
    "PCIE": 11.0,  # generation 3, 16 lanes, after protocol overhead
    "QPI": 9.0,  # between two processor sockets
    "IB": 6.0,  # 56 Gb/s InfiniBand after encoding
    "IB200": 23.0,  # 200 Gb/s InfiniBand
}
LATENCY_SECONDS = {
    "NV1": 1e-6,
    "NV2": 1e-6,
    "NV12": 1e-6,
    "PCIE": 1e-6,
    "QPI": 1e-6,
    "IB": 2e-6,
    "IB200": 2e-6,
}
CUBE_MESH_DOUBLE = ((0, 1), (1, 3), (3, 7), (7, 5), (5, 4), (4, 6), (6, 2), (2, 0))
CUBE_MESH_SINGLE = ((0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7))
PRESETS = ("dgx1", "pcie8", "nvswitch8", "hosts4", "2xdgx1")


class _Drawing:
    """Collects nodes and full-duplex cables by name, and numbers devices first."""

    def __init__(self):
        self.nodes: dict[str, Node] = {}
        self.cables: list[tuple[str, str, str]] = []

    def node(self, name: str, kind: str, host: int | None = 0, socket: int | None = None) -> str:
        self.nodes[name] = Node(name, kind, host, socket)
        return name

    def cable(self, a: str, b: str, kind: str) -> None:
        self.cables.append((a, b, kind))

    def topology(self, name: str, source: str) -> Topology:
        ordered = sorted(self.nodes.values(), key=lambda node: node.kind != "device")
        place = {node.name: index for index, node in enumerate(ordered)}
        links = []
        for a, b, kind in self.cables:
            rate, latency = NOMINAL_GB_PER_SECOND[kind] * 1e9, LATENCY_SECONDS[kind]
            links += [Link(place[a], place[b], kind, rate, latency), Link(place[b], place[a], kind, rate, latency)]
        return Topology(name, tuple(ordered), tuple(links), source=source)


def _pcie_box(drawing: _Drawing, host: int, prefix: str) -> list[str]:
    """Draw eight devices, two per PCIe switch, two switches per socket; return the devices."""
    devices = []
    cpus = [drawing.node(f"{prefix}CPU{s}", "cpu", host, s) for s in range(2)]
    drawing.cable(cpus[0], cpus[1], "QPI")
    for switch_number in range(4):
        socket = switch_number // 2
        switch = drawing.node(f"{prefix}PLX{switch_number}", "switch", host, socket)
        drawing.cable(switch, cpus[socket], "PCIE")
        for slot in range(2):
            device = drawing.node(f"{prefix}GPU{2 * switch_number + slot}", "device", host, socket)
            drawing.cable(device, switch, "PCIE")
            devices.append(device)
    return devices


def _host(drawing: _Drawing, base: str, host: int, prefix: str, network: str | None) -> None:
    """Draw one host; with a network, its network cards too."""
    if base in ("dgx1", "pcie8"):
        devices = _pcie_box(drawing, host, prefix)
        if base == "dgx1":
            for kind, pairs in (("NV2", CUBE_MESH_DOUBLE), ("NV1", CUBE_MESH_SINGLE)):
                for a, b in pairs:
                    drawing.cable(devices[a], devices[b], kind)
        if network is not None:
            card = drawing.node(f"{prefix}NIC0", "nic", host, 0)
            drawing.cable(card, f"{prefix}CPU0", "PCIE")
            drawing.cable(card, network, "IB")
    elif base == "nvswitch8":
        switch = drawing.node(f"{prefix}NVSwitch", "switch", host)
        for slot in range(8):
            device = drawing.node(f"{prefix}GPU{slot}", "device", host)
            drawing.cable(device, switch, "NV12")
            if network is not None:
                card = drawing.node(f"{prefix}NIC{slot}", "nic", host)
                drawing.cable(device, card, "IB200")
                drawing.cable(card, network, "IB200")
    else:  # one device and one card
        device = drawing.node(f"{prefix}GPU0", "device", host)
        if network is not None:
            card = drawing.node(f"{prefix}NIC0", "nic", host)
            drawing.cable(device, card, "PCIE")
            drawing.cable(card, network, "IB")


def preset(name: str) -> Topology:
    """Build a well-known machine by name.

    Args:
        name: ``"dgx1"`` (eight devices in an NVLink cube mesh), ``"pcie8"`` (eight devices on two sockets, no NVLink),
            ``"nvswitch8"``, ``"hosts<N>"`` (N hosts with one device each), or ``"<N>x<machine>"`` for N such machines
            joined by a network: ``"2xdgx1"`` has one card per host, ``"8xnvswitch8"`` one card per device.

    Returns:
        The topology, at nominal rates.

    Raises:
        ArgumentError: The name is not known.

    >>> Topology.preset("2xdgx1").num_devices, Topology.preset("hosts4").hosts
    (16, ((0,), (1,), (2,), (3,)))
    """
    match = re.fullmatch(r"(?:(\d+)x)?(dgx1|pcie8|nvswitch8)|hosts(\d+)", name)
    if match is None or "0" in (match[1], match[3]):
        raise argument_error(
            "name",
            name,
            f"one of {', '.join(PRESETS)}, 'hosts<N>' or '<N>x<machine>'",
            "choose one, or load a topology file",
        )
    drawing = _Drawing()
    base, num_hosts = (match[2], int(match[1] or 1)) if match[2] else ("single", int(match[3]))
    network = drawing.node("network", "network", None) if num_hosts > 1 else None
    for host in range(num_hosts):
        _host(drawing, base, host, f"h{host}." if num_hosts > 1 else "", network)
    return drawing.topology(name, "preset")


def cluster(
    devices_per_host: Sequence[int],
    local_bytes_per_second: float,
    link_bytes_per_second: float,
    local_latency_seconds: float = 0.0,
    link_latency_seconds: float = 0.0,
    name: str = "cluster",
) -> Topology:
    """Build hosts of devices on a local switch, joined by one uplink per host.

    Args:
        devices_per_host: Number of devices of each host.
        local_bytes_per_second: Rate of the link between a device and its host's switch, each direction.
        link_bytes_per_second: Rate of the link between a host's switch and the network, each direction.
        local_latency_seconds: Latency of a local link.
        link_latency_seconds: Latency of an uplink.
        name: Name of the topology.

    Returns:
        The topology; with one host there is no network.

    >>> two_hosts = cluster([2, 2], 250e6, 25e6)
    >>> two_hosts.bytes_per_second(0, 1), two_hosts.bytes_per_second(0, 2)
    (250000000.0, 25000000.0)
    """
    if len(devices_per_host) == 0 or min(devices_per_host) < 1:
        raise argument_error(
            "devices_per_host", devices_per_host, "at least one device in every host", "drop empty hosts"
        )
    num_devices = sum(devices_per_host)
    nodes, links = [], []

    def cable(a: int, b: int, kind: str, rate: float, latency: float) -> None:
        links.extend([Link(a, b, kind, rate, latency), Link(b, a, kind, rate, latency)])

    for host, size in enumerate(devices_per_host):
        nodes += [Node(f"h{host}.D{slot}", "device", host) for slot in range(size)]
    network = num_devices + len(devices_per_host)
    first = 0
    for host, size in enumerate(devices_per_host):
        switch = num_devices + host
        nodes.append(Node(f"h{host}.switch", "switch", host))
        for device in range(first, first + size):
            cable(device, switch, "LOCAL", local_bytes_per_second, local_latency_seconds)
        if len(devices_per_host) > 1:
            cable(switch, network, "UPLINK", link_bytes_per_second, link_latency_seconds)
        first += size
    if len(devices_per_host) > 1:
        nodes.append(Node("network", "network", None))
    return Topology(name, tuple(nodes), tuple(links), source="preset")
