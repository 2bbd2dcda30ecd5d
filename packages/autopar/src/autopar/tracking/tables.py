"""Tables of frontiers over the choices of a few nodes, and how one table leads back to the choices.

A table has a scope (nodes) and one frontier per combination of their choices, all in flat arrays. Combining two tables
multiplies their frontiers where they agree, and may eliminate one node by taking the union over its choices. Every
point remembers the choice and the two points it came from, so an assignment is recovered by walking back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autopar.tracking.kernels import combine_cells, thin_run

__all__ = ["Products", "Table", "combine", "leaf_table", "recover_choices", "thin"]


@dataclass(frozen=True, eq=False)
class Table:
    """Frontiers over the choices of ``scope``.

    Attributes:
        scope: Nodes, ascending.
        sizes: Number of choices of each.
        offsets: int64 [cells + 1], cells in row-major order of the scope.
        costs: int64 [points, 2], (memory, seconds), memory ascending and seconds strictly descending inside a cell.
        parents: The two tables this one was combined from; empty for costs of the problem.
        eliminated: Node whose choice was united away, -1 for none.
        origin: int64 [points, 3]: the choice of ``eliminated`` that made the point, and the points of ``parents``.
        content: Number that equal tables share whatever their nodes, given by :class:`Products`.
        error: Factor by which thinning may have raised the memory of a point.
    """

    scope: tuple[int, ...]
    sizes: tuple[int, ...]
    offsets: np.ndarray
    costs: np.ndarray
    parents: tuple[Table, ...] = ()
    eliminated: int = -1
    origin: np.ndarray | None = None
    content: int = -1
    error: float = 1.0

    @property
    def num_cells(self) -> int:
        """Number of combinations of choices."""
        return self.offsets.shape[0] - 1

    @property
    def num_points(self) -> int:
        """Number of points over all cells."""
        return self.costs.shape[0]


def leaf_table(scope: tuple[int, ...], costs: np.ndarray) -> Table:
    """Make the table of a node's or an edge's costs, int64 [*choices, 2]; negative costs mark forbidden cells."""
    order = np.argsort(scope)
    costs = costs.transpose(*order, len(scope))
    flat = costs.reshape(-1, 2)
    allowed = flat[:, 0] >= 0
    offsets = np.concatenate([[0], np.cumsum(allowed)]).astype(np.int64)
    return Table(tuple(sorted(scope)), costs.shape[:-1], offsets, flat[allowed])


def _strides(table: Table) -> dict[int, int]:
    steps = np.concatenate([np.cumprod(table.sizes[::-1])[::-1][1:], [1]]) if table.sizes else []
    return {node: int(step) for node, step in zip(table.scope, steps, strict=True)}


_NO_BOUNDS = np.zeros((1, 0)), np.zeros(0), np.zeros((0, 0))


def combine(a: Table, b: Table, eliminated: int = -1, bounds: tuple[np.ndarray, ...] = _NO_BOUNDS) -> Table:
    """Multiply two tables and, when ``eliminated`` is a node, unite over its choices.

    Points that ``bounds``, as :meth:`autopar.tracking.bounds.Bounds.of_table` returns them, show to be of no use are
    left out.

    Cost: per cell of the result the points that survive, times the logarithm of the number of shifted runs; the runs
    are the points of the table with fewer points.
    """
    if a.num_points > b.num_points:
        a, b = b, a
    sizes = dict(zip(a.scope + b.scope, a.sizes + b.sizes, strict=True))
    num_choices = sizes.pop(eliminated, 1)
    scope = tuple(sorted(sizes))
    shape = tuple(sizes[node] for node in scope)
    strides = [_strides(table) for table in (a, b)]
    cells = []
    for stride in strides:
        cell = np.zeros(shape, np.int64)
        for dim, node in enumerate(scope):
            if node in stride:
                along = np.arange(shape[dim], dtype=np.int64) * stride[node]
                cell += along.reshape([-1 if d == dim else 1 for d in range(len(shape))])
        cells.append(cell.reshape(-1))
    steps = [stride.get(eliminated, 0) for stride in strides]
    merge: Any = combine_cells
    offsets, points = merge(*cells, *steps, num_choices, a.offsets, b.offsets, a.costs, b.costs, *bounds)
    costs, origin = points[:, :2].copy(), points[:, 2:].copy()
    return Table(scope, shape, offsets, costs, (a, b), eliminated, origin, error=max(a.error, b.error))


def thin(table: Table, limit: float) -> Table:
    """Drop points as long as the error of the whole line of descent stays below ``limit``.

    Every point has one left that is as fast and needs at most ``limit / table.error`` times its memory.
    """
    offsets, kept = thin_run(table.costs, table.offsets, limit / table.error)
    origin = None if table.origin is None else table.origin[kept]
    return replace(table, offsets=offsets, costs=table.costs[kept], origin=origin, error=limit)


def recover_choices(table: Table, point: int, num_nodes: int) -> np.ndarray:
    """Walk back from a point to the choices it stands for, int32 [num_nodes]; -1 for nodes that are not part of it."""
    choices = np.full(num_nodes, -1, np.int32)
    open_points = [(table, point)]
    while open_points:
        table, point = open_points.pop()
        if table.origin is None:
            continue
        choice, *points = table.origin[point].tolist()
        if table.eliminated >= 0:
            choices[table.eliminated] = choice
        open_points += zip(table.parents, points, strict=True)
    return choices


class Products:
    """Remembers products, so that equal tables over other nodes are not multiplied again.

    Repeated layers of a model give equal tables. Two operations are the same when their tables have the same content
    and their nodes are ordered alike; the arrays of the first are then used for the second.
    """

    def __init__(self) -> None:
        self._contents: dict[tuple, int] = {}
        self._results: dict[tuple, Table] = {}

    def known(self, table: Table) -> Table:
        """Give a table of the problem the number of its content."""
        key = (table.sizes, table.offsets.tobytes(), table.costs.tobytes())
        return replace(table, content=self._contents.setdefault(key, len(self._contents)))

    def combine(self, a: Table, b: Table, eliminated: int = -1) -> Table:
        """Return :func:`combine` of the two, computed once for equal ones."""
        if (a.num_points, a.content) > (b.num_points, b.content):
            a, b = b, a
        places = {node: place for place, node in enumerate(sorted({*a.scope, *b.scope}))}
        patterns = tuple(tuple(places[node] for node in table.scope) for table in (a, b))
        key = (a.content, b.content, *patterns, places.get(eliminated, -1))
        return self._once(key, lambda: combine(a, b, eliminated), a, b, eliminated)

    def thin(self, table: Table, limit: float) -> Table:
        """Return :func:`thin` of a table, computed once for equal ones."""
        key = (table.content, "thin", limit)
        a, b = table.parents
        return self._once(key, lambda: thin(table, limit), a, b, table.eliminated)

    def combine_within(self, a: Table, b: Table, eliminated: int, bounds: tuple[np.ndarray, ...]) -> Table:
        """Return :func:`combine` within bounds; the table is like no other from then on."""
        content = self._contents.setdefault(("bounded", len(self._contents)), len(self._contents))
        return replace(combine(a, b, eliminated, bounds), content=content)

    def _once(self, key: tuple, compute: Callable[[], Table], a: Table, b: Table, eliminated: int) -> Table:
        if key not in self._results:
            content = self._contents.setdefault(key, len(self._contents))
            self._results[key] = replace(compute(), content=content)
        scope = tuple(sorted({*a.scope, *b.scope} - {eliminated}))
        return replace(self._results[key], scope=scope, parents=(a, b), eliminated=eliminated)
