"""What each rank is doing right now, readable from outside even after the rank has died.

A file mapped into memory by the launcher and all its ranks holds one fixed-size record a rank: which collective it is
in, under which tag, at which step, since when. Writing costs about a microsecond and needs no cooperation of a rank
that hangs, is stopped or was killed. Records are advisory: a reader may see a half-written one.
"""

from __future__ import annotations

import mmap
import struct
import time
from dataclasses import dataclass
from pathlib import Path

__all__ = ["RankStatus", "StatusBoard"]

_RECORD = struct.Struct("=di48s64s")


@dataclass(frozen=True)
class RankStatus:
    """One rank's record.

    Attributes:
        collective: Name of the collective the rank is in; empty when it is in none.
        tag: The tag of that collective.
        step: Last step announced by the rank, -1 before the first.
        seconds: How long it has been there.
    """

    collective: str
    tag: str
    step: int
    seconds: float

    def __str__(self) -> str:
        step = f" at step {self.step}" if self.step >= 0 else ""
        if not self.collective:
            return f"outside any collective{step}"
        return f"during {self.collective} (tag {self.tag!r}){step}"


class StatusBoard:
    """The records of all ranks of one launch.

    Args:
        path: The shared file; made when ``create`` is set.
        num_ranks: Number of records.
        create: Whether to make the file with empty records.
    """

    def __init__(self, path: str | Path, num_ranks: int, create: bool = False):
        if create:
            empty = _RECORD.pack(time.time(), -1, b"", b"")
            Path(path).write_bytes(empty * num_ranks)
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), _RECORD.size * num_ranks)

    def write(self, rank: int, collective: str, tag: str, step: int) -> None:
        """Record that ``rank`` entered ``collective`` now; an empty name says it left."""
        record = (time.time(), step, collective.encode()[:48], tag.encode()[:64])
        _RECORD.pack_into(self._map, rank * _RECORD.size, *record)

    def read(self, rank: int) -> RankStatus:
        """Return the record of ``rank``."""
        since, step, collective, tag = _RECORD.unpack_from(self._map, rank * _RECORD.size)
        text = [field.rstrip(b"\0").decode(errors="replace") for field in (collective, tag)]
        return RankStatus(text[0], text[1], step, max(0.0, time.time() - since))

    def close(self) -> None:
        """Unmap the file."""
        self._map.close()
