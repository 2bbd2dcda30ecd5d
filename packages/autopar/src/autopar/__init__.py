"""The time-memory frontier of parallel plans for any nn.Module, and the chosen plan applied."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from autopar._version import __version__

if TYPE_CHECKING:
    from autopar import experts as experts
    from autopar import pipeline as pipeline
    from autopar.capture import fake_tensors, trace
    from autopar.cluster import Cluster
    from autopar.execution import ParallelModule, apply
    from autopar.export import Export, export_calls
    from autopar.frontier import Frontier
    from autopar.operator_profile import measure_operators
    from autopar.plan import Plan
    from autopar.planner import mini_parallelism, profile, search
    from autopar.presets import search_presets
    from autopar.problem import Problem
    from autopar.tracking import track
    from autopar.verification import verify

__all__ = [
    "Cluster",
    "Export",
    "Frontier",
    "ParallelModule",
    "Plan",
    "Problem",
    "__version__",
    "apply",
    "export_calls",
    "fake_tensors",
    "measure_operators",
    "mini_parallelism",
    "profile",
    "search",
    "search_presets",
    "trace",
    "track",
    "verify",
]

_HOME_OF_NAME = {
    "Cluster": "cluster",
    "Export": "export",
    "Frontier": "frontier",
    "ParallelModule": "execution",
    "Plan": "plan",
    "Problem": "problem",
    "apply": "execution",
    "export_calls": "export",
    "fake_tensors": "capture",
    "measure_operators": "operator_profile",
    "mini_parallelism": "planner",
    "profile": "planner",
    "search": "planner",
    "search_presets": "presets",
    "trace": "capture",
    "track": "tracking",
    "verify": "verification",
}


def __getattr__(name: str) -> Any:
    if name in _HOME_OF_NAME:
        return getattr(importlib.import_module(f"autopar.{_HOME_OF_NAME[name]}"), name)
    if name in ("experts", "pipeline"):
        return importlib.import_module(f"autopar.{name}")
    raise AttributeError(f"module 'autopar' has no attribute {name!r}")
