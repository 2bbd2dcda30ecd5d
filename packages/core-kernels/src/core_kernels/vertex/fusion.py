"""Planning: which kernel computes which value, and what is written to memory.

A kernel walks the rows of one side. For each row it runs one or more loops over the row's edges, each an edge stage
with the aggregations that end it, and between loops a row stage. All aggregations to destinations that depend on each
other only through their own row fuse into one kernel, so a whole attention layer is one pass over the rows.

A program needs at most four groups of kernels, in this order:

1. ``S`` rows without edges: source-wise values too costly to be recomputed at every edge.
2. ``D`` rows: aggregations to destinations that later kernels read.
3. ``S`` rows: aggregations to sources (gradients), one kernel per edge type.
4. ``D`` rows: whatever destination-wise work is left.

Edge values stay in registers. The exception are narrow ones (one number per head) that hold an exponential or a dot
product over features and are wanted by a later kernel as well: they are stored, one number per edge and head.

Source: Seastar (EuroSys 2021), section 6, fuses one aggregation per kernel by a state machine; we differ by fusing
chains of aggregations of the same row.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from core_kernels.vertex.ir import Program, ancestors

__all__ = ["COSTLY", "Kernel", "Loop", "Plan", "Root", "make_plan"]

#: Operations not repeated for the same edge if it can be helped.
COSTLY = frozenset({"exp", "log", "sqrt", "tanh", "sigmoid", "elu", "elu_step", "feature_sum"})

_ROW_AGGREGATIONS = {
    "D": frozenset({"sum_dst", "max_dst", "min_dst", "shift_dst"}),
    "S": frozenset({"sum_src"}),
}


@dataclass(frozen=True)
class Root:
    """Something a loop does with a value at each edge, or a row stage with a value of the row.

    Attributes:
        action: ``sum``, ``max``, ``min`` into the row's accumulator, ``all`` into the partial sum of a parameter's
            gradient, ``store`` to the array of the value, ``keep`` in scratch memory of the row.
        value: Number of the value.
        target: Number of the aggregation, or the value itself.
    """

    action: str
    value: int
    target: int


@dataclass
class Loop:
    """One pass over the edges of a row.

    Attributes:
        relation: Edge type; None for a row stage, which is no loop.
        roots: What it computes.
    """

    relation: str | None
    roots: list[Root] = field(default_factory=list)


@dataclass
class Kernel:
    """A walk over the rows of one side.

    Attributes:
        side: ``D``: rows are destinations, edges come in; ``S``: rows are sources of ``relation``, edges go out.
        relation: Edge type of source rows.
        steps: Loops and row stages in order.
        kept: Narrow edge values that a loop leaves in scratch memory for later loops of the same row.
    """

    side: str
    relation: str
    steps: list[Loop]
    kept: tuple[int, ...] = ()

    def writes(self) -> set[int]:
        """Return the numbers of the arrays and partial sums it writes."""
        return {root.target for step in self.steps for root in step.roots if root.action in ("store", "all")}

    def aggregates(self) -> set[int]:
        """Return the numbers of the aggregations it computes for its rows."""
        return {root.target for step in self.steps for root in step.roots if root.action in ("sum", "max", "min")}


@dataclass(frozen=True, eq=False)
class Plan:
    """The kernels of a program in order, and the values that are written to memory (results included)."""

    program: Program
    kernels: tuple[Kernel, ...]
    arrays: tuple[int, ...]


def make_plan(program: Program) -> Plan:
    """Return the plan of a typed program."""
    return _Planner(program).plan()


@dataclass
class _Stage:
    """Aggregations and results that one kernel will compute."""

    side: str
    relation: str
    aggregations: list[int]
    results: list[int]


class _Planner:
    def __init__(self, program: Program):
        self.program, self.nodes = program, program.nodes
        self.arrays: set[int] = {n for n in program.outputs if self.nodes[n].op != "sum_all"}
        self.leaves = {n for n, node in enumerate(self.nodes) if node.op in ("input", "const", "degree")}

    def plan(self) -> Plan:
        stages = self._assign_stages()
        self._store_crossing_edge_values(stages)
        stages = self._store_far_values(stages)
        self._store_crossing_aggregations(stages)
        kernels = [_KernelBuilder(self, stage).build() for stage in stages]
        kernels = [kernel for kernel in kernels if kernel.steps]
        return Plan(self.program, tuple(kernels), tuple(sorted(self.arrays)))

    def _of(self, ops: frozenset[str]) -> list[int]:
        return [number for number, node in enumerate(self.nodes) if node.op in ops]

    def _assign_stages(self) -> list[_Stage]:
        to_source, to_destination = self._of(_ROW_AGGREGATIONS["S"]), self._of(_ROW_AGGREGATIONS["D"])
        outputs = list(dict.fromkeys(self.program.outputs))
        if not to_source:
            return [_Stage("D", "", to_destination, outputs)]
        behind_sources = ancestors(self.nodes, to_source)
        early = [n for n in to_destination if n in behind_sources]
        first, last = _Stage("D", "", early, []), _Stage("D", "", [n for n in to_destination if n not in early], [])
        middle = {r: _Stage("S", r, [], []) for r in dict.fromkeys(self.nodes[n].relation for n in to_source)}
        for number in to_source:
            middle[self.nodes[number].relation].aggregations.append(number)
        for number in outputs:
            node = self.nodes[self.nodes[number].args[0]] if self.nodes[number].op == "sum_all" else self.nodes[number]
            if ancestors(self.nodes, [number]) & set(last.aggregations):
                last.results.append(number)
            elif node.kind in "SE" and node.relation in middle:
                middle[node.relation].results.append(number)
            else:
                (last if node.kind == "E" else first).results.append(number)
        return [first, *middle.values(), last]

    def roots_of(self, stage: _Stage) -> list[int]:
        """Return the values a stage has to evaluate: arguments of its aggregations, and its results."""
        reduced = [*stage.aggregations, *(n for n in stage.results if self.nodes[n].op == "sum_all")]
        return [self.nodes[n].args[0] for n in reduced] + [n for n in stage.results if n not in reduced]

    def stops(self) -> set[int]:
        """Return the values no kernel looks behind: leaves, aggregations and what is stored."""
        reduced = {n for n, node in enumerate(self.nodes) if node.op in _ROW_AGGREGATIONS["D"] | _ROW_AGGREGATIONS["S"]}
        return self.leaves | reduced

    def is_costly(self, number: int) -> bool:
        """Whether recomputing the value takes an exponential, a dot product or the like."""
        inside = ancestors(self.nodes, [number], self.stops())
        return any(self.nodes[n].op in COSTLY for n in inside if n not in self.stops())

    def is_worth_storing(self, number: int) -> bool:
        """Whether a value is one per edge, narrow and costly."""
        node = self.nodes[number]
        return node.kind == "E" and not node.is_wide and number not in self.leaves and self.is_costly(number)

    def frontier(self, roots: Iterable[int], is_wanted: set[int]) -> list[int]:
        """Return the first values worth storing and wanted on every way down from ``roots``."""
        found, seen, stack, stops = [], set(), list(roots), self.stops()
        while stack:
            number = stack.pop()
            if number in seen or number in self.leaves:
                continue
            seen.add(number)
            if number in is_wanted and self.is_worth_storing(number):
                found.append(number)
            elif number not in stops:
                stack.extend(self.nodes[number].args)
        return sorted(found)

    def _store_crossing_edge_values(self, stages: list[_Stage]) -> None:
        evaluated_in: list[tuple[_Stage, set[int]]] = []
        for stage in stages:
            roots = self.roots_of(stage)
            for earlier, evaluated in evaluated_in:
                for number in self.frontier(roots, evaluated):
                    self.arrays.add(number)
                    if number not in earlier.results:
                        earlier.results.append(number)
            evaluated_in.append((stage, ancestors(self.nodes, roots, self.stops() | self.arrays)))

    def _store_far_values(self, stages: list[_Stage]) -> list[_Stage]:
        """Store values of the far end that are dear to recompute at every edge; return the stages, with new ones."""
        early: dict[str, _Stage] = {}
        for stage in stages:
            far = "S" if stage.side == "D" else "D"
            for number in self._far_values(stage, far):
                if self._is_cheap(number) or number in self.arrays:
                    continue
                self.arrays.add(number)
                relation = self.nodes[number].relation
                home = stages[0] if far == "D" else early.setdefault(relation, _Stage("S", relation, [], []))
                home.results.append(number)
        return [*early.values(), *stages]

    def _far_values(self, stage: _Stage, far: str) -> list[int]:
        """Return the computed far-side values that edges of a stage read."""
        own = set(stage.results)
        evaluated = ancestors(self.nodes, self.roots_of(stage), self.stops() | (self.arrays - own))
        used = {arg for n in evaluated - self.stops() if self.nodes[n].kind == "E" for arg in self.nodes[n].args}
        used |= {self.nodes[n].args[0] for n in stage.aggregations}
        return sorted(n for n in used if self.nodes[n].kind == far and n not in self.stops())

    def _is_cheap(self, number: int) -> bool:
        inside = ancestors(self.nodes, [number], self.stops() | self.arrays)
        wide_loads = sum(self.nodes[n].is_wide for n in inside if n in self.stops() or n in self.arrays)
        return wide_loads <= 1 and not self.is_costly(number)

    def _store_crossing_aggregations(self, stages: list[_Stage]) -> None:
        for stage in stages:
            stops = self.stops() | (self.arrays - set(stage.results))
            read = ancestors(self.nodes, self.roots_of(stage), stops)
            for other in stages:
                if other is not stage:
                    self.arrays |= read & set(other.aggregations)


class _KernelBuilder:
    """Orders the work of one stage into loops and row stages."""

    def __init__(self, planner: _Planner, stage: _Stage):
        self.planner, self.stage, self.nodes = planner, stage, planner.nodes
        self.own = set(stage.aggregations) | set(stage.results)
        self.stops = planner.leaves | (planner.arrays - self.own)
        self._level: dict[int, int] = {}

    def build(self) -> Kernel:
        loops: dict[tuple[int, str], Loop] = {}
        row_stages: dict[int, Loop] = {}
        for action, value, target in self._edge_roots():
            key = self._level_of(value), self._relation_of(value, target)
            loops.setdefault(key, Loop(key[1])).roots.append(Root(action, value, target))
        for action, value in self._row_roots(loops):
            target = next(
                (n for n in self.stage.results if self.nodes[n].op == "sum_all" and self.nodes[n].args[0] == value),
                value,
            )
            stage = row_stages.setdefault(self._level_of(value), Loop(None))
            stage.roots.append(Root(action, value, target if action == "all" else value))
        steps: list[Loop] = []
        for level in range(max([0, *row_stages, *(level for level, _ in loops)]) + 1):
            steps += [row_stages[level]] if level in row_stages else []
            steps += [loop for (at, _), loop in sorted(loops.items()) if at == level]
        kept = self._keep_edge_values(steps)
        return Kernel(self.stage.side, self.stage.relation, steps, tuple(sorted(kept)))

    def _edge_roots(self) -> list[tuple[str, int, int]]:
        roots = []
        for number in self.stage.aggregations:
            action = {"max_dst": "max", "shift_dst": "max", "min_dst": "min"}.get(self.nodes[number].op, "sum")
            roots.append((action, self.nodes[number].args[0], number))
        for number in self.stage.results:
            node = self.nodes[number]
            if node.op == "sum_all" and self.nodes[node.args[0]].kind == "E":
                roots.append(("all", node.args[0], number))
            elif node.kind == "E":
                roots.append(("store", number, number))
        return roots

    def _row_roots(self, loops: dict[tuple[int, str], Loop]) -> list[tuple[str, int]]:
        side, roots = self.stage.side, []
        for number in self.stage.results:
            node = self.nodes[number]
            if node.op == "sum_all" and self.nodes[node.args[0]].kind == side:
                roots.append(("all", node.args[0]))
        stored = {n for n in self.own if n in self.planner.arrays and self.nodes[n].kind == side}
        roots += [("store", number) for number in sorted(stored)]
        at_edges = {root.value for loop in loops.values() for root in loop.roots}
        evaluated = ancestors(self.nodes, at_edges, self.stops | set(self.stage.aggregations))
        used = {
            arg for n in evaluated - self.stops if self.nodes[n].kind == "E" for arg in self.nodes[n].args
        } | at_edges
        for number in sorted(used):
            is_leaf = number in self.stops or number in self.stage.aggregations
            if self.nodes[number].kind == side and not is_leaf and number not in stored:
                roots.append(("keep", number))
        return roots

    def _relation_of(self, value: int, target: int) -> str:
        node = self.nodes[target]
        return self.nodes[value].relation if node.op == "sum_all" else node.relation

    def _level_of(self, number: int) -> int:
        """Return how many loops of this kernel have to end before the value can be computed."""
        if number not in self._level:
            args = self.nodes[number].args
            level = 0 if number in self.stops else max((self._level_of(arg) for arg in args), default=0)
            self._level[number] = level + (number in self.stage.aggregations)
        return self._level[number]

    def _keep_edge_values(self, steps: list[Loop]) -> set[int]:
        """Add ``keep`` roots for edge values that later loops of the row need as well."""
        kept: set[int] = set()
        loops = [step for step in steps if step.relation is not None]
        stops = self.stops | self.planner.stops()
        for position, loop in enumerate(loops):
            evaluated = ancestors(self.nodes, [root.value for root in loop.roots], stops | kept)
            later = [
                root.value for other in loops[position + 1 :] for root in other.roots if other.relation == loop.relation
            ]
            for number in self.planner.frontier(later, evaluated - kept - self.stops):
                kept.add(number)
                loop.roots.append(Root("keep", number, number))
        return kept
