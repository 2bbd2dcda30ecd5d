"""Data sets that take a while to build are built once per user and kept as ``.npy`` files.

The folder is that of :mod:`core_kernels._user_cache`. A data set is written under a name of its own and then renamed,
so that ranks that build at once never see half of one: the first rename wins, the others discard theirs. Where nothing
can be written, the data set is built every time.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from core_kernels._user_cache import cache_root
from core_kernels.datasets.data import GraphData
from core_kernels.datasets.readers import npy_folder

__all__ = ["cached"]

_logger = logging.getLogger(__name__)


def cached(name: str, version: int, build: Callable[[], GraphData]) -> GraphData:
    """Return the data set kept under this name and version, building and keeping it when there is none.

    Args:
        name: Name of the data set.
        version: Raised whenever ``build`` gives another result.
        build: Makes the data set.
    """
    folder = cache_root() / "datasets" / f"{name}-v{version}"
    if not (folder / "meta.json").is_file():
        data = build()
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        except OSError as error:
            _logger.warning("cannot keep data set %s in %s: %s", name, folder.parent, error)
            return data
        try:
            data.save(partial)
            partial.rename(folder)
        except OSError as error:
            if not (folder / "meta.json").is_file():
                _logger.warning("cannot keep data set %s in %s: %s", name, folder, error)
                return data
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return npy_folder(folder)
