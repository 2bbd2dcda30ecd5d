"""Devices, switches and hosts joined by typed, directed links.

A :class:`Topology` answers what a planner asks: which physical links does a transfer between two devices occupy, how
fast is each, which devices share a host, and how much can flow at once between two sets of devices. A pair's route is
its direct link where there is one; otherwise the path with the fewest links over nodes that are not devices, and among
those the widest. Forwarding through another device is therefore never hidden in a route: a planner must ask for it.
Two routes over one link share its bandwidth, so contention needs no extra rule; a :class:`ContentionGroup` adds one
where links share what the drawing does not show (a half-duplex medium, a host's memory).

Callers may not assume that every pair has a route (:meth:`Topology.is_reachable`), nor that routes are symmetric.

Source: DGCL (EuroSys 2021, doi 10.1145/3447786.3456233), the device graph. We differ in that links carry measured
bytes per second and latency instead of a relative cost per type.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import sha256
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from core_kernels.errors import ArgumentError
from core_kernels.topology.routes import Routes, find_routes, max_flow

__all__ = ["ContentionGroup", "Link", "Node", "Topology", "TopologyError", "UnreachablePairError"]

SCHEMA = "core_kernels.topology"
VERSION = 1
NODE_KINDS = ("device", "switch", "cpu", "nic", "network")


class TopologyError(ArgumentError):
    """A topology, or a file that describes one, cannot be used."""


class UnreachablePairError(TopologyError):
    """Two devices have no route between them."""


@dataclass(frozen=True)
class Node:
    """An end of links.

    Args:
        name: Unique name shown to people, for example ``"GPU3"``.
        kind: One of ``"device"``, ``"switch"``, ``"cpu"``, ``"nic"``, ``"network"``.
        host: Number of the host the node is in; ``None`` for what lies between hosts.
        socket: Number of the processor socket in its host, where known.
    """

    name: str
    kind: str
    host: int | None = 0
    socket: int | None = None


@dataclass(frozen=True)
class Link:
    """A directed link; a full-duplex cable is two of them.

    Args:
        source: Index of the node data leaves.
        target: Index of the node data enters.
        kind: Technology, for example ``"NV2"``, ``"PCIE"``, ``"QPI"``, ``"IB"``, ``"TCP"``.
        bytes_per_second: Payload bandwidth, above 0.
        latency_seconds: Time before the first byte arrives, at least 0.
    """

    source: int
    target: int
    kind: str
    bytes_per_second: float
    latency_seconds: float = 0.0


@dataclass(frozen=True)
class ContentionGroup:
    """Links that share one capacity beyond their own.

    Args:
        name: Name shown to people.
        links: Indices of the member links.
        bytes_per_second: What all members together can carry.
    """

    name: str
    links: tuple[int, ...]
    bytes_per_second: float


@dataclass(frozen=True)
class Topology:
    """A machine or cluster as planners see it. Devices are the nodes ``0 .. num_devices - 1``.

    Args:
        name: Name shown to people.
        nodes: All nodes, devices first.
        links: All directed links.
        groups: Capacities shared by several links.
        source: Where the description came from; ``"inferred"`` parts are named here.

    >>> dgx1 = Topology.preset("dgx1")
    >>> dgx1.num_devices, dgx1.hosts
    (8, ((0, 1, 2, 3, 4, 5, 6, 7),))
    >>> [dgx1.links[link].kind for link in dgx1.route(0, 1)]
    ['NV2']
    """

    name: str
    nodes: tuple[Node, ...]
    links: tuple[Link, ...]
    groups: tuple[ContentionGroup, ...] = ()
    source: str = "given"

    def __post_init__(self):
        for field_name in ("nodes", "links", "groups"):
            object.__setattr__(self, field_name, tuple(getattr(self, field_name)))
        _check(self)

    # ---- devices and hosts -------------------------------------------------------------------------------------------

    @cached_property
    def num_devices(self) -> int:
        """Number of devices."""
        return sum(node.kind == "device" for node in self.nodes)

    @cached_property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """Devices of each host, in ascending order of host number."""
        members: dict[int, list[int]] = {}
        for device, host in enumerate(self._host_numbers):
            members.setdefault(host, []).append(device)
        return tuple(tuple(members[host]) for host in sorted(members))

    @cached_property
    def _host_numbers(self) -> list[int]:
        """Number of each device's host, which every device has."""
        return [node.host for node in self.nodes[: self.num_devices] if node.host is not None]

    @cached_property
    def host_of_device(self) -> np.ndarray:
        """int64 ``[num_devices]``: position in :attr:`hosts` of each device."""
        owner = np.zeros(self.num_devices, np.int64)
        for position, devices in enumerate(self.hosts):
            owner[list(devices)] = position
        return owner

    @cached_property
    def sockets(self) -> tuple[tuple[int, ...], ...]:
        """Devices that share a host and a socket; a host whose sockets are unknown counts as one."""
        members: dict[tuple[int, int], list[int]] = {}
        for device in range(self.num_devices):
            node = self.nodes[device]
            members.setdefault((int(self.host_of_device[device]), node.socket or 0), []).append(device)
        return tuple(tuple(members[key]) for key in sorted(members))

    # ---- routes and resources ----------------------------------------------------------------------------------------

    @cached_property
    def routes(self) -> Routes:
        """All routes, over resources: the links first, then the contention groups."""
        return find_routes(self)

    def is_reachable(self, source: int, target: int) -> bool:
        """Say whether ``source`` can send to ``target`` without forwarding through another device."""
        return self.routes.is_reachable(source, target)

    def route(self, source: int, target: int) -> tuple[int, ...]:
        """List the links a transfer occupies, in order.

        Raises:
            UnreachablePairError: There is no path that avoids other devices.
        """
        if not self.is_reachable(source, target):
            raise UnreachablePairError(
                f"{self.nodes[source].name} cannot reach {self.nodes[target].name} in topology {self.name!r}: expected "
                "a direct link or a path over switches; add the missing link, or plan a relay through another device"
            )
        return self.routes.links(source, target)

    @cached_property
    def resource_names(self) -> tuple[str, ...]:
        """Names of links, then of groups, as shown in plans."""
        links = (f"{self.nodes[a.source].name}->{self.nodes[a.target].name} ({a.kind})" for a in self.links)
        return (*links, *(group.name for group in self.groups))

    @cached_property
    def resource_bytes_per_second(self) -> np.ndarray:
        """float64 ``[num_resources]``: capacity of every link, then of every group."""
        return np.array([item.bytes_per_second for item in (*self.links, *self.groups)], np.float64)

    def bytes_per_second(self, source: int, target: int) -> float:
        """Return the bandwidth of a transfer that has the machine to itself."""
        self.route(source, target)
        return float(self.resource_bytes_per_second[self.routes.resources(source, target)].min())

    def latency_seconds(self, source: int, target: int) -> float:
        """Return the summed latency of the route's links."""
        return sum(self.links[link].latency_seconds for link in self.route(source, target))

    def max_flow(self, sources: Iterable[int], targets: Iterable[int]) -> float:
        """Return the bytes per second that can flow from one set of devices to another, forwarding allowed.

        Cost: one maximum-flow computation (scipy) on the graph of nodes and links.
        """
        return max_flow(self, list(sources), list(targets))

    # ---- parts of a topology -----------------------------------------------------------------------------------------

    def host_topology(self, host: int) -> Topology:
        """Return the part of the topology inside one host; its devices are renumbered in ascending order."""
        number = self.nodes[self.hosts[host][0]].host
        kept = [index for index, node in enumerate(self.nodes) if node.host == number]
        return self._restricted(f"{self.name}/host{host}", kept)

    def between_hosts(self) -> Topology:
        """Return the topology of whole hosts: every host becomes one device; links of equal ends are summed."""
        numbers = sorted(set(self._host_numbers))
        position = {number: index for index, number in enumerate(numbers)}
        outside = [index for index, node in enumerate(self.nodes) if node.host not in position]
        place = {index: len(position) + k for k, index in enumerate(outside)}
        place |= {index: position[node.host] for index, node in enumerate(self.nodes) if node.host in position}
        merged: dict[tuple[int, int, str], list[float]] = {}
        for link in self.links:
            ends = (place[link.source], place[link.target])
            if ends[0] != ends[1]:
                entry = merged.setdefault((*ends, link.kind), [0.0, 0.0])
                entry[0] += link.bytes_per_second
                entry[1] = max(entry[1], link.latency_seconds)
        nodes = [Node(f"host{k}", "device", k) for k in range(len(position))]
        nodes += [Node(self.nodes[index].name, "network", None) for index in outside]
        links = [Link(a, b, kind, rate, latency) for (a, b, kind), (rate, latency) in merged.items()]
        return Topology(f"{self.name}/hosts", tuple(nodes), tuple(links), source=self.source)

    def _restricted(self, name: str, kept: Sequence[int]) -> Topology:
        place = {old: new for new, old in enumerate(kept)}
        inside = [k for k, link in enumerate(self.links) if link.source in place and link.target in place]
        link_place = {old: new for new, old in enumerate(inside)}
        links = tuple(
            Link(place[a.source], place[a.target], a.kind, a.bytes_per_second, a.latency_seconds)
            for a in (self.links[k] for k in inside)
        )
        groups = []
        for group in self.groups:
            members = tuple(link_place[k] for k in group.links if k in link_place)
            if members:
                groups.append(ContentionGroup(group.name, members, group.bytes_per_second))
        return Topology(name, tuple(self.nodes[k] for k in kept), links, tuple(groups), self.source)

    # ---- files -------------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-able form."""
        return {
            "schema": SCHEMA,
            "version": VERSION,
            "name": self.name,
            "source": self.source,
            "nodes": [asdict(node) for node in self.nodes],
            "links": [asdict(link) for link in self.links],
            "groups": [asdict(group) for group in self.groups],
        }

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Topology:
        """Build a topology from its JSON-able form.

        Raises:
            TopologyError: Fields are missing, unknown or contradict each other.
        """
        if fields.get("schema") != SCHEMA or fields.get("version") != VERSION:
            found = f"{fields.get('schema')!r} version {fields.get('version')!r}"
            raise TopologyError(f"the description is {found}; expected {SCHEMA!r} version {VERSION}; convert it first")
        try:
            groups = tuple(
                ContentionGroup(g["name"], tuple(g["links"]), g["bytes_per_second"]) for g in fields["groups"]
            )
            nodes = tuple(Node(**node) for node in fields["nodes"])
            links = tuple(Link(**link) for link in fields["links"])
            return cls(fields["name"], nodes, links, groups, fields.get("source", "given"))
        except (KeyError, TypeError) as error:
            raise TopologyError(f"the description is incomplete: {error}; expected the fields save() writes") from error

    def save(self, path: str | Path) -> None:
        """Write the topology as JSON, or as YAML when the name ends so."""
        text = json.dumps(self.to_dict(), indent=1)
        if Path(path).suffix in {".yaml", ".yml"}:
            import yaml

            text = yaml.safe_dump(self.to_dict(), sort_keys=False)
        Path(path).write_text(text + "\n")

    @staticmethod
    def load(path: str | Path = "auto") -> Topology:
        """Read a topology from a file of any known form, or find the one of this machine; see :func:`load_topology`."""
        from core_kernels.topology.load import load_topology

        return load_topology(path)

    @staticmethod
    def preset(name: str) -> Topology:
        """Build a well-known machine; see :func:`core_kernels.topology.presets.preset`."""
        from core_kernels.topology.presets import preset

        return preset(name)

    def fingerprint(self) -> str:
        """Return 16 hex digits that change whenever a node, link or group changes; names and source do not count."""
        fields = self.to_dict()
        structure = [fields["links"], fields["groups"], [[n.kind, n.host, n.socket] for n in self.nodes]]
        return sha256(json.dumps(structure, sort_keys=True).encode()).hexdigest()[:16]

    def draw(self) -> str:
        """Draw the topology as text; see :func:`core_kernels.topology.drawing.draw`."""
        from core_kernels.topology.drawing import draw

        return draw(self)


def _check(topology: Topology) -> None:
    """Refuse a description that no planner could use."""
    kinds = [node.kind for node in topology.nodes]
    for node in topology.nodes:
        if node.kind not in NODE_KINDS:
            raise TopologyError(f"node {node.name} has kind {node.kind!r}; expected one of {NODE_KINDS}; correct it")
        if not isinstance(node.host, int | None) or not isinstance(node.socket, int | None):
            raise TopologyError(
                f"node {node.name} is on host {node.host!r}, socket {node.socket!r}; expected whole numbers or none; "
                "correct them"
            )
        if node.kind == "device" and node.host is None:
            raise TopologyError(
                f"device {node.name} is on host None; expected the number of its host, since only switches between "
                "hosts have none; give it one, 0 where there is a single host"
            )
    num_devices = kinds.count("device")
    if num_devices == 0:
        raise TopologyError("the topology holds no device; expected at least one node of kind 'device'; add one")
    if any(kind == "device" for kind in kinds[num_devices:]):
        raise TopologyError("devices must be the first nodes; reorder the nodes so that devices precede switches")
    names = [node.name for node in topology.nodes]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise TopologyError(f"two nodes are named {twice!r}; expected unique names; rename one")
    for index, link in enumerate(topology.links):
        is_whole = isinstance(link.source, int) and isinstance(link.target, int)
        ends_exist = is_whole and 0 <= link.source < len(kinds) and 0 <= link.target < len(kinds)
        if not ends_exist or link.source == link.target:
            raise TopologyError(
                f"link {index} joins nodes {link.source} and {link.target}; expected two different nodes below "
                f"{len(kinds)}; correct its ends"
            )
        if not 0 < link.bytes_per_second < inf or not 0 <= link.latency_seconds < inf:
            raise TopologyError(
                f"link {index} has bytes_per_second={link.bytes_per_second} and latency_seconds={link.latency_seconds};"
                " expected above 0 and at least 0, both finite; remove a dead link instead of giving it no bandwidth"
            )
    for group in topology.groups:
        if not 0 < group.bytes_per_second < inf or any(not 0 <= k < len(topology.links) for k in group.links):
            raise TopologyError(
                f"group {group.name!r} is not valid: expected finite bytes_per_second above 0 and link indices below "
                f"{len(topology.links)}; correct it"
            )
