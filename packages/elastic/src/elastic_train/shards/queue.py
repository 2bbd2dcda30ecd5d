"""A queue of shards that workers read together, each record once, whoever comes, goes or is lost.

A global batch is made of a fixed number of *streams*. A stream reads one shard at a time, its part of the batch from
the place where it stood at the last committed step; when its shard has ended it takes the next that nobody has begun.
Workers share the streams among them, anew whenever membership changes. What counts (which shard each stream reads, how
far, and which shards are next) is the same on every worker and changes only with a committed step. So a batch that
fails is read again from where it began: from memory by whoever read it, else from the reader at that position.

Which records form a batch depends on the streams alone, not on the workers. Nobody knows beforehand how many records a
shard holds: workers tell each other what they found, in one small sum per batch, and again when a shard ended and
another has to fill the gap. At the end of an epoch streams that still have records read more, so a batch is short only
when an epoch ends; its samples are weighted.

Callers may not assume that a worker reads much when few shards are left: make many more shards than streams.

Source: the queue of data partitions with offsets of "Elastic Deep Learning in Multi-Tenant GPU Clusters". Where we
differ: no leader hands out shards; all workers compute the same assignment from what is committed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from elastic_train.errors import StateMismatchError, input_error
from elastic_train.shards.open import OpenShards
from elastic_train.shards.readers import Reader

__all__ = ["Fill", "ShardQueue", "spread"]

# What streams tell each other of one round: records taken, the position behind them, whether the shard has ended.
_TAKEN, _POSITION, _ENDED = range(3)


@dataclass
class _Progress:
    """How far the job is; the same on every worker.

    Attributes:
        epoch: The epoch.
        next_shard: Place, in the epoch's order, of the first shard that nobody has begun.
        cursor: Records of the epoch that count.
        streams: Of each stream the number of its shard, -1 for none, and the position there.
    """

    epoch: int
    next_shard: int
    cursor: int
    streams: list[list[int]]


@dataclass
class Fill:
    """A global batch that waits for its commit.

    Attributes:
        epoch: Its epoch.
        cursor: Records of the epoch before it.
        counts: Records of each stream.
        records: Those of the streams that this worker reads.
    """

    epoch: int
    cursor: int
    counts: list[int]
    records: dict[int, list[Any]] = field(default_factory=dict)


class ShardQueue:
    """Shards, how to read them, and how far a job is with them. Pass it to an :class:`ElasticDataLoader`.

    Args:
        shards: What the reader reads: paths, parts of files, names; of the same order on every worker.
        reader: Reads a shard from a position on, see :mod:`elastic_train.shards.readers`.
        num_streams: Shards that are read at once, at most the samples of a batch. More workers than streams have
            nothing to do; ``None`` takes as many as the job may have workers, up to 16 and the number of shards.
        seed: Seed of the order of shards in each epoch.
        shuffle: ``False`` reads shards in order. Records of a shard come in its own order in any case.

    >>> queue = ShardQueue(["a", "b", "c"], reader=__import__("elastic_train").shards.Iterables(list))
    >>> queue.status()["todo"], queue.status()["delivery"]
    (3, 'exactly once')
    """

    def __init__(
        self,
        shards: Iterable[Any],
        reader: Reader,
        num_streams: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
    ):
        if isinstance(shards, str | Path):
            raise input_error("shards", str(shards), "a list of shards", "put the path into a list")
        self._shards = list(shards)
        if not self._shards:
            raise input_error("shards", [], "at least one shard", "see that the paths match files")
        if not hasattr(reader, "read") or not isinstance(getattr(reader, "is_exact", None), bool):
            raise input_error("reader", reader, "an object with read(shard, position) and is_exact", "take TextLines()")
        if num_streams is not None and num_streams < 1:
            raise input_error("num_streams", num_streams, "at least 1", "leave it out, or use that of workers")
        self._reader, self._seed, self._shuffle = reader, seed, shuffle
        self.num_streams, self._open = num_streams or 0, OpenShards(reader)
        content = repr((self._shards, seed, shuffle)).encode()
        self._fingerprint = hashlib.sha256(content).hexdigest()[:16]
        self._order: tuple[int, list[int]] = (-1, [])
        self._committed = self._begin(0)
        self._pending: _Progress | None = None

    @property
    def is_exact(self) -> bool:
        """Whether every record counts exactly once; otherwise at least once."""
        return self._reader.is_exact

    @property
    def delivery(self) -> str:
        """What the queue promises of a record: ``"exactly once"`` or ``"at least once"``."""
        return "exactly once" if self.is_exact else "at least once"

    def settle_streams(self, batch_size: int, max_workers: int, logical_workers: int) -> None:
        """Fix the number of streams when the size of a batch and the job's limits are known.

        Raises:
            InputError: More streams than samples, or other streams than logical workers.
        """
        wanted = self.num_streams or logical_workers or min(16, max_workers, batch_size, len(self._shards))
        if wanted > batch_size:
            expected = f"at most global_batch_size={batch_size}"
            raise input_error("num_streams", wanted, expected, "use fewer streams, or a larger batch")
        if logical_workers not in (0, wanted):
            expected = f"logical_workers={logical_workers}, each of which reads one"
            raise input_error("num_streams", wanted, expected, "leave it out")
        self.num_streams = wanted
        self._committed = self._begin(0)

    def fill(
        self, batch_size: int, mine: Sequence[int], num_epochs: int
    ) -> Generator[list[list[int]], list[list[int]], Fill | None]:
        """Read this worker's part of the next batch, as a conversation.

        Yields a table with a row per stream, filled for the streams of ``mine``; send the sum of the tables of all
        workers back. Nothing counts before :meth:`commit`.

        Args:
            batch_size: Samples of the batch over all workers.
            mine: Streams that this worker reads.
            num_epochs: Epochs to read.

        Returns:
            The batch, or ``None`` when all epochs are done.

        Raises:
            InputError: No shard has any record.
        """
        self._open.rewind()
        self._pending = None
        progress = self._copy()
        while progress.epoch < num_epochs:
            batch = Fill(progress.epoch, progress.cursor, [0] * self.num_streams, {stream: [] for stream in mine})
            yield from self._fill_from(progress, batch, batch_size)
            if sum(batch.counts):
                self._pending = progress
                return batch
            if not progress.cursor:
                raise input_error(
                    "shards", len(self._shards), "records in at least one of them", "see that the files are not empty"
                )
            progress = self._begin(progress.epoch + 1)
        return None

    def commit(self) -> None:
        """Let the batch count that was filled last."""
        if self._pending is None:
            return
        self._committed, self._pending = self._pending, None
        self._open.accept({shard: position for shard, position in self._committed.streams if shard >= 0})

    def peek(self, count: int) -> list[Any]:
        """Return some records that do not count, for a trial; none when reading them would lose them."""
        found: list[Any] = []
        for shard in self._shards if self.is_exact else []:
            found += [record for record, _ in islice(self._reader.read(shard, 0), count - len(found))]
            if len(found) == count:
                break
        return found

    def status(self) -> dict[str, Any]:
        """Return the epoch, how many shards wait, the shards being read with their positions, and what is promised."""
        progress = self._committed
        doing = [(self._shards[shard], position) for shard, position in progress.streams if shard >= 0]
        return {
            "epoch": progress.epoch,
            "records": progress.cursor,
            "todo": len(self._shards) - progress.next_shard,
            "doing": doing,
            "done": progress.next_shard - len(doing),
            "delivery": self.delivery,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return how far the job is, as JSON-able values."""
        progress = self._copy()
        return {
            "shards": self._fingerprint, "epoch": progress.epoch, "next_shard": progress.next_shard,
            "cursor": progress.cursor, "streams": progress.streams,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another worker is.

        Raises:
            StateMismatchError: That worker reads other shards, or as another number of streams.
        """
        found = (self._fingerprint, self.num_streams)
        expected = (state["shards"], len(state["streams"]))
        if found != expected:
            raise StateMismatchError(
                f"the queue has {len(self._shards)} shards of fingerprint {found[0]} in {found[1]} streams: expected "
                f"fingerprint {expected[0]} in {expected[1]}, as the job has; list the same shards in the same order"
            )
        self._committed = _Progress(
            state["epoch"], state["next_shard"], state["cursor"], [list(stream) for stream in state["streams"]]
        )
        self._pending = None

    def _copy(self) -> _Progress:
        now = self._committed
        return _Progress(now.epoch, now.next_shard, now.cursor, [list(stream) for stream in now.streams])

    def _begin(self, epoch: int) -> _Progress:
        return _Progress(epoch, 0, 0, [[-1, 0] for _ in range(self.num_streams)])

    def _order_of(self, epoch: int) -> list[int]:
        if self._order[0] != epoch:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            count = len(self._shards)
            order = torch.randperm(count, generator=generator).tolist() if self._shuffle else list(range(count))
            self._order = (epoch, order)
        return self._order[1]

    def _fill_from(
        self, progress: _Progress, batch: Fill, batch_size: int
    ) -> Generator[list[list[int]], list[list[int]], None]:
        wanted = [_part_of(batch_size, stream, self.num_streams) for stream in range(self.num_streams)]
        while True:
            self._give_shards(progress)
            spread(wanted, [shard >= 0 for shard, _ in progress.streams])
            if not any(wanted):
                return
            table = [[0, 0, 0] for _ in wanted]
            for stream, records in batch.records.items():
                if wanted[stream]:
                    number, position = progress.streams[stream]
                    shard = self._shards[number]
                    taken, behind, has_ended = self._open.take(number, shard, position, wanted[stream])
                    records += taken
                    table[stream] = [len(taken), behind, int(has_ended)]
            table = yield table
            for stream, row in enumerate(table):
                if wanted[stream]:
                    wanted[stream] -= row[_TAKEN]
                    batch.counts[stream] += row[_TAKEN]
                    progress.cursor += row[_TAKEN]
                    progress.streams[stream][1] = row[_POSITION]
                    if row[_ENDED]:
                        progress.streams[stream] = [-1, 0]

    def _give_shards(self, progress: _Progress) -> None:
        order = self._order_of(progress.epoch)
        for stream in progress.streams:
            if stream[0] < 0 and progress.next_shard < len(order):
                stream[:] = [order[progress.next_shard], 0]
                progress.next_shard += 1


def _part_of(total: int, index: int, count: int) -> int:
    return total * (index + 1) // count - total * index // count


def spread(wanted: list[int], has_shard: Sequence[bool]) -> None:
    """Let streams that have a shard read, in addition, what those without one should have read.

    >>> wanted = [3, 2, 4]
    >>> spread(wanted, [False, True, True])
    >>> wanted
    [0, 3, 6]
    """
    able = [stream for stream, has in enumerate(has_shard) if has]
    missing = sum(wanted[stream] for stream, has in enumerate(has_shard) if not has)
    for stream, has in enumerate(has_shard):
        if not has:
            wanted[stream] = 0
    for index, stream in enumerate(able):
        wanted[stream] += _part_of(missing, index, len(able))
