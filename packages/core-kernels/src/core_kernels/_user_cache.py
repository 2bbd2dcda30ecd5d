"""Where this package keeps what takes long to make: compiled kernels, generated sources, built data sets.

One folder per user: ``$SEXTET_CACHE``, else ``core-kernels`` in the user's cache folder. Files are written beside their
final name and renamed, so that processes that work at once see a whole file or none.
"""

from __future__ import annotations

import functools
import os
import tempfile
from pathlib import Path

__all__ = ["cache_root", "cache_subfolder", "write_atomically"]


def cache_root() -> Path:
    """Return the folder that holds everything kept between runs; it need not exist."""
    if given := os.environ.get("SEXTET_CACHE"):
        return Path(given)
    if os.name == "nt" and (local := os.environ.get("LOCALAPPDATA")):
        return Path(local) / "core-kernels"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "core-kernels"


def cache_subfolder(kind: str) -> Path:
    """Return the folder for things of one kind, made if needed.

    Where the cache cannot be written, a folder of this user under the temporary directory takes its place.

    Args:
        kind: Name of the sub-folder.
    """
    folder = cache_root() / kind
    try:
        folder.mkdir(parents=True, exist_ok=True)
        usable = os.access(folder, os.W_OK)
    except OSError:
        usable = False
    if not usable:
        folder = _private_temporary_folder() / kind
        folder.mkdir(exist_ok=True)
    return folder


@functools.cache
def _private_temporary_folder() -> Path:
    """Return a folder that only this user can have written to: compiled code is loaded from it."""
    user = os.getuid() if hasattr(os, "getuid") else "user"
    folder = Path(tempfile.gettempdir()) / f"core-kernels-{user}"
    folder.mkdir(exist_ok=True, mode=0o700)
    found = folder.lstat()
    if hasattr(os, "getuid") and (found.st_uid != user or found.st_mode & 0o022 or not folder.is_dir()):
        return Path(tempfile.mkdtemp(prefix="core-kernels-"))
    return folder


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that other processes see all of it or nothing."""
    handle, scratch = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
    os.replace(scratch, path)
