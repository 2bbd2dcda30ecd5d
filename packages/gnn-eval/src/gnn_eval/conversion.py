"""Writing a graph as a directory of files, once, in an order that keeps neighbours together if wanted.

Features too large for memory are given as the path of a ``.npy`` file and copied by windows of rows: a window of the
new order is read with coalesced reads and written in sequence. The edges of one destination keep their order, so sums
add in the order of the full forward whatever the order of the rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gnn_eval.disk_rows import DiskRows
from gnn_eval.errors import EvaluationArgumentError
from gnn_eval.order import cluster_order
from gnn_eval.row_stores import RamRows, RowStore
from gnn_eval.stored_graph import GRAPH_SCHEMA, StoredGraph

__all__ = ["convert", "copy_rows"]

_WINDOW_BYTES = 128 << 20


def convert(
    inputs: Mapping[str, Tensor | str | Path], directory: str | Path, order: str = "natural", cluster_rows: int = 4096
) -> StoredGraph:
    """Write a graph as a directory that :class:`gnn_eval.StoredGraph` reads.

    Args:
        inputs: ``edge_index`` and the model's other inputs by argument name, one row per node or per edge; a tensor,
            or the path of a ``.npy`` file, which is never read as a whole.
        directory: Made if it does not exist.
        order: ``"natural"``, or ``"cluster"`` to lay nodes of one neighbourhood next to each other. Ids given and
            results returned are the same either way.
        cluster_rows: Most nodes of a cluster.

    >>> import tempfile
    >>> graph = convert({"x": torch.eye(3), "edge_index": torch.tensor([[0, 1], [2, 1]])}, tempfile.mkdtemp())
    >>> graph.num_nodes, graph.num_edges, graph.indptr.tolist()
    (3, 2, [0, 0, 1, 2])
    """
    from core_kernels import Graph

    if order not in ("natural", "cluster"):
        raise EvaluationArgumentError(
            f"order={order!r} is not valid: expected 'natural' or 'cluster'; pass one of them"
        )
    edges = inputs.get("edge_index")
    if not isinstance(edges, Tensor) or "x" not in inputs:
        raise EvaluationArgumentError(
            f"inputs has {sorted(inputs)}; expected a tensor 'edge_index' and 'x' with one row per node; pass both"
        )
    stores = {name: _as_rows(given) for name, given in inputs.items() if name != "edge_index"}
    num_nodes, num_edges = stores["x"].num_rows, edges.size(1)
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    graph, nodes = Graph.from_edge_index(edges, num_nodes), None
    if order == "cluster":
        nodes = cluster_order(graph.indptr, graph.indices, cluster_rows)
        graph = graph.permute(nodes)
        np.save(directory / "perm.npy", nodes.numpy())
    else:
        (directory / "perm.npy").unlink(missing_ok=True)
    np.save(directory / "indptr.npy", graph.indptr.numpy())
    np.save(directory / "indices.npy", graph.indices.numpy())
    kinds: dict[str, list[str]] = {"node_inputs": [], "edge_inputs": []}
    for name, rows in stores.items():
        per_edge = rows.num_rows == num_edges and ("edge" in name or num_edges != num_nodes)
        if not per_edge and rows.num_rows != num_nodes:
            raise EvaluationArgumentError(
                f"{name} has {rows.num_rows} rows; expected {num_nodes}, one per node, or {num_edges}, one per edge; "
                "leave it out"
            )
        kinds["edge_inputs" if per_edge else "node_inputs"].append(name)
        copy_rows(rows, directory / f"{name}.npy", graph.edge_ids if per_edge else nodes)
    schema, version = GRAPH_SCHEMA
    halves = [name for name, rows in stores.items() if rows.read_range(0, 0).dtype == torch.bfloat16]
    counts = {"num_nodes": num_nodes, "num_edges": num_edges}
    manifest = {"schema": schema, "version": version, **counts, **kinds, "bfloat16": halves}
    (directory / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return StoredGraph(directory)


def copy_rows(rows: RowStore, path: Path, ids: Tensor | None = None, window_bytes: int = _WINDOW_BYTES) -> DiskRows:
    """Write the rows ``ids`` (all if ``None``) of a store to a new file, a window at a time.

    Args:
        rows: Where they are read.
        path: The file to write; not the one that is read.
        ids: int64, in the order wanted.
        window_bytes: Bytes of rows in memory at a time.
    """
    count = rows.num_rows if ids is None else ids.numel()
    first = rows.read_range(0, min(1, rows.num_rows))
    made = DiskRows.create(path, (count, *first.shape[1:]), first.dtype)
    step = max(window_bytes // max(made.row_bytes, 1), 1)
    for start in range(0, count, step):
        stop = min(start + step, count)
        made.write_range(start, rows.read_range(start, stop) if ids is None else rows.read_rows(ids[start:stop]))
    return made


def _as_rows(given: Tensor | str | Path) -> RowStore:
    return RamRows(given) if isinstance(given, Tensor) else DiskRows(Path(given))
