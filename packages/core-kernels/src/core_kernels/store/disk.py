"""Rows of a ``.npy`` file, read straight to their place with few system calls.

The wanted rows are sorted. Neighbours in the file, and neighbours but for a small gap, become one ``preadv`` whose
vector of buffers lets the wanted rows land side by side in the result and the gaps in a scrap buffer: nothing is copied
twice. A pool of threads issues the calls; the interpreter lock is free while the system reads.

Callers may not assume anything of the order in which a file is read.
"""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from core_kernels.errors import CoreKernelsError, argument_error
from core_kernels.graph.transform import check_ids

__all__ = ["NpyRows"]

_MAX_GAP_BYTES = 16 << 10
"""Reading this much for nothing is cheaper than another system call."""
_MAX_CALL_BYTES = 4 << 20
_MAX_BUFFERS = 512
"""Buffers of one call; Linux takes up to 1,024."""


class NpyRows:
    """A two-dimensional ``.npy`` file of which single rows are read.

    Args:
        path: The file, in C order.
        num_threads: Reads under way at a time.

    Attributes:
        bytes_read: Bytes asked of the system so far, gaps included.
        num_calls: Calls that asked for them.

    Raises:
        ArgumentError: There is no such file, or it holds no two-dimensional array in C order.
    """

    def __init__(self, path: str | Path, num_threads: int = 4):
        self.path = Path(path)
        if not self.path.is_file():
            raise argument_error("path", str(path), "an existing .npy file", "write one with numpy.save(path, array)")
        if num_threads < 1:
            raise argument_error("num_threads", num_threads, "at least 1", "pass the number of reads under way")
        try:
            array = np.load(self.path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise argument_error("path", str(path), f"a .npy file ({error})", "write it with numpy.save") from None
        if array.ndim != 2 or not array.flags.c_contiguous:
            shown = f"shape {array.shape}" + ("" if array.flags.c_contiguous else " in Fortran order")
            raise argument_error(
                "path", str(path), f"a two-dimensional array in C order, found {shown}", "save array.copy(order='C')"
            )
        self.num_rows, self.num_columns = array.shape
        try:
            self.dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
        except (TypeError, ValueError):
            expected = f"numbers of a type and byte order that torch has, found {array.dtype.str}"
            raise argument_error("path", str(path), expected, "save array.astype(numpy.float32)") from None
        self.row_bytes = array.itemsize * self.num_columns
        self.bytes_read = self.num_calls = 0
        self._data_offset = array.offset
        self._numpy_dtype = array.dtype
        self._file = os.open(self.path, os.O_RDONLY)
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="npy-rows")

    def read(self, rows: Tensor) -> Tensor:
        """Return the given rows, distinct and ascending, as a new tensor [num, num_columns].

        Raises:
            CoreKernelsError: The file is shorter than its header says.
        """
        out, futures = self.start(rows)
        for future in futures:
            future.result()
        return out

    def start(self, rows: Tensor) -> tuple[Tensor, list[Future]]:
        """Begin to read rows; the tensor is filled once every future is done.

        Raises:
            ArgumentError: The rows are not distinct, ascending and in [0, num_rows).
            CoreKernelsError: The file was closed.
        """
        if self._file < 0:
            raise CoreKernelsError(f"{self.path} was closed; expected an open file to read from; open it again")
        rows = check_ids("rows", rows, self.num_rows)
        if bool((rows.diff() <= 0).any()):
            raise argument_error("rows", rows.tolist(), "distinct ids in ascending order", "pass rows.unique()")
        sorted_rows = rows.numpy()
        out = np.empty((len(sorted_rows), self.num_columns), self._numpy_dtype)
        if self.row_bytes == 0 or not len(sorted_rows):
            return torch.from_numpy(out), []
        flat = out.reshape(-1).view(np.uint8).data
        runs = self._cut_runs(sorted_rows)
        spans = (int(sorted_rows[last - 1] - sorted_rows[first]) + 1 for first, last in runs)
        self.bytes_read += sum(spans) * self.row_bytes
        self.num_calls += len(runs)
        futures = [self._pool.submit(self._read_run, sorted_rows[first:last], flat, first) for first, last in runs]
        return torch.from_numpy(out), futures

    def close(self) -> None:
        """Wait for reads under way and close the file."""
        self._pool.shutdown()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _cut_runs(self, rows: np.ndarray) -> list[tuple[int, int]]:
        """Cut sorted rows where the gap is wide; then long runs into calls of at most some bytes and buffers."""
        is_one_range = rows[-1] - rows[0] + 1 == len(rows)
        max_step = 1 if is_one_range else _MAX_GAP_BYTES // self.row_bytes + 1
        per_call = max(1, _MAX_CALL_BYTES // (self.row_bytes * max_step))
        if max_step > 1:  # a row and the gap before it take two buffers
            per_call = min(per_call, _MAX_BUFFERS // 2)
        cuts = np.flatnonzero(np.diff(rows) > max_step) + 1
        bounds = [0, *cuts.tolist(), len(rows)]
        return [
            (start, min(start + per_call, stop))
            for first, stop in pairwise(bounds)
            for start in range(first, stop, per_call)
        ]

    def _read_run(self, rows: np.ndarray, flat: memoryview, first: int) -> None:
        """Read one run into the bytes of the result, of which row ``first`` is the run's first."""
        size = self.row_bytes
        breaks = np.flatnonzero(np.diff(rows) > 1) + 1
        bounds = [0, *breaks.tolist(), len(rows)]
        gaps = [(int(rows[b]) - int(rows[b - 1]) - 1) * size for b in bounds[1:-1]]
        scrap = memoryview(bytearray(max(gaps, default=0)))
        buffers = []
        for index, (start, stop) in enumerate(pairwise(bounds)):
            if index:
                buffers.append(scrap[: gaps[index - 1]])
            buffers.append(flat[(first + start) * size : (first + stop) * size])
        offset = self._data_offset + int(rows[0]) * size
        while buffers:
            count = os.preadv(self._file, buffers, offset)
            if count == 0:
                raise CoreKernelsError(
                    f"{self.path} ends at byte {offset}; its header promises {self.num_rows} rows of {size} bytes; "
                    "write the file again"
                )
            offset += count
            # The system may return less than was asked for: go on behind it.
            while buffers and count >= len(buffers[0]):
                count -= len(buffers.pop(0))
            if buffers and count:
                buffers[0] = buffers[0][count:]
