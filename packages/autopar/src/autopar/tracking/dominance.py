"""Choices that no optimal assignment needs, found before the search by looking at each node and its neighbours.

Choice b of a node makes choice a superfluous when b is not worse whatever the neighbours choose. With c the node's own
costs and e the costs of an edge to a neighbour with choices x, in memory and in seconds alike::

    c(a) - c(b) + sum over edges of min over x of (e(a, x) - e(b, x)) >= 0

Any assignment with a then becomes one with b that costs no more in either, so the frontier stays as it is. A choice
that goes takes its column out of the neighbours' minima, so the test is repeated until nothing changes. Nodes left with
one choice drop out of the search. The test costs K^2 times the neighbours' choices; equal edges of repeated layers
share it.

Source: the elimination criterion of Goldstein (Efficient rotamer elimination applied to protein side-chains,
Biophys. J. 66, 1994), here in two costs at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numba import njit

__all__ = ["FORBIDDEN", "undominated_choices"]

# Stands for the cost of a forbidden combination; sums of costs stay far below it.
FORBIDDEN = np.int64(1) << 60

Edge = tuple[int, int, np.ndarray]


def undominated_choices(nodes: Sequence[np.ndarray], edges: Sequence[Edge]) -> list[np.ndarray]:
    """Return per node the positions of the choices that are left, ascending.

    Args:
        nodes: int64 [choices, 2] each, negative where forbidden.
        edges: ``(u, v, int64 [choices of u, choices of v, 2])``, negative where forbidden.

    A node whose choices are all forbidden keeps its first, so that the search finds nothing by itself.

    >>> nodes = [np.array([[1, 5], [2, 6]]), np.array([[0, 3], [3, 0]])]
    >>> [kept.tolist() for kept in undominated_choices(nodes, [(0, 1, np.zeros((2, 2, 2), np.int64))])]
    [[0], [0, 1]]
    """
    return _Pruning(nodes, edges).run()


class _Pruning:
    def __init__(self, nodes: Sequence[np.ndarray], edges: Sequence[Edge]):
        known: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # the original stays alive beside its id

        def marked(costs: np.ndarray) -> np.ndarray:
            if id(costs) not in known:
                known[id(costs)] = costs, np.where(costs < 0, FORBIDDEN, costs)
            return known[id(costs)][1]

        self.nodes = [marked(costs) for costs in nodes]
        self.left = [np.arange(len(costs)) for costs in nodes]
        turned: dict[int, np.ndarray] = {}
        self.around: list[list[tuple[int, np.ndarray]]] = [[] for _ in nodes]
        for u, v, costs in edges:
            forth = marked(costs)
            back = turned.setdefault(id(forth), forth.transpose(1, 0, 2))
            self.around[u].append((v, forth))
            self.around[v].append((u, back))
        self._kept: dict[tuple, np.ndarray] = {}

    def run(self) -> list[np.ndarray]:
        waiting = dict.fromkeys(range(len(self.nodes)))
        while waiting:
            node = next(iter(waiting))
            del waiting[node]
            kept = self._undominated(node)
            if len(kept) < len(self.left[node]):
                self.left[node] = kept
                waiting.update(dict.fromkeys(other for other, _ in self.around[node]))
        return self.left

    def _undominated(self, node: int) -> np.ndarray:
        """Return which choices of a node stay; the same for nodes with the same costs and the same choices left."""
        own = self.left[node]
        if len(own) == 1:
            return own
        sides = [(id(costs), self.left[other].tobytes()) for other, costs in self.around[node]]
        key = (id(self.nodes[node]), own.tobytes(), *sorted(sides))
        if key not in self._kept:
            self._kept[key] = self._test(node)
        return self._kept[key]

    def _test(self, node: int) -> np.ndarray:
        own = self.left[node]
        costs = self.nodes[node][own]
        margin = costs[:, None, :] - costs[None, :, :]
        possible: np.ndarray = np.all(costs < FORBIDDEN, axis=-1)
        for other, edge in self.around[node]:
            _add_least_differences(margin, possible, edge, own, self.left[other])
        if not possible.any():
            return own[:1]
        beaten: np.ndarray = np.all(margin >= 0, axis=-1)  # [a, b]: b is not worse than a
        earlier = np.arange(len(own))[None, :] < np.arange(len(own))[:, None]
        beaten &= possible[None, :] & (~beaten.T | earlier)
        return own[possible & ~np.any(beaten, axis=1)]


@njit(cache=True, nogil=True)
def _add_least_differences(margin, possible, edge, own, left):
    """Add to ``margin`` [a, b, 2] the least that a costs more than b over the neighbour's choices; see the module.

    What a must not meet decides nothing against it; ``possible`` becomes false where it must not meet anything.
    """
    for a in range(own.shape[0]):
        meets = False
        for x in left:
            meets |= edge[own[a], x, 0] < FORBIDDEN and edge[own[a], x, 1] < FORBIDDEN
        possible[a] &= meets
        for b in range(own.shape[0]):
            for axis in range(2):
                least = FORBIDDEN
                for x in left:
                    from_a, from_b = edge[own[a], x], edge[own[b], x]
                    if from_a[0] < FORBIDDEN and from_a[1] < FORBIDDEN:
                        least = min(least, from_a[axis] - from_b[axis])
                margin[a, b, axis] = min(max(margin[a, b, axis] + least, -FORBIDDEN), FORBIDDEN)
