"""The data of a training run: graph, features and who owns which node.

Plans hold numbers only and can be saved; the data they were made for is bound to them in memory, and a plan that comes
from a file is checked against the data it is given.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from core_kernels import Graph, PartitionBook, partition_graph
from gnn_parallel.cache import expected_reads
from gnn_parallel.errors import input_error
from gnn_parallel.loader import BatchSchedule, PairSchedule, Schedule

__all__ = ["TrainingData"]


@dataclass(frozen=True, eq=False)
class TrainingData:
    """A graph with features, and a partition of its nodes.

    Args:
        graph: Square graph.
        source: ``[num_nodes, width]``, a floating matrix in host memory or a memory map, or the path of one as
            ``.npy``, which is then mapped.
        partition: Owner of each node; it has one part per rank.
        seeds: int64 ids of the nodes trained on, or ``[2, num_pairs]`` for link prediction; ``None`` for all nodes.

    Raises:
        InputError: The three do not belong together.
    """

    graph: Graph
    source: Tensor | Path
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
        if self.seeds is not None:
            self._check_nodes(self.seeds)

    def _check_nodes(self, items: Tensor) -> None:
        if not isinstance(items, Tensor):
            raise input_error("seeds", type(items).__name__, "an int64 tensor", "pass torch.tensor(seeds)")
        if items.numel():
            lowest, highest, num_nodes = int(items.min()), int(items.max()), self.graph.num_nodes
            if lowest < 0 or highest >= num_nodes:
                wrong = lowest if lowest < 0 else highest
                raise input_error("seeds", wrong, f"node ids in [0, {num_nodes})", "pass ids of this graph")

    @functools.cached_property
    def features(self) -> Tensor:
        """The feature matrix, in memory or mapped."""
        if isinstance(self.source, Tensor):
            return self.source
        if not self.source.is_file():
            raise input_error("features", str(self.source), "an existing .npy file", "check the path")
        # Copy-on-write, since torch wants memory it may write to; nothing ever is.
        return torch.from_numpy(np.load(self.source, mmap_mode="c"))

    @functools.cached_property
    def train_ids(self) -> Tensor:
        """Nodes trained on, int64, distinct."""
        if self.seeds is None:
            return torch.arange(self.graph.num_nodes)
        return self.seeds if self.seeds.dim() == 1 else self.seeds.unique()

    @functools.cached_property
    def owner(self) -> Tensor:
        """Part that owns each node, int64 ``[num_nodes]``."""
        return _labels(self.partition)

    def owner_in_host(self, parts_per_rank: int) -> Tensor:
        """Return which rank of its host owns each node when a rank owns several neighbouring parts.

        With H hosts that hold all nodes each, a rank owns H parts.
        """
        return self.owner if parts_per_rank == 1 else self.owner // parts_per_rank

    @functools.lru_cache(maxsize=8)  # noqa: B019 - lives as long as the data, which is what is wanted
    def expected_reads(self, parts_per_rank: int, rank: int, fanouts: tuple[int, ...], strategy: str) -> Tensor:
        """Return how often a rank is expected to read each row, up to a factor, float64 ``[num_nodes]``."""
        owner = self.owner_in_host(parts_per_rank)
        kind = "dnp" if strategy == "dnp" else "gdp"  # all others read for the seeds they take
        return expected_reads(self.graph, owner, rank, self.train_ids, fanouts, kind)

    @functools.lru_cache(maxsize=2)  # noqa: B019
    def clusters(self, num_clusters: int, seed: int) -> Tensor:
        """Return the cluster of each node, the same on every rank."""
        return _labels(partition_graph(self.graph, num_clusters, "metis", seed=seed))

    def schedule(
        self,
        items: Tensor,
        batch_size: int,
        seed: int,
        *,
        shuffle: bool = True,
        num_clusters: int = 0,
        num_negatives: int = 1,
    ) -> Schedule:
        """Return the batches of some seeds or pairs."""
        self._check_nodes(items)
        if items.dim() == 2:
            return PairSchedule(items, batch_size, seed, shuffle, self.graph.num_nodes, num_negatives)
        clusters = self.clusters(num_clusters, seed) if num_clusters and shuffle else None
        return BatchSchedule(items, batch_size, seed, shuffle, clusters)


def _labels(partition: PartitionBook) -> Tensor:
    labels = torch.empty(partition.num_nodes, dtype=torch.int64)
    labels[partition.perm] = torch.repeat_interleave(torch.arange(partition.num_parts), partition.sizes)
    return labels
