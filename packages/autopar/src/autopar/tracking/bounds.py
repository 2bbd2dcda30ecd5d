"""What an exact search may leave out once good plans are known: bounds from weighted sums of the two costs.

For a weight w (seconds per unit of memory) the least of ``seconds + w * memory`` over all assignments is an ordinary
shortest-path problem on the elimination tree: one number per cell instead of a frontier. Computed from the leaves to
the root and back, it gives for every cell of every table the least that the rest of the problem adds. Symbols::

    excess_w(p)   seconds + w memory of a partial assignment p, plus that least of the rest, minus the least of all
    corner        a point just outside of what the known frontier dominates
    slack_w(c)    seconds + w memory of a corner c, minus the least of all

An assignment that no known plan beats lies on the better side of some corner c, so ``excess_w <= slack_w(c)`` for every
w at once. Choices and points for which no corner holds are left out; what is left still has every optimal assignment.
Corners are grouped by the weight at which they are nearest the least, and a group is as slack as its slackest.

Source: Lagrangian bounds of bicriteria shortest paths and of the knapsack's core (Pisinger, Oper. Res. 45, 1997), here
on the tables of bucket elimination.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit

__all__ = ["Bounds", "Factor", "find_bounds"]

Factor = tuple[tuple[int, ...], np.ndarray]  # nodes ascending, int64 [*choices, 2], negative where forbidden

_MIN_WEIGHTS, _MAX_WEIGHTS = 8, 64
# Cells times weights computed at once, float64.
_MOST_NUMBERS = 1 << 22
# Sums of float64 are off by less than this share.
_ROUNDING = 1e-10


@dataclass(frozen=True)
class Bounds:
    """Bounds for one order of elimination.

    Attributes:
        weights: float64 [W].
        least: float64 [W], the least weighted sum of all assignments.
        limits: float64 [groups, W], the largest slack of the corners of each group.
        rest: Per eliminated node float64 [cells of its table, W], the least of everything else.
        marginals: Per eliminated node float64 [choices, W], the least of all with that choice.
    """

    weights: np.ndarray
    least: np.ndarray
    limits: np.ndarray
    rest: dict[int, np.ndarray]
    marginals: dict[int, np.ndarray]

    def useful_choices(self, node: int) -> np.ndarray:
        """Return bool [choices]: whether an assignment that nobody beats may make the choice."""
        excess = self.marginals[node] - self.least
        return np.any(np.all(excess[:, None, :] <= self.limits[None], axis=-1), axis=1)

    def of_table(self, node: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (least of the rest [cells, W], weights, limits) for the table that is left when a node is eliminated.

        The rest is what :func:`autopar.tracking.kernels.combine_cells` adds to a point's own weighted sum.
        """
        return self.rest[node] - self.least, self.weights, self.limits


def find_bounds(factors: Sequence[Factor], order: Sequence[int], known: np.ndarray) -> Bounds:
    """Compute bounds for a problem, an order of elimination and a known frontier.

    Args:
        factors: Costs.
        order: All nodes of the factors.
        known: int64 [points, 2] of assignments that exist, memory ascending and seconds descending; its two ends are
            the least memory and the least seconds of all.
    """
    share = max(1, _MOST_NUMBERS // _largest_cluster(factors, order))
    weights = _weights(known, min(_MAX_WEIGHTS, max(_MIN_WEIGHTS, share)))
    parts = [_Tree(factors, order, weights[start : start + share]) for start in range(0, len(weights), share)]
    least = np.concatenate([part.least for part in parts])
    rest = {node: np.concatenate([part.rest[node] for part in parts], -1) for node in order}
    marginals = {node: np.concatenate([part.marginals[node] for part in parts], -1) for node in order}
    # Only a memory of one unit less than the next known point's is still worth its seconds.
    corners = np.concatenate([np.stack([known[1:, 0] - 1, known[:-1, 1]], -1), known[-1:]]).astype(np.float64)
    slack = corners[:, 1:] + weights * corners[:, :1] - least
    group = (slack / np.maximum(least, 1.0)).argmin(1)
    limits = np.full((len(weights), len(weights)), -np.inf)
    np.maximum.at(limits, group, slack)
    limits += _ROUNDING * np.maximum(least, 1.0)
    used = np.isin(np.arange(len(weights)), group)
    limits[~used] = -np.inf
    return Bounds(weights, least, limits, rest, marginals)


def _weights(known: np.ndarray, most: int) -> np.ndarray:
    """Return the slopes of the lower convex hull of a frontier, or ``most`` of them when there are more."""
    points = known.astype(np.float64)
    corners = points[_lower_hull(points)]
    if len(corners) < 2:
        return np.array([max(1.0, float(known[0, 1])) / max(1.0, float(known[0, 0]))])
    slopes = -np.diff(corners[:, 1]) / np.diff(corners[:, 0])
    if len(slopes) > most:
        slopes = slopes[np.unique(np.linspace(0, len(slopes) - 1, most).round().astype(int))]
    return slopes


@njit(cache=True, nogil=True)
def _lower_hull(points):  # pragma: no cover - compiled
    """Return the positions of the points on the lower convex hull; memory ascending."""
    hull = np.empty(points.shape[0], np.int64)
    size = 0
    for c in range(points.shape[0]):
        while size > 1:
            a, b = points[hull[size - 2]], points[hull[size - 1]]
            if (b[1] - a[1]) * (points[c, 0] - a[0]) < (points[c, 1] - a[1]) * (b[0] - a[0]):
                break  # b lies below the line from a to c
            size -= 1
        hull[size] = c
        size += 1
    return hull[:size]


def _largest_cluster(factors: Sequence[Factor], order: Sequence[int]) -> int:
    sizes = {node: size for scope, costs in factors for node, size in zip(scope, costs.shape, strict=False)}
    largest = 1
    for _, cluster, _ in _clusters([scope for scope, _ in factors], order):
        largest = max(largest, int(np.prod([sizes[node] for node in cluster])))
    return largest


def _clusters(scopes: Sequence[tuple[int, ...]], order: Sequence[int]):
    """Yield (node, nodes of its cluster ascending, the node its table goes to or -1) in order of elimination."""
    place = {node: position for position, node in enumerate(order)}
    waiting: dict[int, set[int]] = {node: {node} for node in order}
    for scope in scopes:
        if scope:
            waiting[min(scope, key=place.__getitem__)].update(scope)
    for node in order:
        cluster = waiting.pop(node)
        left = cluster - {node}
        heir = min(left, key=place.__getitem__) if left else -1
        if left:
            waiting[heir] |= left
        yield node, tuple(sorted(cluster)), heir


class _Tree:
    """Weighted least sums on the elimination tree, for some weights at once."""

    def __init__(self, factors: Sequence[Factor], order: Sequence[int], weights: np.ndarray):
        self.weights = weights
        place = {node: position for position, node in enumerate(order)}
        self._own: dict[int, list[tuple[tuple[int, ...], np.ndarray]]] = {node: [] for node in order}
        self._weighted: dict[int, np.ndarray] = {}
        self.least = np.zeros(len(weights))
        for scope, costs in factors:
            if scope:
                self._own[min(scope, key=place.__getitem__)].append((scope, self._weigh(costs)))
            else:
                self.least = self.least + self._weigh(costs)
        self._clusters = list(_clusters([scope for scope, _ in factors], order))
        self._children: dict[int, list[int]] = {node: [] for node in order}
        self._tables: dict[int, np.ndarray] = {}
        self.rest: dict[int, np.ndarray] = {}
        self.marginals: dict[int, np.ndarray] = {}
        self._collect()
        self._distribute()

    def _weigh(self, costs: np.ndarray) -> np.ndarray:
        if id(costs) not in self._weighted:
            sums = costs[..., 1:] + costs[..., :1] * self.weights
            self._weighted[id(costs)] = np.where(costs[..., :1] < 0, np.inf, sums)
        return self._weighted[id(costs)]

    def _total(self, node: int, cluster: tuple[int, ...]) -> np.ndarray:
        """Return the sum of all that mentions the node, over its cluster."""
        total: np.ndarray | None = None
        parts = [*self._own[node], *((self._scope_of[child], self._tables[child]) for child in self._children[node])]
        for scope, table in parts:
            spread = _spread(table, scope, cluster)
            total = spread if total is None else total + spread
        if total is None:
            return np.zeros((1,) * len(cluster) + (len(self.weights),))
        return total

    def _collect(self) -> None:
        self._scope_of: dict[int, tuple[int, ...]] = {}
        for node, cluster, heir in self._clusters:
            total = self._total(node, cluster)
            self._scope_of[node] = tuple(other for other in cluster if other != node)
            self._tables[node] = total.min(cluster.index(node))
            if heir >= 0:
                self._children[heir].append(node)
            else:
                self.least = self.least + self._tables[node]

    def _distribute(self) -> None:
        for node, cluster, heir in reversed(self._clusters):
            own = self._tables[node]
            if heir < 0:
                self.rest[node] = self.least - own
            whole = self._total(node, cluster) + np.expand_dims(self.rest[node].reshape(own.shape), cluster.index(node))
            self.marginals[node] = _least_over(whole, cluster, (node,))
            for child in self._children[node]:
                scope = self._scope_of[child]
                with np.errstate(invalid="ignore"):  # what is forbidden stays forbidden
                    rest = _least_over(whole, cluster, scope) - self._tables[child]
                self.rest[child] = np.where(np.isnan(rest), np.inf, rest)
        for node, _, _ in self._clusters:
            self.rest[node] = self.rest[node].reshape(-1, len(self.weights))


def _spread(table: np.ndarray, scope: tuple[int, ...], cluster: tuple[int, ...]) -> np.ndarray:
    """Give a table over ``scope`` the dims of ``cluster``; both ascending, weights last."""
    missing = tuple(position for position, node in enumerate(cluster) if node not in scope)
    return np.expand_dims(table, missing)


def _least_over(whole: np.ndarray, cluster: tuple[int, ...], scope: tuple[int, ...]) -> np.ndarray:
    """Return the least over all nodes of ``cluster`` that are not in ``scope``."""
    return whole.min(tuple(position for position, node in enumerate(cluster) if node not in scope))
