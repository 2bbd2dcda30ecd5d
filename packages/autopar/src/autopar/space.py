"""The search space of one mesh: variables with choices, their costs, and the edges between them.

Four kinds of variables:

- *operator*: one configuration of its rule;
- *storage*: how a parameter or buffer is kept, and whether a gathered copy is kept for the backward pass or dropped and
  gathered again (``drop``), as fully sharded data parallelism does;
- *delivery*: the layout in which a tensor with several readers is handed to all of them. A re-scheduling that readers
  share is thus paid once, forward and backward;
- *result*: the loss, wanted whole on every rank.

Operators that repeat in time share one variable (:mod:`autopar.ties`). Edges price re-scheduling. Gradient
synchronisation needs no term of its own: it is the backward part of re-scheduling a parameter from ``R`` to ``Q``.
Tables of equal operators are shared by identity, which the search recognises.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autopar.cluster import Cluster
from autopar.cost_model import (
    conversion_cost,
    local_bytes,
    operator_seconds,
    saved_bytes,
    update_bytes,
    update_seconds,
    working_bytes,
)
from autopar.graph import Graph, Operator, TensorInfo
from autopar.placement import Layout, R, divides, value_layout
from autopar.problem import Problem
from autopar.resharding import steps_between
from autopar.retention import shares_memory, storage_needs
from autopar.rules import Configuration, configurations, rule_of
from autopar.ties import tied_operators
from autopar.tracking.order import balanced_order, elimination_order, largest_scope

__all__ = ["SearchSpace", "Storage", "Variable"]

_MULTIPLE = ("unbind", "split", "split_with_sizes", "chunk")


@dataclass(frozen=True)
class Storage:
    """How a parameter or buffer is kept between uses."""

    layout: Layout
    drop: bool = False


@dataclass(eq=False)
class Variable:
    """One node of the search problem.

    Attributes:
        kind: ``"operator"``, ``"storage"``, ``"delivery"`` or ``"result"``.
        operator: Position in the graph, of the first where several are planned alike.
        choices: A :class:`Configuration`, :class:`Storage` or layout each.
        layouts: Layout of the tensor it hands on, per choice.
        costs: float64 [choices, 2] memory and seconds.
        working: float64 [choices] bytes needed only while it runs.
        members: Positions of all that share the choice.
    """

    kind: str
    operator: int
    choices: Sequence[Any]
    layouts: Sequence[Layout]
    costs: np.ndarray
    working: np.ndarray
    members: list[int] = field(default_factory=list)


@dataclass(eq=False)
class Edge:
    """Re-scheduling between two variables: costs [K_u, K_v, 2] and working bytes [K_u, K_v]."""

    source: int
    target: int
    costs: np.ndarray
    working: np.ndarray


@dataclass(eq=False)
class SearchSpace:
    """All choices for one graph on one mesh.

    Args:
        graph: Captured step.
        mesh: Sizes of the axes.
        cluster: Costs.
        keep: Restricts choices: a function of variable kind, operator and choice; used for presets.
        gathers_parameters: Whether a parameter may be computed with in a larger layout than it is stored in.
    """

    graph: Graph
    mesh: tuple[int, ...]
    cluster: Cluster
    keep: Callable[[str, Operator, object], bool] | None = None
    gathers_parameters: bool = True
    variables: list[Variable] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._memo: dict[tuple, Any] = {}
        self._units: tuple[float, float] | None = None
        self._readers = self.graph.consumers()
        self._needs = storage_needs(self.graph)
        self._first = tied_operators(self.graph)
        self._edge_between: dict[tuple[int, int], Edge] = {}
        self._variable_of: dict[int, int] = {}
        self._delivery_of: dict[int, int] = {}
        self._classes: dict[int, list[int]] = {}
        for position, first in enumerate(self._first):
            self._classes.setdefault(first, []).append(position)
        for position, operator in enumerate(self.graph.operators):
            self._add_operator(position, operator)
        self._add_result()

    def problem(self, working_limit: float = np.inf) -> Problem:
        """Return the bare problem; choices that need more working bytes than the limit are forbidden."""
        limited: dict[int, np.ndarray] = {}

        def limit(costs: np.ndarray, working: np.ndarray) -> np.ndarray:
            if working.max(initial=0) <= working_limit:
                return costs
            if id(costs) not in limited:
                limited[id(costs)] = np.where((working > working_limit)[..., None], np.inf, costs)
            return limited[id(costs)]

        nodes = [limit(variable.costs, variable.working) for variable in self.variables]
        edges = [(e.source, e.target, limit(e.costs, e.working)) for e in self.edges]
        problem = Problem(nodes, edges, self._units)
        if np.isinf(working_limit):
            self._units = problem.memory_unit, problem.seconds_unit
        return problem

    def working_levels(self, max_levels: int) -> list[float]:
        """Return bounds on the working set worth searching under, ascending.

        Below the first nothing is feasible; every further one admits choices that the one before forbids. When there
        are more than ``max_levels``, those kept form about a geometric row that ends with the largest.
        """
        tables = {id(v.working): v.working for v in self.variables} | {id(e.working): e.working for e in self.edges}
        finite = [np.where(np.isfinite(v.costs).all(-1), v.working, np.inf).min(initial=np.inf) for v in self.variables]
        least = max(finite, default=0.0)
        values = np.unique(np.concatenate([table.reshape(-1) for table in tables.values()]))
        levels = [float(value) for value in values if value > least]
        levels = [float(least), *levels]
        if len(levels) <= max_levels:
            return levels
        wanted = np.geomspace(max(levels[0], 1.0), max(levels[-1], 1.0), max_levels)
        return sorted({min(levels, key=lambda level: abs(level - value)) for value in wanted} | {levels[-1]})

    def fits(self, max_cells: int) -> bool:
        """Whether no elimination of the search holds more than so many combinations of choices."""
        return self.largest_table(halved=True) <= max_cells or self.largest_table() <= max_cells

    def largest_table(self, halved: bool = False) -> int:
        """Return the most combinations of choices that one elimination of the search holds in one of the two orders."""
        edges = [(edge.source, edge.target) for edge in self.edges]
        sizes = [len(variable.choices) for variable in self.variables]
        choose_order = balanced_order if halved else elimination_order
        return largest_scope(choose_order(len(sizes), edges), edges, sizes)[0]

    def _add_operator(self, position: int, operator: Operator) -> None:
        if operator.is_leaf:
            variable = self._storage_variable(position, operator)
        else:
            variable = self._operator_variable(position, operator)
        index = self._add(variable, self._variable_of)
        for slot, source in enumerate(operator.inputs):
            self._connect(source, index, position, slot)
        readers = self._readers[position]
        if len(readers) > 1 and operator.output.has_gradient and operator.kind not in _MULTIPLE:
            self._add_delivery(position, operator, index)

    def _add(self, variable: Variable, index_of: dict[int, int]) -> int:
        """Add a variable, or put it on the one of its class; ``index_of`` is filled in."""
        position = variable.operator
        index = next((index_of[m] for m in self._classes[self._first[position]] if m in index_of), None)
        if index is None:
            index = len(self.variables)
            self.variables.append(variable)
        else:
            shared = self.variables[index]
            shared.costs = shared.costs + variable.costs
            shared.working = np.maximum(shared.working, variable.working)
        index_of[position] = index
        self.variables[index].members.append(position)
        return index

    def _masked(self, kind: str, operator: Operator, choices: Sequence, costs: np.ndarray) -> np.ndarray:
        if self.keep is None:
            return costs
        kept = np.array([self.keep(kind, operator, choice) for choice in choices])
        return np.where(kept[:, None], costs, np.inf) if kept.any() else costs

    def _operator_variable(self, position: int, operator: Operator) -> Variable:
        key = ("operator", *operator.signature)
        if key not in self._memo:
            choices = configurations(operator, self.mesh)
            costs = np.array([
                (saved_bytes(operator, c, self.mesh), operator_seconds(operator, c, self.mesh, self.cluster))
                for c in choices
            ], dtype=np.float64)  # fmt: skip
            working = np.array([working_bytes(operator, c, self.mesh) for c in choices], dtype=np.float64)
            layouts = [choice.output for choice in choices]
            self._memo[key] = (choices, layouts, costs, working)
        choices, layouts, costs, working = self._memo[key]
        costs = self._masked("operator", operator, choices, costs)
        return Variable("operator", position, choices, layouts, costs, working)

    def _storage_variable(self, position: int, operator: Operator) -> Variable:
        info = operator.output
        changes = any(self.graph.operators[r].kind in ("add_", "batch_norm") for r, _ in self._readers[position])
        is_shared = len(self._readers[position]) > 1
        key = ("storage", operator.kind, info, changes, is_shared)
        if key not in self._memo:
            choices = self._storages(operator, is_shared)
            costs = np.array([self._storage_cost(operator, c.layout) for c in choices], dtype=np.float64)
            optimizer = self.graph.optimizer if operator.kind == "parameter" else ""
            updates = [update_bytes(optimizer, local_bytes(info, c.layout, self.mesh)) for c in choices]
            self._memo[key] = (choices, [c.layout for c in choices], costs, np.array(updates, dtype=np.float64))
        choices, layouts, costs, working = self._memo[key]
        costs = self._masked("storage", operator, choices, costs)
        return Variable("storage", position, choices, layouts, costs, working)

    def _storages(self, operator: Operator, is_shared: bool) -> list[Storage]:
        whole = (R,) * len(self.mesh)
        if operator.kind in ("input", "constant"):
            return [Storage(whole)]
        forms = [R, *range(min(2, len(operator.output.shape)))]
        layouts = [()]
        for size in self.mesh:
            layouts = [(*layout, form) for layout in layouts for form in (forms if size > 1 else [R])]
        layouts = [layout for layout in layouts if divides(operator.output.shape, layout, self.mesh)]
        storages = [Storage(layout) for layout in layouts]
        if operator.kind == "parameter" and self.gathers_parameters and not is_shared:
            storages += [Storage(layout, drop=True) for layout in layouts if layout != whole]
        return storages

    def _storage_cost(self, operator: Operator, layout: Layout) -> tuple[float, float]:
        if operator.kind in ("input", "constant"):
            return 0.0, 0.0
        stored = local_bytes(operator.output, layout, self.mesh)
        if not operator.output.has_gradient:
            return float(stored), 0.0
        factor = self.graph.state_factor
        return stored * (2 + factor), update_seconds(self.graph, stored, self.cluster)

    def _add_delivery(self, position: int, operator: Operator, source: int) -> None:
        layouts = self._delivery_layouts(operator, source)
        readers = self._readers[position]
        costs = self._masked("delivery", operator, layouts, self._zeros(len(layouts), 2))
        variable = Variable("delivery", position, layouts, layouts, costs, self._zeros(len(layouts)))
        index = self._add(variable, self._delivery_of)
        self._add_edge(source, index, position, layouts, any(self._needs[r][slot] for r, slot in readers), same=False)

    def _delivery_layouts(self, operator: Operator, source: int) -> list[Layout]:
        """Return the layouts that some reader of the tensor, or of one tied to it, wants on each axis."""
        variable = self.variables[source]
        per_axis = []
        for axis in range(len(self.mesh)):
            wanted = {layout[axis] for layout in variable.layouts}
            for member in self._classes[self._first[variable.operator]]:
                for reader, slot in self._readers[member]:
                    wanted |= {c.inputs[slot][axis] for c in self._configurations(self.graph.operators[reader])}
            per_axis.append(tuple(sorted(wanted)))
        key = ("layouts", operator.output.shape, *per_axis)
        if key not in self._memo:
            layouts = itertools.product(*per_axis)
            self._memo[key] = [layout for layout in layouts if divides(operator.output.shape, layout, self.mesh)]
        return self._memo[key]

    def _zeros(self, *shape: int) -> np.ndarray:
        return self._memo.setdefault(("zeros", *shape), np.zeros(shape))

    def _configurations(self, operator: Operator) -> list[Configuration]:
        key = ("operator", *operator.signature)
        if key not in self._memo:
            self._operator_variable(0, operator)
        return self._memo[key][0]

    def _add_result(self) -> None:
        whole: list[Layout] = [(R,) * len(self.mesh)]
        result = self.graph.result
        index = len(self.variables)
        self.variables.append(Variable("result", result, whole, whole, np.zeros((1, 2)), np.zeros(1), [result]))
        self._add_edge(self._variable_of[result], index, result, whole, False, same=False)

    def _connect(self, source: int, index: int, position: int, slot: int) -> None:
        producer, reader = self.graph.operators[source], self.graph.operators[position]
        variable = self.variables[index]
        targets = self._memo.setdefault(  # one list object per rule and slot, so that tables are shared
            ("targets", id(variable.choices), slot), [choice.inputs[slot] for choice in variable.choices]
        )
        same = producer.kind in _MULTIPLE or (producer.kind == "buffer" and reader.kind in ("add_", "batch_norm"))
        origin = self._delivery_of.get(source, self._variable_of[source])
        self._add_edge(origin, index, source, targets, self._needs[position][slot], same)

    def _add_edge(
        self, source: int, target: int, position: int, targets: list[Layout], needed: bool, same: bool
    ) -> None:
        producer, origin = self.graph.operators[position], self.variables[source]
        is_storage = origin.kind == "storage"
        # What the producer keeps anyway, and what shares another tensor's memory, is not paid again.
        free = is_storage or origin.kind == "delivery" or shares_memory(producer)
        free = free or rule_of(producer.kind).saves_output
        key = ("edge", id(origin.choices), id(targets), producer.output, needed, same, free, producer.kind == "buffer")
        if key not in self._memo:
            self._memo[key] = self._edge_tables(origin, targets, producer, needed, same, free)
        self._join(source, target, *self._memo[key])

    def _join(self, source: int, target: int, costs: np.ndarray, working: np.ndarray) -> None:
        """Add an edge; between tied operators, add to the edge there is, or to the variable when both are one."""
        if source == target:
            variable = self.variables[source]
            variable.costs = variable.costs + np.einsum("iic->ic", costs)
            variable.working = np.maximum(variable.working, working.diagonal())
            return
        edge = self._edge_between.get((source, target))
        if edge is None:
            edge = self._edge_between[source, target] = Edge(source, target, costs, working)
            self.edges.append(edge)
            return
        key = ("sum", id(edge.costs), id(costs))
        if key not in self._memo:  # the operands stay alive beside the sum, so that their ids stay theirs
            self._memo[key] = edge.costs + costs, np.maximum(edge.working, working), edge.costs, costs
        edge.costs, edge.working = self._memo[key][:2]

    def _edge_tables(
        self, origin: Variable, targets: list[Layout], producer: Operator, needed: bool, same: bool, free: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        columns = {layout: place for place, layout in enumerate(dict.fromkeys(targets))}
        rows = {choice: place for place, choice in enumerate(dict.fromkeys(_sources(origin)))}
        small = np.empty((len(rows), len(columns), 2))
        working = np.zeros((len(rows), len(columns)))
        for (layout, drop), i in rows.items():
            for target, j in columns.items():
                small[i, j], working[i, j] = self._convert(
                    producer.output, layout, target, drop, needed, same, free, origin.kind == "storage"
                )
        take = np.array([rows[choice] for choice in _sources(origin)])
        give = np.array([columns[layout] for layout in targets])
        return small[take][:, give], working[take][:, give]

    def _convert(
        self, info: TensorInfo, layout: Layout, target: Layout, drop: bool, needed: bool, same: bool, free: bool,
        is_storage: bool,
    ) -> tuple[tuple[float, float], float]:  # fmt: skip
        """Return ((memory, seconds), working bytes) of one re-scheduling."""
        forbidden = (np.inf, np.inf), 0.0
        if same:
            equal = value_layout(layout) == value_layout(target) if not info.has_gradient else layout == target
            return ((0.0, 0.0), 0.0) if equal else forbidden
        steps = steps_between(layout, target, info.shape, self.mesh, info.has_gradient)
        if steps is None:
            return forbidden
        cost = conversion_cost(steps, info, self.mesh, self.cluster, is_storage)
        kept = local_bytes(info, target if cost.moves_data else layout, self.mesh) if needed else 0
        if is_storage:
            if cost.gathers and not self.gathers_parameters:
                return forbidden
            gathered = local_bytes(info, target, self.mesh) if cost.gathers else 0
            if drop:
                if not cost.gathers:
                    return forbidden
                return (0.0, cost.seconds + (cost.forward_seconds if needed else 0.0)), 2.0 * gathered
            return (float(gathered if needed else 0), cost.seconds), float(gathered)
        if not cost.moves_data and free:
            kept = 0
        return (float(kept), cost.seconds), 0.0


def _sources(origin: Variable) -> list[tuple[Layout, bool]]:
    return [(layout, getattr(choice, "drop", False)) for layout, choice in zip(origin.layouts, origin.choices)]  # noqa: B905
