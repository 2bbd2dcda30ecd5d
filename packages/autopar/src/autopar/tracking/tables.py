"""Tables of frontiers over the choices of a few nodes, and how one table leads back to the choices.

A table has a scope (nodes) and one frontier per combination of their choices, all in flat arrays. Combining two tables
multiplies their frontiers where they agree, and may eliminate one node by taking the union over its choices. Every
point remembers the choice and the two points it came from, so an assignment is recovered by walking back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autopar.tracking.kernels import combine_cells, thin_run
from autopar.tracking.sieve import choose_weights, supports

__all__ = ["Products", "Table", "combine", "leaf_table", "narrow", "recover_choices", "thin"]


@dataclass(eq=False, slots=True)
class Table:
    """Frontiers over the choices of ``scope``; not changed once made.

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

    def placed(self, scope: tuple[int, ...], parents: tuple[Table, ...], eliminated: int) -> Table:
        """Return the same over other nodes, made of other tables."""
        arrays = self.offsets, self.costs
        return Table(scope, self.sizes, *arrays, parents, eliminated, self.origin, self.content, self.error)


def leaf_table(scope: tuple[int, ...], costs: np.ndarray) -> Table:
    """Make the table of a node's or an edge's costs, int64 [*choices, 2]; negative costs mark forbidden cells.

    Args:
        scope: Nodes, ascending.
        costs: Their costs.
    """
    flat = costs.reshape(-1, 2)
    allowed = flat[:, 0] >= 0
    offsets = np.zeros(len(flat) + 1, np.int64)
    np.cumsum(allowed, out=offsets[1:])
    return Table(scope, costs.shape[:-1], offsets, flat[allowed])


def _strides(table: Table) -> dict[int, int]:
    strides, step = {}, 1
    for node, size in zip(reversed(table.scope), reversed(table.sizes), strict=True):
        strides[node] = step
        step *= size
    return strides


@functools.lru_cache(maxsize=1024)
def _first_cells(shape: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
    """Return for every cell of a result the cell of a factor that has these strides along the result's dims."""
    cells = np.zeros(shape, np.int64)
    for dim, stride in enumerate(strides):
        if stride:
            along = np.arange(shape[dim], dtype=np.int64) * stride
            cells += along.reshape([-1 if d == dim else 1 for d in range(len(shape))])
    return cells.reshape(-1)


_NO_BOUNDS = np.zeros((1, 0)), np.zeros(0), np.zeros((0, 0))
_NO_SIEVE = np.zeros(0), np.zeros((1, 0)), np.zeros((1, 0), np.int64), np.zeros((1, 0)), np.zeros((1, 0), np.int64)
# Runs per cell of a union beyond which the sieve costs less than merging them all.
_MANY_RUNS = 32


def _sieve(a: Table, b: Table, num_choices: int) -> tuple[np.ndarray, ...]:
    """Return what the kernel needs to leave out runs beforehand, nothing where the unions are small."""
    if num_choices * a.num_points < _MANY_RUNS * a.num_cells:
        return _NO_SIEVE
    weights = choose_weights(a.costs, b.costs)
    return weights, *supports(a.costs, a.offsets, weights), *supports(b.costs, b.offsets, weights)


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
    cells = [_first_cells(shape, tuple(stride.get(node, 0) for node in scope)) for stride in strides]
    steps = [stride.get(eliminated, 0) for stride in strides]
    merge: Any = combine_cells
    offsets, points = merge(
        *cells, *steps, num_choices, a.offsets, b.offsets, a.costs, b.costs, *bounds, *_sieve(a, b, num_choices)
    )
    costs, origin = points[:, :2].copy(), points[:, 2:].copy()
    return Table(scope, shape, offsets, costs, (a, b), eliminated, origin, error=max(a.error, b.error))


def thin(table: Table, limit: float) -> Table:
    """Drop points as long as the error of the whole line of descent stays below ``limit``.

    Every point has one left that is as fast and needs at most ``limit / table.error`` times its memory.
    """
    offsets, kept = thin_run(table.costs, table.offsets, limit / table.error)
    origin = None if table.origin is None else table.origin[kept]
    return replace(table, offsets=offsets, costs=table.costs[kept], origin=origin, error=limit)


def narrow(table: Table, node: int, choices: np.ndarray) -> Table:
    """Drop the points of all cells in which ``node`` makes another choice than those of ``choices``."""
    place = table.scope.index(node)
    is_kept = np.isin(np.arange(table.sizes[place]), choices)
    cells = np.broadcast_to(is_kept.reshape([-1 if d == place else 1 for d in range(len(table.sizes))]), table.sizes)
    counts = np.diff(table.offsets)
    points = np.repeat(cells.reshape(-1), counts)
    offsets = np.concatenate([[0], np.cumsum(counts * cells.reshape(-1))])
    origin = None if table.origin is None else table.origin[points]
    return replace(table, offsets=offsets, costs=table.costs[points], origin=origin)


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
        self._leaves: dict[int, tuple[np.ndarray, Table]] = {}  # the costs stay alive, so that their ids stay theirs

    def leaf(self, scope: tuple[int, ...], costs: np.ndarray) -> Table:
        """Return :func:`leaf_table` of costs, made once for costs that are shared by identity."""
        if id(costs) not in self._leaves:
            table = leaf_table(scope, costs)
            key = (table.sizes, table.offsets.tobytes(), table.costs.tobytes())
            table.content = self._contents.setdefault(key, len(self._contents))
            self._leaves[id(costs)] = costs, table
        return self._leaves[id(costs)][1].placed(scope, (), -1)

    def combine(self, a: Table, b: Table, eliminated: int = -1) -> Table:
        """Return :func:`combine` of the two, computed once for equal ones."""
        if (a.num_points, a.content) > (b.num_points, b.content):
            a, b = b, a
        nodes = sorted({*a.scope, *b.scope})
        places = [nodes.index(node) for node in a.scope + b.scope]
        place = nodes.index(eliminated) if eliminated >= 0 else -1
        key = (a.content, b.content, len(a.scope), place, *places)
        return self._once(key, lambda: combine(a, b, eliminated), nodes, (a, b), eliminated)

    def thin(self, table: Table, limit: float) -> Table:
        """Return :func:`thin` of a table, computed once for equal ones."""
        key = (table.content, "thin", limit)
        return self._once(key, lambda: thin(table, limit), table.scope, table.parents, table.eliminated)

    def narrow(self, table: Table, node: int, choices: np.ndarray) -> Table:
        """Return :func:`narrow` of a table, computed once for equal ones."""
        key = (table.content, "narrow", table.scope.index(node), choices.tobytes())
        narrowed = self._once(key, lambda: narrow(table, node, choices), table.scope, table.parents, table.eliminated)
        return table if narrowed.num_points == table.num_points else narrowed

    def combine_within(self, a: Table, b: Table, eliminated: int, bounds: tuple[np.ndarray, ...]) -> Table:
        """Return :func:`combine` within bounds; the table is like no other from then on."""
        content = self._contents.setdefault(("bounded", len(self._contents)), len(self._contents))
        return replace(combine(a, b, eliminated, bounds), content=content)

    def _once(
        self,
        key: tuple,
        compute: Callable[[], Table],
        nodes: Sequence[int],
        parents: tuple[Table, ...],
        eliminated: int,
    ) -> Table:
        if key not in self._results:
            result = compute()
            result.content = self._contents.setdefault(key, len(self._contents))
            self._results[key] = result
        scope = tuple(node for node in nodes if node != eliminated)
        return self._results[key].placed(scope, tuple(parents), eliminated)
