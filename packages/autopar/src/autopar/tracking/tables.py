"""Tables of frontiers over the choices of a few nodes, and how one table leads back to the choices.

A table has a scope (nodes) and one frontier per combination of their choices, all in flat arrays. Combining two tables
multiplies their frontiers where they agree, and may eliminate one node by taking the union over its choices. Every
point remembers the choice and the two points it came from, so an assignment is recovered by walking back.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopar.tracking.kernels import combine_cells, thin_run

__all__ = ["Table", "combine", "leaf_table", "recover_choices", "thin"]


@dataclass(frozen=True, eq=False)
class Table:
    """Frontiers over the choices of ``scope``.

    Attributes:
        scope: Nodes, ascending.
        sizes: Number of choices of each.
        offsets: int64 [cells + 1], cells in row-major order of the scope.
        memory: int64 [points], ascending inside a cell.
        seconds: int64 [points], strictly descending inside a cell.
        parents: The two tables this one was combined from; empty for costs of the problem.
        eliminated: Node whose choice was united away, -1 for none.
        choice: int32 [points], the choice of ``eliminated`` that made the point.
        points: Two int64 [points], the points of ``parents``.
    """

    scope: tuple[int, ...]
    sizes: tuple[int, ...]
    offsets: np.ndarray
    memory: np.ndarray
    seconds: np.ndarray
    parents: tuple[Table, ...] = ()
    eliminated: int = -1
    choice: np.ndarray | None = None
    points: tuple[np.ndarray, ...] = ()

    @property
    def num_points(self) -> int:
        """Number of points over all cells."""
        return self.memory.shape[0]


def leaf_table(scope: tuple[int, ...], costs: np.ndarray) -> Table:
    """Make the table of a node's or an edge's costs, int64 [*choices, 2]; negative costs mark forbidden cells."""
    order = np.argsort(scope)
    costs = costs.transpose(*order, len(scope))
    flat = costs.reshape(-1, 2)
    allowed = flat[:, 0] >= 0
    offsets = np.concatenate([[0], np.cumsum(allowed)]).astype(np.int64)
    kept = flat[allowed]
    return Table(tuple(sorted(scope)), costs.shape[:-1], offsets, np.ascontiguousarray(kept[:, 0]), kept[:, 1].copy())


def _strides(table: Table) -> dict[int, int]:
    steps = np.concatenate([np.cumprod(table.sizes[::-1])[::-1][1:], [1]]) if table.sizes else []
    return {node: int(step) for node, step in zip(table.scope, steps, strict=True)}


def combine(a: Table, b: Table, eliminated: int = -1) -> Table:
    """Multiply two tables and, when ``eliminated`` is a node, unite over its choices.

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
    offsets, memory, seconds, choice, from_a, from_b = combine_cells(
        *cells,
        strides[0].get(eliminated, 0),
        strides[1].get(eliminated, 0),
        num_choices,
        a.offsets,
        a.memory,
        a.seconds,
        b.offsets,
        b.memory,
        b.seconds,
    )
    return Table(scope, shape, offsets, memory, seconds, (a, b), eliminated, choice, (from_a, from_b))


def thin(table: Table, ratio: float) -> Table:
    """Drop points so that each has one left that is as fast and needs at most ``ratio`` times its memory."""
    offsets, kept = thin_run(table.memory, table.offsets, ratio)
    return Table(
        table.scope,
        table.sizes,
        offsets,
        table.memory[kept],
        table.seconds[kept],
        table.parents,
        table.eliminated,
        None if table.choice is None else table.choice[kept],
        tuple(points[kept] for points in table.points),
    )


def recover_choices(table: Table, point: int, num_nodes: int) -> np.ndarray:
    """Walk back from a point to the choices it stands for, int32 [num_nodes]; -1 for nodes that are not part of it."""
    choices = np.full(num_nodes, -1, np.int32)
    open_points = [(table, point)]
    while open_points:
        table, point = open_points.pop()
        if table.eliminated >= 0:
            choices[table.eliminated] = table.choice[point]
        for parent, points in zip(table.parents, table.points, strict=True):
            open_points.append((parent, int(points[point])))
    return choices
