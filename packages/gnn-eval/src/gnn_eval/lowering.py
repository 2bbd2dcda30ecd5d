"""From a typed program to the steps of each stage.

A step makes one tensor for one *row set* of a block: the range of destinations at hand, the source rows their edges
read, or the edges themselves, grouped by destination. Lowering asks for the values a stage must deliver and walks
back to what is stored, so each stage holds exactly the steps it needs, and a value needed at two row sets is computed
for each. Stages are lowered from the last to the first, since a stage stores only what later ones load.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from gnn_eval.frontends.opaque import conv_call
from gnn_eval.patterns import gather_of, reduction_of
from gnn_eval.program import Kind, Program, Value
from gnn_eval.sizes import Size
from gnn_eval.stages import Levels, is_computed

__all__ = ["EdgeSet", "Rows", "StageProgram", "Step", "lower"]

_STRUCTURE_VIEWS = {"view", "reshape", "expand", "unsqueeze", "squeeze", "_unsafe_view"}


@dataclass(frozen=True)
class EdgeSet:
    """Edges of one space, grouped by one index vector (``None``: in the order of the edge list).

    Args:
        space: Size of the edge space.
        grouping: Name of the index vector by whose values edges belong to destinations.
    """

    space: Size
    grouping: str | None


@dataclass(frozen=True)
class Rows:
    """A row set of a block.

    Args:
        kind: ``"range"`` (destinations at hand), ``"source"`` (rows their edges read) or ``"edge"``.
        space: Space the rows belong to.
        grouping: For edges, the index vector they are grouped by.
    """

    kind: str
    space: Size
    grouping: str | None = None

    @property
    def key(self) -> str:
        """A short unique text, used in slot names and in the memory model."""
        return f"{self.kind} {self.space}" + (f" by {self.grouping}" if self.grouping else "")


@dataclass
class Step:
    """One tensor of a block.

    Args:
        action: ``"load"`` (stored or structural rows), ``"apply"`` (row-wise operator), ``"gather"``, ``"reduce"``
            or ``"conv"``.
        slot: Where the tensor is kept while needed.
        name: The program's value.
        rows: The row set.
        inputs: Slots of the operator's arguments by name of the value.
        edge_set: For gathers and reductions, the edges concerned.
        index: For gathers, the index vector; ``at_range`` tells whether it is the one edges are grouped by.
        at_range: See ``index``.
    """

    action: str
    slot: str
    name: str
    rows: Rows
    inputs: dict[str, str] = field(default_factory=dict)
    edge_set: EdgeSet | None = None
    index: str = ""
    at_range: bool = False

    @property
    def edges(self) -> EdgeSet:
        """The edge set of a gather or a reduction."""
        assert self.edge_set is not None, f"step {self.slot} reads no edges"
        return self.edge_set


@dataclass
class StageProgram:
    """The steps of one stage for the rows of one space.

    Args:
        level: Number of the stage; 0 only transforms rows, without reading neighbours.
        space: Space whose rows the stage delivers.
        steps: Steps in order.
        results: Slot of each value the stage delivers, by name.
        edge_sets: For each edge set, the index vectors read through it and the space each points into.
    """

    level: int
    space: Size
    steps: list[Step] = field(default_factory=list)
    results: dict[str, str] = field(default_factory=dict)
    edge_sets: dict[EdgeSet, dict[str, Size]] = field(default_factory=dict)

    def loads(self) -> Iterator[Step]:
        """Yield the steps that load rows."""
        return (step for step in self.steps if step.action == "load")

    def source_spaces(self) -> dict[Size, bool]:
        """Return the spaces read at source rows, and whether every such value is read as it is stored."""
        spaces: dict[Size, bool] = {}
        for step in self.steps:
            if step.rows.kind == "source":
                spaces[step.rows.space] = spaces.get(step.rows.space, True) and step.action == "load"
            if step.action == "conv":
                spaces |= dict.fromkeys((space for found in self.edge_sets.values() for space in found.values()), False)
        return spaces


def lower(program: Program, levels: Levels, stored: set[str]) -> list[StageProgram]:
    """Return the stages in the order in which they run.

    Args:
        program: A typed program.
        levels: Its levels.
        stored: Values chosen to be stored between stages.
    """
    spaces = list(dict.fromkeys(v.type.rows for v in program.values.values() if is_computed(v)))
    last = max((levels.of(name) for name in (*program.outputs, *stored)), default=0)
    loaded: set[str] = set()
    stages: list[StageProgram] = []
    for level in range(last, -1, -1):
        for space in spaces:
            names = [n for n in program.outputs if program[n].type.space == space and levels.of(n) == level]
            names += [n for n in stored if program[n].type.space == space and levels.of(n) == level and n in loaded]
            names = list(dict.fromkeys(names))
            if not names:
                continue
            stage = _Lowering(program, levels, stored, level, space).run(names)
            loaded |= {step.name for step in stage.loads()}
            stages.append(stage)
    return stages[::-1]


class _Lowering:
    """Builds one stage."""

    def __init__(self, program: Program, levels: Levels, stored: set[str], level: int, space: Size):
        self._program, self._levels, self._stored, self._level = program, levels, stored, level
        self._stage = StageProgram(level, space)
        self._made: set[str] = set()

    def run(self, names: list[str]) -> StageProgram:
        rows = Rows("range", self._stage.space)
        for name in names:
            self._stage.results[name] = self._need(name, rows)
        return self._stage

    def _need(self, name: str, rows: Rows) -> str:
        value = self._program[name]
        if value.type.space is None or value.type.kind is Kind.STRUCT:
            return name
        slot = f"{name} @ {rows.key}"
        if slot not in self._made:
            self._made.add(slot)
            self._stage.steps.append(self._step(value, rows, slot))
        return slot

    def _step(self, value: Value, rows: Rows, slot: str) -> Step:
        if not is_computed(value):
            if value.type.uniform or self._is_structure_view(value):
                return self._apply(value, rows, slot)
            return Step("load", slot, value.name, rows)
        is_ready = value.op == "input" or (value.name in self._stored and self._levels.of(value.name) < self._level)
        if is_ready:
            return Step("load", slot, value.name, rows)
        if value.op == "conv":
            return self._conv(value, rows, slot)
        reduction = reduction_of(self._program, value)
        if reduction is not None and self._program[reduction.source].type.space is not None:
            edge_set = EdgeSet(self._program[reduction.source].type.rows, reduction.index)
            self._stage.edge_sets.setdefault(edge_set, {})
            inputs = {
                reduction.base: self._need(reduction.base, rows),
                reduction.source: self._need(reduction.source, Rows("edge", edge_set.space, reduction.index)),
            }
            return Step("reduce", slot, value.name, rows, inputs, edge_set)
        gather = gather_of(self._program, value)
        if gather is not None and self._program[gather.source].type.space is not None:
            return self._gather(value, rows, slot)
        return self._apply(value, rows, slot)

    def _apply(self, value: Value, rows: Rows, slot: str) -> Step:
        return Step("apply", slot, value.name, rows, {name: self._need(name, rows) for name in value.refs()})

    def _gather(self, value: Value, rows: Rows, slot: str) -> Step:
        gather = gather_of(self._program, value)
        edge_set = EdgeSet(value.type.rows, rows.grouping)
        source_space = self._program[gather.source].type.rows
        at_range = gather.index == rows.grouping and rows.kind == "edge"
        source_rows = Rows("range" if at_range else "source", source_space)
        indices = self._stage.edge_sets.setdefault(edge_set, {})
        if not at_range:
            indices[gather.index] = source_space
        inputs = {gather.source: self._need(gather.source, source_rows)}
        return Step("gather", slot, value.name, rows, inputs, edge_set, gather.index, at_range)

    def _conv(self, value: Value, rows: Rows, slot: str) -> Step:
        """Ask for what a convolution's block needs: rows at hand, source rows and edge data, by place of the tensor."""
        call = conv_call(value.kwargs["call"])
        tensors, destination = value.args[0], value.kwargs["destination"]
        inputs: dict[str, str] = {}
        groupings: dict[int, tuple[Size, str]] = {}
        for place, role in enumerate(call.roles):
            if role[0] == "relation" and role[2] == destination:
                source, grouping = (value.kwargs["rows"][f"{place}.{side}"].name for side in (0, 1))
                space = self._program[grouping].type.rows
                groupings[place] = (space, grouping)
                source_space = self._program[tensors[role[1]].name].type.rows
                self._stage.edge_sets.setdefault(EdgeSet(space, grouping), {})[source] = source_space
                inputs[f"{role[1]} sources"] = self._need(tensors[role[1]].name, Rows("source", source_space))
        inputs[f"{destination} range"] = self._need(tensors[destination].name, rows)
        if call.takes_graph:
            for place, role in enumerate(call.roles):
                if role[0] == "node":
                    inputs[f"{place} range"] = self._need(tensors[place].name, rows)
                    if not call.at_destinations_only(place):
                        inputs[f"{place} sources"] = self._need(tensors[place].name, Rows("source", rows.space))
        for place, role in enumerate(call.roles):
            if role[0] == "edge" and role[1] in groupings:
                inputs[f"{place} edges"] = self._need(tensors[place].name, Rows("edge", *groupings[role[1]]))
        return Step("conv", slot, value.name, rows, inputs)

    def _is_structure_view(self, value: Value) -> bool:
        if value.short_op not in _STRUCTURE_VIEWS:
            return False
        arguments = [self._program[name].type for name in value.refs()]
        return all(kind.space == value.type.space and kind.factor == value.type.factor for kind in arguments)
