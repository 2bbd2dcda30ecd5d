"""Graphs named on a command line: generated, or read from disk.

``rmat:SCALE``, ``grid:SIDE``, ``sbm:NODES``, ``movielens``, ``planetoid:DIR:NAME``, a folder of ``.npy`` files, or
an edge list. Data without features or labels get random ones: the exchange does not look at values.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from core_kernels import datasets
from core_kernels.datasets import GraphData
from core_kernels.graph import Graph
from gnn_comm.errors import GnnCommArgumentError

__all__ = ["grid", "load_graph_data"]

_NUM_CLASSES = 8


def load_graph_data(spec: str, num_features: int = 64, seed: int = 0) -> GraphData:
    """Make or read the graph that ``spec`` names, with features, labels and a training mask.

    Args:
        spec: See the module.
        num_features: Width of features where the source has none.
        seed: Of generated graphs, features and labels.

    Raises:
        GnnCommArgumentError: The name is not understood.

    >>> load_graph_data("grid:3").graph.num_edges
    24
    """
    kind, _, rest = spec.partition(":")
    if kind == "rmat" and rest.isdigit():
        scale = int(rest)
        data = datasets.rmat(2**scale, 16 * 2**scale, seed=seed)
    elif kind == "grid" and rest.isdigit():
        data = GraphData(grid(int(rest)), name=spec)
    elif kind == "sbm" and rest.isdigit():
        data = datasets.sbm(int(rest), _NUM_CLASSES, num_features=num_features, seed=seed)
    elif spec == "movielens":
        data = datasets.movielens()
    elif kind == "planetoid" and ":" in rest:
        data = datasets.planetoid(*rest.rsplit(":", 1))
    elif Path(spec).is_dir():
        data = datasets.npy_folder(spec)
    elif Path(spec).is_file():
        data = datasets.edge_list(spec)
    else:
        raise GnnCommArgumentError(
            f"graph {spec!r} is not known; expected rmat:SCALE, grid:SIDE, sbm:NODES, movielens, planetoid:DIR:NAME, "
            "a folder of .npy files or an edge list; check the path"
        )
    return _completed(data, num_features, seed)


def _completed(data: GraphData, num_features: int, seed: int) -> GraphData:
    generator = torch.Generator().manual_seed(seed)
    changes: dict = {}
    num_nodes = data.graph.num_nodes
    if data.features is None:
        changes["features"] = torch.randn(num_nodes, num_features, generator=generator)
    if data.labels is None:
        changes["labels"] = torch.randint(_NUM_CLASSES, (num_nodes,), generator=generator)
        changes["num_classes"] = _NUM_CLASSES
    if data.train_mask is None:
        labels = changes.get("labels", data.labels)
        changes["train_mask"], changes["val_mask"], changes["test_mask"] = datasets.split_masks(labels, seed)
    return replace(data, **changes) if changes else data


def grid(side: int) -> Graph:
    """Build a square grid with edges both ways."""
    try:
        vertex = torch.arange(side * side).view(side, side)
    except RuntimeError as error:
        raise GnnCommArgumentError(
            f"side={side} makes {side * side} nodes; expected a grid that fits into memory; choose a smaller one"
        ) from error
    right = torch.stack([vertex[:, :-1].flatten(), vertex[:, 1:].flatten()])
    down = torch.stack([vertex[:-1].flatten(), vertex[1:].flatten()])
    one_way = torch.cat([right, down], dim=1)
    return Graph.from_edge_index(torch.cat([one_way, one_way.flip(0)], dim=1), side * side)
