"""A graph with what is known of its nodes, in memory and as a folder of ``.npy`` files.

The folder has the names of an unpacked OGB node-property data set, so that :func:`~core_kernels.datasets.npy_folder`
reads both::

    graph/                      a saved Graph; or instead of it edge_index.npy [2, num_edges]
    node_feat.npy               float32 [num_nodes, num_features]            optional
    node_label.npy              int64 [num_nodes] or [num_nodes, 1]          optional, negative or NaN = unlabelled
    train_idx.npy valid_idx.npy test_idx.npy                                 optional, node ids
    meta.json                   name, num_nodes, num_classes                 optional
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from core_kernels import random
from core_kernels.errors import argument_error
from core_kernels.graph import Graph

__all__ = ["GraphData", "split_masks"]

_SPLIT_LAYER = 0x5911
"""Keeps the random numbers of a split apart from other uses of the same seed."""


@dataclass(frozen=True, eq=False)
class GraphData:
    """A graph, node features, labels and the split.

    Args:
        graph: A square graph.
        features: [num_nodes, num_features], or ``None``.
        labels: int64 [num_nodes], -1 = unlabelled, or ``None``.
        train_mask: Boolean [num_nodes], or ``None``.
        val_mask: Boolean [num_nodes], or ``None``.
        test_mask: Boolean [num_nodes], or ``None``.
        name: Name of the data set.
        num_classes: Number of classes; 0 without labels.

    Raises:
        ArgumentError: A tensor has another number of rows than the graph, or a label is no class.

    >>> data = GraphData(Graph.from_edge_index(torch.tensor([[0], [1]]), 2), torch.zeros(2, 3))
    >>> data
    GraphData('graph', num_nodes=2, num_edges=1, num_features=3, num_classes=0)
    """

    graph: Graph
    features: Tensor | None = None
    labels: Tensor | None = None
    train_mask: Tensor | None = None
    val_mask: Tensor | None = None
    test_mask: Tensor | None = None
    name: str = "graph"
    num_classes: int = 0

    def __post_init__(self):
        for name in ("features", "labels", "train_mask", "val_mask", "test_mask"):
            tensor = getattr(self, name)
            if tensor is not None and (tensor.dim() == 0 or tensor.shape[0] != self.graph.num_nodes):
                expected = f"({self.graph.num_nodes}, ...), one row per node"
                raise argument_error(f"{name}.shape", tuple(tensor.shape), expected, "pass rows in the graph's order")
        if self.labels is not None and self.labels.numel() and not -1 <= int(self.labels.max()) < self.num_classes:
            raise argument_error(
                "labels", int(self.labels.max()), f"classes in [-1, {self.num_classes})", "pass num_classes"
            )

    @property
    def num_features(self) -> int:
        """Width of the features; 0 without."""
        return 0 if self.features is None else self.features.shape[1]

    def to(self, device: torch.device | str) -> GraphData:
        """Return the data on ``device``."""
        names = ("features", "labels", "train_mask", "val_mask", "test_mask")
        tensors = [getattr(self, name) for name in names]
        moved = [None if tensor is None else tensor.to(device) for tensor in tensors]
        return GraphData(self.graph.to(device), *moved, name=self.name, num_classes=self.num_classes)

    def save(self, dir: str | Path) -> None:
        """Write the data to a folder that :func:`~core_kernels.datasets.npy_folder` reads; ``meta.json`` comes last."""
        folder = Path(dir)
        self.graph.save(folder / "graph")
        ids = {
            f"{part}_idx": None if mask is None else mask.nonzero().squeeze(1)
            for part, mask in (("train", self.train_mask), ("valid", self.val_mask), ("test", self.test_mask))
        }
        for name, tensor in {"node_feat": self.features, "node_label": self.labels, **ids}.items():
            if tensor is not None:
                np.save(folder / f"{name}.npy", tensor.cpu().numpy(), allow_pickle=False)
        meta = {"name": self.name, "num_nodes": self.graph.num_nodes, "num_classes": self.num_classes}
        (folder / "meta.json").write_text(json.dumps(meta) + "\n")

    def __repr__(self) -> str:
        sizes = f"num_nodes={self.graph.num_nodes}, num_edges={self.graph.num_edges}"
        return f"GraphData({self.name!r}, {sizes}, num_features={self.num_features}, num_classes={self.num_classes})"


def split_masks(labels: Tensor, seed: int = 0, shares: tuple[float, float] = (0.6, 0.2)) -> tuple[Tensor, ...]:
    """Split the labelled nodes at random into training, validation and test masks.

    Args:
        labels: int64 [num_nodes], negative = unlabelled, in no part.
        seed: Seed of the split.
        shares: Shares of training and validation; the test part gets the rest.

    Returns:
        Three boolean masks [num_nodes].

    Raises:
        ArgumentError: Shares that are negative or sum to more than 1.

    >>> [int(mask.sum()) for mask in split_masks(torch.tensor([0, 1, -1, 0, 1, 1]))]
    [3, 1, 1]
    """
    if min(shares) < 0 or sum(shares) > 1:
        raise argument_error("shares", shares, "shares of at least 0 that sum to at most 1", "pass (0.6, 0.2)")
    labelled = (labels >= 0).nonzero().squeeze(1)
    order = labelled[random.permutation(labelled.shape[0], seed, layer=_SPLIT_LAYER)]
    ends = [round(share * order.shape[0]) for share in (shares[0], sum(shares))]
    masks = torch.zeros(3, labels.shape[0], dtype=torch.bool)
    for mask, ids in zip(masks, order.tensor_split(ends), strict=True):
        mask[ids] = True
    return tuple(masks)
