"""Graphs larger than memory: inputs and intermediate values on disk, with resume.

A :class:`StoredGraph` is a directory of ``.npy`` files with edges grouped by destination. A :class:`Workspace` is a
directory for what stages hand to each other; it records after each block how far a stage got, so that a run that was
killed goes on with the next block. Values are deleted when no later stage loads them.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from gnn_eval.disk_rows import DiskRows
from gnn_eval.edge_structure import EdgeStructure
from gnn_eval.errors import EvaluationArgumentError
from gnn_eval.hoisting import StructureEvaluator
from gnn_eval.lowering import EdgeSet, StageProgram
from gnn_eval.program import Program, Ref
from gnn_eval.row_stores import RamRows, RowStore

if TYPE_CHECKING:
    from gnn_eval.plan import Compiled

__all__ = ["StoredGraph", "Workspace", "convert", "open_output"]

_SCHEMA = "gnn-eval-graph"
_EXAMPLE_NODES = 256


class StoredGraph:
    """A homogeneous graph in a directory, as :func:`convert` writes it.

    Args:
        directory: Holds ``manifest.json``, ``indptr.npy``, ``indices.npy`` and one ``.npy`` file per input.
    """

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        manifest = json.loads((self.directory / "manifest.json").read_text())
        if manifest.get("schema") != _SCHEMA or manifest.get("version") != 1:
            raise EvaluationArgumentError(
                f"{directory}/manifest.json is not of schema {_SCHEMA} version 1; convert it again"
            )
        self.num_nodes, self.num_edges = manifest["num_nodes"], manifest["num_edges"]
        self.node_inputs, self.edge_inputs = manifest["node_inputs"], manifest["edge_inputs"]
        self.indptr = torch.from_numpy(np.load(self.directory / "indptr.npy", allow_pickle=False))
        # A private map: torch asks for writable memory, and nothing is ever written to it.
        mapped = np.load(self.directory / "indices.npy", mmap_mode="c", allow_pickle=False)
        self.indices = torch.from_numpy(mapped)

    def rows(self, name: str) -> DiskRows:
        """Return the rows of an input."""
        return DiskRows(self.directory / f"{name}.npy")

    def edge_index(self, stop: int | None = None) -> Tensor:
        """Return int64 ``[2, edges]`` of the first ``stop`` destinations, in the order of the files."""
        stop = self.num_nodes if stop is None else stop
        counts = self.indptr[: stop + 1].diff()
        targets = torch.repeat_interleave(torch.arange(stop), counts)
        return torch.stack([self.indices[: int(self.indptr[stop])].long(), targets])

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

    def bind(
        self, program: Program, model: nn.Module, roles: dict[str, str] | None
    ) -> tuple[None, dict[str, RowStore], StructureEvaluator]:
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
        return None, stores, _StoredStructure(program, model, self, stores)


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

    def in_degrees(self, name: str) -> Tensor | None:
        return self._graph.indptr.diff() if self._is_row(name, 1) else None

    def edge_structures(self, stages: list[StageProgram]) -> dict[EdgeSet, EdgeStructure]:
        grouped: dict[EdgeSet, EdgeStructure] = {}
        others: list[StageProgram] = []
        for stage in stages:
            for edge_set, indices in stage.edge_sets.items():
                if (
                    edge_set.grouping
                    and self._is_row(edge_set.grouping, 1)
                    and all(self._is_row(n, 0) for n in indices)
                ):
                    name = next(iter(indices), edge_set.grouping)
                    grouped[edge_set] = EdgeStructure.from_csc(self._graph.indptr, name, self._graph.indices)
                else:
                    others.append(StageProgram(stage.level, stage.space, edge_sets={edge_set: indices}))
        return grouped | super().edge_structures(others)

    def _is_row(self, name: str, side: int) -> bool:
        value = self._program[name]
        if value.op != "aten.select.int" or value.args[1:] != (0, side) or not isinstance(value.args[0], Ref):
            return False
        return self._program[value.args[0].name].op == "input"


def convert(inputs: dict[str, Tensor], directory: str | Path) -> StoredGraph:
    """Write a graph as a directory that :class:`StoredGraph` reads.

    Args:
        inputs: ``edge_index`` and the model's other inputs by argument name, one row per node or per edge.
        directory: Made if it does not exist.

    >>> import tempfile
    >>> graph = convert({"x": torch.eye(3), "edge_index": torch.tensor([[0, 1], [2, 1]])}, tempfile.mkdtemp())
    >>> graph.num_nodes, graph.num_edges, graph.indptr.tolist()
    (3, 2, [0, 0, 1, 2])
    """
    from core_kernels import Graph

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    edges = inputs["edge_index"]
    nodes = next((t.size(0) for n, t in inputs.items() if n == "x"), None)
    if nodes is None:
        raise EvaluationArgumentError(f"inputs has {sorted(inputs)}; expected 'x' with one row per node; pass it")
    graph = Graph.from_edge_index(edges, nodes)
    np.save(directory / "indptr.npy", graph.indptr.numpy())
    np.save(directory / "indices.npy", graph.indices.numpy())
    kinds: dict[str, list[str]] = {"node_inputs": [], "edge_inputs": []}
    for name, tensor in inputs.items():
        if name == "edge_index":
            continue
        per_edge = tensor.size(0) == edges.size(1) and ("edge" in name or tensor.size(0) != nodes)
        kinds["edge_inputs" if per_edge else "node_inputs"].append(name)
        ordered = tensor if not per_edge or graph.edge_ids is None else tensor[graph.edge_ids]
        np.save(directory / f"{name}.npy", ordered.contiguous().numpy())
    manifest = {"schema": _SCHEMA, "version": 1, "num_nodes": nodes, "num_edges": edges.size(1), **kinds}
    (directory / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return StoredGraph(directory)


class Workspace:
    """A directory for values between stages and for the progress of a run.

    Args:
        directory: Made if it does not exist.
        compiled: The plan that runs.
        stores: Rows of the inputs.
        counts: Numbers of nodes and edges.
        model: The model, whose parameters are part of what a resumed run must share.
        resume: Go on with what the directory holds.
    """

    def __init__(
        self,
        directory: Path,
        compiled: Compiled,
        counts: dict[str, int],
        model: nn.Module,
        resume: bool,
    ):
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._progress_file = directory / "progress.json"
        fingerprint = _fingerprint(compiled, counts, model)
        self._done: dict[str, int] = {}
        self.resumed = resume and self._progress_file.exists()
        if self.resumed:
            found = json.loads(self._progress_file.read_text())
            if found["fingerprint"] != fingerprint:
                raise EvaluationArgumentError(
                    f"{directory} holds a run of another model, graph or set of parameters ({found['fingerprint']}, "
                    f"now {fingerprint}); pass resume=False to start over, or another directory"
                )
            self._done = found["done"]
        self._fingerprint = fingerprint
        self._save()

    def new_rows(self, name: str, shape: list[int], dtype: torch.dtype) -> DiskRows:
        """Return the file of a value, kept from the resumed run if there is one."""
        path = self.directory / f"{name}.npy"
        if self.resumed and path.exists():
            return DiskRows(path, dtype)
        return DiskRows.create(path, shape, dtype)

    def discard(self, store: RowStore) -> None:
        """Delete a value that is not needed any more."""
        if isinstance(store, DiskRows) and store.path.parent == self.directory:
            store.close()
            store.path.unlink(missing_ok=True)

    def done_rows(self, place: int) -> int:
        """Return how many rows of a stage are computed."""
        return self._done.get(str(place), 0)

    def mark_done(self, place: int, rows: int) -> None:
        """Record that a stage's rows up to ``rows`` are written."""
        self._done[str(place)] = rows
        self._save()

    def finish(self, results: list[RowStore]) -> None:
        """Remove what a finished run leaves here: its record, and results that have been read."""
        for store in results:
            self.discard(store)
        self._progress_file.unlink(missing_ok=True)

    def _save(self) -> None:
        fresh = self._progress_file.with_suffix(".new")
        fresh.write_text(json.dumps({"fingerprint": self._fingerprint, "done": self._done}))
        os.replace(fresh, self._progress_file)


def _fingerprint(compiled: Compiled, counts: dict[str, int], model: nn.Module) -> str:
    digest = hashlib.sha256()
    for value in compiled.program.values.values():
        digest.update(f"{value.name} {value.op} {value.args}".encode())
    digest.update(
        json.dumps([sorted(compiled.stored), {n: c for n, c in sorted(counts.items()) if n[1] == "_"}]).encode()
    )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def open_output(
    out: Tensor | str | Path, compiled: Compiled, structure: StructureEvaluator, resume: bool
) -> dict[str, RowStore]:
    """Return the store of the only output, over a tensor or a file of the caller."""
    names = compiled.program.outputs
    if len(names) != 1:
        raise EvaluationArgumentError(f"out= was given, but the model returns {len(names)} tensors; leave out= away")
    value = compiled.program[names[0]]
    shape = [structure.count_of(size) for size in value.shape]
    if isinstance(out, Tensor):
        if list(out.shape) != shape or out.dtype != value.dtype:
            raise EvaluationArgumentError(
                f"out has shape {list(out.shape)} and {out.dtype}; expected {shape} and {value.dtype}; allocate it so"
            )
        return {names[0]: RamRows(out, value.type.row_dim)}
    path = Path(out)
    if value.type.row_dim != 0:
        raise EvaluationArgumentError("the result does not have its rows first; pass out=None")
    return {
        names[0]: DiskRows(path, value.dtype) if resume and path.exists() else DiskRows.create(path, shape, value.dtype)
    }
