"""Data that every worker count reads exactly once.

The order of an epoch is a permutation drawn from the seed and the epoch's number, the same on every worker. The job's
cursor counts the samples of committed steps; a global batch is the run of samples after the cursor, split evenly over
the present workers. So whatever happens to workers, samples before the cursor are done once and those after it not yet.
The last batch of an epoch may be smaller: it is weighted by its samples, never padded.

When a batch has fewer samples than there are workers, those without a sample compute one with weight 0, so that all run
the same code; it does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from typing import Any

import torch

from elastic_train import session
from elastic_train.errors import input_error
from elastic_train.job import Job

__all__ = ["ElasticDataLoader"]


class ElasticDataLoader:
    """Batches of this worker, for as long as the job runs.

    Args:
        dataset: Map-style: has ``__len__`` and ``__getitem__``.
        global_batch_size: Samples of one step over all workers; constant whatever their number.
        num_epochs: Epochs to run; the loop ends after them.
        seed: Seed of the permutations.
        shuffle: ``False`` reads in order.
        collate: Makes a batch of a list of samples.
        job: The job; ``None`` takes the one of this process.
        warm_up: Does a forward and a backward pass on a batch; called once before this worker joins, so that what a
            first pass costs holds nobody up. It leaves no trace.

    Attributes:
        indices: Samples of the present global batch that this worker counts, up to this pass.
    """

    def __init__(
        self,
        dataset: Any,
        global_batch_size: int,
        num_epochs: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        collate: Callable[[list[Any]], Any] | None = None,
        job: Job | None = None,
        warm_up: Callable[[Any], object] | None = None,
    ):
        if not isinstance(dataset, Sized) or len(dataset) == 0:
            raise input_error("dataset", dataset, "a map-style dataset with samples", "give it __len__")
        if global_batch_size < 1:
            raise input_error("global_batch_size", global_batch_size, "at least 1", "pass the samples of one step")
        self._dataset: Any = dataset
        self._job, self._num_epochs = job or session.current_job(), num_epochs
        self._global_batch_size, self._seed, self._shuffle = global_batch_size, seed, shuffle
        self._collate = collate or torch.utils.data.default_collate
        self._warm_up = warm_up
        self.indices: list[int] = []

    def __iter__(self) -> Iterator[Any]:
        if self._warm_up is not None:
            share = max(self._global_batch_size // self._job.max_shares, 1)
            samples = [self._dataset[i % len(self._dataset)] for i in range(share)]
            self._job.warm_up(self._warm_up, self._collate(samples))
        self._job.join()
        order, drawn = self.order_of(self._job.epoch), self._job.epoch
        while not self._job.is_leaving:
            job = self._job
            if job.cursor >= len(order):
                job.epoch, job.cursor = job.epoch + 1, 0
            if job.epoch >= self._num_epochs:
                break
            if drawn != job.epoch:
                order, drawn = self.order_of(job.epoch), job.epoch
            batch = order[job.cursor : job.cursor + self._global_batch_size]
            yield self._take_share(batch)
        if not self._job.is_leaving:
            self._job.finish()

    def order_of(self, epoch: int) -> list[int]:
        """Return the order of the samples in an epoch."""
        if not self._shuffle:
            return list(range(len(self._dataset)))
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
        return torch.randperm(len(self._dataset), generator=generator).tolist()

    def _take_share(self, batch: list[int]) -> Any:
        share, num_shares, is_first = self._job.next_share()
        begin = len(batch) * share // num_shares
        end = len(batch) * (share + 1) // num_shares
        self.indices = ([] if is_first else self.indices) + batch[begin:end]
        self._job.set_share(end - begin, len(batch))
        return self._collate([self._dataset[i] for i in batch[begin:end] or batch[:1]])
