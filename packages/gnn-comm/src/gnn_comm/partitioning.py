"""Partitions made for communication: who owns which vertex, and which rows that sends over which link.

Fewer cut edges is not the goal: a row that crosses a slow link once serves every destination behind it. The
hierarchical method therefore splits by host first, then by socket, then by device, each time asking METIS for the
least volume (rows copied) instead of the least cut, so that the slowest links are crossed least.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch

from core_kernels.graph import Graph
from core_kernels.partition import PartitionBook, partition_graph
from core_kernels.topology import Topology
from gnn_comm._metis import split_by_metis
from gnn_comm.errors import GnnCommArgumentError, PlanMismatchError
from gnn_comm.requests import RequestClasses, collect_requests

__all__ = ["METHODS", "Partition", "partition"]

METHODS = ("hierarchical", "metis", "random", "given")


@dataclass(frozen=True, eq=False)
class Partition:
    """A graph split over the devices of a topology.

    Args:
        book: Who owns what; part ``p`` belongs to device ``p``.
        graph: The graph in the book's numbering.
        graph_fingerprint: Fingerprint of the graph as the user numbered it.
        method: How the parts were made.
    """

    book: PartitionBook
    graph: Graph
    graph_fingerprint: str
    method: str

    @property
    def num_parts(self) -> int:
        """Number of parts."""
        return self.book.num_parts

    @cached_property
    def offsets(self) -> np.ndarray:
        """int64 ``[num_parts + 1]``: part ``p`` owns the new ids ``offsets[p] : offsets[p + 1]``."""
        return self.book.offsets.cpu().numpy().astype(np.int64)

    @cached_property
    def requests(self) -> RequestClasses:
        """Classes of rows that must travel."""
        return collect_requests(self.graph.indptr.cpu().numpy(), self.graph.indices.cpu().numpy(), self.offsets)

    @cached_property
    def fingerprint(self) -> str:
        """16 hexadecimal digits of graph and ownership; a plan fits only the partition it was made for."""
        digest = blake2b(self.graph_fingerprint.encode(), digest_size=8)
        digest.update(self.offsets.tobytes())
        digest.update(self.book.perm.cpu().numpy().tobytes())
        return digest.hexdigest()

    def report(self, topology: Topology) -> dict[str, Any]:
        """Describe the partition in rows.

        Returns:
            ``cut_edges``, ``balance``, ``remote_rows`` (copies needed by all parts), ``max_remote_rows`` (by one),
            ``between_host_rows`` (each row once per host that needs it) and ``rows_per_link`` (rows over each link if
            every copy is sent straight, by link name, busiest first).
        """
        _check_topology(self, topology)
        table = self.requests.num_remote_rows()
        hosts = topology.host_of_device
        away = np.zeros((self.requests.num_classes, len(topology.hosts)), bool)
        classes = np.repeat(np.arange(self.requests.num_classes), np.diff(self.requests.need_indptr))
        away[classes, hosts[self.requests.need]] = True
        away[np.arange(self.requests.num_classes), hosts[self.requests.source]] = False
        loads = np.zeros(len(topology.resource_bytes_per_second), np.int64)
        for i, j in zip(*np.nonzero(table), strict=True):
            if topology.is_reachable(int(i), int(j)):
                loads[topology.routes.resources(int(i), int(j))] += table[i, j]
        busiest = [int(k) for k in np.argsort(-loads, kind="stable") if loads[k]]
        return {
            "method": self.method,
            "num_parts": self.num_parts,
            "cut_edges": self.book.cut,
            "balance": self.book.balance,
            "remote_rows": int(table.sum()),
            "max_remote_rows": int(table.sum(axis=0).max(initial=0)),
            "between_host_rows": int((away.sum(axis=1) * self.requests.num_rows).sum()),
            "rows_per_link": {topology.resource_names[k]: int(loads[k]) for k in busiest},
        }

    def save(self, dir: str | Path) -> None:
        """Write the book and the renumbered graph into a folder."""
        import json

        folder = Path(dir)
        self.book.save(folder / "book")
        self.graph.save(folder / "graph")
        header = {"graph_fingerprint": self.graph_fingerprint, "method": self.method}
        header["stored_fingerprint"] = self.graph.fingerprint()
        (folder / "communication.json").write_text(json.dumps(header) + "\n")

    @classmethod
    def load(cls, dir: str | Path) -> Partition:
        """Read a partition written by :meth:`save`.

        Raises:
            PlanMismatchError: Files are missing or damaged.
        """
        import json

        folder = Path(dir)
        try:
            header = json.loads((folder / "communication.json").read_text())
            book, graph = PartitionBook.load(folder / "book"), Graph.load(folder / "graph")
            if int(book.offsets[-1]) != graph.num_nodes:
                raise ValueError(f"the book has {int(book.offsets[-1])} nodes, the graph {graph.num_nodes}")
            if graph.fingerprint() != header["stored_fingerprint"]:  # no plan would notice edges inside a part
                raise ValueError("the graph was changed since it was saved")
            return cls(book, graph, str(header["graph_fingerprint"]), str(header["method"]))
        except Exception as error:  # damaged files fail in as many ways as there are readers
            raise PlanMismatchError(
                f"dir={str(dir)!r} cannot be read ({error}); expected a whole folder written by Partition.save; "
                "partition again"
            ) from error


def partition(
    graph: Graph,
    topology: Topology,
    method: str = "hierarchical",
    parts: Any = None,
    seed: int = 0,
) -> Partition:
    """Split a graph over the devices of a topology.

    Args:
        graph: A square graph.
        topology: The machine; its devices give the number of parts.
        method: ``"hierarchical"`` (hosts, sockets, devices; least volume), ``"metis"`` (least cut), ``"random"`` or
            ``"given"``.
        parts: Part of each vertex, only with ``"given"``.
        seed: Of METIS and of the random split.

    Returns:
        The partition.

    Raises:
        GnnCommArgumentError: The method is unknown, the seed negative, or parts do not go with the method.

    >>> ring = Graph.from_edge_index(torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), 4)
    >>> found = partition(ring, Topology.preset("hosts2"), method="given", parts=[0, 0, 1, 1])
    >>> found.requests.num_remote_rows().tolist()
    [[0, 1], [1, 0]]
    """
    if method not in METHODS:
        raise GnnCommArgumentError(f"method={method!r} is not known; expected one of {METHODS}; choose one")
    if (parts is not None) != (method == "given"):
        raise GnnCommArgumentError(
            f"method={method!r} {'without' if parts is None else 'with'} parts: expected parts with method='given' and "
            "with no other; pass both or neither"
        )
    if not 0 <= seed < 2**31:
        raise GnnCommArgumentError(f"seed={seed} is not valid; expected a number in [0, {2**31}); pass such as 0")
    num_parts = topology.num_devices
    if method == "hierarchical":
        parts_found = torch.from_numpy(_split_hierarchically(graph, topology, seed))
        book = partition_graph(graph, num_parts, "given", parts=parts_found)
    elif method == "given":
        given = torch.as_tensor(parts)
        if not (given.is_floating_point() or given.is_complex()) or given.numel() == 0:
            given = given.long()  # anything else is refused below: a rounded part would be a wrong one
        book = partition_graph(graph, num_parts, "given", parts=given)
    else:
        book = partition_graph(graph, num_parts, method, seed=seed)
    return Partition(book, book.reorder(graph), graph.fingerprint(), method)


def _split_hierarchically(graph: Graph, topology: Topology, seed: int) -> np.ndarray:
    """Split by host, then by socket, then by device; return the device of each vertex."""
    from scipy.sparse import csr_array

    symmetric = graph.to("cpu").symmetrized()
    sources, destinations = (ids.numpy() for ids in symmetric.coo())
    keep = sources != destinations
    shape = (graph.num_nodes, graph.num_nodes)
    adjacency = csr_array((np.ones(int(keep.sum()), np.int8), (destinations[keep], sources[keep])), shape=shape)
    device_of = np.zeros(graph.num_nodes, np.int64)
    hosts = [set(host) for host in topology.hosts]
    sockets = [set(socket) for socket in topology.sockets]
    levels = [hosts, sockets, [{device} for device in range(topology.num_devices)]]

    def descend(vertices: np.ndarray, devices: set[int], level: int) -> None:
        if level == len(levels):
            device_of[vertices] = next(iter(devices))
            return
        groups = [group for group in levels[level] if group <= devices] or [devices]
        inside = adjacency[vertices][:, vertices] if len(groups) > 1 else adjacency[:0]
        part = (
            split_by_metis(inside.indptr, inside.indices, [len(group) for group in groups], seed)
            if len(groups) > 1
            else np.zeros(len(vertices), np.int64)
        )
        for number, group in enumerate(groups):
            descend(vertices[part == number], group, level + 1)

    descend(np.arange(graph.num_nodes), set(range(topology.num_devices)), 0)
    return device_of


def _check_topology(parts: Partition, topology: Topology) -> None:
    if parts.num_parts != topology.num_devices:
        raise PlanMismatchError(
            f"the partition has {parts.num_parts} parts but topology {topology.name!r} has {topology.num_devices} "
            "devices; expected one part per device; partition for this topology"
        )
