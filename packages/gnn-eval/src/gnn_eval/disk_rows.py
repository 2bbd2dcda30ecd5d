"""Rows in ``.npy`` files, read in large pieces and written in sequence.

Ranges are one read. Scattered rows are asked for in increasing order; neighbours closer than a gap are read together,
several pieces at a time on a few threads, and only the wanted rows are kept. The loop over the pieces is compiled and
calls the system's ``pread`` itself, so a hundred thousand scattered rows cost a hundred thousand reads and no more, and
the interpreter stays free. The kernel is told not to read ahead of scattered reads: no page is fetched that holds no
wanted row or short gap.

Callers may not assume that a row written is on the disk before :meth:`DiskRows.close`; it outlives the process, not the
machine.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numba import njit, types
from torch import Tensor

from gnn_eval.errors import EvaluationArgumentError

__all__ = ["DiskRows", "load_array"]

_GAP_BYTES = 16 << 10
_PIECE_BYTES = 1 << 20
_THREADS = 4
_PAGE_BYTES = 4096
# ssize_t pread(int, void *, size_t, off_t); an address travels in the same register as an integer.
_pread = types.ExternalFunction("pread", types.intp(types.int32, types.intp, types.uintp, types.int64))


def load_array(path: Path, mode: Literal["r", "c"] | None = None) -> Any:
    """Read or map a ``.npy`` file.

    Raises:
        EvaluationArgumentError: If the file is cut short, or not of this kind.
    """
    try:
        found = np.load(path, mmap_mode=mode, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise EvaluationArgumentError(
            f"{path} cannot be read ({error}); expected a whole .npy file of numbers; write it again"
        ) from None
    if not isinstance(found, np.ndarray):
        raise EvaluationArgumentError(f"{path} is an archive; expected a .npy file; save its array alone with np.save")
    return found


class DiskRows:
    """Rows of one value in a ``.npy`` file.

    Args:
        path: The file.
        dtype: Dtype of the rows, needed for bfloat16, which ``.npy`` files keep as uint16.

    Attributes:
        read_bytes: Bytes read so far, gaps included.
        written_bytes: Bytes written so far.
    """

    row_dim = 0

    def __init__(self, path: Path, dtype: torch.dtype | None = None):
        self.path = Path(path)
        self._file = -1
        mapped = load_array(self.path, "r")
        if mapped.ndim == 0 or not mapped.flags.c_contiguous:
            raise EvaluationArgumentError(f"{path} has shape {mapped.shape} or is not in C order; save it row by row")
        self.shape, self._numpy_dtype, self._offset = mapped.shape, mapped.dtype, mapped.offset
        self.dtype = dtype or torch.from_numpy(np.empty(0, self._numpy_dtype)).dtype
        del mapped
        self.num_rows = self.shape[0]
        self.row_bytes = math.prod(self.shape[1:]) * self._numpy_dtype.itemsize
        self._file = os.open(self.path, os.O_RDWR if os.access(self.path, os.W_OK) else os.O_RDONLY)
        os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_RANDOM)
        self._pool: ThreadPoolExecutor | None = None
        self.read_bytes = self.written_bytes = 0

    @classmethod
    def create(cls, path: Path, shape: Sequence[int], dtype: torch.dtype) -> DiskRows:
        """Make a file of zeros; it takes no space on disk until rows are written."""
        kept = torch.uint16 if dtype == torch.bfloat16 else dtype
        numpy_dtype = torch.empty(0, dtype=kept).numpy().dtype
        with open(path, "wb") as file:
            file.write(_header(tuple(shape), numpy_dtype))
            file.truncate(_PAGE_BYTES + math.prod(shape) * numpy_dtype.itemsize)
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
        view, done = memoryview(rows.reshape(-1).view(np.uint8).data), 0
        while done < len(view):
            got = os.preadv(self._file, [view[done:]], self._offset + start * self.row_bytes + done)
            if got <= 0:
                raise self._cut_short()
            done += got
        self.read_bytes += done
        return torch.from_numpy(rows).view(self.dtype)

    def read_rows(self, ids: Tensor) -> Tensor:
        """Return the rows ``ids``; reading is fastest when they increase."""
        wanted = ids.numpy()
        if wanted.size < 2 or bool((wanted[1:] > wanted[:-1]).all()):
            return self.read_into(wanted, self.empty(wanted.size))
        distinct, places = np.unique(wanted, return_inverse=True)
        if distinct.size < wanted.size:
            return self.read_into(distinct, self.empty(distinct.size))[torch.from_numpy(places)]
        return self.read_into(distinct, self.empty(wanted.size), np.argsort(wanted))

    def empty(self, num_rows: int) -> Tensor:
        """Return room for some rows."""
        return torch.from_numpy(np.empty((num_rows, *self.shape[1:]), self._numpy_dtype)).view(self.dtype)

    def read_into(self, ids: np.ndarray, out: Tensor, places: np.ndarray | None = None) -> Tensor:
        """Read distinct increasing rows to rows ``places`` of ``out`` (one after another if left out); return ``out``.

        Args:
            ids: int64, distinct and increasing.
            out: Made by :meth:`empty`.
            places: int64, where each row goes.
        """
        size = self.row_bytes
        if ids.size == 0 or size == 0:
            return out
        cuts = _cut_into_pieces(ids, max(_GAP_BYTES // size, 1), max(_PIECE_BYTES // size, 1))
        target = bytes_of(out)
        where = np.empty(0, np.int64) if places is None else places
        shares = np.unique(np.linspace(0, cuts.size - 1, min(_THREADS, cuts.size - 1) + 1).astype(np.int64))

        def read_share(share: int) -> int:
            scratch = np.empty(max(_PIECE_BYTES, size), np.uint8)
            own = cuts[shares[share] : shares[share + 1] + 1]
            return _read_pieces(self._file, self._offset, size, ids, own, target, where, scratch)

        if shares.size == 2:
            got = [read_share(0)]
        else:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(_THREADS)
            got = list(self._pool.map(read_share, range(shares.size - 1)))
        if min(got) < 0:
            raise self._cut_short()
        self.read_bytes += sum(got)
        return out

    def _cut_short(self) -> EvaluationArgumentError:
        return EvaluationArgumentError(
            f"{self.path} has {os.fstat(self._file).st_size} bytes and cannot be read to its last row; expected "
            f"{self._offset + self.num_rows * self.row_bytes}: the file is cut short; write it again"
        )

    def write_range(self, start: int, rows: Tensor) -> None:
        """Write ``rows`` from ``start`` on."""
        data = rows.contiguous()
        data = data.view(torch.uint16) if self.dtype == torch.bfloat16 else data.to(self.dtype)
        view, done = memoryview(data.numpy().reshape(-1).view(np.uint8).data), 0
        while done < len(view):
            done += os.pwrite(self._file, view[done:], self._offset + start * self.row_bytes + done)
        self.written_bytes += done

    def write_rows(self, ids: Tensor, rows: Tensor) -> None:
        """Write ``rows`` at ``ids``, one write for each run of neighbours."""
        if ids.numel() > 1 and not bool((ids.diff() > 0).all()):
            order = ids.argsort()
            ids, rows = ids[order], rows[order]
        cuts = _cut_into_pieces(ids.numpy(), 1, ids.numel() + 1)
        for first, last in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
            self.write_range(int(ids[first]), rows[first:last])

    def whole(self) -> None:
        """Return ``None``: the rows are not in memory."""
        return


def _header(shape: tuple[int, ...], dtype: np.dtype) -> bytes:
    """Return a ``.npy`` header that fills a page, so that no row lies on one page more than it must."""
    described = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    start = np.lib.format.magic(1, 0) + (_PAGE_BYTES - 10).to_bytes(2, "little")
    return start + repr(described).encode().ljust(_PAGE_BYTES - 11) + b"\n"


def bytes_of(rows: Tensor) -> np.ndarray:
    """Return the memory of contiguous rows as a flat uint8 array."""
    return rows.view(torch.uint8).numpy().reshape(-1) if rows.numel() else np.empty(0, np.uint8)


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


@njit(cache=True, nogil=True)
def _read_pieces(file, origin, row_bytes, ids, cuts, out, places, scratch):
    """Read the pieces between ``cuts``; return the bytes read, -1 if the file ends too early."""
    total = 0
    for piece in range(cuts.size - 1):
        first, last = cuts[piece], cuts[piece + 1]
        start = ids[first]
        num_bytes = (ids[last - 1] - start + 1) * row_bytes
        is_run = places.size == 0 and num_bytes == (last - first) * row_bytes
        target = out[first * row_bytes :] if is_run else scratch
        done = 0
        while done < num_bytes:
            got = _pread(file, target.ctypes.data + done, num_bytes - done, origin + start * row_bytes + done)
            if got <= 0:
                return -1
            done += got
        total += num_bytes
        if not is_run:
            for position in range(first, last):
                place = position if places.size == 0 else places[position]
                taken = (ids[position] - start) * row_bytes
                out[place * row_bytes : (place + 1) * row_bytes] = scratch[taken : taken + row_bytes]
    return total
