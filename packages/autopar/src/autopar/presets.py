"""The usual schemes as points of the search space: data parallelism, fully sharded, tensor parallelism.

A scheme restricts the choices of a mesh of one axis; the fastest plan that is left stands for it. Restrictions are as
the schemes are used: data parallelism splits the work on every sample wherever an operator can, instead of computing
the same on all devices; fully sharded data parallelism stores every parameter split that can be; tensor parallelism
splits every matrix that can be split. The frontier of :func:`autopar.search` is over the same space without
restrictions, so it is never worse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from autopar.cluster import Cluster
from autopar.graph import Graph, Operator
from autopar.placement import Q, R
from autopar.plan import Plan
from autopar.planner import plan_of
from autopar.rules import Configuration, configurations
from autopar.space import SearchSpace
from autopar.tracking import track

__all__ = ["search_presets"]

Keep = Callable[[str, Operator, Any], bool]


def search_presets(
    graph: Graph, cluster: Cluster, eps: float = 0.0, names: Sequence[str] = ("data", "fsdp", "tensor")
) -> dict[str, Plan]:
    """Return the fastest plan of each usual scheme on a mesh of one axis.

    ``data``: parameters whole on every device, work split. ``fsdp``: parameters stored split, gathered for each use and
    dropped, work split. ``tensor``: matrices stored and used split, parameters never move, samples are not split.
    A scheme that the model's shapes forbid is left out.
    """
    mesh = (cluster.num_devices,)
    plans = {}
    for name in names:
        keep = _PRESETS[name](graph, mesh)
        space = SearchSpace(graph, mesh, cluster, keep, gathers_parameters=name == "fsdp")
        frontier = track(space.problem(), eps)
        if len(frontier):
            plans[name] = plan_of(space, frontier[-1].choices)
    return plans


def _parameter_layouts(operator: Operator, choice: Configuration) -> list[tuple[int, ...]]:
    """Return the layouts in which an operator takes parameters."""
    names = [source.name for source in operator.node.all_input_nodes]
    infos = zip(operator.input_info, choice.inputs, strict=True)
    return [layout for (_, layout), name in zip(infos, names, strict=False) if name.startswith("p_")]


def _sample_operators(graph: Graph) -> set[str]:
    """Return the operators that work on samples: those that the first input, the batch, reaches."""
    reached: set[int] = set()
    size = next((o.output.shape[0] for o in graph.operators if o.kind == "input" and o.output.shape), 0)
    for position, operator in enumerate(graph.operators):
        is_batch = operator.kind == "input" and operator.output.shape[:1] == (size,)
        if is_batch or reached.intersection(operator.inputs):
            reached.add(position)
    return {graph.operators[position].name for position in reached}


def _data_parallel(graph: Graph, mesh: tuple[int, ...]) -> Keep:
    on_samples = _sample_operators(graph)

    def keeps_parameters(operator: Operator, choice: Configuration) -> bool:
        return all(form in (R, Q) for layout in _parameter_layouts(operator, choice) for form in layout)

    def splits(operator: Operator, choice: Configuration) -> bool:
        return bool(choice.active) and keeps_parameters(operator, choice)

    def keep(kind: str, operator: Operator, choice: Any) -> bool:
        if kind == "storage":
            return operator.kind != "parameter" or all(form == R for form in choice.layout)
        if kind != "operator":
            return True
        if operator.name in on_samples and any(splits(operator, other) for other in configurations(operator, mesh)):
            return splits(operator, choice)
        return keeps_parameters(operator, choice)

    return keep


def _fully_sharded(graph: Graph, mesh: tuple[int, ...]) -> Keep:
    data = _data_parallel(graph, mesh)

    def keep(kind: str, operator: Operator, choice: Any) -> bool:
        if kind == "storage" and operator.kind == "parameter":
            return choice.drop
        return data(kind, operator, choice)

    return keep


def _tensor_parallel(graph: Graph, mesh: tuple[int, ...]) -> Keep:
    def keep(kind: str, operator: Operator, choice: Any) -> bool:
        if kind == "storage" and operator.kind == "parameter" and len(operator.output.shape) >= 2:
            return any(form >= 0 for form in choice.layout)
        if kind != "operator" or not operator.output.shape:
            return True
        is_data = [not source.name.startswith("p_") for source in operator.node.all_input_nodes]
        forms = [layout for layout, data in zip(choice.inputs, is_data, strict=False) if data]
        return all(form != 0 for layout in [*forms, choice.output] for form in layout) or operator.kind == "flatten"

    return keep


_PRESETS: dict[str, Callable[[Graph, tuple[int, ...]], Keep]] = {
    "data": _data_parallel,
    "fsdp": _fully_sharded,
    "tensor": _tensor_parallel,
}
