"""Which seeds form a step, and which of them a rank takes.

A step's batch is global: ``batch_size`` seeds drawn without replacement by a random order that depends on seed and
epoch only. Ranks share it out, so the model sees the same batches under every number of ranks, every rank takes the
same number of steps, and a last batch that is too small still has its share for everybody, perhaps none. Seeds go to
the rank that owns them as far as equal shares allow.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from core_kernels import random
from gnn_parallel.errors import input_error

__all__ = ["BatchSchedule", "share_seeds"]

_EPOCH_ORDER = -1
"""Layer key of the epoch's order in the stateless generator; sampling uses layers from 0 up."""


@dataclass(frozen=True)
class BatchSchedule:
    """The batches of every epoch.

    Attributes:
        seeds: int64 ``[num_seeds]``, distinct node ids to train on.
        batch_size: Seeds per step, over all ranks.
        seed: Seed of the order.
        shuffle: Whether the order is random; else ascending in ``seeds``.

    >>> schedule = BatchSchedule(torch.arange(5), batch_size=2, seed=0)
    >>> schedule.steps_per_epoch, sorted(torch.cat(schedule.batches(epoch=3)).tolist())
    (3, [0, 1, 2, 3, 4])
    """

    seeds: Tensor
    batch_size: int
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.batch_size, bool) or not isinstance(self.batch_size, int) or self.batch_size < 1:
            raise input_error(
                "batch_size", self.batch_size, "an integer of at least 1", "pass seeds per step, over all ranks"
            )
        if self.seeds.dim() != 1 or self.seeds.dtype != torch.int64:
            shown = (tuple(self.seeds.shape), self.seeds.dtype)
            raise input_error("seeds", shown, "int64 [num_seeds]", "pass node ids, mask.nonzero().view(-1) of a mask")
        if len(self.seeds) == 0:
            raise input_error("seeds", "an empty tensor", "at least one node", "check the training mask")

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps that use every seed once."""
        return -(-len(self.seeds) // self.batch_size)

    def batches(self, epoch: int) -> list[Tensor]:
        """Return the seeds of every step of an epoch."""
        if not self.shuffle:
            return list(self.seeds.split(self.batch_size))
        order = random.permutation(len(self.seeds), self.seed, epoch, _EPOCH_ORDER)
        return list(self.seeds[order].split(self.batch_size))


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
