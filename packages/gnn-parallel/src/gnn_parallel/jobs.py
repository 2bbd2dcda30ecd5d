"""What ``gnn-parallel`` trains: a data set with labels, a model, and all settings of a run in one small object."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core_kernels import Graph, PartitionBook, datasets, random
from core_kernels.comm import Group
from core_kernels.datasets import GraphData
from core_kernels.interconnect import Interconnect
from gnn_parallel.errors import input_error
from gnn_parallel.models import SampledGNN, make_model
from gnn_parallel.plan import Plan
from gnn_parallel.planner import choose_strategy

__all__ = ["LabelledGraph", "TrainJob", "load_dataset", "make_plan"]

_LINK_SPLIT = -4
"""Layer key of the split of edges in the stateless generator."""


@dataclass(frozen=True, eq=False)
class LabelledGraph:
    """A graph with features, labels and a split; what training needs of a data set, nothing missing.

    Attributes:
        name: Of the data set.
        graph: Square graph.
        features: ``[num_nodes, num_features]``.
        labels: int64 ``[num_nodes]``.
        num_classes: Number of classes.
        train_ids: int64 node ids, or pairs, to train on.
        val_ids: To validate on.
        test_ids: To test on.
    """

    name: str
    graph: Graph
    features: Tensor
    labels: Tensor
    num_classes: int
    train_ids: Tensor
    val_ids: Tensor
    test_ids: Tensor

    @property
    def num_features(self) -> int:
        """Columns of a feature row."""
        return self.features.shape[1]

    @property
    def train_mask(self) -> Tensor:
        """Boolean ``[num_nodes]`` of the nodes trained on."""
        mask = torch.zeros(self.graph.num_nodes, dtype=torch.bool)
        mask[self.train_ids.reshape(-1)] = True
        return mask

    @classmethod
    def of(cls, data: GraphData, dtype: torch.dtype = torch.float32) -> LabelledGraph:
        """Take a data set that has everything.

        Args:
            data: The data set.
            dtype: Type of the features.

        Raises:
            InputError: Features, labels or a mask are missing.
        """
        parts = (data.features, data.labels, data.train_mask, data.val_mask, data.test_mask)
        names = ("features", "labels", "train_mask", "val_mask", "test_mask")
        missing = [name for name, part in zip(names, parts, strict=True) if part is None]
        features, labels, *masks = (part for part in parts if part is not None)
        if missing:
            raise input_error(
                "dataset", data.name, f"{', '.join(missing)} as well", "add the missing files to the folder"
            )
        ids = [mask.nonzero().view(-1) for mask in masks]
        return cls(data.name, data.graph, features.to(dtype), labels, data.num_classes, *ids)

    def as_links(self, share: float = 0.1, seed: int = 0) -> LabelledGraph:
        """Return the task of predicting links: the ids become pairs ``[2, num_pairs]``, and the graph loses those of
        validation and test, in both directions.

        Args:
            share: Share of linked pairs for validation, and again for test.
            seed: Of the split.
        """
        edges, num_nodes = self.graph.edge_index().long(), self.graph.num_nodes
        keys, link = torch.unique(edges.min(0).values * num_nodes + edges.max(0).values, return_inverse=True)
        order = random.permutation(len(keys), seed, 0, _LINK_SPLIT)
        num_held = max(1, round(share * len(keys)))
        held = torch.zeros(len(keys), dtype=torch.bool)
        held[order[: 2 * num_held]] = True
        pairs = torch.stack([keys // num_nodes, keys % num_nodes])[:, order]
        kept = edges[:, ~held[link]]
        graph = Graph.from_edge_index(kept, num_nodes)
        ids = (kept, pairs[:, :num_held], pairs[:, num_held : 2 * num_held])
        return LabelledGraph(self.name, graph, self.features, self.labels, self.num_classes, *ids)


@dataclass(frozen=True)
class TrainJob:
    """What to train, on what, for how long; small enough to send to every rank.

    Attributes:
        dataset: ``"movielens"``, ``"sbm"`` or a folder of ``.npy`` files.
        task: ``"nodes"`` (classification) or ``"links"`` (prediction).
        model: Name of a model.
        hidden: Columns between layers.
        fanouts: Neighbours per layer, the hop at the seeds first.
        batch_size: Seeds per step over all ranks.
        epochs: Epochs.
        strategy: ``"auto"`` or a strategy.
        learning_rate: Of Adam.
        dropout: Between layers.
        clip: Largest norm of the gradients; 0 for any.
        heads: Of attention layers.
        seed: Of weights, batches and sampling.
        placement: Where features are.
        cache: Copies of other ranks' rows when sharded, or rows in memory over a disk.
        reuse: Keep sharded rows of a batch for the next.
        num_clusters: Clusters whose order batches follow; 0 for independent batches.
        num_hosts: Hosts that work data-parallel; ``None`` lets the planner choose.
        is_mixed: Compute and send activations in bfloat16.
        dtype: Type of features and weights.
        interconnect: A saved interconnect file; measured when left out.
        num_trials: Most steps of each strategy to try before the choice.
        validation: ``"full"`` or ``"sampled"`` neighbourhoods.
        replan_every: Epochs after which to plan again; 0 for never.
        log: File to append one JSON line per epoch to.
        save: Checkpoint to write at the end.
        resume: Checkpoint to start from.
        is_shown: Whether rank 0 prints.
    """

    dataset: str = "movielens"
    task: str = "nodes"
    model: str = "sage"
    hidden: int = 64
    fanouts: tuple[int, ...] = (10, 10)
    batch_size: int = 512
    epochs: int = 5
    strategy: str = "auto"
    learning_rate: float = 0.003
    dropout: float = 0.5
    clip: float = 0.0
    heads: int = 4
    seed: int = 0
    placement: str = "replicated"
    cache: str = "0"
    reuse: bool = False
    num_clusters: int = 0
    num_hosts: int | None = None
    is_mixed: bool = False
    dtype: str = "float32"
    interconnect: str = ""
    num_trials: int = 32
    validation: str = "full"
    replan_every: int = 0
    log: str = ""
    save: str = ""
    resume: str = ""
    is_shown: bool = True

    def load(self) -> LabelledGraph:
        """Load the data."""
        return load_dataset(self.dataset, self.dtype, self.task)

    def make_model(self, data: LabelledGraph) -> SampledGNN:
        """Build the model, with equal weights on every rank."""
        return make_model(
            self.model,
            data.num_features,
            self.hidden,
            self.hidden if self.task == "links" else data.num_classes,
            len(self.fanouts),
            heads=self.heads,
            dropout=self.dropout,
            seed=self.seed,
            dtype=getattr(torch, self.dtype),
        )


def load_dataset(name: str, dtype: str = "float32", task: str = "nodes") -> LabelledGraph:
    """Return a data set with features and labels.

    Args:
        name: ``"movielens"``, ``"sbm"`` (a generated graph with planted classes) or a folder of ``.npy`` files.
        dtype: ``"float32"`` or ``"float64"``, the type of the features.
        task: ``"nodes"`` or ``"links"``.

    Raises:
        InputError: An unknown name or task, or data without features, labels or masks.
    """
    if task not in ("nodes", "links"):
        raise input_error("task", task, "nodes or links", "correct the spelling")
    if name == "movielens":
        data = datasets.movielens()
    elif name == "sbm":
        data = datasets.sbm(20_000, num_classes=20, num_features=64)
    elif Path(name).is_dir():
        data = datasets.npy_folder(name)
    else:
        raise input_error("dataset", name, "movielens, sbm or an existing folder", "correct the spelling or the path")
    labelled = LabelledGraph.of(data, getattr(torch, dtype))
    return labelled.as_links() if task == "links" else labelled


def make_plan(
    job: TrainJob, data: LabelledGraph, partition: PartitionBook, group: Group | None, **options: Any
) -> Plan:
    """Plan a job; see :func:`gnn_parallel.plan`."""
    if job.interconnect:
        options = {"interconnect": Interconnect.load(job.interconnect)} | options
    arguments: dict[str, Any] = {
        "features": _feature_file(job) if job.placement == "disk" else data.features,
        "partition": partition,
        "fanouts": job.fanouts,
        "batch_size": job.batch_size,
        "seeds": data.train_ids,
        "cache": job.cache,
        "placement": job.placement,
        "strategy": job.strategy,
        "num_hosts": job.num_hosts,
        "reuse": job.reuse,
        "num_clusters": job.num_clusters,
        "is_mixed": job.is_mixed,
        "seed": job.seed,
        "num_trials": job.num_trials,
        "num_epochs": max(1, job.epochs),
        "group": group,
    }
    return choose_strategy(data.graph, job.make_model(data), **(arguments | options))


def _feature_file(job: TrainJob) -> Path:
    path = Path(job.dataset) / "node_feat.npy"
    if not path.is_file():
        expected = "a folder with node_feat.npy, whose rows are read from disk"
        raise input_error("dataset", job.dataset, expected, "save the data with GraphData.save")
    return path
