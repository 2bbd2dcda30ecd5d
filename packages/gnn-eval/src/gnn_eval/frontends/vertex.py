"""The front end of vertex programs and of layers that take a :class:`core_kernels.Graph`.

A model called as ``model(graph, x)`` is traced with a stand-in for the graph. Each layer of :mod:`core_kernels.nn`, and
each vertex program called directly, becomes one node of the program: what it reads of sources, destinations and edges
is known from its arguments, and it runs fused on a :class:`core_kernels.Block` that knows the full graph's degrees.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from gnn_eval.containers import TracedGraph
from gnn_eval.frontends import export, opaque
from gnn_eval.model_call import ModelCall
from gnn_eval.program import Program
from gnn_eval.registry import spec_of

__all__ = ["capture"]


def capture(model: nn.Module, call: ModelCall) -> tuple[Program, Any]:
    """Trace a model that takes a graph object; see :func:`gnn_eval.frontends.export.capture`."""

    def prepare(copied: nn.Module) -> None:
        for path, module in copied.named_modules():
            spec = spec_of(module)
            if type(module).__module__.startswith("core_kernels.nn") or (spec is not None and spec.graph == "block"):
                opaque.hide(module, path)

    with _programs_as_one_operator():
        program, skeleton = export.capture(model, call, prepare)
    return opaque.with_conv_values(program), skeleton


@contextmanager
def _programs_as_one_operator() -> Iterator[None]:
    """Let vertex programs called on the stand-in graph become one opaque operator while tracing."""
    from core_kernels.vertex import VertexProgram

    original = VertexProgram.__call__

    def called(self: VertexProgram, graph: Any, **kwargs: Any) -> Any:
        if not isinstance(graph, TracedGraph):
            return original(self, graph, **kwargs)
        return opaque.call_whole(self, f"vertex program {self.name}", "", (graph,), kwargs)

    VertexProgram.__call__ = called
    try:
        yield
    finally:
        VertexProgram.__call__ = original
