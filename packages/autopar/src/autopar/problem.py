"""The bare search problem: choices with costs on nodes, costs of combinations on edges.

A node is an operator, its choices are its configurations; each choice costs memory and seconds. An edge joins two
operators and prices every pair of their choices: what re-scheduling the tensor between them costs. The cost of an
assignment is the sum over nodes and edges, in both coordinates.

Memory is additive here. Peaks that are not (a transient that only one operator needs at a time) are handled above this
module, by searching once per bound on the transient.

Source: TensorOpt (IEEE TPDS 33(8), 2022, arXiv 2004.10856), its operator graph; names are the paper's where known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from autopar.errors import ProblemError

__all__ = ["Problem"]

# Sums of costs stay below 2**52, so that they are exact as int64 and as float64.
_LARGEST_SUM = 1 << 52


class Problem:
    """Costs of every choice of every node and of every pair of choices along every edge.

    Args:
        nodes: Per node a float array [num_choices, 2] of (memory, seconds), or a list of such pairs.
        edges: Mapping from ``(u, v)`` to an array [num_choices_u, num_choices_v, 2], or a list of
            ``(u, v, array)`` in which a pair may occur several times (the costs then add).
        units: Units of memory and seconds, of a problem with more choices whose whole numbers shall be the same.

    Raises:
        ProblemError: A node without choices, an edge of unknown nodes or of the wrong shape, a negative or NaN cost.
            Infinite seconds or memory mark a combination as forbidden.

    Costs are held as integers in units of :attr:`memory_unit` and :attr:`seconds_unit`. Integer sums do not depend on
    the order of addition, so equal plans of repeated layers are recognised as equal instead of differing by a rounding.

    >>> problem = Problem([[(1, 5), (4, 2)], [(2, 3), (3, 1)]], {(0, 1): [[(0, 0), (0, 1)], [(0, 1), (0, 0)]]})
    >>> problem.num_nodes, problem.cost([1, 1])
    (2, (7.0, 3.0))
    """

    def __init__(
        self,
        nodes: Sequence[Any],
        edges: Mapping[tuple[int, int], Any] | Sequence[tuple[int, int, Any]] = (),
        units: tuple[float, float] | None = None,
    ):
        self._read: dict[int, tuple[Any, np.ndarray]] = {}
        self.node_costs = [self._once(f"nodes[{i}]", node, 2) for i, node in enumerate(nodes)]
        listed = [(u, v, costs) for (u, v), costs in edges.items()] if isinstance(edges, Mapping) else list(edges)
        self.edge_costs: list[tuple[int, int, np.ndarray]] = []
        for u, v, costs in listed:
            self.edge_costs.append((u, v, self._read_edge(u, v, costs)))
        self.memory_unit, self.seconds_unit = units or (self._choose_unit(0), self._choose_unit(1))

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self.node_costs)

    def num_choices(self, node: int) -> int:
        """Return the number of choices of one node."""
        return self.node_costs[node].shape[0]

    def cost(self, choices: Sequence[int]) -> tuple[float, float]:
        """Return (memory, seconds) of an assignment, one choice per node.

        Raises:
            ProblemError: The number of choices is not the number of nodes.
        """
        if len(choices) != self.num_nodes:
            raise ProblemError(
                f"choices has length {len(choices)}; expected num_nodes={self.num_nodes}; give one choice per node"
            )
        terms = [costs[choice] for costs, choice in zip(self.node_costs, choices, strict=True)]
        terms += [costs[choices[u], choices[v]] for u, v, costs in self.edge_costs]
        return math.fsum(term[0] for term in terms), math.fsum(term[1] for term in terms)

    def as_integers(self, costs: np.ndarray) -> np.ndarray:
        """Return costs [..., 2] in whole units; forbidden combinations become -1 in both coordinates."""
        units = np.array([self.memory_unit, self.seconds_unit])
        allowed = np.isfinite(costs).all(-1, keepdims=True)
        return np.where(allowed, np.rint(np.where(allowed, costs, 0) / units), -1).astype(np.int64)

    def _read_edge(self, u: int, v: int, costs: Any) -> np.ndarray:
        for name, node in (("u", u), ("v", v)):
            if not 0 <= node < self.num_nodes:
                raise ProblemError(
                    f"edge ({u}, {v}): {name}={node} is not a node; expected 0 to {self.num_nodes - 1}; "
                    "number the nodes as they stand in the list"
                )
        if u == v:
            raise ProblemError(f"edge ({u}, {v}) joins a node with itself; add its cost to the node's own")
        read = self._once(f"edge ({u}, {v})", costs, 3)
        expected = (self.num_choices(u), self.num_choices(v), 2)
        if read.shape != expected:
            raise ProblemError(
                f"edge ({u}, {v}) has costs of shape {read.shape}; expected {expected}, the choices of u by those of v "
                "by (memory, seconds); transpose or regroup them"
            )
        return read

    def _once(self, name: str, costs: Any, num_dims: int) -> np.ndarray:
        """Check costs once, however many nodes or edges share them."""
        known = self._read.get(id(costs))
        if known is None or known[1].ndim != num_dims:
            known = self._read[id(costs)] = costs, _read_costs(name, costs, num_dims)
        return known[1]

    def _choose_unit(self, axis: int) -> float:
        """Return the unit that keeps every sum below 2**52; 1 when the costs are whole numbers that already do."""
        arrays = [*self.node_costs, *(costs for _, _, costs in self.edge_costs)]
        columns = [array[..., axis][np.isfinite(array).all(-1)] for array in arrays]
        total = math.fsum(float(column.max(initial=0.0)) for column in columns)
        if total < _LARGEST_SUM and all((column == np.rint(column)).all() for column in columns):
            return 1.0
        # A power of two scales without rounding.
        return 2.0 ** (math.frexp(total)[1] - 51)


def _read_costs(name: str, costs: Any, num_dims: int) -> np.ndarray:
    array = np.asarray(costs, dtype=np.float64)
    if array.ndim != num_dims or array.shape[-1] != 2 or array.size == 0:
        raise ProblemError(
            f"{name} has costs of shape {array.shape}; expected {num_dims} dimensions, the last (memory, seconds), and "
            "at least one choice; give a choice of cost (0, 0) to a node that costs nothing"
        )
    if np.isnan(array).any() or (array < 0).any():
        raise ProblemError(
            f"{name} has the cost {array[np.isnan(array) | (array < 0)][0]}; expected numbers of at least 0; "
            "shift negative costs, use inf for a forbidden choice"
        )
    return array
