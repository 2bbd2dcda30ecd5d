"""A worker's passes over a queue of shards: the conversation of workers about each batch."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch

from elastic_train.group import Links
from elastic_train.job import Job
from elastic_train.logical import shares_of
from elastic_train.shards.queue import Fill, ShardQueue
from elastic_train.state import receive_bytes, send_bytes

__all__ = ["ShardFeed", "streams_of"]


def streams_of(rank: int, size: int, num_streams: int, is_logical: bool = False) -> range:
    """Return the streams that a worker reads: in bitwise mode those of its shares, else every ``size``-th.

    >>> [list(streams_of(rank, 3, 8)) for rank in range(3)]
    [[0, 3, 6], [1, 4, 7], [2, 5]]
    """
    return shares_of(rank, size, num_streams) if is_logical else range(rank, num_streams, size)


class ShardFeed:
    """What an :class:`~elastic_train.ElasticDataLoader` takes from a queue.

    Args:
        queue: The queue.
        job: The job.
        num_epochs: Epochs to read.
    """

    def __init__(self, queue: ShardQueue, job: Job, num_epochs: int):
        self._queue, self._job, self._num_epochs = queue, job, num_epochs
        queue.settle_streams(job.global_batch_size, job.agent.limits.max_workers, job.logical_workers)
        self._batch: Fill | None = None
        self._spare: list[Any] = []

    def next_pass(self) -> tuple[list[Any], int, int] | None:
        """Return samples, how many count, and those of the global batch; ``None`` at the end."""
        batch, job = self._batch, self._job
        if job.next_share()[2]:
            batch = self._batch = self._fill()
        if batch is None:
            job.epoch, job.cursor = self._num_epochs, 0
            return None
        job.epoch, job.cursor = batch.epoch, batch.cursor
        if job.logical_workers:
            records = batch.records[job.next_share()[0]]
        else:
            records = [record for part in batch.records.values() for record in part]
        return records or self._spare, len(records), sum(batch.counts)

    def peek(self, count: int) -> list[Any]:
        """Return records for a trial."""
        return self._queue.peek(count)

    def commit(self) -> None:
        """Let the batch count."""
        self._queue.commit()

    def state_dict(self) -> dict[str, Any]:
        """Return how far the queue is."""
        return self._queue.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another worker is."""
        self._queue.load_state_dict(state)

    def _fill(self) -> Fill | None:
        """Fill a batch together with the others; again with the survivors when one is lost meanwhile."""
        while True:
            links = self._job.links
            assert links is not None
            talk = self._queue.fill(self._job.global_batch_size, self._streams_of(links, links.rank), self._num_epochs)
            try:
                table = next(talk)
                while True:
                    try:
                        total = _sum(links, table)
                    except RuntimeError as error:
                        self._job.recover(error)
                        break
                    table = talk.send(total)
            except StopIteration as end:
                batch: Fill | None = end.value
                try:
                    self._share_spare(links, batch)
                except RuntimeError as error:
                    self._job.recover(error)
                    continue
                return batch

    def _streams_of(self, links: Links, rank: int) -> Sequence[int]:
        return streams_of(rank, links.size, self._queue.num_streams, bool(self._job.logical_workers))

    def _share_spare(self, links: Links, batch: Fill | None) -> None:
        """See that every worker has a record to compute, also one without any that count."""
        if batch is None:
            return
        held = [sum(batch.counts[stream] for stream in self._streams_of(links, rank)) for rank in range(links.size)]
        lacking = [rank for rank, count in enumerate(held) if not count]
        giver = next(rank for rank, count in enumerate(held) if count)
        own = [record for part in batch.records.values() for record in part[:1]]
        if links.rank == giver and lacking:
            send_bytes(links, pickle.dumps(own[0]), lacking)
        self._spare = own[:1] or [pickle.loads(receive_bytes(links, giver))]


def _sum(links: Links, table: list[list[int]]) -> list[list[int]]:
    if links.size == 1:
        return table
    total = torch.tensor(table, dtype=torch.int64)
    links.sum_async(total).wait()
    return total.tolist()
