"""Graph and embedding kernels, a vertex-centric layer compiler, collectives and a tiered store for PyTorch.

Importing this package is cheap: it compiles nothing and loads no CUDA library. Names are loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from core_kernels._version import __version__

if TYPE_CHECKING:
    from core_kernels import comm, datasets, interconnect, launch, nn, ops, store, testing, topology, vertex
    from core_kernels._backend import backend
    from core_kernels.graph import Block, Graph
    from core_kernels.partition import PartitionBook, partition_graph

__all__ = [
    "Block",
    "Graph",
    "PartitionBook",
    "__version__",
    "backend",
    "comm",
    "datasets",
    "interconnect",
    "launch",
    "nn",
    "ops",
    "partition_graph",
    "store",
    "testing",
    "topology",
    "vertex",
]

_MODULES = {"comm", "datasets", "interconnect", "launch", "nn", "ops", "store", "testing", "topology", "vertex"}
_HOME_OF_NAME = {
    "Block": "graph",
    "Graph": "graph",
    "PartitionBook": "partition",
    "backend": "_backend",
    "partition_graph": "partition",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"core_kernels.{name}")
    if name in _HOME_OF_NAME:
        return getattr(importlib.import_module(f"core_kernels.{_HOME_OF_NAME[name]}"), name)
    raise AttributeError(f"module 'core_kernels' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
