"""The shards that a worker has open, with the records it has read but that do not count yet.

Records are kept until their step is committed, so that a batch that failed is taken again from memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from elastic_train.shards.readers import Reader

__all__ = ["OpenShards"]


class _Open:
    """One shard: ``kept`` holds what was read behind ``base``, of which ``taken`` records are in the present batch."""

    def __init__(self, records: Iterator[tuple[Any, int]], base: int):
        self.records, self.base = records, base
        self.kept: deque[tuple[Any, int]] = deque()
        self.taken, self.has_ended = 0, False

    def position(self) -> int:
        return self.kept[self.taken - 1][1] if self.taken else self.base

    def take(self, count: int) -> list[Any]:
        while len(self.kept) < self.taken + count and not self.has_ended:
            entry = next(self.records, None)
            if entry is None:
                self.has_ended = True
            else:
                self.kept.append(entry)
        begin, self.taken = self.taken, min(self.taken + count, len(self.kept))
        return [self.kept[index][0] for index in range(begin, self.taken)]

    def accept(self) -> None:
        self.base = self.position()
        for _ in range(self.taken):
            self.kept.popleft()
        self.taken = 0


class OpenShards:
    """The open shards of one worker.

    Args:
        reader: Reads them.
    """

    def __init__(self, reader: Reader):
        self._reader = reader
        self._open: dict[int, _Open] = {}

    def take(self, number: int, shard: Any, position: int, count: int) -> tuple[list[Any], int, bool]:
        """Take up to ``count`` records of a shard; opens it at ``position`` when it is not open there.

        Returns:
            The records, the position behind them, and whether the shard had fewer. That it ends just here is not
            told, although a shard that was read before may know it: what is told must not depend on who reads.
        """
        found = self._open.get(number)
        if found is None or found.position() != position:
            found = self._open[number] = _Open(self._reader.read(shard, position), position)
        try:
            taken = found.take(count)
        except Exception as error:
            error.add_note(f"while reading shard {shard!r} behind position {found.position()}")
            raise
        return taken, found.position(), len(taken) < count

    def rewind(self) -> None:
        """Put back what was taken since the last commit."""
        for found in self._open.values():
            found.taken = 0

    def accept(self, positions: dict[int, int]) -> None:
        """Let go of what was taken, as it counts now, and of shards that are not at one of these positions."""
        for number, found in list(self._open.items()):
            found.accept()
            if positions.get(number) != found.base:
                del self._open[number]
