"""Bucket elimination over tables of frontiers, and what one elimination tells about the nodes still to come.

Eliminating a node multiplies all tables that mention it and unites over its choices. A choice that made no point of the
union is of no use between *these* tables: whatever the nodes around choose, another choice is not worse. That holds for
every node that has tables of the same content around it, so all of those drop the choice before their turn comes.
Dropping it from all at once loses nothing: they can be changed one after the other, each with the others left alone.
Equal layers in a row meet this at every doubling; a residual stream of 25 layouts is down to 7 after two of them, and
unions of the long tables cost the cube of that share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from autopar.tracking.bounds import Bounds
from autopar.tracking.tables import Products, Table

__all__ = ["eliminate"]

# Points per cell below which thinning a table is not worth the error.
_FEW_POINTS = 4
# Points of both tables at a node beyond which it is worth looking for others like it.
_WORTH_NARROWING = 1 << 13
_NOTHING = np.zeros(2, np.int64)


def eliminate(
    tables: Sequence[Table],
    order: Sequence[int],
    errors: Sequence[float],
    products: Products,
    bounds: Bounds | None = None,
    most_points: float = math.inf,
) -> Table | None:
    """Eliminate the nodes of ``order`` and return the table without scope that is left; ``None`` for a try in vain.

    Args:
        tables: Costs of nodes and edges.
        order: All nodes of the tables.
        errors: Per node by which factor memory may be off once it is eliminated.
        products: Remembers what equal tables gave.
        bounds: What leaves points out, of the same order.
        most_points: Points of one table beyond which the search is given up.
    """
    return _Elimination(tables, order, products).run(errors, bounds, most_points)


class _Elimination:
    def __init__(self, tables: Sequence[Table], order: Sequence[int], products: Products):
        self.products, self.order = products, order
        self.place = {node: position for position, node in enumerate(order)}
        self.waiting: dict[int, list[Table]] = {node: [] for node in order}
        self.known: set[tuple] = set()
        self.whole = self.nothing = products.leaf((), _NOTHING)
        for table in tables:
            self._put(table)

    def run(self, errors: Sequence[float], bounds: Bounds | None, most_points: float) -> Table | None:
        for node in self.order:
            around = self.waiting.pop(node)
            # The table with most points comes last: it is merged once, the small ones multiply among themselves.
            *small, large = sorted(around, key=lambda table: table.num_points)
            product = small[0] if small else self.nothing
            for table in small[1:]:
                product = self.products.combine(product, table)
            if bounds is None:
                result = self.products.combine(product, large, node)
                if product.num_points > _WORTH_NARROWING:
                    self._narrow_alike(node, around, result)
            else:
                result = self.products.combine_within(product, large, node, bounds.of_table(node))
            if errors[node] > result.error and result.num_points > _FEW_POINTS * result.num_cells:
                result = self.products.thin(result, errors[node])
            if result.num_points > most_points:
                return None
            self._put(result)
        return self.whole

    def _put(self, table: Table) -> None:
        """Let a table wait for the first of its nodes."""
        if table.scope:
            self.waiting[min(table.scope, key=self.place.__getitem__)].append(table)
        else:
            self.whole = self.products.combine(self.whole, table)

    def _narrow_alike(self, node: int, around: Sequence[Table], result: Table) -> None:
        """Drop choices that made no point at a node from the nodes that have equal tables around them."""
        likeness = _likeness(node, around)
        if likeness in self.known or result.origin is None:
            return
        self.known.add(likeness)
        is_used = np.zeros(around[0].sizes[around[0].scope.index(node)], np.bool_)
        is_used[result.origin[:, 0]] = True
        choices = is_used.nonzero()[0]
        tables_of: dict[int, list[Table]] = {other: [] for other in self.waiting}
        for tables in self.waiting.values():
            for table in tables:
                for other in table.scope:
                    tables_of[other].append(table)
        alike = {
            other
            for other, tables in tables_of.items()
            if len(tables) == len(around) and _likeness(other, tables) == likeness
        }
        for tables in self.waiting.values():
            for place, table in enumerate(tables):
                for other in sorted(alike.intersection(table.scope)):
                    tables[place] = self.products.narrow(tables[place], other, choices)


def _likeness(node: int, tables: Sequence[Table]) -> tuple:
    """Return a key that is equal for nodes whose tables differ in the names of the other nodes only."""
    names = {node: 0}
    key: list[int] = []
    for table in sorted(tables, key=lambda table: (table.content, table.scope.index(node))):
        key.append(table.content)
        key += [names.setdefault(other, len(names)) for other in table.scope]
    return tuple(key)
