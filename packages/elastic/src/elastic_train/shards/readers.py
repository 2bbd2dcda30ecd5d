"""Readers of shards: where records begin and end, and how to go on at a position.

A reader yields the records of a shard from a position on, each with the position behind it. A position is a whole
number that means something to the reader alone: a byte, a row, a count. ``0`` is the begin. What ``read`` yields at a
position must be what would have come after the record with that position: then every record counts exactly once. A
reader that cannot promise it says ``is_exact = False``; records of a shard whose worker is lost, or that moves to
another worker, may then come again.

A shard is what the reader says: a path, or ``(path, begin, end)`` for a part of a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from elastic_train.errors import input_error

__all__ = ["BinaryRecords", "Iterables", "NpyRecords", "Reader", "TextLines"]


class Reader(Protocol):
    """What a shard queue needs of a reader.

    Attributes:
        is_exact: Whether reading on at a position gives what would have come there.
    """

    is_exact: bool

    def read(self, shard: Any, position: int) -> Iterator[tuple[Any, int]]:
        """Yield the records of a shard behind a position, each with the position behind it."""
        ...


class TextLines:
    """Lines of text files, without their ends; positions are bytes.

    A part ``(path, begin, end)`` has the lines whose first byte lies in it, so parts need not end where lines do.

    Args:
        encoding: Encoding of the files; a byte of the line end must not be part of another character.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "words.txt")
    ...     _ = path.write_text("one\\ntwo\\nthree\\n")
    ...     parts = TextLines().split([path], shard_bytes=5)
    ...     [[line for line, _ in TextLines().read(part, 0)] for part in parts]
    [['one', 'two'], ['three'], []]
    """

    is_exact = True

    def __init__(self, encoding: str = "utf-8"):
        self._encoding = encoding

    def split(self, paths: Sequence[str | Path], shard_bytes: int) -> list[tuple[str, int, int]]:
        """Return parts of files of about ``shard_bytes`` each."""
        return _split(paths, [Path(path).stat().st_size for path in paths], shard_bytes, "shard_bytes")

    def read(self, shard: Any, position: int) -> Iterator[tuple[str, int]]:
        """Yield the lines of a file or part behind a byte."""
        path, begin, end = _part(shard)
        with open(path, "rb") as file:
            if position:
                file.seek(position)
            elif begin:
                file.seek(begin - 1)  # a line that begins here belongs to this part: its end is the byte before
                file.readline()
            while (end < 0 or file.tell() < end) and (line := file.readline()):
                yield line.rstrip(b"\r\n").decode(self._encoding), file.tell()


class NpyRecords:
    """Rows of ``.npy`` files as tensors; positions are rows.

    A part ``(path, begin, end)`` has the rows from ``begin`` up to ``end``.
    """

    is_exact = True

    def split(self, paths: Sequence[str | Path], shard_rows: int) -> list[tuple[str, int, int]]:
        """Return parts of files of ``shard_rows`` rows each, the last of a file with what is left."""
        rows = [len(np.load(path, mmap_mode="r", allow_pickle=False)) for path in paths]
        return _split(paths, rows, shard_rows, "shard_rows")

    def read(self, shard: Any, position: int) -> Iterator[tuple[torch.Tensor, int]]:
        """Yield the rows of a file or part behind a row."""
        path, begin, end = _part(shard)
        rows = np.load(path, mmap_mode="r", allow_pickle=False)
        for row in range(max(begin, position), len(rows) if end < 0 else min(end, len(rows))):
            yield torch.from_numpy(np.array(rows[row])), row + 1


class BinaryRecords:
    """Records of the same number of bytes; positions are records.

    Args:
        record_bytes: Bytes of a record.
        decode: Makes a record of bytes.

    A part ``(path, begin, end)`` has the records from ``begin`` up to ``end``. A last record that is cut short is
    refused.
    """

    is_exact = True

    def __init__(self, record_bytes: int, decode: Callable[[bytes], Any] = bytes):
        if record_bytes < 1:
            raise input_error("record_bytes", record_bytes, "at least 1", "pass the bytes of one record")
        self._record_bytes, self._decode = record_bytes, decode

    def split(self, paths: Sequence[str | Path], shard_records: int) -> list[tuple[str, int, int]]:
        """Return parts of files of ``shard_records`` records each, the last of a file with what is left."""
        counts = [self._count(path) for path in paths]
        return _split(paths, counts, shard_records, "shard_records")

    def read(self, shard: Any, position: int) -> Iterator[tuple[Any, int]]:
        """Yield the records of a file or part behind a record."""
        path, begin, end = _part(shard)
        count = self._count(path)
        first = max(begin, position)
        with open(path, "rb") as file:
            file.seek(first * self._record_bytes)
            for index in range(first, count if end < 0 else min(end, count)):
                yield self._decode(file.read(self._record_bytes)), index + 1

    def _count(self, path: str | Path) -> int:
        size = Path(path).stat().st_size
        if size % self._record_bytes:
            expected = f"a file whose {size} bytes are a multiple of record_bytes={self._record_bytes}"
            raise input_error("shard", str(path), expected, "correct record_bytes, or complete the file")
        return size // self._record_bytes


class Iterables:
    """Any iterables, such as decoders of compressed files or subscriptions; positions are counts of records.

    Args:
        make: Makes the iterable of a shard.
        is_repeatable: Whether ``make`` gives the same records again. Then a worker that takes over a shard skips those
            that counted, and each counts once. Otherwise it takes what comes, and records may count twice.
    """

    def __init__(self, make: Callable[[Any], Iterable[Any]], is_repeatable: bool = True):
        if not callable(make):
            raise input_error("make", make, "a function from a shard to an iterable", "pass the function")
        self._make, self.is_exact = make, is_repeatable

    def read(self, shard: Any, position: int) -> Iterator[tuple[Any, int]]:
        """Yield the records of a shard behind a count of them."""
        skipped = position if self.is_exact else 0
        for index, record in enumerate(islice(iter(self._make(shard)), skipped, None), position + 1):
            yield record, index


def _part(shard: Any) -> tuple[str, int, int]:
    """Return path, begin and end of a shard; the end is -1 for that of the file."""
    if isinstance(shard, str | Path):
        return str(shard), 0, -1
    path, begin, end = shard
    return str(path), int(begin), int(end)


def _split(paths: Sequence[str | Path], sizes: Sequence[int], shard_size: int, name: str) -> list[tuple[str, int, int]]:
    if shard_size < 1:
        raise input_error(name, shard_size, "at least 1", "pass the size of a shard")
    return [
        (str(path), begin, min(begin + shard_size, size))
        for path, size in zip(paths, sizes, strict=True)
        for begin in range(0, size, shard_size)
    ]
