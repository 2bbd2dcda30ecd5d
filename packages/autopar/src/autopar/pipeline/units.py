"""Where a captured step may be cut into stages, finer than layers: every place that a single tensor crosses.

Operators are kept in their captured order. Between two of them lies a possible boundary when exactly one value with a
gradient is needed on both sides; a transformer layer then falls into its attention and its feed-forward half. Values
without gradient, such as masks and positions, are computed anew by every stage that needs them. What stands between
two boundaries is a *unit*; units without parameters join the one before, which moves a boundary behind activations
and poolings.

Source: the sub-layer granularity of AutoPipe; its units are the halves of transformer layers, ours follow from the
graph.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain

from torch.fx.node import map_arg

from autopar.errors import ProblemError
from autopar.graph import Graph, Operator, TensorInfo
from autopar.pipeline.microbatches import MicroBatches
from autopar.placement import local_shape

__all__ = ["Unit", "find_units", "part_of", "required_operators", "unit_graph", "unit_signature"]


@dataclass(frozen=True)
class Unit:
    """A piece of the step that is never cut.

    Attributes:
        operators: Positions of its operators with gradient, ascending.
        source: Position of the value that comes in, ``None`` for the first unit.
        result: Position of the value that goes out; the loss for the last unit.
    """

    operators: tuple[int, ...]
    source: int | None
    result: int


def find_units(graph: Graph, max_units: int = 256) -> list[Unit]:
    """Return the units of a step in order.

    Args:
        graph: The captured step.
        max_units: With more, neighbours are joined two by two.

    >>> from autopar import models, trace
    >>> graph = trace(*models.gpt(layers=2))
    >>> [graph.operators[unit.result].kind for unit in find_units(graph)]
    ['embedding', 'add', 'add', 'add', 'add', 'add', 'layer_norm', 'cross_entropy_loss']
    """
    if max_units < 1:
        raise ProblemError(f"max_units={max_units} is not valid: expected at least 1; leave it out for the default")
    trunk = [p for p, operator in enumerate(graph.operators) if not operator.is_leaf and operator.output.has_gradient]
    if not trunk:
        raise ProblemError(
            f"{graph.module_name} has no operator with a gradient; expected parameters to train; trace it in training"
        )
    last_use = {position: position for position in trunk}
    for position in trunk:
        for source in graph.operators[position].inputs:
            if source in last_use:
                last_use[source] = max(last_use[source], position)
    pieces: list[list[int]] = [[]]
    crossing: list[int] = []
    alive: set[int] = set()
    for position in trunk:
        pieces[-1].append(position)
        alive.add(position)
        alive = {value for value in alive if last_use[value] > position}
        if len(alive) == 1 and _is_tensor(graph, next(iter(alive))):
            crossing.append(next(iter(alive)))
            pieces.append([])
    pieces, crossing = _join_light(graph, [piece for piece in pieces if piece], crossing)
    while len(pieces) > max_units:
        pieces = [[*chain.from_iterable(pieces[place : place + 2])] for place in range(0, len(pieces), 2)]
        crossing = crossing[1::2][: len(pieces) - 1]
    ends = [*crossing[: len(pieces) - 1], graph.result]
    starts = [None, *ends[:-1]]
    return [Unit(tuple(p), source, end) for p, source, end in zip(pieces, starts, ends, strict=True)]


def _is_tensor(graph: Graph, position: int) -> bool:
    return graph.operators[position].kind not in (
        "unbind",
        "split",
        "split_with_sizes",
        "chunk",
        "max_pool2d_with_indices",
    )


def _join_light(graph: Graph, pieces: list[list[int]], crossing: list[int]) -> tuple[list[list[int]], list[int]]:
    """Join pieces without parameters to the piece before, leading ones to the piece after."""
    joined: list[list[int]] = []
    ends: list[int] = []
    for place, piece in enumerate(pieces):
        first_is_light = len(joined) == 1 and not _has_parameters(graph, joined[0])
        if joined and (first_is_light or not _has_parameters(graph, piece)):
            joined[-1] = joined[-1] + piece
            ends.pop()
        else:
            joined.append(piece)
        ends.append(crossing[place] if place < len(crossing) else graph.result)
    return joined, ends[:-1]


def _has_parameters(graph: Graph, piece: Iterable[int]) -> bool:
    return any(graph.operators[source].kind == "parameter" for p in piece for source in graph.operators[p].inputs)


def required_operators(graph: Graph, operators: Iterable[int], given: Iterable[int] = ()) -> list[int]:
    """Return what must be at hand to run some operators: they, what they read, and what those read, ascending.

    Values in ``given`` come from elsewhere and are not followed.
    """
    wanted, stop = set(operators), set(given)
    waiting = list(wanted)
    while waiting:
        for source in graph.operators[waiting.pop()].inputs:
            if source not in wanted and source not in stop:
                wanted.add(source)
                waiting.append(source)
    return sorted(wanted - stop)


def part_of(
    graph: Graph, operators: Iterable[int], source: int | None, result: int, batches: MicroBatches
) -> tuple[Graph, list[int]]:
    """Return some operators as a graph of its own with the shapes of one micro-batch, for planning.

    The value that comes in is an input with a gradient, listed first.

    Returns:
        The graph, and the position in the whole graph of each of its operators.
    """
    given = [] if source is None else [source]
    positions = [*given, *required_operators(graph, operators, given)]
    number = {position: place for place, position in enumerate(positions)}
    sizes = {position: _local(graph.operators[position].output, batches, position) for position in positions}
    made: list[Operator] = []
    for position in positions:
        whole = graph.operators[position]
        config = batches.configs[position]
        if config is None or position == source:
            kind = "input" if position == source else whole.kind
            made.append(replace(whole, kind=kind, inputs=(), input_info=(), output=sizes[position]))
            continue
        infos = tuple(
            replace(info, shape=local_shape(info.shape, layout, (batches.count,)))
            for info, layout in zip(whole.input_info, config.inputs, strict=True)
        )
        inputs = tuple(number[source_of] for source_of in whole.inputs)
        made.append(replace(whole, inputs=inputs, input_info=infos, output=sizes[position]))
    part = Graph(
        made, number[result], graph.optimizer, graph.state_factor, graph.module_name, graph.fx_graph, len(given),
        constants=graph.constants,
    )  # fmt: skip
    return part, positions


def unit_graph(graph: Graph, unit: Unit, batches: MicroBatches) -> tuple[Graph, list[int]]:
    """Return :func:`part_of` for one unit."""
    return part_of(graph, unit.operators, unit.source, unit.result, batches)


def unit_signature(part: Graph) -> tuple:
    """Return what decides the costs of a unit: equal for the units of repeated layers."""
    described = []
    for operator in part.operators:
        arguments = map_arg((operator.node.args, operator.node.kwargs), lambda _: "tensor")
        described.append((operator.kind, operator.inputs, operator.input_info, operator.output, str(arguments)))
    return tuple(described)


def _local(info: TensorInfo, batches: MicroBatches, position: int) -> TensorInfo:
    form = batches.forms[position]
    return replace(info, shape=local_shape(info.shape, (form,), (batches.count,))) if form >= 0 else info
