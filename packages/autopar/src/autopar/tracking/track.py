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

import itertools
import math

import numpy as np

from autopar.errors import ProblemError
from autopar.frontier import Frontier
from autopar.problem import Problem
from autopar.tracking.order import balanced_order, elimination_depths, elimination_order, largest_scope, widest_node
from autopar.tracking.tables import Products, Table, leaf_table, recover_choices

__all__ = ["track"]


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
    edges = [(u, v) for u, v, _ in problem.edge_costs]
    sizes = [problem.num_choices(node) for node in range(problem.num_nodes)]
    order, conditioned = _plan_elimination(edges, sizes, max_cells, balanced=eps > 0)
    enumerated, settled = _split_conditions(problem, conditioned, sizes, max_conditions)
    left = [(u, v) for u, v in edges if u not in conditioned and v not in conditioned]
    limits = _error_limits(eps, order, left, problem.num_nodes)
    results = []
    products = Products()
    for combination in itertools.product(*(range(sizes[node]) for node in enumerated)):
        fixed = settled | dict(zip(enumerated, combination, strict=True))
        results.append((fixed, _eliminate(_tables(problem, fixed, products), order, limits, products)))
    return _unite(problem, results, exact=not settled)


def _error_limits(eps: float, order: list[int], edges: list, num_nodes: int) -> list[float]:
    """Return per node by which factor memory may be off once it is eliminated, growing along every line of descent.

    A sum is off by no more than its worst part, so errors grow along a line of descent, not with the nodes. What small
    tables leave unused goes to the large ones that stem from them.
    """
    depths = elimination_depths(order, edges, num_nodes)
    deepest = max(depths, default=1)
    return [(1 + eps) ** (depth / max(1, deepest)) for depth in depths]


def _plan_elimination(edges: list, sizes: list[int], max_cells: int, balanced: bool) -> tuple[list[int], list[int]]:
    """Return the order of elimination and the nodes that must be conditioned for it to stay below ``max_cells``."""
    conditioned: list[int] = []
    while True:
        fixed = set(conditioned)
        left = [(u, v) for u, v in edges if u not in fixed and v not in fixed]
        choices = (balanced_order, elimination_order) if balanced else (elimination_order, balanced_order)
        for choose_order in choices:
            order = [node for node in choose_order(len(sizes), left) if node not in fixed]
            if largest_scope(order, left, sizes)[0] <= max_cells or len(conditioned) == len(sizes):
                return order, conditioned
        conditioned.append(widest_node(edges, sizes, fixed))


def _split_conditions(
    problem: Problem, conditioned: list[int], sizes: list[int], max_conditions: int
) -> tuple[list[int], dict[int, int]]:
    """Split conditioned nodes into those enumerated and those settled on their own best choice."""
    enumerated: list[int] = []
    combinations = 1
    settled = {}
    for node in conditioned:
        if combinations * sizes[node] <= max_conditions:
            combinations *= sizes[node]
            enumerated.append(node)
        else:
            settled[node] = _best_alone(problem, node)
    return enumerated, settled


def _best_alone(problem: Problem, node: int) -> int:
    """Return the choice with the least time, counting for each edge the cheapest partner."""
    seconds = problem.node_costs[node][:, 1].copy()
    for u, v, costs in problem.edge_costs:
        if u == node:
            seconds += costs[..., 1].min(1)
        elif v == node:
            seconds += costs[..., 1].min(0)
    return int(seconds.argmin())


def _tables(problem: Problem, fixed: dict[int, int], products: Products) -> list[Table]:
    """Make the tables of all costs, with the choices of ``fixed`` put in; equal costs share their arrays."""
    tables = []
    read: dict[int, np.ndarray] = {}
    for costs in [*problem.node_costs, *(costs for _, _, costs in problem.edge_costs)]:
        if id(costs) not in read:
            read[id(costs)] = problem.as_integers(costs)
    for node, costs in enumerate(problem.node_costs):
        integers = read[id(costs)]
        table = leaf_table((), integers[fixed[node]]) if node in fixed else leaf_table((node,), integers)
        tables.append(products.known(table))
    for u, v, costs in problem.edge_costs:
        integers = read[id(costs)]
        scope = tuple(node for node in (u, v) if node not in fixed)
        if v in fixed:
            integers = integers[:, fixed[v]]
        if u in fixed:
            integers = integers[fixed[u]]
        tables.append(products.known(leaf_table(scope, integers)))
    return tables


# Points per cell below which thinning a table is not worth the error.
_FEW_POINTS = 4


def _eliminate(tables: list[Table], order: list[int], limits: list[float], products: Products) -> Table:
    """Eliminate the nodes of ``order`` and return the table without scope that is left."""
    waiting: dict[int, list[Table]] = {node: [] for node in order}
    place = {node: position for position, node in enumerate(order)}
    nothing = products.known(leaf_table((), np.zeros(2, np.int64)))
    whole = nothing
    for table in tables:
        if table.scope:
            waiting[min(table.scope, key=place.__getitem__)].append(table)
        else:
            whole = products.combine(whole, table)
    for node in order:
        # The table with most points comes last, so that it is merged once and the small ones multiply among themselves.
        *small, large = sorted(waiting.pop(node), key=lambda table: table.num_points)
        product = nothing
        for table in small:
            product = products.combine(product, table)
        result = products.combine(product, large, node)
        if limits[node] > result.error and result.num_points > _FEW_POINTS * result.num_cells:
            result = products.thin(result, limits[node])
        if result.scope:
            waiting[min(result.scope, key=place.__getitem__)].append(result)
        else:
            whole = products.combine(whole, result)
    return whole


def _unite(problem: Problem, results: list[tuple[dict[int, int], Table]], exact: bool) -> Frontier:
    """Reduce the frontiers of all conditions to one and attach the way back to choices."""
    memory, seconds = np.concatenate([table.costs for _, table in results]).T
    source = np.repeat(np.arange(len(results)), [table.num_points for _, table in results])
    point = np.concatenate([np.arange(table.num_points) for _, table in results])
    order = np.lexsort((seconds, memory))
    faster = np.minimum.accumulate(np.append(np.iinfo(np.int64).max, seconds[order]))[:-1] > seconds[order]
    kept = order[faster]

    def choices_of(index: int) -> tuple[int, ...]:
        fixed, table = results[source[kept[index]]]
        choices = recover_choices(table, int(point[kept[index]]), problem.num_nodes)
        for node, choice in fixed.items():
            choices[node] = choice
        return tuple(choices.tolist())

    return Frontier(
        memory[kept] * problem.memory_unit, seconds[kept] * problem.seconds_unit, choices_of=choices_of, exact=exact
    )
