"""Which seeds or node pairs form a step, and which of them a rank takes.

A step's batch is global: ``batch_size`` items drawn without replacement by a random order that depends on seed and
epoch only. Ranks share it out, so the model sees the same batches under every number of ranks, every rank takes the
same number of steps, and a last batch that is too small still has its share for everybody, perhaps none. Items go to
the rank that owns them as far as equal shares allow.

Items are seeds (node classification) or pairs of nodes (link prediction); a pair brings its negatives, whose nodes are
drawn by the stateless generator, so that they too are the same under every number of ranks. With clusters, the random
order is one of clusters first: batches then share more neighbours, but are no longer drawn independently.

Source: cluster-ordered batches after 2PGraph; there, too, they change what a batch is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from core_kernels import random
from gnn_parallel.errors import input_error

__all__ = ["BatchSchedule", "PairSchedule", "Schedule", "Share", "share_seeds"]

_EPOCH_ORDER, _CLUSTER_ORDER, _NEGATIVES = -1, -2, -3
"""Layer keys in the stateless generator; sampling uses layers from 0 up."""


@dataclass(frozen=True)
class Share:
    """A rank's part of a batch.

    Attributes:
        seeds: int64, distinct nodes whose rows the model shall compute; may be empty.
        num_items: Seeds, or pairs with their negatives, for the weight of the loss.
        pairs: int64 ``[2, pairs]``, positions in ``seeds``, for link prediction.
        y: 1 for pairs, 0 for negatives.
    """

    seeds: Tensor
    num_items: int
    pairs: Tensor | None = None
    y: Tensor | None = None


@dataclass(frozen=True)
class Schedule(ABC):
    """The batches of every epoch.

    Attributes:
        items: int64, what is drawn: ``[num_seeds]`` node ids or ``[2, num_pairs]``.
        batch_size: Items per step, over all ranks.
        seed: Seed of the order.
        shuffle: Whether the order is random; else that of ``items``.
    """

    items: Tensor
    batch_size: int
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.batch_size, bool) or not isinstance(self.batch_size, int) or self.batch_size < 1:
            raise input_error(
                "batch_size", self.batch_size, "an integer of at least 1", "pass seeds per step, over all ranks"
            )
        if self.items.shape[-1:].numel() == 0 or self.items.shape[-1] == 0:
            raise input_error("seeds", "an empty tensor", "at least one node", "check the training mask")

    @property
    def num_items(self) -> int:
        """Number of items."""
        return self.items.shape[-1]

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps that use every item once."""
        return -(-self.num_items // self.batch_size)

    def positions(self, epoch: int) -> list[Tensor]:
        """Return the positions of the items of every step of an epoch."""
        order = self._order(epoch) if self.shuffle else torch.arange(self.num_items)
        return list(order.split(self.batch_size))

    def _order(self, epoch: int) -> Tensor:
        return random.permutation(self.num_items, self.seed, epoch, _EPOCH_ORDER)

    @abstractmethod
    def share(self, epoch: int, positions: Tensor, owner: Tensor, num_ranks: int) -> list[Share]:
        """Share a batch out over ranks."""


@dataclass(frozen=True)
class BatchSchedule(Schedule):
    """Batches of seeds.

    Attributes:
        clusters: int64 ``[num_nodes]``, cluster of each node; batches then come cluster by cluster.

    >>> schedule = BatchSchedule(torch.arange(5), batch_size=2, seed=0)
    >>> schedule.steps_per_epoch, sorted(torch.cat(schedule.batches(epoch=3)).tolist())
    (3, [0, 1, 2, 3, 4])
    """

    clusters: Tensor | None = None

    def __post_init__(self) -> None:
        if self.items.dim() != 1 or self.items.dtype != torch.int64:
            shown = (tuple(self.items.shape), self.items.dtype)
            raise input_error("seeds", shown, "int64 [num_seeds]", "pass node ids, mask.nonzero().view(-1) of a mask")
        super().__post_init__()
        seen = torch.zeros(int(self.items.max()) + 1, dtype=torch.bool)
        seen[self.items] = True
        num_distinct = int(seen.sum())
        if num_distinct != len(self.items):
            shown = f"{len(self.items)} ids of {num_distinct} nodes"
            raise input_error("seeds", shown, "distinct nodes", "pass seeds.unique()")

    def batches(self, epoch: int) -> list[Tensor]:
        """Return the seeds of every step of an epoch."""
        return [self.items[positions] for positions in self.positions(epoch)]

    def share(self, epoch: int, positions: Tensor, owner: Tensor, num_ranks: int) -> list[Share]:
        """Share a batch of seeds out over ranks."""
        return [Share(seeds, len(seeds)) for seeds in share_seeds(self.items[positions], owner, num_ranks)]

    def _order(self, epoch: int) -> Tensor:
        order = super()._order(epoch)
        if self.clusters is None:
            return order
        num_clusters = int(self.clusters.max()) + 1
        turn = torch.empty(num_clusters, dtype=torch.int64)
        turn[random.permutation(num_clusters, self.seed, epoch, _CLUSTER_ORDER)] = torch.arange(num_clusters)
        return order[torch.argsort(turn[self.clusters[self.items[order]]], stable=True)]


@dataclass(frozen=True)
class PairSchedule(Schedule):
    """Batches of linked pairs with negatives.

    Attributes:
        num_nodes: Negatives are drawn from these.
        num_negatives: Pairs with the same first node and a random second one, per pair.

    >>> schedule = PairSchedule(torch.tensor([[0, 1], [2, 3]]), batch_size=2, num_nodes=4)
    >>> [share] = schedule.share(0, torch.arange(2), torch.zeros(4, dtype=torch.int64), 1)
    >>> share.seeds[share.pairs][:, :2].tolist(), share.y.tolist()
    ([[0, 1], [2, 3]], [1.0, 1.0, 0.0, 0.0])
    """

    num_nodes: int = 0
    num_negatives: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.items.dim() != 2 or self.items.shape[0] != 2 or self.items.dtype != torch.int64:
            shown = (tuple(self.items.shape), self.items.dtype)
            raise input_error("seeds", shown, "int64 [2, num_pairs]", "pass graph.edge_index() or a part of it")
        if self.num_negatives < 1:
            raise input_error("num_negatives", self.num_negatives, "at least 1", "pass negatives per pair, such as 1")

    def share(self, epoch: int, positions: Tensor, owner: Tensor, num_ranks: int) -> list[Share]:
        """Share a batch of pairs out over ranks, with their negatives."""
        by_owner = positions[torch.argsort(owner[self.items[0, positions]], stable=True)]
        return [self._with_negatives(epoch, mine) for mine in by_owner.tensor_split(num_ranks)]

    def _with_negatives(self, epoch: int, positions: Tensor) -> Share:
        pairs, draws = self.items[:, positions], torch.arange(self.num_negatives)
        bits = random.random_bits(self.seed, epoch, _NEGATIVES, positions.view(-1, 1), draws)
        others = random.bounded(bits, self.num_nodes).view(-1)
        negatives = torch.stack([pairs[0].repeat_interleave(self.num_negatives), others])
        nodes = torch.cat([pairs, negatives], dim=1)
        seeds, local = torch.unique(nodes, return_inverse=True)
        y = torch.zeros(nodes.shape[1])
        y[: pairs.shape[1]] = 1.0
        return Share(seeds, nodes.shape[1], local, y)


def share_seeds(batch: Tensor, owner: Tensor, num_ranks: int) -> list[Tensor]:
    """Share a batch out in equal parts, seeds to their owner as far as that allows.

    Args:
        batch: int64 ``[seeds]``.
        owner: int64 ``[num_nodes]``, owner of each node.
        num_ranks: Number of ranks.

    Returns:
        The seeds of each rank; sizes differ by at most one and may be 0.

    >>> [part.tolist() for part in share_seeds(torch.tensor([0, 1, 2, 3]), torch.tensor([1, 0, 1, 0]), 2)]
    [[1, 3], [0, 2]]
    """
    by_owner = batch[torch.argsort(owner[batch], stable=True)]
    return list(by_owner.tensor_split(num_ranks))
