"""Frontier Tracking: eliminate one node after another while keeping whole frontiers.

Node, edge and branch elimination and linear dynamic programming of the paper are one algorithm here: bucket elimination
over the semiring of frontiers (union as addition, product as multiplication). All tables that mention a node are
multiplied, the union over its choices removes it; when no node is left, one frontier remains. Reducing after every step
loses nothing, because costs add: a dominated part stays dominated whatever is added to it. Products of equal tables
are computed once, so repeated layers cost little more than one of them.

Where the graph is so entangled that a table would exceed ``max_cells``, some nodes are conditioned: the search runs
once for each combination of their choices and the frontiers are united, which is still exact. When those combinations
exceed ``max_conditions``, the remaining nodes keep the choice that is best on its own, and the result says that it is
heuristic.

Source: TensorOpt, sections on Frontier Tracking (FT-Elimination, FT-LDP), arXiv 2004.10856. We differ in the order
(minimum fill, swept along the longest path), in integer costs and in the guarantee of thinning.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from autopar.errors import ProblemError
from autopar.frontier import Frontier
from autopar.problem import Problem
from autopar.tracking.bounds import Bounds, Factor, find_bounds
from autopar.tracking.dominance import FORBIDDEN, undominated_choices
from autopar.tracking.elimination import eliminate
from autopar.tracking.order import balanced_order, elimination_order, largest_scope, subtree_sizes, widest_node
from autopar.tracking.tables import Products, Table, recover_choices

__all__ = ["track", "track_all"]


def track(problem: Problem, eps: float = 0.0, max_cells: int = 1 << 22, max_conditions: int = 4096) -> Frontier:
    """Find the Pareto frontier of (memory, seconds) over all assignments of choices.

    Args:
        problem: Costs of nodes and edges.
        eps: 0 for the exact frontier. Otherwise every point of the exact frontier has one in the result that is at
            least as fast and needs at most ``1 + eps`` times its memory; the least memory stays exact.
        max_cells: Largest number of combinations of choices that one elimination may hold.
        max_conditions: Largest number of combinations of conditioned nodes that are searched one by one.

    Returns:
        The frontier, memory ascending; empty when every assignment is forbidden.

    Raises:
        ProblemError: ``eps`` is negative or not finite, or a limit is below 1.

    Cost: along a chain of N nodes with K choices, O(N K^2 F log K) for frontiers of F points.

    >>> problem = Problem([[(1, 5), (4, 2)], [(2, 3), (3, 1)]], {(0, 1): [[(0, 0), (0, 1)], [(0, 1), (0, 0)]]})
    >>> [(point.memory, point.seconds, point.choices) for point in track(problem).points]
    [(3.0, 8.0, (0, 0)), (4.0, 7.0, (0, 1)), (6.0, 6.0, (1, 0)), (7.0, 3.0, (1, 1))]
    """
    if not (math.isfinite(eps) and eps >= 0):
        raise ProblemError(f"eps={eps} is not valid: expected a number of at least 0; use 0 for the exact frontier")
    for name, limit in (("max_cells", max_cells), ("max_conditions", max_conditions)):
        if limit < 1:
            raise ProblemError(f"{name}={limit} is not valid: expected at least 1; leave it out for the default")
    return _track(problem, eps, _Limits(max_cells, max_conditions), Products())


def track_all(problems: Iterable[Problem], eps: float = 0.0) -> list[Frontier]:
    """Track problems that have most of their costs in common; when thinning, equal parts are searched once.

    >>> [len(frontier) for frontier in track_all([Problem([[(1, 5), (4, 2)]]), Problem([[(1, 5), (4, 6)]])])]
    [2, 1]
    """
    products = Products()
    return [_track(problem, eps, _Limits(), products) for problem in problems]


def _track(problem: Problem, eps: float, limits: _Limits, products: Products) -> Frontier:
    costs = _Costs.of(problem)
    if eps > 0:
        found = _search(costs, eps, limits, products)
    else:
        costs, found = _search_exactly(costs, limits)
    return _unite(problem, costs, found)


@dataclass(frozen=True)
class _Limits:
    """How much one search may hold; ``most_points`` of one table ends a search that is only a try."""

    max_cells: int = 1 << 22
    max_conditions: int = 4096
    most_points: float = math.inf


@dataclass(frozen=True)
class _Found:
    """Frontiers per combination of conditioned choices; ``is_complete`` unless a table had too many points."""

    results: list[tuple[dict[int, int], Table]]
    is_exact: bool
    is_complete: bool = True

    def points(self) -> np.ndarray:
        """Return the united frontier, int64 [points, 2]."""
        return _reduce(np.concatenate([table.costs for _, table in self.results]))[1]


# Points of one table beyond which an exact search is worth the bounds, and how coarse the searches are that find them.
_LONG_TABLE = 1 << 14
_COARSE = (5e-2, 1e-3)


def _search_exactly(costs: _Costs, limits: _Limits) -> tuple[_Costs, _Found]:
    """Search exactly; where tables grow long, leave out what coarser searches have shown to be beaten."""
    found = _search(costs, 0.0, replace(limits, most_points=_LONG_TABLE), Products())
    if found.is_complete:
        return costs, found
    found = _search(costs, _COARSE[0], limits, Products())
    if len(found.results) > 1 or not found.is_exact:
        return costs, _search(costs, 0.0, limits, Products())
    known = found.points()
    if not len(known):
        return costs, found
    for eps in (*_COARSE[1:], 0.0):
        bounds = _bounds(costs, known, limits)
        costs = costs.restricted([
            bounds.useful_choices(node).nonzero()[0] if node in bounds.marginals else np.arange(len(own))
            for node, own in enumerate(costs.nodes)
        ])  # fmt: skip
        found = _search(costs, eps, limits, Products(), _bounds(costs, known, limits))
        known = _reduce(np.concatenate([known, found.points()]))[1]
    return costs, found


def _bounds(costs: _Costs, known: np.ndarray, limits: _Limits) -> Bounds:
    fixed = costs.decided()
    order, _ = _plan_elimination(costs, limits.max_cells, balanced=False)
    return find_bounds(costs.factors(fixed), order, known)


def _search(costs: _Costs, eps: float, limits: _Limits, products: Products, bounds: Bounds | None = None) -> _Found:
    order, conditioned = _plan_elimination(costs, limits.max_cells, balanced=eps > 0 and bounds is None)
    enumerated, settled = _split_conditions(costs, conditioned, limits.max_conditions)
    without = {*conditioned, *costs.decided()}
    left = [(u, v) for u, v, _ in costs.edges if u not in without and v not in without]
    errors = _error_limits(eps, order, left, len(costs.nodes))
    results = []
    for combination in itertools.product(*(range(len(costs.nodes[node])) for node in enumerated)):
        fixed = costs.decided() | settled | dict(zip(enumerated, combination, strict=True))
        tables = [products.leaf(scope, values) for scope, values in costs.factors(fixed)]
        table = eliminate(tables, order, errors, products, bounds, limits.most_points)
        if table is None:
            return _Found([], False, False)
        results.append((fixed, table))
    return _Found(results, not settled)


# Tables that stem from fewer nodes are small: they are not thinned, so that the error is spent on the long ones.
_SMALL_SUBTREE = 32


def _error_limits(eps: float, order: list[int], edges: list, num_nodes: int) -> list[float]:
    """Return per node by which factor memory may be off once it is eliminated, growing along every line of descent.

    A sum is off by no more than its worst part, so errors grow along a line of descent, not with the nodes. Where equal
    blocks are joined pairwise, every doubling gets the same share.
    """
    sizes = subtree_sizes(order, edges, num_nodes)
    largest = math.log2(max(2.0, max(sizes, default=0) / _SMALL_SUBTREE))
    shares = [math.log2(size / _SMALL_SUBTREE) / largest if size > _SMALL_SUBTREE else 0.0 for size in sizes]
    return [(1 + eps) ** min(1.0, share) for share in shares]


@dataclass(frozen=True)
class _Costs:
    """A problem in whole units, without the choices that no optimal assignment needs.

    Attributes:
        nodes: int64 [choices left, 2] each, -1 where forbidden.
        edges: ``(u, v, int64 [choices left of u, of v, 2])``.
        kept: Per node the positions of its choices in the problem.
    """

    nodes: list[np.ndarray]
    edges: list[tuple[int, int, np.ndarray]]
    kept: list[np.ndarray]

    @classmethod
    def of(cls, problem: Problem) -> _Costs:
        """Read a problem; equal costs share their arrays."""
        read: dict[int, np.ndarray] = {}
        for costs in [*problem.node_costs, *(costs for _, _, costs in problem.edge_costs)]:
            if id(costs) not in read:
                read[id(costs)] = problem.as_integers(costs)
        nodes = [read[id(costs)] for costs in problem.node_costs]
        edges = [(u, v, read[id(costs)]) for u, v, costs in problem.edge_costs]
        every = [np.arange(len(costs)) for costs in nodes]
        return cls(nodes, edges, every).restricted(every)

    def restricted(self, left: list[np.ndarray]) -> _Costs:
        """Return the same with only some choices per node, and of those only the ones that are not dominated."""
        first = self._taken(left)
        return first._taken(undominated_choices(first.nodes, first.edges))

    def _taken(self, left: list[np.ndarray]) -> _Costs:
        taken: dict[tuple, np.ndarray] = {}

        def take(costs: np.ndarray, *kept: np.ndarray) -> np.ndarray:
            if all(len(positions) == size for positions, size in zip(kept, costs.shape, strict=False)):
                return costs
            key = (id(costs), *(positions.tobytes() for positions in kept))
            if key not in taken:
                taken[key] = costs[np.ix_(*kept)]
            return taken[key]

        return _Costs(
            [take(costs, left[node]) for node, costs in enumerate(self.nodes)],
            [(u, v, take(costs, left[u], left[v])) for u, v, costs in self.edges],
            [kept[positions] for kept, positions in zip(self.kept, left, strict=True)],
        )

    def decided(self) -> dict[int, int]:
        """Return the nodes that have one choice left."""
        return {node: 0 for node, costs in enumerate(self.nodes) if len(costs) == 1}

    def factors(self, fixed: dict[int, int]) -> list[Factor]:
        """Return all costs by their nodes, ascending, with the choices of ``fixed`` put in."""
        alone: dict[int, list[np.ndarray]] = {node: [costs] for node, costs in enumerate(self.nodes)}
        constant = np.zeros(2, np.int64)
        pairs: list[Factor] = []
        put_in: dict[tuple, np.ndarray] = {}
        for u, v, costs in self.edges:
            key = (id(costs), fixed.get(u), fixed.get(v), u < v)
            if key not in put_in:
                values = costs if u < v else costs.transpose(1, 0, 2)
                low, high = sorted((u, v))
                values = values[:, fixed[high]] if high in fixed else values
                put_in[key] = values[fixed[low]] if low in fixed else values
            scope = tuple(sorted({u, v} - fixed.keys()))
            if len(scope) == 2:
                pairs.append((scope, put_in[key]))
            elif scope:
                alone[scope[0]].append(put_in[key])
            else:
                constant = _added(constant, put_in[key])
        sums: dict[tuple, np.ndarray] = {}
        factors: list[Factor] = []
        for node, parts in alone.items():
            if node in fixed:
                constant = _added(constant, parts[0][fixed[node]])
                continue
            key = tuple(sorted(map(id, parts)))
            if key not in sums:
                sums[key] = functools.reduce(_added, parts)
            factors.append(((node,), sums[key]))
        return [((), constant), *factors, *pairs]


def _added(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Add costs, negative where either is forbidden."""
    forbidden = (a[..., :1] < 0) | (b[..., :1] < 0)
    return np.where(forbidden, -1, a + b)


def _plan_elimination(costs: _Costs, max_cells: int, balanced: bool) -> tuple[list[int], list[int]]:
    """Return the order of elimination and the nodes that must be conditioned for it to stay below ``max_cells``.

    Nodes with one choice left are neither.
    """
    sizes = [len(own) for own in costs.nodes]
    without = {*costs.decided()}
    conditioned: list[int] = []
    while True:
        edges = [(u, v) for u, v, _ in costs.edges if u not in without and v not in without]
        for choose_order in (balanced_order, elimination_order) if balanced else (elimination_order, balanced_order):
            order = [node for node in choose_order(len(sizes), edges) if node not in without]
            if largest_scope(order, edges, sizes)[0] <= max_cells or len(without) == len(sizes):
                return order, conditioned
        conditioned.append(widest_node(edges, sizes, without))
        without.add(conditioned[-1])


def _split_conditions(costs: _Costs, conditioned: list[int], max_conditions: int) -> tuple[list[int], dict[int, int]]:
    """Split conditioned nodes into those enumerated and those settled on their own best choice."""
    enumerated: list[int] = []
    combinations = 1
    settled = {}
    for node in conditioned:
        if combinations * len(costs.nodes[node]) <= max_conditions:
            combinations *= len(costs.nodes[node])
            enumerated.append(node)
        else:
            settled[node] = _best_alone(costs, node)
    return enumerated, settled


def _best_alone(costs: _Costs, node: int) -> int:
    """Return the choice with the least time, counting for each edge the cheapest partner."""

    def seconds_of(table: np.ndarray) -> np.ndarray:
        return np.where(table[..., 1] < 0, FORBIDDEN, table[..., 1]).astype(np.float64)

    seconds = seconds_of(costs.nodes[node])
    for u, v, table in costs.edges:
        if node in (u, v):
            seconds += seconds_of(table).min(1 if u == node else 0)
    return int(seconds.argmin())


def _reduce(costs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions of the points that no other beats, and those points, memory ascending."""
    order = np.lexsort((costs[:, 1], costs[:, 0]))
    seconds = costs[order, 1]
    kept = order[np.minimum.accumulate(np.append(np.iinfo(np.int64).max, seconds))[:-1] > seconds]
    return kept, costs[kept]


def _unite(problem: Problem, costs: _Costs, found: _Found) -> Frontier:
    """Reduce the frontiers of all conditions to one and attach the way back to choices."""
    results = found.results
    source = np.repeat(np.arange(len(results)), [table.num_points for _, table in results])
    point = np.concatenate([np.arange(table.num_points) for _, table in results])
    kept, points = _reduce(np.concatenate([table.costs for _, table in results]))

    def choices_of(index: int) -> tuple[int, ...]:
        fixed, table = results[source[kept[index]]]
        choices = recover_choices(table, int(point[kept[index]]), problem.num_nodes)
        for node, choice in fixed.items():
            choices[node] = choice
        return tuple(int(costs.kept[node][choice]) for node, choice in enumerate(choices))

    memory, seconds = points[:, 0] * problem.memory_unit, points[:, 1] * problem.seconds_unit
    return Frontier(memory, seconds, choices_of=choices_of, exact=found.is_exact)
