"""Memory of this process as the kernel counts it: now, and the highest since a mark.

What counts is what the process has allocated and touched (anonymous memory). Pages of mapped files, such as the code of
libraries, do not count: the system drops and reads them again as it likes. Memory that was freed but is kept by the
allocator counts, so it is handed back before a mark is set. The kernel knows a high-water mark only of both together;
the pages of files are taken off as they are when the mark is read.

The high-water mark is one per process: two meters at work at the same time disturb each other.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch

__all__ = ["PeakMeter", "allocated_bytes", "is_out_of_memory"]

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def allocated_bytes() -> int:
    """Return the resident memory of this process that belongs to no file, 0 where the kernel does not tell."""
    resident, of_files = _resident()
    return resident - of_files


def _resident() -> tuple[int, int]:
    """Return the resident bytes, and those of them that are pages of files."""
    try:
        _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    except (OSError, ValueError):
        return 0, 0
    return int(resident) * _PAGE_BYTES, int(shared) * _PAGE_BYTES


class PeakMeter:
    """Measures allocated memory from its making on.

    Args:
        hand_back: First give freed memory back to the system; the pages then cost time when they are used again.

    Attributes:
        works: Whether the kernel lets the high-water mark be reset.
        start_bytes: Allocated memory when the meter was made.

    >>> meter = PeakMeter()
    >>> meter.mark() >= 0, meter.peak() >= 0, meter.highest() >= meter.start_bytes
    (True, True, True)
    """

    def __init__(self, hand_back: bool = True) -> None:
        self.works = _CLEAR.exists() and os.access(_CLEAR, os.W_OK)
        self._highest = self.start_bytes = 0
        self.start_bytes = self.mark(hand_back)
        self._highest = self.start_bytes

    def mark(self, hand_back: bool = True) -> int:
        """Begin to watch for a new peak; return the memory in use now.

        Args:
            hand_back: First give freed memory back to the system.
        """
        if hand_back:
            _hand_back_freed_memory()
        if not self.works:
            return 0
        self._highest = max(self._highest, self.peak())
        try:
            _CLEAR.write_text("5")  # resets the high-water mark of this process
        except OSError:
            self.works = False
        return allocated_bytes()

    def peak(self) -> int:
        """Return the highest allocated memory since the last mark."""
        if not self.works:
            return 0
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 - _resident()[1]
        return 0

    def highest(self) -> int:
        """Return the highest allocated memory since the meter was made."""
        return max(self._highest, self.peak())


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error says that memory ran out, on a device or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error)
    return "can't allocate memory" in text or "not enough memory" in text


def _hand_back_freed_memory() -> None:
    trim = getattr(_libc, "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)


_libc = ctypes.CDLL(None)
