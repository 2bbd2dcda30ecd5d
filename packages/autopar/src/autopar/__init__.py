"""The time-memory frontier of parallel plans for any nn.Module, and the chosen plan applied."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from autopar._version import __version__

if TYPE_CHECKING:
    from autopar.frontier import Frontier
    from autopar.problem import Problem
    from autopar.tracking import track

__all__ = ["Frontier", "Problem", "__version__", "track"]

_HOME_OF_NAME = {"Frontier": "frontier", "Problem": "problem", "track": "tracking"}


def __getattr__(name: str) -> Any:
    if name in _HOME_OF_NAME:
        return getattr(importlib.import_module(f"autopar.{_HOME_OF_NAME[name]}"), name)
    raise AttributeError(f"module 'autopar' has no attribute {name!r}")
