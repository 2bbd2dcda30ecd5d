"""Generated sources on disk, per user, and the compiled functions made from them.

A source lies under a name that is the hash of its text, so a file is never changed after it is complete: it is written
under a temporary name and linked to its final one, which fails harmlessly when another process was first. Numba keeps
machine code beside it. A lock file makes processes that need the same function compile it once; each function is
compiled for exactly one set of argument types, which the hash covers.

The folder is that of :mod:`core_kernels._user_cache`.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from core_kernels._user_cache import cache_subfolder
from core_kernels.errors import CoreKernelsError

try:
    import fcntl
except ImportError:  # Windows: processes may compile the same function twice, with equal results
    fcntl = None

__all__ = ["compile_lock", "load_function"]

_loaded: dict[str, Any] = {}
_lock = threading.Lock()


def load_function(source: str, name: str) -> tuple[Callable[..., Any], Path]:
    """Return the function ``name`` of a generated module, written to the cache if new, and the module's path."""
    digest = hashlib.blake2b(source.encode(), digest_size=12).hexdigest()
    with _lock:
        if digest not in _loaded:
            path = cache_subfolder("vertex") / f"vertex_{digest}.py"
            if not path.exists():
                try:
                    _write_once(path, source)
                except OSError as error:
                    raise CoreKernelsError(
                        f"{path} cannot be written: {error.strerror}; expected room for generated kernels; free some "
                        "in this folder, or set SEXTET_CACHE to another one"
                    ) from error
            spec = importlib.util.spec_from_file_location(f"core_kernels_vertex_{digest}", path)
            assert spec is not None  # the name ends in .py
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
            _loaded[digest] = (getattr(module, name), path)
        return _loaded[digest]


def _write_once(path: Path, source: str) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(source)
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        os.unlink(temporary)


@contextlib.contextmanager
def compile_lock(path: Path) -> Iterator[None]:
    """Hold the lock of a generated module against other processes; the kernel drops it if this process dies."""
    if fcntl is None:
        yield
        return
    with open(path.with_suffix(".lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
