"""The data of a training run: graph, features and who owns which node.

Plans hold numbers only and can be saved; the data they were made for is bound to them in memory, and a plan that comes
from a file is checked against the data it is given.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from core_kernels import Graph, PartitionBook
from gnn_parallel.errors import input_error

__all__ = ["TrainingData"]


@dataclass(frozen=True, eq=False)
class TrainingData:
    """A graph with features, and a partition of its nodes.

    Args:
        graph: Square graph.
        features: ``[num_nodes, width]``, a floating matrix in host memory or a memory map.
        partition: Owner of each node; it has one part per rank.
        seeds: int64 ids of the nodes trained on; ``None`` for all.

    Raises:
        InputError: The three do not belong together.
    """

    graph: Graph
    features: Tensor
    partition: PartitionBook
    seeds: Tensor | None = None

    def __post_init__(self) -> None:
        num_nodes = self.graph.num_nodes
        if self.features.dim() != 2 or self.features.shape[0] != num_nodes:
            expected = f"a matrix with {num_nodes} rows, one per node of the graph"
            raise input_error(
                "features", tuple(self.features.shape), expected, "pass graph and features of the same data"
            )
        if not self.features.is_floating_point():
            raise input_error("features", self.features.dtype, "a floating type", "convert with features.float()")
        if self.features.requires_grad:
            raise input_error(
                "features", "a tensor that requires a gradient", "constant inputs", "pass features.detach()"
            )
        if self.partition.num_nodes != num_nodes:
            expected = f"a partition of {num_nodes} nodes"
            raise input_error("partition", f"{self.partition.num_nodes} nodes", expected, "partition this graph")

    @functools.cached_property
    def train_ids(self) -> Tensor:
        """Nodes trained on, int64."""
        return torch.arange(self.graph.num_nodes) if self.seeds is None else self.seeds

    @functools.cached_property
    def owner(self) -> Tensor:
        """Rank that owns each node, int64 ``[num_nodes]``."""
        owner = torch.empty(self.graph.num_nodes, dtype=torch.int64)
        owner[self.partition.perm] = torch.repeat_interleave(
            torch.arange(self.partition.num_parts), self.partition.sizes
        )
        return owner
