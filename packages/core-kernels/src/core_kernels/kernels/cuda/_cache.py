"""Where compiled kernels are kept: one folder per user, safe for several processes at once.

Files are written beside their final name and renamed, so a reader sees a whole file or none.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

__all__ = ["cache_directory", "write_atomically"]


def cache_directory(kind: str) -> Path:
    """Return the folder for compiled things of one kind, made if needed.

    ``CORE_KERNELS_CACHE`` names the parent; otherwise it is ``$XDG_CACHE_HOME/core-kernels`` or
    ``~/.cache/core-kernels``, and a folder of this user under the temporary directory when neither can be written.

    Args:
        kind: Name of the sub-folder.
    """
    parent = os.environ.get("CORE_KERNELS_CACHE")
    base = Path(parent) if parent else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "core-kernels"
    folder = base / kind
    try:
        folder.mkdir(parents=True, exist_ok=True)
        usable = os.access(folder, os.W_OK)
    except OSError:
        usable = False
    if not usable:
        folder = Path(tempfile.gettempdir()) / f"core-kernels-{os.getuid()}" / kind
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that other processes see all of it or nothing."""
    handle, scratch = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
    os.replace(scratch, path)
