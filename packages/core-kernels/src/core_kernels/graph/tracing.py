"""Derived arrays of a graph under ``torch.compile`` and ``torch.export``: computed for real, before tracing reads them.

Transposes, self-loop graphs and normalisations are computed once and kept on the graph. While torch traces, that
computation must not be traced: it is run at trace time on the real arrays, and the trace finds the kept result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from core_kernels.graph.structure import Graph

__all__ = ["before_tracing", "kept", "prepare_for_tracing"]

_prepare: list[Callable[[Any], Any]] = []


def before_tracing(compute: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Register a function that keeps its result on a graph, to be run when a trace first meets the graph.

    A trace sees what is kept on a graph as it was at first sight, so everything has to be there by then.
    """
    _prepare.append(compute)
    return compute


def kept(compute: Callable[..., Any], graph: Any, *args: Any) -> Any:
    """Return ``compute(graph, *args)``, a function that keeps its result on ``graph``."""
    if torch.compiler.is_compiling():
        _run_outside(compute, graph, *args)
    return compute(graph, *args)


@torch._dynamo.assume_constant_result
def _run_outside(compute: Callable[..., Any], graph: Any, *args: Any) -> bool:
    with _disable_current_modes():
        prepare_for_tracing(graph)
        compute(graph, *args)
    return True


def prepare_for_tracing(graph: Any) -> None:
    """Compute everything that a trace may want to find on ``graph``."""
    for prepare in _prepare:
        prepare(graph)


@before_tracing
def _prepare_derived_arrays(graph: Graph) -> None:
    graph.in_degrees()
    graph.transpose().edge_ids  # noqa: B018  computed when first read
