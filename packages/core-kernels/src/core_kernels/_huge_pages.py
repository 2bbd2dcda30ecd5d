"""Huge pages for large CPU tensors, where Linux has them.

Memory comes in pages of 4 KiB unless a program asks for pages of 2 MiB. Small ones cost twice: the first touch of each
is a page fault, which for a result that is written once can take longer than the arithmetic; and the processor knows
the place of some thousand pages only, so that rows read at random from hundreds of megabytes each wait for the
translation of their address before they wait for memory. :func:`advise` prevents the first for fresh memory,
:func:`collapse` the second for memory that is in use. Neither changes contents or addresses, and both are only advice:
where the system refuses, nothing is lost.

Callers may not assume that pages are huge afterwards.

Source: madvise(2), MADV_HUGEPAGE and MADV_COLLAPSE (Linux 6.1).
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable

from torch import Tensor

__all__ = ["advise", "collapse"]

_PAGE_BYTES, _HUGE_PAGE_BYTES = 1 << 12, 1 << 21
#: Fresh memory below this size comes from what the allocator reuses anyway.
_ADVISED_BYTES = 1 << 25
#: Tables below this size stay in the caches, with most of their addresses.
_COLLAPSED_BYTES = 1 << 26
#: Bytes that are moved in about the time that one random read saves afterwards.
_BYTES_PER_READ = 4
#: Refusals (no huge page free, pages pinned by a device) after which this process asks no more.
_MAX_REFUSALS = 3
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25

_refusals = 0


def advise(fresh: Tensor) -> None:
    """Ask for huge pages below a tensor that has just been allocated and not yet been written."""
    if fresh.nbytes >= _ADVISED_BYTES and fresh.device.type == "cpu":
        _call_madvise(fresh, _PAGE_BYTES, _MADV_HUGEPAGE)


def collapse(table: Tensor, num_reads: int) -> None:
    """Move a large table onto huge pages if so many rows are about to be read at random that this pays soon.

    Only memory of torch's own allocator is moved: a mapped file would be read as a whole, memory shared with other
    processes is not ours to move. A process that has forked moves nothing, for parent and child would no longer share
    the pages.

    Args:
        table: What is read.
        num_reads: Rows that will be read, repetitions counted.
    """
    global _refusals
    paid_bytes = num_reads * _BYTES_PER_READ
    if paid_bytes < _COLLAPSED_BYTES or _refusals >= _MAX_REFUSALS:
        return
    if not _COLLAPSED_BYTES <= table.nbytes <= paid_bytes:
        return
    is_own = table.device.type == "cpu" and table.untyped_storage().resizable() and not table.is_shared()
    if is_own and table.is_contiguous():
        _refusals += not _call_madvise(table, _HUGE_PAGE_BYTES, _MADV_COLLAPSE)


def _call_madvise(tensor: Tensor, page_bytes: int, advice: int) -> bool:
    """Give advice on the whole pages inside a tensor; return whether it was taken."""
    madvise = _madvise()
    if madvise is None:
        return False
    begin = -(-tensor.data_ptr() // page_bytes) * page_bytes
    return madvise(begin, (tensor.data_ptr() + tensor.nbytes - begin) // page_bytes * page_bytes, advice) == 0


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


def _stop_collapsing() -> None:
    global _refusals
    _refusals = _MAX_REFUSALS


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_parent=_stop_collapsing, after_in_child=_stop_collapsing)
