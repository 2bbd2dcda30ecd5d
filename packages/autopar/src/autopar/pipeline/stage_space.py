"""The intra-operator frontier of one unit on the devices of one stage.

A unit is searched as :func:`autopar.search` searches a whole step, on the shapes of one micro-batch, with one thing
fixed: the layout in which activations come in and go out (the *boundary*), samples split or whole per axis. Units
with equal boundaries fit together without re-scheduling, so the frontier of a stage is the product of its units'
frontiers.

A point has three coordinates, because a stage of a pipeline holds some things once and others per micro-batch in
flight:

- ``states``: parameters, their gradients, optimiser state and buffers, once;
- ``saved``: what is kept for the backward pass, once per micro-batch in flight;
- ``seconds``: of one micro-batch, forward and backward. What happens once per step (gradient synchronisation of
  parameters that are computed with as they are stored, the optimiser) counts its m-th part. Gathered parameters are
  gathered, and their gradients scattered, for every micro-batch.

Parameters that several units read are stored whole, so that stages can add their gradients.

The search runs once for each number of micro-batches in flight, with ``saved`` weighted by it, and keeps every point
found.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.cluster import Cluster
from autopar.cost_model import conversion_cost, local_bytes
from autopar.graph import Graph, Operator, TensorInfo
from autopar.placement import Layout, R, divides
from autopar.problem import Problem
from autopar.resharding import steps_between
from autopar.rules import rule_of
from autopar.space import SearchSpace, Storage, Variable
from autopar.tracking import track

__all__ = ["StageSpace", "UnitFrontier", "boundaries", "per_micro_batch", "search_unit"]


@dataclass(eq=False)
class StageSpace(SearchSpace):
    """The search space of a unit whose activations come in and go out in one of some layouts.

    Args:
        layouts: These layouts; :meth:`weighted` fixes one.
        num_micro_batches: Over how many micro-batches the costs of a step are spread.
        has_source: Whether the first operator is a value of the stage before.
    """

    layouts: Sequence[Layout] = ()
    num_micro_batches: int = 1
    has_source: bool = True

    def _storages(self, operator: Operator, is_shared: bool) -> list[Storage]:
        if self._is_source(operator):
            return [Storage(layout) for layout in self.layouts]
        return super()._storages(operator, is_shared)

    def _convert(
        self, info: TensorInfo, layout: Layout, target: Layout, drop: bool, needed: bool, same: bool, free: bool,
        is_storage: bool,
    ) -> tuple[tuple[float, float], float]:  # fmt: skip
        """Price the gradient of a gathered parameter, which is scattered for every micro-batch, in full."""
        (memory, seconds), working = super()._convert(info, layout, target, drop, needed, same, free, is_storage)
        if is_storage and not same and np.isfinite(seconds):
            steps = steps_between(layout, target, info.shape, self.mesh, info.has_gradient)
            spread = conversion_cost(steps or (), info, self.mesh, self.cluster, True)
            if spread.gathers:
                seconds += (self.num_micro_batches - 1) * (spread.seconds - spread.forward_seconds)
        return (memory, seconds), working

    def _is_source(self, operator: Operator) -> bool:
        return self.has_source and operator is self.graph.operators[0]

    def _storage_cost(self, operator: Operator, layout: Layout) -> tuple[float, float]:
        memory, seconds = super()._storage_cost(operator, layout)
        return memory, seconds / self.num_micro_batches

    def _edge_tables(
        self, origin: Variable, targets: list[Layout], producer: Operator, needed: bool, same: bool, free: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        if self._is_source(producer):  # an activation, whatever kind of leaf it is here
            origin = replace(origin, kind="operator")
        return super()._edge_tables(origin, targets, producer, needed, same, free)

    @property
    def hands_on(self) -> bool:
        """Whether the unit's result is a value for the next; not the loss."""
        return len(self.graph.operators[self.graph.result].output.shape) > 0

    def _add_result(self) -> None:
        super()._add_result()
        if self.hands_on:
            result, index, layouts = self.graph.result, len(self.variables) - 1, list(self.layouts)
            self.edges.pop()
            self.variables[index] = Variable(
                "result", result, layouts, layouts, np.zeros((len(layouts), 2)), np.zeros(len(layouts)), [result]
            )
            self._add_edge(self._variable_of[result], index, result, layouts, False, same=False)

    def weighted(self, num_in_flight: int, layout: Layout) -> Problem:
        """Return the problem with a fixed boundary, in which what is saved counts ``num_in_flight`` times."""
        once, each = np.array([1.0, 1.0]), np.array([float(num_in_flight), 1.0])
        made: dict[tuple[int, bool], np.ndarray] = {}

        def weigh(costs: np.ndarray, is_state: bool) -> np.ndarray:
            key = id(costs), is_state
            if key not in made:
                made[key] = costs * (once if is_state else each)
            return made[key]

        nodes = [weigh(variable.costs, variable.kind == "storage") for variable in self.variables]
        ends = [self._variable_of[0]] if self.has_source else []
        ends += [len(self.variables) - 1] if self.hands_on else []
        place = list(self.layouts).index(layout)
        for end in ends:
            nodes[end] = np.where(np.arange(len(self.layouts))[:, None] == place, nodes[end], np.inf)
        return Problem(nodes, [(edge.source, edge.target, weigh(edge.costs, False)) for edge in self.edges])

    def split_costs(self, choices: Sequence[int]) -> tuple[float, float, float]:
        """Return (states, saved, seconds) of an assignment."""
        states = saved = seconds = 0.0
        for variable, choice in zip(self.variables, choices, strict=True):
            memory, took = variable.costs[choice]
            states += memory if variable.kind == "storage" else 0.0
            saved += 0.0 if variable.kind == "storage" else memory
            seconds += took
        for edge in self.edges:
            memory, took = edge.costs[choices[edge.source], choices[edge.target]]
            saved, seconds = saved + memory, seconds + took
        return float(states), float(saved), float(seconds)

    def working_of(self, choices: Sequence[int]) -> float:
        """Return the largest working set of an assignment."""
        working = [float(v.working[c]) for v, c in zip(self.variables, choices, strict=True)]
        working += [float(e.working[choices[e.source], choices[e.target]]) for e in self.edges]
        return max(working, default=0.0)


@dataclass(eq=False)
class UnitFrontier:
    """The points of one unit on one mesh with one boundary.

    Attributes:
        points: float64 [points, 3]: states and saved bytes, seconds.
        working: Bytes of the largest working set of any point.
        space: The space, for reading choices.
        choices: Choice of each variable, per point.
    """

    points: np.ndarray
    working: float
    space: StageSpace
    choices: list[tuple[int, ...]]


def boundaries(num_axes: int) -> list[Layout]:
    """Return the layouts activations may have between units: samples split or whole on each axis.

    >>> boundaries(2)
    [(0, 0), (0, -1), (-1, 0), (-1, -1)]
    """
    return list(itertools.product((0, R), repeat=num_axes))


def per_micro_batch(cluster: Cluster, num_micro_batches: int) -> Cluster:
    """Return the cluster on which gradient synchronisation costs each micro-batch its share of once per step."""
    return replace(cluster, overlap=1 - (1 - cluster.overlap) / num_micro_batches)


def search_unit(
    part: Graph,
    mesh: tuple[int, ...],
    layouts: Sequence[Layout],
    cluster: Cluster,
    num_micro_batches: int,
    in_flight: Sequence[int],
    has_source: bool = True,
    eps: float = 0.0,
    shared: Collection[str] = (),
) -> list[UnitFrontier | None]:
    """Search one unit.

    Args:
        part: The unit at the shapes of one micro-batch.
        mesh: Devices of the stage.
        layouts: Layouts that activations may come in and go out in.
        cluster: Costs, from :func:`per_micro_batch`.
        num_micro_batches: Micro-batches of a step.
        in_flight: Numbers of micro-batches in flight to search for.
        has_source: Whether its first operator is a value of the unit before.
        eps: Thinning, as in :func:`autopar.search`.
        shared: Parameters that other units read as well; they are stored whole.

    Returns:
        Per layout the points, or ``None`` when the layout does not divide the activations.
    """
    ends = [part.operators[0].output] if has_source else []
    ends += [part.operators[part.result].output] if part.operators[part.result].output.shape else []
    fitting = [layout for layout in layouts if all(divides(info.shape, layout, mesh) for info in ends)]
    if not fitting:
        return [None] * len(layouts)
    whole = Storage((R,) * len(mesh))

    def keep(kind: str, operator: Operator, choice: object) -> bool:
        return kind != "storage" or operator.target not in shared or choice == whole

    space = StageSpace(
        part, mesh, cluster, keep if shared else None,
        layouts=fitting, num_micro_batches=num_micro_batches, has_source=has_source,
    )  # fmt: skip
    return [_search_layout(space, layout, in_flight, eps) if layout in fitting else None for layout in layouts]


def _search_layout(space: StageSpace, layout: Layout, in_flight: Sequence[int], eps: float) -> UnitFrontier | None:
    kept: dict[tuple[int, ...], tuple[float, float, float]] = {}
    for count in in_flight:
        frontier = track(space.weighted(count, layout), eps)
        for index in range(len(frontier)):
            choices = frontier[index].choices
            kept[choices] = space.split_costs(choices)
    if not kept:
        return None
    points, choices_kept = _reduce(np.array(list(kept.values())), list(kept))
    points[:, 1] += _received_bytes(space, layout) if space.has_source else 0
    return UnitFrontier(points, max(space.working_of(choices) for choices in choices_kept), space, choices_kept)


def _reduce(points: np.ndarray, choices: list[tuple[int, ...]]) -> tuple[np.ndarray, list[tuple[int, ...]]]:
    """Keep the points that no other beats in all three coordinates."""
    order = np.lexsort(points.T[::-1])
    kept: list[int] = []
    for index in order:
        if not kept or not (points[kept] <= points[index]).all(1).any():
            kept.append(int(index))
    return points[kept].copy(), [choices[index] for index in kept]


def _received_bytes(space: StageSpace, layout: Layout) -> int:
    """Return what stays of the incoming value for the backward pass, where its maker does not keep it anyway."""
    graph = space.graph
    if not any(space._needs[reader][slot] for reader, slot in graph.consumers()[0]):
        return 0
    maker = graph.operators[0]
    kind = maker.node.target._schema.name.split("::")[-1] if hasattr(maker.node.target, "_schema") else ""
    if kind and rule_of(kind).saves_output:
        return 0
    return local_bytes(maker.output, layout, space.mesh)
