"""Running a command under a limit of memory that also counts the page cache, and counting the bytes it reads.

A control group (version 2, or the memory controller of version 1) is made below the root, which takes permission to do
so. Reads then go to the disk: what does not fit the limit cannot stay cached.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["MemoryGroup", "drop_from_cache", "memory_group", "read_bytes"]

_ROOT = Path("/sys/fs/cgroup")


class MemoryGroup:
    """A control group with a limit of memory.

    Args:
        path: Its directory.
        limit_bytes: The limit, page cache included.
    """

    def __init__(self, path: Path, limit_bytes: int):
        self.path, self.limit_bytes = path, limit_bytes
        path.mkdir()
        is_v2 = (_ROOT / "cgroup.controllers").exists()
        (path / ("memory.max" if is_v2 else "memory.limit_in_bytes")).write_text(str(limit_bytes))
        self._peak = path / ("memory.peak" if is_v2 else "memory.max_usage_in_bytes")

    def start(self, command: list[str], **options) -> subprocess.Popen:
        """Start a command inside the group."""
        tasks = str(self.path / "cgroup.procs")
        return subprocess.Popen(command, preexec_fn=lambda: Path(tasks).write_text(str(os.getpid())), **options)

    def peak_bytes(self) -> int:
        """Return the highest use of memory, page cache included; it ends at the limit where files are read."""
        return int(self._peak.read_text())


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[MemoryGroup]:
    """Yield a control group that is removed at the end.

    Raises:
        OSError: Control groups cannot be made here.
    """
    root = _ROOT if (_ROOT / "cgroup.controllers").exists() else _ROOT / "memory"
    group = MemoryGroup(root / f"gnn-eval-{os.getpid()}", limit_bytes)
    try:
        yield group
    finally:
        group.path.rmdir()


def read_bytes(process: int | str = "self") -> int:
    """Return the bytes a process had read from disks; what came out of the page cache does not count."""
    for line in Path(f"/proc/{process}/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    raise OSError(f"/proc/{process}/io does not tell the bytes read")


def drop_from_cache(directory: Path) -> None:
    """Write files out and drop their pages, so that the next reader begins at the disk."""
    for path in directory.rglob("*.npy"):
        file = os.open(path, os.O_RDWR)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)
