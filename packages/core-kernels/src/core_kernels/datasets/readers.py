"""Readers of plain files: a folder of ``.npy`` arrays, and edge lists as CSV or Parquet."""

from __future__ import annotations

import gzip
import json
from itertools import chain
from pathlib import Path
from typing import IO

import numpy as np
import torch
from torch import Tensor

from core_kernels.datasets.data import GraphData
from core_kernels.errors import MissingDependencyError, argument_error
from core_kernels.graph import Graph

__all__ = ["edge_list", "npy_folder"]


def npy_folder(dir: str | Path, mmap: bool = False) -> GraphData:
    """Read a data set from a folder of ``.npy`` files, the layout of :mod:`core_kernels.datasets.data`.

    Args:
        dir: A folder with ``edge_index.npy`` or a saved graph in ``graph/``; features, labels and splits are optional.
        mmap: Leave features and graph on disk until they are read.

    Returns:
        The data; without ``meta.json`` the name is the folder's and the classes are counted from the labels.

    Raises:
        ArgumentError: The folder holds no graph, or arrays that do not fit each other.

    >>> npy_folder("missing")
    Traceback (most recent call last):
        ...
    core_kernels.errors.ArgumentError: dir='missing' is not valid: expected a folder with edge_index.npy or graph/; \
unpack the data set there
    """
    folder = Path(dir)
    meta_path = folder / "meta.json"
    meta = _read_meta(meta_path)
    features = _read_npy(folder / "node_feat.npy", mmap)
    labels = _read_labels(folder / "node_label.npy")
    if (folder / "graph" / "graph.json").is_file():
        graph = Graph.load(folder / "graph", mmap)
    elif (folder / "edge_index.npy").is_file():
        sized = next((array.shape[0] for array in (features, labels) if array is not None), None)
        graph = Graph.from_edge_index(_read_npy(folder / "edge_index.npy", mmap), meta.get("num_nodes", sized))
    else:
        raise argument_error("dir", str(dir), "a folder with edge_index.npy or graph/", "unpack the data set there")
    masks = [_read_mask(folder / f"{part}_idx.npy", graph.num_nodes) for part in ("train", "valid", "test")]
    num_classes = meta.get("num_classes", 0 if labels is None or not labels.numel() else int(labels.max()) + 1)
    name = meta.get("name", folder.name)
    return GraphData(graph, features, labels, *masks, name=name, num_classes=num_classes)


def edge_list(
    path: str | Path, num_nodes: int | None = None, source: str | None = None, destination: str | None = None
) -> GraphData:
    """Read a graph from an edge list.

    Args:
        path: ``.csv`` (commas), ``.tsv`` or ``.txt`` (white space), each also with ``.gz``, or ``.parquet``. Text may
            begin with a line of column names; lines that begin with ``#`` are skipped.
        num_nodes: Number of nodes; the largest id plus one when left out.
        source: Column of the sources; the first one when left out.
        destination: Column of the destinations; the second one when left out.

    Returns:
        The graph without features and labels.

    Raises:
        ArgumentError: No such file, column or suffix; ids that are not integers of at least 0.
        MissingDependencyError: Parquet without pyarrow.
    """
    path = Path(path)
    if not path.is_file():
        raise argument_error("path", str(path), "an existing file", "check the path")
    suffix = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    if suffix == ".parquet":
        columns = _read_parquet(path, source, destination)
    elif suffix in (".csv", ".tsv", ".txt"):
        columns = _read_text(path, "," if suffix == ".csv" else None, source, destination)
    else:
        raise argument_error("path", str(path), "a file ending in .csv, .tsv, .txt or .parquet", "convert or rename it")
    return GraphData(Graph.from_edge_index(columns, num_nodes), name=path.name.split(".")[0])


def _read_npy(path: Path, mmap: bool) -> Tensor | None:
    if not path.is_file():
        return None
    mapped = mmap and path.stat().st_size > 1024  # an empty file cannot be mapped
    try:
        return torch.from_numpy(np.load(path, mmap_mode="c" if mapped else None, allow_pickle=False))
    except (EOFError, TypeError, ValueError) as error:
        raise argument_error("path", str(path), f"a whole .npy file of numbers ({error})", "save it again") from None


def _read_meta(path: Path) -> dict:
    if not path.is_file():
        return {}
    try:
        meta = json.loads(path.read_text())
    except ValueError as error:
        raise argument_error("path", str(path), f"JSON ({error})", "write it again or remove it") from None
    if not isinstance(meta, dict):
        raise argument_error("path", str(path), f"a JSON object, found {meta!r}", "write it again or remove it")
    return meta


def _read_labels(path: Path) -> Tensor | None:
    labels = _read_npy(path, mmap=False)
    if labels is None:
        return None
    if labels.dim() == 2 and labels.shape[1] == 1:
        labels = labels.squeeze(1)
    if labels.dim() != 1:
        raise argument_error(
            path.name, tuple(labels.shape), "one class per node, shape (num_nodes,)", "keep one task of the data set"
        )
    if labels.is_floating_point():
        labels = labels.nan_to_num(-1.0)
    return labels.long().clamp(min=-1)


def _read_mask(path: Path, num_nodes: int) -> Tensor | None:
    ids = _read_npy(path, mmap=False)
    if ids is None:
        return None
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < num_nodes:
        bad = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
        raise argument_error(path.name, bad, f"node ids in [0, {num_nodes})", "use the split of this graph")
    mask = torch.zeros(num_nodes, dtype=torch.bool)
    mask[ids.long()] = True
    return mask


def _find_columns(path: Path, names: list[str], source: str | None, destination: str | None) -> tuple[int, int]:
    """Return the positions of the two columns."""
    positions = []
    for argument, wanted, default in (("source", source, 0), ("destination", destination, 1)):
        if wanted is not None and wanted not in names:
            raise argument_error(argument, wanted, f"a column of {path.name}: {names}", "pass one of these names")
        positions.append(default if wanted is None else names.index(wanted))
    if max(positions) >= len(names):
        raise argument_error("path", str(path), f"two columns, found {names}", "store source and destination")
    return positions[0], positions[1]


def _read_text(path: Path, delimiter: str | None, source: str | None, destination: str | None) -> tuple[Tensor, ...]:
    with _open_text(path) as lines:
        first = next((line for line in lines if line.strip() and not line.startswith("#")), "")
    names = [name.strip().strip('"') for name in first.strip().split(delimiter)]
    has_names = not any(_is_number(name) for name in names)
    if not first:
        return torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
    columns = _find_columns(path, names, source, destination)
    with _open_text(path) as lines:
        rows = (line for line in lines if line.strip() and not line.startswith("#"))
        first = next(rows)
        rows = rows if has_names else chain([first], rows)
        try:
            table = np.loadtxt(rows, dtype=np.int64, delimiter=delimiter, usecols=columns, ndmin=2, unpack=True)
        except ValueError as error:
            raise argument_error("path", str(path), f"integer ids ({error})", "number the nodes from 0 on") from None
    return tuple(torch.from_numpy(np.ascontiguousarray(column)) for column in table)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _open_text(path: Path) -> IO[str]:
    return gzip.open(path, "rt") if path.suffix == ".gz" else path.open()


def _read_parquet(path: Path, source: str | None, destination: str | None) -> tuple[Tensor, ...]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise MissingDependencyError(
            f"{path} is a Parquet file and pyarrow is not installed; "
            'run pip install "core-kernels[data]", or store the edges as CSV'
        ) from None
    names = parquet.read_schema(path).names
    chosen = [names[position] for position in _find_columns(path, names, source, destination)]
    table = parquet.read_table(path, columns=chosen)
    columns = [table.column(name).to_numpy() for name in chosen]
    for name, column in zip(chosen, columns, strict=True):
        if column.dtype.kind not in "iu":
            raise argument_error(
                "path", str(path), f"integer ids, {name} is {column.dtype}", "number the nodes from 0 on"
            )
    return tuple(torch.from_numpy(column.astype(np.int64)) for column in columns)
