"""Stages: where a layer-wise evaluation must be cut.

A value is at level ``k`` when it can be computed for a range of destinations in stage ``k``. A stage is cut at a
*source-side gather of a computed value*: that gather reads rows anywhere in the graph, so all rows must exist before.
Reductions cut nothing, and a gather by the very index a reduction combines by reads rows of the range at hand; graph
attention (maximum, sum and weighted sum over the same edges) is one stage.

Edge values have no order of their own. They are evaluated grouped by the index of the reduction they flow into, so an
edge value has one level per grouping; grouping ``None`` is the order of the edge list itself.

Source: Yin et al., "DGI: An Easy and Efficient Framework for GNN Model Evaluation", KDD 2023. There every message
passing call starts a new layer; cutting at gathers instead needs fewer stages.
"""

from __future__ import annotations

from dataclasses import dataclass

from gnn_eval.patterns import gather_of, reduction_of
from gnn_eval.program import Program, Value
from gnn_eval.sizes import Size

__all__ = ["LaterUse", "Levels", "is_computed", "later_uses", "natural_spaces"]


@dataclass(frozen=True)
class LaterUse:
    """The need of a value in a stage after the one that computes it.

    Args:
        name: The value.
        level: The later stage.
        at_sources: Whether rows anywhere in the graph are needed, not just the range at hand.
    """

    name: str
    level: int
    at_sources: bool


def is_computed(value: Value) -> bool:
    """Whether the value has rows that are computed in parts (not structure, not a parameter)."""
    return value.type.space is not None and not value.type.static


class Levels:
    """The level of each value under each grouping, computed when asked.

    Args:
        program: A typed program.
    """

    def __init__(self, program: Program):
        self._program = program
        self._known: dict[tuple[str, str | None], int] = {}

    def of(self, name: str, grouping: str | None = None) -> int:
        """Return the stage in which the rows of ``name`` can first be computed."""
        key = (name, grouping)
        if key not in self._known:
            # Programs are in order of dependence, so a loop over earlier values keeps this from recursing deeply.
            for earlier in self._program.values:
                value = self._program[earlier]
                same_rows = grouping is None or value.type.space == self._program[name].type.space
                if (earlier, grouping) not in self._known and is_computed(value) and same_rows:
                    self._known[(earlier, grouping)] = self._compute(earlier, grouping)
                if earlier == name:
                    break
            self._known.setdefault(key, 0)
        return self._known[key]

    def _compute(self, name: str, grouping: str | None) -> int:
        value = self._program[name]
        if value.op == "input":
            return 0
        if value.op == "conv":
            return 1 + max((self.of(n) for n in value.refs() if is_computed(self._program[n])), default=0)
        reduction = reduction_of(self._program, value)
        if reduction is not None and self._program[reduction.source].type.space is not None:
            inner = self.of(reduction.source, reduction.index)
            return max(1, inner, self.of(reduction.base)) + (grouping is not None)
        gather = gather_of(self._program, value)
        if gather is not None and self._program[gather.source].type.space is not None:
            return max(self.of(gather.source), 1) if gather.index == grouping else self.of(gather.source) + 1
        return max((self.of(n, grouping) for n in value.refs() if is_computed(self._program[n])), default=0)


def natural_spaces(program: Program) -> set[Size]:
    """Return the spaces whose rows have an order of their own: nodes, and whatever reductions combine into."""
    found = set(program.node_spaces())
    for value in program.values.values():
        reduction = reduction_of(program, value) if is_computed(value) else None
        if reduction is not None and program[reduction.source].type.space is not None:
            found.add(value.type.rows)
    return found


def later_uses(program: Program, levels: Levels) -> list[LaterUse]:
    """Return which values are needed in a stage after their own, before deciding what is stored."""
    found: dict[LaterUse, None] = {}
    natural = natural_spaces(program)
    seen: set[tuple[str, str, int]] = set()

    def need(name: str, level: int, at_sources: bool) -> None:
        if is_computed(program[name]) and levels.of(name) < level:
            found[LaterUse(name, level, at_sources)] = None

    def walk_edges(name: str, grouping: str | None, level: int) -> None:
        if (name, grouping or "", level) in seen:
            return
        seen.add((name, grouping or "", level))
        value = program[name]
        if not is_computed(value):
            return
        gather = gather_of(program, value)
        if gather is not None and program[gather.source].type.space is not None:
            need(gather.source, level, gather.index != grouping)
        elif value.op == "input" or reduction_of(program, value) is not None:
            need(name, level, True)
        else:
            for argument in value.refs():
                walk_edges(argument, grouping, level)

    for name, value in program.values.items():
        if not is_computed(value) or value.op == "input":
            continue
        reduction = reduction_of(program, value)
        gather = gather_of(program, value)
        if value.op == "conv":
            for argument in value.refs():
                need(argument, levels.of(name), True)
        elif reduction is not None and program[reduction.source].type.space is not None:
            need(reduction.base, levels.of(name), False)
            walk_edges(reduction.source, reduction.index, levels.of(name))
        elif gather is not None and program[gather.source].type.space is not None:
            if value.type.space in natural or name in program.outputs:
                need(gather.source, levels.of(name), True)
        elif value.type.space in natural:
            for argument in value.refs():
                need(argument, levels.of(name), False)
    for name in program.outputs:
        if program[name].type.space not in natural:
            walk_edges(name, None, levels.of(name))
    return list(found)
