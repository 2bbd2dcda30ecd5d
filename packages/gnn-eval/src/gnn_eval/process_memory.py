"""Memory of this process as the kernel counts it: now, and the highest since a mark."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["PeakMeter", "resident_bytes"]

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    """Return the resident memory of this process, 0 where the kernel does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError):
        return 0


class PeakMeter:
    """Measures how far resident memory rises above its value at :meth:`mark`.

    >>> meter = PeakMeter()
    >>> meter.mark()
    >>> meter.rise() >= 0
    True
    """

    def __init__(self) -> None:
        self._start = 0
        self.works = _CLEAR.exists() and os.access(_CLEAR, os.W_OK)

    def mark(self) -> None:
        """Set the mark to the memory in use now."""
        if not self.works:
            return
        try:
            _CLEAR.write_text("5")  # resets the high-water mark of this process
        except OSError:
            self.works = False
        self._start = resident_bytes()

    def rise(self) -> int:
        """Return the bytes by which memory was above the mark at most."""
        if not self.works:
            return 0
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return max(int(line.split()[1]) * 1024 - self._start, 0)
        return 0
