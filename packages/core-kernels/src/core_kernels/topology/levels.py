"""Rebuild a tree of switches from pairwise PCIe classes.

Drivers and ``nvidia-smi`` only say, for each pair, how far up the tree the two devices meet: at one switch, at
several switches, at a host bridge, in one NUMA node, or across sockets. Joining pairs level by level gives the
coarsest tree that agrees with all of them. What a pair's own line hides (a pair shown as NVLink) follows from its
neighbours; where nothing tells, the pair is placed by NUMA node.

The result is marked as inferred: two trees may give the same classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from core_kernels.topology.model import Link, Node, Topology
from core_kernels.topology.presets import LATENCY_SECONDS, NOMINAL_GB_PER_SECOND

__all__ = ["LEVELS", "NVLinks", "tree_from_levels"]

LEVELS = ("PIX", "PXB", "PHB", "NODE", "SYS")
MAX_NVLINKS_PER_DEVICE = 18  # of any NVIDIA device so far: more links in a table mean a switch in between


class NVLinks:
    """NVLink cables between devices, in number of bonded links.

    Args:
        pairs: Links of each unordered pair ``(i, j)``, ``i < j``.
        into_switch: Links of each device into an NVSwitch.
        gb_per_second_per_link: Payload rate of one link, one direction.
    """

    def __init__(
        self,
        pairs: Mapping[tuple[int, int], int],
        into_switch: Mapping[int, int] | None = None,
        gb_per_second_per_link: float = NOMINAL_GB_PER_SECOND["NV1"],
    ):
        self.pairs, self.into_switch = dict(pairs), dict(into_switch or {})
        self.gb_per_second_per_link = gb_per_second_per_link

    def recognise_switch(self, num_devices: int) -> NVLinks:
        """Move the cables to a switch when a device would need more links than any device has."""
        per_device = [sum(n for pair, n in self.pairs.items() if device in pair) for device in range(num_devices)]
        if max(per_device, default=0) <= MAX_NVLINKS_PER_DEVICE:
            return self
        widest = {d: max(n for pair, n in self.pairs.items() if d in pair) for d in range(num_devices) if per_device[d]}
        return NVLinks({}, widest, self.gb_per_second_per_link)


def tree_from_levels(
    name: str,
    device_names: Sequence[str],
    levels: Mapping[tuple[int, int], str],
    numa: Sequence[int | None],
    nvlinks: NVLinks,
    card_names: Sequence[str] = (),
    pcie_gb_per_second: Sequence[float] | None = None,
    source: str = "inferred",
) -> Topology:
    """Build the topology of one host.

    Args:
        name: Name of the topology.
        device_names: Names of the devices.
        levels: Class of each known pair ``(i, j)``, ``i < j``, one of :data:`LEVELS`; network cards follow the devices.
        numa: NUMA node of each device and card, ``None`` where unknown.
        nvlinks: NVLink cables.
        card_names: Names of the network cards.
        pcie_gb_per_second: Rate of the PCIe slot of each device; nominal where left out.
        source: Where the classes came from.

    Returns:
        The topology; devices keep their order.
    """
    num_devices, num_ends = len(device_names), len(device_names) + len(card_names)
    switch_of = _join(num_ends, levels, {"PIX"}, range(num_ends))
    bridge_of = _join(num_ends, levels, {"PXB"}, switch_of)
    socket_of = _join(num_ends, levels, {"PHB", "NODE"}, _same_numa(bridge_of, numa))
    numbers = {root: k for k, root in enumerate(dict.fromkeys(socket_of))}
    socket = [numbers[root] for root in socket_of]
    nodes = [Node(device, "device", 0, socket[k]) for k, device in enumerate(device_names)]
    links: list[Link] = []

    def add(node: Node) -> int:
        nodes.append(node)
        return len(nodes) - 1

    def cable(a: int, b: int, kind: str, gb_per_second: float) -> None:
        latency = LATENCY_SECONDS.get(kind, LATENCY_SECONDS["NV1"])
        links.extend([Link(a, b, kind, gb_per_second * 1e9, latency), Link(b, a, kind, gb_per_second * 1e9, latency)])

    pcie = NOMINAL_GB_PER_SECOND["PCIE"]
    rates = [*(pcie_gb_per_second or [pcie] * num_devices), *[pcie] * len(card_names)]
    cards = [add(Node(card, "nic", 0, socket[num_devices + k])) for k, card in enumerate(card_names)]
    ends = [*range(num_devices), *cards]
    cpus = {k: add(Node(f"CPU{k}", "cpu", 0, k)) for k in sorted(set(socket))}
    for a in cpus:
        for b in cpus:
            if a < b:
                cable(cpus[a], cpus[b], "QPI", NOMINAL_GB_PER_SECOND["QPI"])
    bridges: dict[int, int] = {}
    switches: dict[int, int] = {}
    for end in range(num_ends):
        root, bridge = switch_of[end], bridge_of[end]
        if root not in switches:
            members = [k for k in range(num_ends) if switch_of[k] == root]
            fastest = max(rates[k] for k in members)
            switches[root] = add(Node(f"PCIe{len(switches)}", "switch", 0, socket[end]))
            above = cpus[socket[end]]
            if len({switch_of[k] for k in range(num_ends) if bridge_of[k] == bridge}) > 1:
                if bridge not in bridges:
                    bridges[bridge] = add(Node(f"bridge{len(bridges)}", "switch", 0, socket[end]))
                    cable(bridges[bridge], above, "PCIE", fastest)
                above = bridges[bridge]
            cable(switches[root], above, "PCIE", fastest)
        cable(ends[end], switches[root], "PCIE", rates[end])
    nvlinks = nvlinks.recognise_switch(num_devices)
    for (a, b), count in sorted(nvlinks.pairs.items()):
        cable(a, b, f"NV{count}", count * nvlinks.gb_per_second_per_link)
    if nvlinks.into_switch:
        fabric = add(Node("NVSwitch", "switch", 0))
        for device, count in sorted(nvlinks.into_switch.items()):
            cable(device, fabric, f"NV{count}", count * nvlinks.gb_per_second_per_link)
    return Topology(name, tuple(nodes), tuple(links), source=source)


def _join(size: int, levels: Mapping[tuple[int, int], str], joining: set[str], roots) -> list[int]:
    """Union the sets that a pair of one of the given classes connects; a set's root is its lowest member."""
    root = list(roots)
    for (a, b), level in sorted(levels.items()):
        if level in joining and root[a] != root[b]:
            low, high = sorted((root[a], root[b]))
            root = [low if r == high else r for r in root]
    return root


def _same_numa(roots: list[int], numa: Sequence[int | None]) -> list[int]:
    """Union the sets that hold ends of one NUMA node."""
    root = list(roots)
    for node in {n for n in numa if n is not None}:
        members = [k for k, n in enumerate(numa) if n == node]
        joined = {root[k] for k in members}
        root = [min(joined) if r in joined else r for r in root]
    return root
