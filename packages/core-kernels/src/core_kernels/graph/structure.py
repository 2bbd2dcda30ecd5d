"""The graph of every package here: in-edges grouped by destination.

``indptr[d]:indptr[d + 1]`` is the range of positions of destination ``d``; ``indices`` holds the source of each.
Positions are an inner order. Users see edge ids, positions in the list they gave: ``edge_ids[p]`` is the id of position
``p``, ``None`` when the two agree. Edges of one destination stay in the user's order.

Parallel edges, self-loops, isolated nodes and empty graphs are legal. A graph is never changed after it was made;
degrees, the reversed graph and the fingerprint are computed once, when first asked for, and kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from core_kernels.errors import ArgumentTypeError, argument_error
from core_kernels.graph import build, transform
from core_kernels.graph.files import load_arrays, save_arrays

if TYPE_CHECKING:
    from core_kernels.graph.block import Block

__all__ = ["Graph"]

_HASH_CHUNK = 1 << 20


class Graph:
    """A directed graph, or a bipartite one when the numbers of sources and destinations differ.

    Args:
        indptr: int64 [num_dst + 1], from 0 to num_edges, never decreasing.
        indices: int32 or int64 [num_edges], source ids in [0, num_src).
        num_src: Number of sources; the number of destinations when left out.
        edge_ids: int64 [num_edges], a permutation: the id of each position. ``None``: ids are positions.
        validate: Check all of this, in O(nodes + edges); ``False`` trusts the caller.

    Raises:
        ArgumentError: An array has a shape or values it may not have.
        ArgumentTypeError: An array has another dtype.

    >>> graph = Graph.from_edge_index(torch.tensor([[0, 1, 2, 0], [1, 2, 0, 2]]), num_nodes=3)
    >>> graph
    Graph(num_nodes=3, num_edges=4, device=cpu)
    >>> graph.indptr.tolist(), graph.indices.tolist(), graph.edge_ids.tolist()
    ([0, 1, 2, 4], [2, 0, 1, 0], [2, 0, 1, 3])
    """

    def __init__(
        self,
        indptr: Tensor,
        indices: Tensor,
        num_src: int | None = None,
        edge_ids: Tensor | None = None,
        validate: bool = True,
    ):
        self.indptr, self.indices = indptr, indices
        self._edge_ids: Tensor | Callable[[], Tensor] | None = edge_ids
        self.num_dst = indptr.shape[0] - 1
        self.num_src = self.num_dst if num_src is None else int(num_src)
        self.num_edges = indices.shape[0]
        self._cache: dict[str, Any] = {}
        if validate:
            self._validate()

    @classmethod
    def from_edge_index(cls, edge_index: Any, num_nodes: int | tuple[int, int] | None = None) -> Graph:
        """Build a graph from a list of edges.

        Args:
            edge_index: int32 or int64 [2, num_edges], row 0 sources, row 1 destinations; or a pair of columns.
            num_nodes: Number of nodes, or (num_src, num_dst). Left out: the largest id plus one.

        Returns:
            The graph, on the device of the list, with int32 indices while source ids fit.

        Raises:
            ArgumentError: Wrong shape, or an id outside the number of nodes.
            ArgumentTypeError: Not integers.

        Cost: two passes over the edges; at most one temporary of 4 bytes per edge beside the result.

        >>> Graph.from_edge_index(torch.tensor([[0, 3], [1, 0]])).num_nodes
        4
        """
        sources, destinations = build.read_edge_index(edge_index)
        num_src, num_dst = build.read_num_nodes(num_nodes, sources, destinations)
        indptr, indices, edge_ids = build.sort_by_key(destinations, sources, num_dst, num_src)
        return cls(indptr, indices, num_src, edge_ids, validate=False)

    @classmethod
    def from_scipy(cls, matrix: Any) -> Graph:
        """Build a graph from a scipy sparse matrix: an edge from row i to column j per stored entry.

        Edge ids follow ``matrix.tocoo()``, so ``torch.from_numpy(matrix.tocoo().data)`` are matching edge weights.

        >>> import scipy.sparse
        >>> Graph.from_scipy(scipy.sparse.eye_array(3, format="csr")).num_edges
        3
        """
        if not hasattr(matrix, "tocoo"):
            raise ArgumentTypeError(
                f"matrix is a {type(matrix).__name__}; expected a scipy.sparse matrix; "
                "wrap a dense one in scipy.sparse.coo_array"
            )
        coo = matrix.tocoo()
        return cls.from_edge_index((torch.from_numpy(coo.row), torch.from_numpy(coo.col)), tuple(coo.shape))

    @classmethod
    def from_pyg(cls, data: Any) -> Graph:
        """Build a graph from a PyG ``Data`` object, of which ``edge_index`` and ``num_nodes`` are read."""
        if getattr(data, "edge_index", None) is None:
            raise argument_error("data", data, "a Data object with edge_index", "undo ToSparseTensor before converting")
        return cls.from_edge_index(data.edge_index, data.num_nodes)

    @classmethod
    def from_dgl(cls, dgl_graph: Any) -> Graph:
        """Build a graph from a homogeneous DGL graph; edge ids are DGL's."""
        if len(dgl_graph.etypes) != 1:
            raise argument_error(
                "dgl_graph", dgl_graph.etypes, "one edge type", "pick one with dgl_graph[source, edge, destination]"
            )
        num_nodes = (dgl_graph.num_src_nodes(), dgl_graph.num_dst_nodes())
        return cls.from_edge_index(dgl_graph.edges(order="eid"), num_nodes)

    @property
    def edge_ids(self) -> Tensor | None:
        """Edge id of each position, int64 [num_edges]; ``None`` when ids are positions."""
        edge_ids = self._edge_ids
        if edge_ids is not None and not isinstance(edge_ids, Tensor):
            with torch.inference_mode(False):
                edge_ids = self._edge_ids = edge_ids()
        return edge_ids

    @property
    def num_nodes(self) -> int:
        """Number of nodes of a square graph."""
        if self.num_src != self.num_dst:
            raise argument_error(
                "num_nodes",
                f"({self.num_src}, {self.num_dst})",
                "as many sources as destinations",
                "read num_src and num_dst of a bipartite graph",
            )
        return self.num_dst

    @property
    def device(self) -> torch.device:
        """Device that holds the arrays."""
        return self.indptr.device

    @property
    def global_in_degrees(self) -> Tensor | None:
        """In-degrees of the destinations in the full graph, int64 [num_dst]: here, this graph."""
        return self.in_degrees()

    @property
    def global_out_degrees(self) -> Tensor | None:
        """Out-degrees of the sources in the full graph, int64 [num_src]: here, this graph."""
        return self.out_degrees()

    def in_degrees(self) -> Tensor:
        """Return the number of edges into each destination, int64 [num_dst]."""
        return self._once("in_degrees", self.indptr.diff)

    def out_degrees(self) -> Tensor:
        """Return the number of edges out of each source, int64 [num_src]."""
        if "transpose" in self._cache:
            return self._cache["transpose"].in_degrees()
        return self._once("out_degrees", lambda: build.count_ids(self.indices, self.num_src))

    def coo(self) -> tuple[Tensor, Tensor]:
        """Return source and destination of each position."""
        return self.indices, build.expand_rows(self.indptr, self.num_edges)

    def edge_index(self) -> Tensor:
        """Return the edges in the order of their ids, int64 [2, num_edges].

        >>> Graph.from_edge_index(torch.tensor([[0, 1], [1, 0]])).edge_index().tolist()
        [[0, 1], [1, 0]]
        """
        return torch.stack([self.from_positions(column.long()) for column in self.coo()])

    def to_positions(self, edge_values: Tensor) -> Tensor:
        """Reorder values [num_edges, ...] from edge ids to positions, differentiably; itself if they agree."""
        self._check_edge_values("edge_values", edge_values)
        return edge_values if self.edge_ids is None else edge_values.index_select(0, self.edge_ids)

    def from_positions(self, values: Tensor) -> Tensor:
        """Reorder values [num_edges, ...] from positions to edge ids, differentiably; itself if they agree."""
        self._check_edge_values("values", values)
        return values if self.edge_ids is None else torch.empty_like(values).index_copy(0, self.edge_ids, values)

    def transpose(self) -> Graph:
        """Return the graph of the reversed edges; the same edge-wise tensors are valid for it.

        Positions of one row are in ascending order of the other end. Computed once; the transpose of the transpose is
        a graph of its own, whose rows are sorted.
        """

        def compute() -> Graph:
            indptr, indices, positions = transform.transpose(self.indptr, self.indices, self.num_src)
            self._cache["transpose_positions"] = positions
            reverse = Graph(indptr, indices, self.num_dst, validate=False)
            edge_ids = self.edge_ids
            # Backward passes work in positions, so the ids of the reversed edges are looked up only when asked for.
            reverse._edge_ids = positions if edge_ids is None else lambda: edge_ids[positions]
            return reverse

        return self._once("transpose", compute)

    def transpose_positions(self) -> Tensor:
        """Return the position in this graph of each position of the transpose, int64 [num_edges]."""
        self.transpose()
        return self._cache["transpose_positions"]

    def to(self, device: torch.device | str) -> Graph:
        """Return this graph on ``device``: itself when it is there already."""
        device = torch.device(device)
        if device == self.device or (device.type == self.device.type and device.index is None):
            return self
        return self._rebuilt({name: array.to(device) for name, array in self._arrays().items() if array is not None})

    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits that depend on shape, edges and edge ids, not on dtype or device."""

        def compute() -> str:
            digest = hashlib.blake2b(f"{self.num_src} {self.num_dst}".encode(), digest_size=8)
            for name, array in self._arrays().items():
                if array is not None:
                    digest.update(name.encode())
                    for chunk in array.split(_HASH_CHUNK):
                        digest.update(chunk.long().cpu().numpy().tobytes())
            return digest.hexdigest()

        return self._once("fingerprint", compute)

    def with_self_loops(self) -> Graph:
        """Return the graph with an edge from every node to itself: added, behind its other edges, where missing.

        Added edges have the ids from ``num_edges`` on, in the order of their nodes.

        >>> Graph.from_edge_index(torch.tensor([[0, 1], [0, 0]])).with_self_loops().edge_index().tolist()
        [[0, 1, 1], [0, 0, 1]]
        """
        sources, destinations = self.coo()
        missing = torch.ones(self.num_nodes, dtype=torch.bool, device=self.device)
        missing[sources[sources == destinations].long()] = False
        loops = missing.nonzero().squeeze(1)
        columns = [torch.cat([self.from_positions(column), loops.to(column.dtype)]) for column in self.coo()]
        return Graph.from_edge_index(columns, self.num_nodes)

    def symmetrized(self) -> Graph:
        """Return the graph of all edges in both directions, each once; edge ids are positions, rows are sorted.

        >>> Graph.from_edge_index(torch.tensor([[0, 0, 1], [1, 1, 2]])).symmetrized().edge_index().tolist()
        [[1, 0, 2, 1], [0, 1, 1, 2]]
        """
        num_nodes = self.num_nodes  # refuses a bipartite graph before a kernel would write past its rows
        return Graph(*transform.symmetrize(self.indptr, self.indices), num_nodes, validate=False)

    def permute(self, perm: Tensor) -> Graph:
        """Return the graph with renumbered nodes; edge ids stay.

        Args:
            perm: int64 [num_nodes], the old id of each new id.

        Raises:
            ArgumentError: ``perm`` does not list every node once.

        >>> graph = Graph.from_edge_index(torch.tensor([[0, 1], [1, 2]]), 3)
        >>> graph.permute(torch.tensor([2, 1, 0])).edge_index().tolist()
        [[2, 1], [1, 0]]
        """
        perm = transform.check_permutation("perm", perm, self.num_nodes)
        new_of_old = torch.empty_like(perm)
        new_of_old[perm] = torch.arange(self.num_nodes, device=self.device)
        arrays = transform.permute_rows(self.indptr, self.indices, self.edge_ids, perm, new_of_old)
        return Graph(*arrays[:2], self.num_src, arrays[2], validate=False)

    def in_subgraph(self, nodes: Tensor) -> Block:
        """Return the block of all in-edges of ``nodes``: what one exact layer for them reads.

        Args:
            nodes: Distinct destination ids, int32 or int64 [num].

        Raises:
            ArgumentError: An id is outside the graph or occurs twice.
        """
        from core_kernels.graph.block import Block

        nodes = transform.check_ids("nodes", nodes, self.num_nodes, distinct=True)
        indptr, positions = transform.take_rows(self.indptr, nodes)
        src_ids, local = transform.first_seen_order(nodes, self.indices[positions], self.num_src)
        return Block(
            indptr,
            local.to(build.index_dtype(src_ids.shape[0])),
            src_ids=src_ids,
            dst_ids=nodes,
            global_edge_ids=positions if self.edge_ids is None else self.edge_ids[positions],
            full_graph=self,
            validate=False,
        )

    def save(self, dir: str | Path) -> None:
        """Write the graph to a folder as ``.npy`` files and a ``graph.json``."""
        header = {"kind": type(self).__name__, "num_src": self.num_src, "num_dst": self.num_dst}
        save_arrays(dir, self._arrays(), header)

    @classmethod
    def load(cls, dir: str | Path, mmap: bool = False) -> Graph:
        """Read a graph written by :meth:`save`; ``mmap=True`` leaves the arrays on disk until they are read.

        Raises:
            ArgumentError: The folder holds no graph of this kind or format.
        """
        arrays, header = load_arrays(dir, mmap)
        if header["kind"] != cls.__name__:
            raise argument_error("dir", str(dir), f"a saved {cls.__name__}, found a {header['kind']}", "load as that")
        return cls._from_arrays(arrays, header["num_src"])

    def __repr__(self) -> str:
        square = self.num_src == self.num_dst
        size = f"num_nodes={self.num_dst}" if square else f"num_src={self.num_src}, num_dst={self.num_dst}"
        return f"{type(self).__name__}({size}, num_edges={self.num_edges}, device={self.device})"

    def __getstate__(self) -> dict[str, Any]:
        # What is cached can be computed again; sending it to another process would cost more.
        return {**self.__dict__, "_cache": {}, "_edge_ids": self.edge_ids}

    def _arrays(self) -> dict[str, Tensor | None]:
        return {"indptr": self.indptr, "indices": self.indices, "edge_ids": self.edge_ids}

    @classmethod
    def _from_arrays(cls, arrays: dict[str, Tensor], num_src: int) -> Graph:
        return cls(num_src=num_src, validate=False, **arrays)

    def _rebuilt(self, arrays: dict[str, Tensor]) -> Graph:
        return self._from_arrays(arrays, self.num_src)

    def _once(self, name: str, compute: Any) -> Any:
        if name not in self._cache:
            # Later calls may want gradients, for which tensors made in inference mode cannot be saved.
            with torch.inference_mode(False):
                self._cache[name] = compute()
        return self._cache[name]

    def _check_edge_values(self, name: str, values: Tensor) -> None:
        if values.dim() == 0 or values.shape[0] != self.num_edges:
            raise argument_error(
                f"{name}.shape", tuple(values.shape), f"({self.num_edges}, ...)", "pass one row per edge of this graph"
            )

    def _validate(self) -> None:
        for name, array, dtypes in (
            ("indptr", self.indptr, (torch.int64,)),
            ("indices", self.indices, (torch.int32, torch.int64)),
            ("edge_ids", self.edge_ids, (torch.int64,)),
        ):
            if array is None:
                continue
            if array.dtype not in dtypes:
                wanted = " or ".join(str(dtype) for dtype in dtypes)
                raise ArgumentTypeError(f"{name} has dtype {array.dtype}; expected {wanted}; convert it with .to(...)")
            if array.dim() != 1 or array.device != self.indptr.device:
                where = f"shape {tuple(array.shape)} on {array.device}"
                raise argument_error(name, where, f"a 1-D tensor on {self.indptr.device}", "flatten or move it")
        if self.num_dst < 0 or int(self.indptr[0]) != 0 or int(self.indptr[-1]) != self.num_edges:
            shown = self.indptr[[0, -1]].tolist() if self.num_dst >= 0 else []
            raise argument_error(
                "indptr", shown, f"first 0 and last num_edges={self.num_edges}", "use Graph.from_edge_index(edge_index)"
            )
        steps = self.indptr.diff()
        if bool((steps < 0).any()):
            row = int((steps < 0).nonzero()[0])
            shown = self.indptr[row : row + 2].tolist()
            raise argument_error(
                "indptr", shown, f"no decrease, but row {row} has one", "use Graph.from_edge_index(edge_index)"
            )
        if self.num_src < 0:
            raise argument_error("num_src", self.num_src, "at least 0", "pass the number of sources")
        transform.check_ids("indices", self.indices, self.num_src)
        if self.edge_ids is not None:
            transform.check_permutation("edge_ids", self.edge_ids, self.num_edges)
