"""Splitting the nodes of a graph over parts, and the book that says who owns what.

Nodes are renumbered so that part ``p`` owns the contiguous new ids ``offsets[p]:offsets[p + 1]``. The owner of a
node is then a search in a handful of integers instead of a table of all nodes, and a part's rows are one slice. Inside
a part, nodes keep the order of their old ids.

Methods: ``metis`` (few cut edges, through pymetis; the graph is made symmetric and simple for it), ``random`` (equal
sizes) and ``given``. Parts may be empty: more parts than nodes is legal.

Source: G. Karypis, V. Kumar, "A Fast and High Quality Multilevel Scheme for Partitioning Irregular Graphs", SIAM J.
Sci. Comput. 20(1), 1998.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from core_kernels import random
from core_kernels.errors import MissingDependencyError, argument_error
from core_kernels.graph import Graph
from core_kernels.graph.build import expand_rows, runs_numba, sort_by_key
from core_kernels.graph.transform import check_ids, check_permutation

__all__ = ["PartitionBook", "partition_graph"]

_FORMAT = "core_kernels.partition"
_VERSION = 1
_METHODS = ("metis", "random", "given")
_MIN_NODES_PER_PART = 4
"""Below this, METIS prints complaints and returns empty parts; such graphs are dealt out at random."""
_MARKED_WEIGHT = 4
"""Weight of all marked nodes over that of all others in METIS."""


@dataclass(frozen=True, eq=False)
class PartitionBook:
    """Which part owns which node, under a numbering in which every part is one range.

    Args:
        offsets: int64 [num_parts + 1], new ids ``offsets[p]:offsets[p + 1]`` belong to part ``p``.
        perm: int64 [num_nodes], the old id of each new id.
        method: How the parts were made.
        cut: Number of edges whose ends lie in different parts; -1 when unknown.
        balance: Load of the heaviest part over the average load, at least 1.

    Raises:
        ArgumentError: ``offsets`` is no list of ranges over ``perm``, or ``perm`` no permutation.

    >>> book = PartitionBook(torch.tensor([0, 1, 3]), torch.tensor([2, 0, 1]))
    >>> book.owner(torch.tensor([0, 1, 2])).tolist(), book.to_new(torch.tensor([2])).tolist()
    ([0, 1, 1], [0])
    """

    offsets: Tensor
    perm: Tensor
    method: str = "given"
    cut: int = -1
    balance: float = 1.0
    _new_of_old: Tensor = field(init=False, repr=False)

    def __post_init__(self):
        offsets = self.offsets
        if offsets.dim() != 1 or offsets.dtype != torch.int64 or offsets.shape[0] < 2:
            shown = (tuple(offsets.shape), offsets.dtype)
            raise argument_error("offsets", shown, "int64 [num_parts + 1]", "pass the start of each part and the end")
        check_permutation("perm", self.perm, self.perm.shape[0])
        bounds = (int(offsets[0]), int(offsets[-1]))
        if bounds != (0, self.perm.shape[0]) or bool((offsets.diff() < 0).any()):
            raise argument_error(
                "offsets",
                offsets.tolist(),
                f"a list from 0 to num_nodes={self.perm.shape[0]} without decrease",
                "cumulate the sizes of the parts",
            )
        new_of_old = torch.empty_like(self.perm)
        new_of_old[self.perm] = torch.arange(self.perm.shape[0], device=self.perm.device)
        object.__setattr__(self, "_new_of_old", new_of_old)

    @property
    def num_parts(self) -> int:
        """Number of parts, empty ones included."""
        return self.offsets.shape[0] - 1

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return self.perm.shape[0]

    @property
    def sizes(self) -> Tensor:
        """Number of nodes of each part, int64 [num_parts]."""
        return self.offsets.diff()

    def owner(self, new_ids: Tensor) -> Tensor:
        """Return the part of each new id, int64.

        Raises:
            ArgumentError: An id is outside [0, num_nodes).
        """
        new_ids = check_ids("new_ids", new_ids, self.num_nodes)
        return torch.searchsorted(self.offsets[1:], new_ids, right=True)

    def range(self, part: int) -> range:
        """Return the new ids of ``part``.

        Raises:
            ArgumentError: There is no such part.
        """
        if not 0 <= part < self.num_parts:
            raise argument_error("part", part, f"a part in [0, {self.num_parts})", "pass a rank below num_parts")
        return range(int(self.offsets[part]), int(self.offsets[part + 1]))

    def to_new(self, old_ids: Tensor) -> Tensor:
        """Return the new id of each old id.

        Raises:
            ArgumentError: An id is outside [0, num_nodes).
        """
        return self._new_of_old[check_ids("old_ids", old_ids, self.num_nodes)]

    def to_old(self, new_ids: Tensor) -> Tensor:
        """Return the old id of each new id.

        Raises:
            ArgumentError: An id is outside [0, num_nodes).
        """
        return self.perm[check_ids("new_ids", new_ids, self.num_nodes)]

    def reorder(self, graph: Graph) -> Graph:
        """Return ``graph`` in new ids; its edge ids stay.

        Raises:
            ArgumentError: The graph has another number of nodes.
        """
        return graph.permute(self.perm)

    def save(self, dir: str | Path) -> None:
        """Write ``offsets.npy``, ``perm.npy`` and, last, ``partition.json`` into a folder."""
        folder = Path(dir)
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / "offsets.npy", self.offsets.cpu().numpy(), allow_pickle=False)
        np.save(folder / "perm.npy", self.perm.cpu().numpy(), allow_pickle=False)
        header = {"format": _FORMAT, "version": _VERSION, "num_parts": self.num_parts, "num_nodes": self.num_nodes}
        header |= {"method": self.method, "cut": self.cut, "balance": self.balance}
        (folder / "partition.json").write_text(json.dumps(header, indent=1) + "\n")

    @classmethod
    def load(cls, dir: str | Path) -> PartitionBook:
        """Read a partition written by :meth:`save`.

        Raises:
            ArgumentError: The folder holds no partition of this format.
        """
        path = Path(dir) / "partition.json"
        header = json.loads(path.read_text()) if path.is_file() else {}
        if header.get("format") != _FORMAT or header.get("version") != _VERSION:
            found = (header.get("format"), header.get("version"))
            raise argument_error(
                "dir",
                str(dir),
                f"a saved partition {(_FORMAT, _VERSION)}, found {found}",
                "make it with book.save(dir)",
            )
        offsets, perm = (
            torch.from_numpy(np.load(path.with_name(name), allow_pickle=False)) for name in ("offsets.npy", "perm.npy")
        )
        return cls(offsets, perm, header["method"], header["cut"], header["balance"])


def partition_graph(
    graph: Graph,
    num_parts: int,
    method: str = "metis",
    parts: Tensor | None = None,
    seed: int = 0,
    balance: Tensor | None = None,
) -> PartitionBook:
    """Split the nodes of a graph.

    Args:
        graph: A square graph.
        num_parts: Number of parts, at least 1; may exceed the number of nodes.
        method: ``"metis"`` for few cut edges, ``"random"`` for equal sizes, ``"given"`` to take ``parts``.
        parts: int64 [num_nodes], the part of each node; only with ``"given"``.
        seed: Of METIS and of the random split.
        balance: Boolean [num_nodes], for example the training mask: these nodes are spread evenly too. ``"random"``
            spreads both kinds exactly; ``"metis"``, which balances one weight, gives the marked nodes four times the
            weight of the others in total: no part gets much more than 1.25 times its share of them.

    Returns:
        The book of the split.

    Raises:
        ArgumentError: An argument is out of range or has another shape.
        MissingDependencyError: ``"metis"`` without pymetis.

    Determinism: the same seed gives the same parts; METIS on one platform only.

    >>> graph = Graph.from_edge_index(torch.tensor([[0, 1, 2, 3], [1, 0, 3, 2]]), 4)
    >>> book = partition_graph(graph, 2, method="given", parts=torch.tensor([1, 1, 0, 0]))
    >>> book.perm.tolist(), book.offsets.tolist(), book.cut
    ([2, 3, 0, 1], [0, 2, 4], 0)
    """
    num_nodes = graph.num_nodes
    if not isinstance(num_parts, int) or num_parts < 1:
        raise argument_error("num_parts", num_parts, "an integer of at least 1", "pass the number of ranks")
    if method not in _METHODS:
        raise argument_error("method", method, f"one of {', '.join(_METHODS)}", 'use "metis" unless you compare them')
    if (parts is not None) != (method == "given"):
        raise argument_error(
            "parts", "None" if parts is None else "a tensor", 'a tensor with method="given" only', 'set method="given"'
        )
    if balance is not None and (balance.shape != (num_nodes,) or balance.dtype != torch.bool):
        shown = (tuple(balance.shape), balance.dtype)
        raise argument_error("balance", shown, f"a boolean mask [{num_nodes}]", "pass the training mask")

    if parts is not None:  # exactly with the method "given"
        part_of_node = check_ids("parts", parts, num_parts)
        if part_of_node.shape[0] != num_nodes:
            raise argument_error("parts", tuple(parts.shape), f"({num_nodes},)", "pass one part per node")
    elif method == "random" or num_parts == 1 or num_nodes < _MIN_NODES_PER_PART * num_parts:
        part_of_node = _deal(num_nodes, num_parts, seed, balance).to(graph.device)
    else:
        part_of_node = _run_metis(graph, num_parts, seed, balance)
    return _make_book(graph, num_parts, method, part_of_node, balance)


def _deal(num_nodes: int, num_parts: int, seed: int, balance: Tensor | None) -> Tensor:
    """Deal shuffled nodes out like cards, the marked ones first; part sizes differ by at most one."""
    order = random.permutation(num_nodes, seed)
    if balance is not None:
        marked = balance.cpu()[order]
        order = torch.cat([order[marked], order[~marked]])
    part_of_node = torch.empty(num_nodes, dtype=torch.int32)
    part_of_node[order] = torch.arange(num_nodes, dtype=torch.int32) % num_parts
    return part_of_node


def _run_metis(graph: Graph, num_parts: int, seed: int, balance: Tensor | None) -> Tensor:
    """Let METIS split the symmetric graph without self-loops, which is the only kind it takes."""
    try:
        import pymetis
    except ImportError:
        raise MissingDependencyError(
            'method="metis" needs pymetis, which is not installed; '
            'run pip install "core-kernels[partition]", or pass method="random"'
        ) from None
    symmetric = graph.to("cpu").symmetrized()
    sources, destinations = symmetric.coo()
    keep = sources != destinations
    if not bool(keep.any()):
        return _deal(graph.num_nodes, num_parts, seed, balance).to(graph.device)
    indptr = torch.zeros_like(symmetric.indptr)
    torch.cumsum(torch.bincount(destinations[keep], minlength=graph.num_nodes), 0, out=indptr[1:])
    weights = None
    if balance is not None and 0 < int(balance.sum()) < graph.num_nodes:
        num_marked = int(balance.sum())
        extra = -(-_MARKED_WEIGHT * graph.num_nodes // num_marked)
        weights = (1 + balance.cpu().long() * extra).numpy()
    dtype = pymetis.zero_copy_dtype()
    adjacency = pymetis.CSRAdjacency(indptr.numpy().astype(dtype), sources[keep].numpy().astype(dtype))
    _, parts = pymetis.part_graph(num_parts, adjacency, vweights=weights, options=pymetis.Options(seed=seed))
    return torch.tensor(parts, dtype=torch.int32, device=graph.device)


def _make_book(
    graph: Graph, num_parts: int, method: str, part_of_node: Tensor, balance: Tensor | None
) -> PartitionBook:
    offsets, _, perm = sort_by_key(part_of_node, part_of_node, num_parts, num_parts)
    if perm is None:  # the nodes are in the order of their parts
        perm = torch.arange(graph.num_nodes, device=graph.device)
    load = offsets.diff() if balance is None else torch.bincount(part_of_node[balance], minlength=num_parts)
    average = float(load.sum()) / num_parts
    return PartitionBook(
        offsets,
        perm,
        method,
        _count_cut(graph, part_of_node),
        float(load.max()) / average if average else 1.0,
    )


def _count_cut(graph: Graph, part_of_node: Tensor) -> int:
    # A narrow table stays in the cache: it is read at random, once per edge.
    num_parts = int(part_of_node.max()) + 1 if part_of_node.numel() else 0
    part_of_node = part_of_node.contiguous().to(torch.uint8 if num_parts <= 256 else torch.int32)
    if not runs_numba(graph.indptr):
        rows = expand_rows(graph.indptr, graph.num_edges)
        return int((part_of_node[graph.indices.long()] != part_of_node[rows.long()]).sum())

    from core_kernels.kernels.numba.graph import count_cut

    return int(count_cut(graph.indptr.numpy(), graph.indices.numpy(), part_of_node.numpy()))
