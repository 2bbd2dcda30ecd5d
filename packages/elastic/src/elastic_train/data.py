"""Data that every worker count reads exactly once.

The order of an epoch is a permutation drawn from the seed and the epoch's number, the same on every worker. The job's
cursor counts the samples of committed steps; a global batch is the run of samples after the cursor, split evenly over
the present workers. So whatever happens to workers, samples before the cursor are done once and those after it not yet.
The last batch of an epoch may be smaller: it is weighted by its samples, never padded.

Files and streams, which have no numbered samples, come through a queue of shards, see :mod:`elastic_train.shards`.

When a batch has fewer samples than there are workers, those without a sample compute one with weight 0, so that all run
the same code; it does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from typing import Any, Protocol

import torch

from elastic_train import session
from elastic_train.errors import StateMismatchError, input_error
from elastic_train.job import Job
from elastic_train.parts import Part
from elastic_train.shards.feed import ShardFeed
from elastic_train.shards.queue import ShardQueue

__all__ = ["ElasticDataLoader"]


class _Source(Protocol):
    """Where samples come from; ``next_pass`` gives samples, how many of them count, and those of the global batch."""

    def next_pass(self) -> tuple[list[Any], int, int] | None: ...

    def peek(self, count: int) -> list[Any]: ...

    def commit(self) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class ElasticDataLoader(Part):
    """Batches of this worker, for as long as the job runs.

    Args:
        dataset: Map-style, with ``__len__`` and ``__getitem__``; or a :class:`~elastic_train.ShardQueue`.
        global_batch_size: Samples of one step over all workers, whatever their number; only a policy changes it, see
            :mod:`elastic_train.adaptation`.
        num_epochs: Epochs to run; the loop ends after them.
        seed: Seed of the permutations; a shard queue has its own.
        shuffle: ``False`` reads in order; a shard queue has its own.
        collate: Makes a batch of a list of samples.
        job: The job; ``None`` takes the one of this process.
        warm_up: Does a forward and a backward pass on a batch; called once before this worker joins, so that what a
            first pass costs holds nobody up. It leaves no trace.

    Attributes:
        indices: Samples of the present global batch that this worker counts, up to this pass; of a map-style dataset.
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
        is_queue = isinstance(dataset, ShardQueue)
        if not is_queue and (
            not isinstance(dataset, Sized) or len(dataset) == 0 or not hasattr(dataset, "__getitem__")
        ):
            remedy = "give it __len__ and __getitem__, or pass a ShardQueue for files and iterables"
            raise input_error("dataset", dataset, "a map-style dataset with samples, or a ShardQueue", remedy)
        if global_batch_size < 1:
            raise input_error("global_batch_size", global_batch_size, "at least 1", "pass the samples of one step")
        if num_epochs < 1:
            raise input_error("num_epochs", num_epochs, "at least 1", "pass the number of passes over the data")
        self._job = job or session.current_job()
        self._job.global_batch_size = global_batch_size
        self._collate = collate or torch.utils.data.default_collate
        self._warm_up = warm_up
        self.indices: list[int] = []
        self._source: _Source
        if isinstance(dataset, ShardQueue):
            self._source = ShardFeed(dataset, self._job, num_epochs)
            self._job.agent.describe(data=dataset.delivery)
        else:
            self._source = _Permutation(dataset, self._job, num_epochs, seed, shuffle, self)
            self._job.agent.describe(data="exactly once")
        self._job.add_part("data", self)

    def __iter__(self) -> Iterator[Any]:
        if self._warm_up is not None:
            samples = self._source.peek(max(self._job.global_batch_size // self._job.max_shares, 1))
            if samples:
                self._job.warm_up(self._warm_up, self._collate(samples))
        self._job.join()
        while not self._job.is_leaving:
            self._job.check_voted()
            found = self._source.next_pass()
            if found is None:
                break
            samples, num_samples, num_global = found
            self._job.set_share(num_samples, num_global)
            yield self._collate(samples)
        if not self._job.is_leaving:
            self._job.finish()

    def order_of(self, epoch: int) -> list[int]:
        """Return the order of the samples of a map-style dataset in an epoch."""
        if not isinstance(self._source, _Permutation):
            raise input_error("dataset", "a ShardQueue", "a map-style dataset", "ask the queue for its status()")
        return self._source.order_of(epoch)

    def committed(self, lowest: list[int]) -> None:
        """Let the samples of the step count."""
        self._source.commit()

    def state_dict(self) -> dict[str, Any]:
        """Return what the data of a job is, and how far it is in it beyond epoch and cursor."""
        return self._source.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another worker is."""
        self._source.load_state_dict(state)


class _Permutation:
    """The samples of a map-style dataset."""

    def __init__(self, dataset: Any, job: Job, num_epochs: int, seed: int, shuffle: bool, loader: ElasticDataLoader):
        self._dataset, self._job, self._num_epochs = dataset, job, num_epochs
        self._seed, self._shuffle, self._loader = seed, shuffle, loader
        self._order: tuple[int, list[int]] = (-1, [])

    def order_of(self, epoch: int) -> list[int]:
        if self._order[0] != epoch:
            count = len(self._dataset)
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            order = torch.randperm(count, generator=generator).tolist() if self._shuffle else list(range(count))
            self._order = (epoch, order)
        return self._order[1]

    def next_pass(self) -> tuple[list[Any], int, int] | None:
        job = self._job
        if job.cursor >= len(self._dataset):
            job.epoch, job.cursor = job.epoch + 1, 0
        if job.epoch >= self._num_epochs:
            return None
        batch = self.order_of(job.epoch)[job.cursor : job.cursor + job.global_batch_size]
        share, num_shares, is_first = job.next_share()
        mine = batch[len(batch) * share // num_shares : len(batch) * (share + 1) // num_shares]
        self._loader.indices = ([] if is_first else self._loader.indices) + mine
        return [self._dataset[index] for index in mine or batch[:1]], len(mine), len(batch)

    def peek(self, count: int) -> list[Any]:
        return [self._dataset[index % len(self._dataset)] for index in range(count)]

    def commit(self) -> None:
        pass  # epoch and cursor are the job's

    def state_dict(self) -> dict[str, Any]:
        return {"samples": len(self._dataset), "seed": self._seed, "shuffle": self._shuffle}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state != self.state_dict():
            raise StateMismatchError(
                f"the dataset has {self.state_dict()}: expected {state}, as the job has; pass the same dataset and seed"
            )
