"""Shard queues under random histories: every record counts once, and batches do not depend on the workers."""

from __future__ import annotations

from itertools import chain, repeat
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_train.errors import InputError, StateMismatchError
from elastic_train.shards import BinaryRecords, Iterables, NpyRecords, ShardQueue, TextLines
from elastic_train.shards.feed import streams_of

EPOCHS = 2


class Job:
    """Workers of one process that read a queue in step; each has a queue of its own, as processes have."""

    def __init__(self, make, batch_size, num_workers=1):
        self.make, self.batch_size = make, batch_size
        self.workers = [make() for _ in range(num_workers)]

    def fill(self):
        """Return the batch as each worker sees it, ``None`` at the end."""
        size = len(self.workers)
        talks = [
            queue.fill(self.batch_size, streams_of(rank, size, queue.num_streams), EPOCHS)
            for rank, queue in enumerate(self.workers)
        ]
        tables, batches = [next(talk, None) for talk in talks], [None] * size
        while any(table is not None for table in tables):
            assert all(table is not None for table in tables), "workers disagree on whether the batch is full"
            total = np.sum(tables, axis=0).tolist()
            for rank, talk in enumerate(talks):
                try:
                    tables[rank] = talk.send(total)
                except StopIteration as end:
                    tables[rank], batches[rank] = None, end.value
        assert len({batch is None for batch in batches}) == 1
        return batches

    def resize(self, size, source=0):
        """Keep the first workers, or add some that take the state of one."""
        state = self.workers[source].state_dict()
        self.workers = self.workers[:size] + [self.make() for _ in range(size - len(self.workers))]
        for worker in self.workers:
            worker.load_state_dict(state)


def run(make, batch_size, history=()):
    """Return the committed batches, each with its epoch and its records in order; ``history`` is what befalls steps.

    ``("drop",)`` fails the step on all workers; ``("half", n)`` lets only the first ``n`` of them commit and lose the
    others; ``("size", n)`` goes on with ``n`` workers after the step.
    """
    job, done = Job(make, batch_size), []
    for event in chain(history, repeat(("none",))):
        batches = job.fill()
        if batches[0] is None:
            break
        if event[0] == "drop":
            continue
        survivors = job.workers[: min(event[1], len(job.workers))] if event[0] == "half" else job.workers
        for worker in survivors:
            worker.commit()
        records = {stream: part for batch in batches for stream, part in batch.records.items()}
        done.append((batches[0].epoch, [record for stream in sorted(records) for record in records[stream]]))
        assert len({str(worker.state_dict()) for worker in survivors}) == 1
        if event[0] in ("size", "half"):
            job.resize(event[1] if event[0] == "size" else len(survivors) + 1)
    return done


def check(batches, expected, batch_size):
    for epoch in range(EPOCHS):
        found = [records for number, records in batches if number == epoch]
        assert sorted(record for records in found for record in records) == sorted(expected)
        assert all(len(records) == batch_size for records in found[:-1])


SHARDS = st.lists(st.integers(0, 9), min_size=1, max_size=7).filter(any)
EVENTS = st.one_of(
    st.just(("none",)), st.just(("drop",)), st.tuples(st.just("size"), st.integers(1, 5)),
    st.tuples(st.just("half"), st.integers(1, 3)),
)  # fmt: skip


def make_queue(lengths, num_streams, batch_size, kind=ShardQueue, is_repeatable=True):
    def make():
        reader = Iterables(lambda shard: ((shard, index) for index in range(lengths[shard])), is_repeatable)
        queue = kind(range(len(lengths)), reader, num_streams=num_streams)
        queue.settle_streams(batch_size, 5, 0)
        return queue

    return make


@settings(max_examples=60, deadline=None)
@given(SHARDS, st.integers(1, 6), st.integers(0, 5), st.lists(EVENTS, max_size=12))
def test_every_record_counts_once_whatever_happens(lengths, num_streams, extra, history):
    batch_size = num_streams + extra
    make = make_queue(lengths, num_streams, batch_size)
    batches = run(make, batch_size, history)
    check(batches, [(s, i) for s, length in enumerate(lengths) for i in range(length)], batch_size)
    assert batches == run(make, batch_size), "what a batch holds depends on the workers"


class Forgetful(ShardQueue):
    """The twin: a worker that takes over shards reads them from their begin."""

    def load_state_dict(self, state):
        super().load_state_dict({**state, "streams": [[shard, 0] for shard, _ in state["streams"]]})


def test_the_check_sees_lost_offsets():
    lengths, expected = [5, 5], [(s, i) for s in range(2) for i in range(5)]
    for kind, sees in ((ShardQueue, False), (Forgetful, True)):
        batches = run(make_queue(lengths, 2, 4, kind), 4, [("size", 3)])
        if sees:
            with pytest.raises(AssertionError):
                check(batches, expected, 4)
        else:
            check(batches, expected, 4)


def test_a_stream_that_cannot_be_repeated_counts_at_least_once():
    make = make_queue([6, 6], 2, 4, is_repeatable=False)
    assert make().status()["delivery"] == "at least once"
    found = [record for _, records in run(make, 4, [("none",), ("half", 1)]) for record in records]
    expected = {(s, i) for s in range(2) for i in range(6)}
    assert set(found) == expected
    assert len(found) > EPOCHS * len(expected)
    quiet = [record for _, records in run(make, 4, [("drop",), ("drop",)]) for record in records]
    assert len(quiet) == EPOCHS * len(expected), "a step that fails is read again from memory"


@settings(max_examples=30, deadline=None)
@given(st.lists(st.text("ab\u00e9 ", max_size=5), max_size=12), st.integers(1, 9), st.booleans())
def test_parts_of_a_text_have_each_line_once_and_go_on_anywhere(tmp_path_factory, lines, shard_bytes, ends):
    path = tmp_path_factory.mktemp("text") / "lines.txt"
    path.write_text("\n".join(lines) + ("\n" if ends and lines else ""), encoding="utf-8")
    expected = path.read_bytes().decode().splitlines()
    reader, found = TextLines(), []
    for part in reader.split([path], shard_bytes):
        records = list(reader.read(part, 0))
        found += [line for line, _ in records]
        for index, (_, position) in enumerate(records):
            assert list(reader.read(part, position)) == records[index + 1 :]
    assert found == expected == [line for line, _ in reader.read(str(path), 0)]


def as_array(row):
    return row.numpy() if isinstance(row, torch.Tensor) else row


def test_rows_and_records_go_on_anywhere(tmp_path):
    rows = np.arange(14.0).reshape(7, 2)
    np.save(tmp_path / "rows.npy", rows)
    (tmp_path / "records.bin").write_bytes(rows.tobytes())
    for reader, name in ((NpyRecords(), "rows.npy"), (BinaryRecords(16, np.frombuffer), "records.bin")):
        parts = reader.split([tmp_path / name], 3)
        assert len(parts) == 3
        read = [[(as_array(row), position) for row, position in reader.read(part, 0)] for part in parts]
        assert np.array_equal(np.stack([row for part in read for row, _ in part]), rows)
        row, position = next(reader.read(parts[1], read[1][0][1]))
        assert np.array_equal(as_array(row), rows[4])
        assert position == 5
    assert isinstance(next(NpyRecords().read(tmp_path / "rows.npy", 0))[0], torch.Tensor)
    with pytest.raises(InputError, match="multiple of record_bytes=5"):
        list(BinaryRecords(5).read(tmp_path / "records.bin", 0))


def test_other_shards_and_empty_ones_are_refused():
    queue = make_queue([3, 3], 2, 4)()
    with pytest.raises(StateMismatchError, match="list the same shards in the same order"):
        queue.load_state_dict(make_queue([3, 3, 3], 2, 4)().state_dict())
    with pytest.raises(InputError, match="see that the files are not empty"):
        run(make_queue([0, 0], 2, 4), 4)


def test_a_reader_that_fails_says_where():
    def broken(shard):
        yield 1
        raise OSError("disk")

    queue = ShardQueue(["a"], Iterables(broken))
    queue.settle_streams(4, 1, 0)
    with pytest.raises(OSError, match="disk") as caught:
        next(queue.fill(4, [0], 1))
    assert caught.value.__notes__ == ["while reading shard 'a' behind position 0"]


def test_files_of_the_user_are_left_alone(tmp_path):
    path = Path(tmp_path, "lines.txt")
    path.write_text("a\nb\n")
    queue = ShardQueue([path], TextLines())
    assert queue.peek(3) == ["a", "b"]
    assert queue.status()["todo"] == 1
