"""Reader of the Planetoid files ``ind.<name>.*`` (Cora, CiteSeer, PubMed) with their public split.

The files are Python 2 pickles, and unpickling can run any code. They are read by an unpickler that knows exactly the
handful of types they contain, array, dtype, sparse matrix and dictionary of lists, and refuses everything else.

Source: Z. Yang, W. Cohen, R. Salakhutdinov, "Revisiting Semi-Supervised Learning with Graph Embeddings", ICML 2016.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import scipy.sparse
import torch

from core_kernels.datasets.data import GraphData
from core_kernels.errors import ArgumentError, argument_error
from core_kernels.graph import Graph

__all__ = ["planetoid"]

_NUM_VALIDATION_NODES = 500


def planetoid(dir: str | Path, name: str) -> GraphData:
    """Read a Planetoid data set.

    Args:
        dir: Folder with the eight files ``ind.<name>.{x,y,tx,ty,allx,ally,graph,test.index}``.
        name: ``"cora"``, ``"citeseer"`` or ``"pubmed"``.

    Returns:
        The graph, symmetric, without self-loops and duplicates; features as published; the public split. Nodes that
        the files leave without features (CiteSeer has 15) get zeros and no label.

    Raises:
        ArgumentError: A file is missing, or holds anything but arrays and lists.
    """
    folder = Path(dir)
    known = _load(folder, name, "allx")
    tested = _load(folder, name, "tx")
    known_labels, tested_labels = _load(folder, name, "ally"), _load(folder, name, "ty")
    num_train = _load(folder, name, "y").shape[0]
    neighbors = _load(folder, name, "graph")
    test_ids = np.loadtxt(_existing(folder, name, "test.index"), dtype=np.int64, ndmin=1)

    num_nodes = max(len(neighbors), int(test_ids.max()) + 1)
    features = np.zeros((num_nodes, known.shape[1]), np.float32)
    labels = np.full(num_nodes, -1, np.int64)
    for rows, matrix, one_hot in (
        (np.arange(known.shape[0]), known, known_labels),
        (test_ids, tested, tested_labels),
    ):
        features[rows] = matrix.toarray()
        labels[rows] = np.where(one_hot.any(axis=1), one_hot.argmax(axis=1), -1)

    sources = np.repeat(np.array(list(neighbors), np.int64), [len(ends) for ends in neighbors.values()])
    destinations = np.array([end for ends in neighbors.values() for end in ends], np.int64)
    joined = sources != destinations
    graph = Graph.from_edge_index((sources[joined], destinations[joined]), num_nodes).symmetrized()

    masks = torch.zeros(3, num_nodes, dtype=torch.bool)
    masks[0, :num_train] = True
    masks[1, num_train : num_train + _NUM_VALIDATION_NODES] = True
    masks[2, torch.from_numpy(test_ids)] = True
    features, labels = torch.from_numpy(features), torch.from_numpy(labels)
    return GraphData(graph, features, labels, *masks, name=name, num_classes=known_labels.shape[1])


def _existing(folder: Path, name: str, part: str) -> Path:
    path = folder / f"ind.{name}.{part}"
    if not path.is_file():
        raise argument_error("dir", str(folder), f"a folder with {path.name}", "copy the Planetoid files there")
    return path


def _load(folder: Path, name: str, part: str) -> Any:
    path = _existing(folder, name, part)
    with path.open("rb") as file:
        try:
            value = _PlainUnpickler(file, encoding="latin1").load()
        except pickle.UnpicklingError as error:
            raise ArgumentError(
                f"{path} cannot be read: {error}; expected arrays, sparse matrices and lists; fetch the file again"
            ) from None
    return value.to_scipy() if isinstance(value, _SparseRows) else value


class _SparseRows:
    """Stands for a pickled ``csr_matrix``: collects its attributes, runs none of its code."""

    def to_scipy(self) -> scipy.sparse.csr_array:
        """Return the matrix, built anew from its three arrays."""
        fields = self.__dict__
        return scipy.sparse.csr_array((fields["data"], fields["indices"], fields["indptr"]), shape=fields["_shape"])


def _encode_latin1(text: str, encoding: str) -> bytes:
    """Return the bytes that Python 3 stored as text, its only use in such files."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it asks for the codec {encoding}, which is not admitted")
    return text.encode("latin1")


class _PlainUnpickler(pickle.Unpickler):
    """Admits the types of the Planetoid files by name and nothing else."""

    _reconstruct = np.empty(0).__reduce__()[0]
    _admitted: ClassVar = {
        ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
        ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
        ("scipy.sparse.csr", "csr_matrix"): _SparseRows,
        ("scipy.sparse._csr", "csr_matrix"): _SparseRows,
        ("collections", "defaultdict"): defaultdict,
        ("_codecs", "encode"): _encode_latin1,
        ("__builtin__", "list"): list,
        ("builtins", "list"): list,
    }

    def find_class(self, module: str, name: str) -> Any:
        """Return an admitted type."""
        if (module, name) not in self._admitted:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not admitted")
        return self._admitted[module, name]
