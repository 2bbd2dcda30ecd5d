"""Graphs on disk: a directory of ``.npy`` files with edges grouped by destination.

Node features stay in their files and are read by block. Row pointers are held in memory, 8 bytes a node; the sources of
the edges are read by block too. The rows of a directory may be in an order that keeps neighbours together, so that a
block reads few long pieces; :class:`StoredGraph` then translates, and no caller sees other ids than those he gave.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gnn_eval.disk_rows import DiskRows, load_array
from gnn_eval.edge_structure import EdgeBlock, EdgeStructure
from gnn_eval.errors import EvaluationArgumentError
from gnn_eval.hoisting import StructureEvaluator
from gnn_eval.lowering import EdgeSet, StageProgram
from gnn_eval.program import Program, Ref
from gnn_eval.row_stores import RowStore
from gnn_eval.sizes import Size

__all__ = ["GRAPH_SCHEMA", "StoredGraph"]

GRAPH_SCHEMA = ("gnn-eval-graph", 1)
_EXAMPLE_NODES = 256


class StoredGraph:
    """A homogeneous graph in a directory, as :func:`gnn_eval.convert` writes it.

    Args:
        directory: Holds ``manifest.json``, ``indptr.npy``, ``indices.npy``, one ``.npy`` file per input, and
            ``perm.npy`` if the rows of the files are in another order than the node ids.

    Attributes:
        num_nodes: Number of nodes.
        num_edges: Number of edges.
        indptr: int64 [num_nodes + 1] row pointers, in the order of the files.
        node_of_row: int64 [num_nodes] node of each row of the files, ``None`` if that is the number of the row.
        row_of_node: int64 [num_nodes] row of each node, likewise.
    """

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        try:
            manifest = json.loads((self.directory / "manifest.json").read_text())
        except ValueError as error:
            raise EvaluationArgumentError(
                f"{directory}/manifest.json is not JSON ({error}); expected what convert writes; convert again"
            ) from None
        manifest = manifest if isinstance(manifest, dict) else {}
        if (manifest.get("schema"), manifest.get("version")) != GRAPH_SCHEMA:
            raise EvaluationArgumentError(
                f"{directory}/manifest.json is of schema {manifest.get('schema')} version {manifest.get('version')}; "
                f"expected {GRAPH_SCHEMA[0]} version {GRAPH_SCHEMA[1]}; convert the graph again"
            )
        self.num_nodes, self.num_edges = manifest["num_nodes"], manifest["num_edges"]
        self.node_inputs, self.edge_inputs = manifest["node_inputs"], manifest["edge_inputs"]
        self._halves: list[str] = manifest.get("bfloat16", [])
        self.indptr = self._array("indptr")
        self.node_of_row = self.row_of_node = None
        if (self.directory / "perm.npy").exists():
            self.node_of_row = self._array("perm")
            self.row_of_node = torch.empty_like(self.node_of_row)
            self.row_of_node[self.node_of_row] = torch.arange(self.num_nodes)
        if self.indptr.numel() != self.num_nodes + 1 or int(self.indptr[-1]) != self.num_edges:
            raise EvaluationArgumentError(
                f"{directory} has row pointers of {self.indptr.numel() - 1} nodes; its manifest names {self.num_nodes} "
                f"nodes and {self.num_edges} edges; expected the same; convert the graph again"
            )

    def _array(self, name: str, mode: Literal["c"] | None = None) -> Tensor:
        return torch.from_numpy(load_array(self.directory / f"{name}.npy", mode))

    @property
    def indices(self) -> Tensor:
        """Source row of each edge, mapped from the file, in the order of the files."""
        # A private map: torch asks for writable memory, and nothing is ever written to it.
        return self._array("indices", "c")

    def rows(self, name: str) -> DiskRows:
        """Return the rows of an input or of ``indices``."""
        return DiskRows(self.directory / f"{name}.npy", torch.bfloat16 if name in self._halves else None)

    def edge_index(self, stop: int | None = None) -> Tensor:
        """Return int64 ``[2, edges]`` of the first ``stop`` destinations, with rows and in the order of the files."""
        stop = int(self.num_nodes) if stop is None else stop
        counts = self.indptr[: stop + 1].diff()
        targets = torch.repeat_interleave(torch.arange(stop), counts)
        return torch.stack([self.rows("indices").read_range(0, int(self.indptr[stop])).long(), targets])

    def example(self, model: nn.Module) -> dict[str, Any]:
        """Return a small call made of the first nodes, for compilation and verification."""
        stop = min(_EXAMPLE_NODES, self.num_nodes)
        edges = self.edge_index(stop)
        ids, renamed = torch.cat([torch.arange(stop), edges[0]]).unique(return_inverse=True)
        sources, keep = renamed[stop:], int(edges.size(1))
        accepted = inspect.signature(model.forward).parameters
        found: dict[str, Any] = {n: self.rows(n).read_rows(ids) for n in self.node_inputs if n in accepted}
        found["edge_index"] = torch.stack([sources, renamed[edges[1]]])
        found |= {n: self.rows(n).read_range(0, keep) for n in self.edge_inputs if n in accepted}
        return found

    def identity(self) -> str:
        """Return text that changes when a file of the directory does, without reading the files."""
        files = sorted(self.directory.glob("*.npy"))
        return json.dumps([[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in files])

    def bind(
        self, program: Program, model: nn.Module, roles: dict[str, str] | None
    ) -> tuple[dict[str, RowStore], StructureEvaluator]:
        """Return stores of the inputs and an evaluator of structure for a program compiled for this graph."""
        stores: dict[str, RowStore] = {}
        for name in program.inputs:
            role, shown = program.roles[name], program[name].args[0]
            if role.kind in ("node", "edge"):
                if shown not in (*self.node_inputs, *self.edge_inputs):
                    known = ", ".join([*self.node_inputs, *self.edge_inputs])
                    raise EvaluationArgumentError(
                        f"the model reads {shown}, which {self.directory} lacks (it has {known}); convert again"
                    )
                stores[name] = self.rows(shown)
        return stores, _StoredStructure(program, model, self, stores)


class _StoredStructure(StructureEvaluator):
    """Structure of a stored graph: edges come grouped, in-degrees from row pointers, the rest from the edge list."""

    def __init__(self, program: Program, model: nn.Module, graph: StoredGraph, stores: dict[str, RowStore]):
        counts = {"n_node": graph.num_nodes, "e_edge_index": graph.num_edges}
        super().__init__(program, model, {}, counts)
        self._graph, self._stores = graph, stores

    def _input(self, name: str) -> Tensor:
        if self._program.roles[name].kind == "relation":
            return self._graph.edge_index()
        store = self._stores[name]
        return store.read_range(0, store.num_rows)

    def ids_of_rows(self, space: Size) -> Tensor | None:
        return self._graph.node_of_row if space == self._program.node_space("node") else None

    def in_degrees(self, name: str) -> Tensor | None:
        return self._graph.indptr.diff() if self._is_row(name, 1) else None

    def edge_structures(self, stages: list[StageProgram]) -> dict[EdgeSet, EdgeStructure]:
        grouped: dict[EdgeSet, EdgeStructure] = {}
        others: list[StageProgram] = []
        for stage in stages:
            for edge_set, indices in stage.edge_sets.items():
                target = edge_set.grouping
                if target is not None and self._is_row(target, 1) and all(self._is_row(n, 0) for n in indices):
                    name = next(iter(indices), target)
                    grouped[edge_set] = _StoredEdges(self._graph, name)
                else:
                    others.append(StageProgram(stage.level, stage.space, edge_sets={edge_set: indices}))
        return grouped | super().edge_structures(others)

    def _is_row(self, name: str, side: int) -> bool:
        value = self._program[name]
        if value.op != "aten.select.int" or value.args[1:] != (0, side) or not isinstance(value.args[0], Ref):
            return False
        return self._program[value.args[0].name].op == "input"


class _StoredEdges(EdgeStructure):
    """The edges of a stored graph, whose source rows are read from disk by block."""

    def __init__(self, graph: StoredGraph, name: str):
        super().__init__(None, {}, graph.num_nodes)
        self.num_edges, self._indptr = graph.num_edges, graph.indptr
        self._graph, self._name, self._sources = graph, name, graph.rows("indices")

    def sorted_index(self, name: str) -> Tensor:
        """Return the whole index vector as a mapped file, which is let go with the tensor."""
        return self._graph.indices

    def index(self, name: str, block: EdgeBlock) -> Tensor:
        """Return an index vector for the edges of a block."""
        where = block.positions
        if isinstance(where, slice):
            return self._sources.read_range(where.start, where.stop)
        return self._sources.read_rows(where)

    def held_bytes(self) -> int:
        """Return 0: row pointers belong to the graph, sources stay on disk."""
        return 0
