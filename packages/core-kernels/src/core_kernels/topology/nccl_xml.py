"""Read NCCL's topology XML, as written by ``NCCL_TOPO_DUMP_FILE``.

``system`` holds one ``cpu`` per NUMA node, under it the PCIe tree (``pci`` elements whose link leads to their
parent), at its leaves ``gpu`` and ``nic``. A ``gpu`` lists its ``nvlink`` cables by the bus id of the other end; an
end whose class is that of an NVSwitch is the switch. CPUs of one ``host_hash`` are one host, joined by their socket
link; cards of several hosts meet in one network.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from xml.etree import ElementTree

from core_kernels.topology.model import Link, Node, Topology, TopologyError
from core_kernels.topology.nvml import NVLINK_GB_PER_SECOND
from core_kernels.topology.presets import LATENCY_SECONDS, NOMINAL_GB_PER_SECOND

__all__ = ["from_nccl_xml"]

NVSWITCH_CLASS = "0x068000"
# GB/s of one lane in each direction by the link speed NCCL writes.
_GB_PER_SECOND_PER_LANE = {"2.5": 0.1875, "5": 0.375, "8": 0.75, "16": 1.5, "32": 3.0, "64": 6.0}


def from_nccl_xml(text: str, name: str = "nccl") -> Topology:
    """Build a topology from the text of NCCL's topology XML.

    Args:
        text: The XML.
        name: Name of the topology.

    Raises:
        TopologyError: The text is not XML, or holds no device.
    """
    try:
        system = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise TopologyError(f"the XML cannot be parsed: {error}; expected NCCL_TOPO_DUMP_FILE's output") from error
    if system.tag != "system":
        raise TopologyError(f"the XML's root is <{system.tag}>; expected <system>; dump it with NCCL_TOPO_DUMP_FILE")
    return _Reader(system).topology(name)


class _Reader:
    """Walks the tree once, collecting nodes by name and cables between names."""

    def __init__(self, system: ElementTree.Element):
        self.nodes: dict[str, Node] = {}
        self.cables: list[tuple[str, str, str, float, float]] = []
        self.device_of_bus: dict[str, str] = {}
        self.order: dict[str, int] = {}
        hashes = [cpu.get("host_hash", "0x0") for cpu in system.iter("cpu")]
        self.host_number = {value: k for k, value in enumerate(dict.fromkeys(hashes))}
        gpus = list(self._read_cpus(system))
        for device, gpu in gpus:
            self._read_nvlinks(device, gpu)
        self._join_sockets()

    def _read_cpus(self, system: ElementTree.Element) -> Iterator[tuple[str, ElementTree.Element]]:
        for cpu in system.iter("cpu"):
            host = self.host_number[cpu.get("host_hash", "0x0")]
            socket = int(cpu.get("numaid", "0"))
            label = self._add(f"{self._prefix(host)}CPU{socket}", "cpu", host, socket)
            for child in cpu:
                yield from self._read_pci(child, label, host, socket)

    def _read_pci(self, element, above: str, host: int, socket: int) -> Iterator[tuple[str, ElementTree.Element]]:
        if element.tag == "nic":
            self._read_nets(element, above, host, socket)
        if element.tag != "pci":
            return
        rate, latency = self._pcie_rate(element), LATENCY_SECONDS["PCIE"]
        gpu = element.find("gpu")
        if gpu is not None:
            number = int(gpu.get("dev", str(len(self.device_of_bus))))
            label = self._add(f"{self._prefix(host)}GPU{number}", "device", host, socket)
            self.order[label] = host * 4096 + int(gpu.get("rank", number))
            self.device_of_bus[f"{host}/{element.get('busid', label).lower()}"] = label
            self.cables.append((label, above, "PCIE", rate, latency))
            yield label, gpu
            return
        label = self._add(f"{self._prefix(host)}PCI {element.get('busid', len(self.nodes))}", "switch", host, socket)
        self.cables.append((label, above, "PCIE", rate, latency))
        for child in element:
            yield from self._read_pci(child, label, host, socket)

    def _read_nets(self, nic, above: str, host: int, socket: int) -> None:
        for net in nic.findall("net"):
            label = self._add(
                f"{self._prefix(host)}{net.get('name', 'net')}:{net.get('port', '0')}", "nic", host, socket
            )
            rate = float(net.get("speed", "0")) * 1e6 / 8
            if rate > 0:
                latency = float(net.get("latency", "0")) * 1e-6
                self.cables.append((label, above, "PCIE", rate, 0.0))
                if len(self.host_number) > 1:
                    self._add("network", "network", None, None)
                    self.cables.append((label, "network", "IB", rate, latency or LATENCY_SECONDS["IB"]))

    def _read_nvlinks(self, device: str, gpu: ElementTree.Element) -> None:
        host = self.nodes[device].host
        assert host is not None  # only what joins hosts has none
        major = int(gpu.get("sm", "70")) // 10
        per_link = NVLINK_GB_PER_SECOND.get(major, NVLINK_GB_PER_SECOND[9]) * 1e9
        for nvlink in gpu.findall("nvlink"):
            count = int(nvlink.get("count", "1"))
            if nvlink.get("tclass", "") == NVSWITCH_CLASS:
                switch = self._add(f"{self._prefix(host)}NVSwitch", "switch", host, None)
                self.cables.append((device, switch, f"NV{count}", count * per_link, LATENCY_SECONDS["NV1"]))
                continue
            peer = self.device_of_bus.get(f"{host}/{nvlink.get('target', '').lower()}")
            if peer is not None and self.order[device] < self.order[peer]:
                self.cables.append((device, peer, f"NV{count}", count * per_link, LATENCY_SECONDS["NV1"]))

    def _join_sockets(self) -> None:
        cpus = [node for node in self.nodes.values() if node.kind == "cpu"]
        rate = NOMINAL_GB_PER_SECOND["QPI"] * 1e9
        for a in cpus:
            for b in cpus:
                if a.host == b.host and (a.socket or 0) < (b.socket or 0):
                    self.cables.append((a.name, b.name, "QPI", rate, LATENCY_SECONDS["QPI"]))

    def _prefix(self, host: int) -> str:
        return f"h{host}." if len(self.host_number) > 1 else ""

    def _add(self, label: str, kind: str, host: int | None, socket: int | None) -> str:
        self.nodes.setdefault(label, Node(label, kind, host, socket))
        return label

    @staticmethod
    def _pcie_rate(element: ElementTree.Element) -> float:
        speed = re.match(r"[\d.]+", element.get("link_speed", ""))
        per_lane = _GB_PER_SECOND_PER_LANE.get(speed[0].removesuffix(".0") if speed else "8", 0.75)
        return per_lane * (int(element.get("link_width", "0")) or 16) * 1e9

    def topology(self, name: str) -> Topology:
        ordered = sorted(
            self.nodes.values(), key=lambda node: (node.kind != "device", self.order.get(node.name, 0), node.name)
        )
        place = {node.name: k for k, node in enumerate(ordered)}
        links = []
        for a, b, kind, rate, latency in self.cables:
            links += [Link(place[a], place[b], kind, rate, latency), Link(place[b], place[a], kind, rate, latency)]
        return Topology(name, tuple(ordered), tuple(links), source="NCCL XML")
