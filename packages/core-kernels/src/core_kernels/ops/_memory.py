"""Fresh memory for large results.

The first touch of every 4 KiB page costs a page fault; for a result that is written once, faults can take longer than
the arithmetic. Large CPU results are therefore allocated with the advice to use huge pages (one fault per 2 MiB), where
the system has them. The tensor is an ordinary torch tensor.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["empty_rows"]

#: Below this size the allocator reuses memory anyway.
_LARGE_BYTES = 1 << 25
_PAGE_BYTES = 1 << 12
_MADV_HUGEPAGE = 14


def empty_rows(like: Tensor, num_rows: int, width: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return an uninitialised matrix on the device of ``like``, in its dtype unless another is given."""
    out = like.new_empty((num_rows, width), dtype=dtype)
    if out.nbytes >= _LARGE_BYTES and out.device.type == "cpu":
        _advise(out.data_ptr(), out.nbytes)
    return out


def _advise(address: int, num_bytes: int) -> None:
    madvise = _madvise()
    if madvise is not None:
        begin = -(-address // _PAGE_BYTES) * _PAGE_BYTES
        # Only advice: a kernel without huge pages refuses, and nothing is lost.
        madvise(begin, (address + num_bytes - begin) // _PAGE_BYTES * _PAGE_BYTES, _MADV_HUGEPAGE)


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function
