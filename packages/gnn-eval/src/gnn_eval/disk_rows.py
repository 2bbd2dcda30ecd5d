"""Rows in ``.npy`` files, read in large pieces and written in sequence.

Ranges are one read. Scattered rows are asked for in increasing order; neighbours closer than a gap are read together,
several pieces at a time on a few threads, and only the wanted rows are kept. The kernel's page cache is not relied on:
no page is faulted in row by row, which is what a memory map does.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from numba import njit
from torch import Tensor

from gnn_eval.errors import EvaluationArgumentError

__all__ = ["DiskRows"]

_GAP_BYTES = 16 << 10
_PIECE_BYTES = 4 << 20
_THREADS = 4
_HEADER_VERSION = (1, 0)


class DiskRows:
    """Rows of one value in a ``.npy`` file.

    Args:
        path: The file.
        dtype: Dtype of the rows, needed for bfloat16, which ``.npy`` files keep as uint16.

    Attributes:
        read_bytes: Bytes read so far.
    """

    row_dim = 0

    def __init__(self, path: Path, dtype: torch.dtype | None = None):
        self.path = Path(path)
        mapped = np.load(self.path, mmap_mode="r", allow_pickle=False)
        if mapped.ndim == 0 or not mapped.flags.c_contiguous:
            raise EvaluationArgumentError(f"{path} has shape {mapped.shape} or is not in C order; save it row by row")
        self.shape, self._numpy_dtype, self._offset = mapped.shape, mapped.dtype, mapped.offset
        self.dtype = dtype or torch.from_numpy(np.empty(0, self._numpy_dtype)).dtype
        del mapped
        self.num_rows = self.shape[0]
        self.row_bytes = math.prod(self.shape[1:]) * self._numpy_dtype.itemsize
        self._file = os.open(self.path, os.O_RDWR if os.access(self.path, os.W_OK) else os.O_RDONLY)
        self._pool: ThreadPoolExecutor | None = None
        self.read_bytes = 0

    @classmethod
    def create(cls, path: Path, shape: Sequence[int], dtype: torch.dtype) -> DiskRows:
        """Make a file of zeros; it takes no space on disk until rows are written."""
        kept = torch.uint16 if dtype == torch.bfloat16 else dtype
        numpy_dtype = torch.empty(0, dtype=kept).numpy().dtype
        np.lib.format.open_memmap(path, mode="w+", dtype=numpy_dtype, shape=tuple(shape), version=_HEADER_VERSION)
        return cls(path, dtype)

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        if self._pool is not None:
            self._pool.shutdown()

    def __del__(self) -> None:
        self.close()

    def read_range(self, start: int, stop: int) -> Tensor:
        """Return rows ``start`` to ``stop``."""
        rows = np.empty((max(stop - start, 0), *self.shape[1:]), self._numpy_dtype)
        self._read_into(rows.reshape(-1).view(np.uint8), start * self.row_bytes)
        return torch.from_numpy(rows).view(self.dtype)

    def read_rows(self, ids: Tensor) -> Tensor:
        """Return the rows ``ids``; reading is fastest when they increase."""
        wanted = ids.numpy()
        order = None
        if wanted.size > 1 and not bool((wanted[1:] > wanted[:-1]).all()):
            order = np.argsort(wanted, kind="stable")
            wanted = wanted[order]
        rows = np.empty((wanted.size, *self.shape[1:]), self._numpy_dtype)
        gap = max(_GAP_BYTES // max(self.row_bytes, 1), 1)
        piece = max(_PIECE_BYTES // max(self.row_bytes, 1), 1)
        cuts = _cut_into_pieces(wanted, gap, piece)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_THREADS)
        list(
            self._pool.map(
                lambda place: self._read_piece(wanted, rows, cuts[place], cuts[place + 1]), range(len(cuts) - 1)
            )
        )
        if order is not None:
            back = np.empty_like(rows)
            back[order] = rows
            rows = back
        return torch.from_numpy(rows).view(self.dtype)

    def _read_piece(self, wanted: np.ndarray, rows: np.ndarray, first: int, last: int) -> None:
        start, stop = int(wanted[first]), int(wanted[last - 1]) + 1
        if stop - start == last - first:
            self._read_into(rows[first:last].reshape(-1).view(np.uint8), start * self.row_bytes)
            return
        piece = np.empty((stop - start, *self.shape[1:]), self._numpy_dtype)
        self._read_into(piece.reshape(-1).view(np.uint8), start * self.row_bytes)
        np.take(piece, wanted[first:last] - start, axis=0, out=rows[first:last])

    def _read_into(self, buffer: np.ndarray, offset: int) -> None:
        view, done = memoryview(buffer), 0
        while done < len(view):
            got = os.preadv(self._file, [view[done:]], self._offset + offset + done)
            if got <= 0:
                raise EvaluationArgumentError(
                    f"{self.path} ends at byte {offset + done}; the file is cut short: write it again"
                )
            done += got
        self.read_bytes += done

    def write_range(self, start: int, rows: Tensor) -> None:
        """Write ``rows`` from ``start`` on."""
        data = rows.contiguous()
        data = data.view(torch.uint16) if self.dtype == torch.bfloat16 else data.to(self.dtype)
        view, done = memoryview(data.numpy().reshape(-1).view(np.uint8)), 0
        while done < len(view):
            done += os.pwrite(self._file, view[done:], self._offset + start * self.row_bytes + done)

    def write_rows(self, ids: Tensor, rows: Tensor) -> None:
        """Write ``rows`` at ``ids``, one write for each run of neighbours."""
        order = ids.argsort()
        ids, rows = ids[order], rows[order]
        cuts = _cut_into_pieces(ids.numpy(), 1, ids.numel() + 1)
        for first, last in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
            self.write_range(int(ids[first]), rows[first:last])

    def whole(self) -> None:
        """Return ``None``: the rows are not in memory."""
        return


@njit(cache=True, nogil=True)
def _cut_into_pieces(ids, gap, piece):
    """Return the places where a new read begins: after a gap, or when a piece is long enough."""
    cuts = np.empty(ids.size + 1, np.int64)
    found, start = 0, -1
    for place in range(ids.size):
        if place == 0 or ids[place] - ids[place - 1] > gap or ids[place] - start >= piece:
            cuts[found] = place
            found += 1
            start = ids[place]
    cuts[found] = ids.size
    return cuts[: found + 1]
