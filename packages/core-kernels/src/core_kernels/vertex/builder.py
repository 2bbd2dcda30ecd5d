"""Building programs value by value, already simplified: equal values share a number, constants fold.

Common subexpressions disappear because a value is looked up before it is added. A sum over edges is brought into
normal form here: factors that are the same for all edges of the row go in front of the sum, and the rest multiplies
narrow values (one per head) before wide ones. For attention this moves the division by the softmax denominator from
edges to vertices, in the program and, since it is differentiated afterwards, in its gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from core_kernels.vertex.ir import Node, Shape, join_kinds, join_shapes

__all__ = ["OPERATIONS", "Builder"]

_COMMUTATIVE = frozenset({"add", "mul", "maximum", "minimum", "eq"})

#: Element-wise operations on Python numbers; the names are those of the program.
OPERATIONS: dict[str, Callable[..., float]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "maximum": max,
    "minimum": min,
    "eq": lambda x, y: float(x == y),
    "gt": lambda x, y: float(x > y),
    "neg": lambda x: -x,
    "exp": math.exp,
    "log": math.log,
    "sqrt": math.sqrt,
    "tanh": math.tanh,
    "sigmoid": lambda x: 1.0 / (1.0 + math.exp(-x)),
    "relu": lambda x: max(x, 0.0),
    "abs": lambda x: abs(x),
    "sign": lambda x: float(x > 0) - float(x < 0),
    "leaky_relu": lambda x, slope: x if x > 0 else slope * x,
    "leaky_step": lambda x, slope: 1.0 if x > 0 else slope,
    "elu": lambda x, alpha: x if x > 0 else alpha * (math.exp(x) - 1.0),
    "elu_step": lambda x, alpha: 1.0 if x > 0 else alpha * math.exp(x),
}


class Builder:
    """A growing list of values without duplicates.

    Attributes:
        nodes: The values so far.
    """

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._number_of: dict[Node, int] = {}

    def add(self, node: Node) -> int:
        """Return the number of ``node``, adding it if it is new."""
        if node not in self._number_of:
            self._number_of[node] = len(self.nodes)
            self.nodes.append(node)
        return self._number_of[node]

    def const(self, value: float) -> int:
        """Return a number as a value of the program."""
        return self.add(Node("const", (), "P", (0, 0), float(value)))

    def input(self, kind: str, name: str, shape: Shape | None, relation: str = "") -> int:
        """Return an input value."""
        return self.add(Node("input", (), kind, shape, name, relation))

    def emit(self, op: str, *args: int, attr: float | None = None) -> int:
        """Return ``op`` of ``args``, an element-wise operation."""
        nodes = [self.nodes[arg] for arg in args]
        simpler = self._simplify(op, args, attr)
        if simpler is not None:
            return simpler
        if op in _COMMUTATIVE:
            args = tuple(sorted(args))
        kind, relation = join_kinds(nodes)
        return self.add(Node(op, tuple(args), kind, join_shapes(nodes), attr, relation))

    def feature_sum(self, arg: int) -> int:
        """Return the sum over the feature axis, which stays with length one."""
        node = self.nodes[arg]
        if node.shape is None:
            return self.add(Node("feature_sum", (arg,), node.kind, None, None, node.relation))
        if not node.is_wide:
            return arg
        above, below = self.factors(arg)
        outside = [factor for factor in above if not self.nodes[factor].is_wide]
        outside_below = [factor for factor in below if not self.nodes[factor].is_wide]
        inside = self.product(
            [factor for factor in above if self.nodes[factor].is_wide],
            [factor for factor in below if self.nodes[factor].is_wide],
        )
        inner = self.nodes[inside]
        total = self.add(Node("feature_sum", (inside,), inner.kind, (inner.shape[0], 0), None, inner.relation))
        return self.product([*outside, total], outside_below)

    def aggregate(self, op: str, arg: int, relation: str, empty: float = 0.0) -> int:
        """Return an aggregation of ``arg`` over the edges of ``relation``.

        Args:
            op: One of ``AGGREGATIONS``.
            arg: A value of any kind; each edge contributes the value of its entity.
            relation: Edge type.
            empty: Result where there is no edge.
        """
        node = self.nodes[arg]
        side = {"sum_src": "S", "sum_all": "P"}.get(op, "D")
        if op in ("sum_dst", "sum_src") and node.shape is not None:
            above, below = self.factors(arg)
            same_above = [factor for factor in above if self._is_same_for_row(factor, side)]
            same_below = [factor for factor in below if self._is_same_for_row(factor, side)]
            inside = self.product(
                [factor for factor in above if factor not in same_above],
                [factor for factor in below if factor not in same_below],
            )
            if (same_above or same_below) and empty == 0.0:
                return self.product([*same_above, self._aggregation(op, inside, side, relation, 0.0)], same_below)
            arg = self.product(above, below)
        return self._aggregation(op, arg, side, relation, empty)

    def degree(self, relation: str) -> int:
        """Return the number of in-edges of a destination."""
        return self.add(Node("degree", (), "D", (0, 0), None, relation))

    def alias(self, op: str, arg: int, kind: str, shape: Shape, relation: str = "") -> int:
        """Return ``arg`` seen as one value per edge (``on_edge``) or with more axes (``expand``)."""
        return self.add(Node(op, (arg,), kind, shape, None, relation))

    def _aggregation(self, op: str, arg: int, side: str, relation: str, empty: float) -> int:
        if op == "sum_dst" and self._constant(arg) == 1.0:
            return self.degree(relation)
        return self.add(Node(op, (arg,), side, self.nodes[arg].shape, empty, relation if side != "P" else ""))

    def _is_same_for_row(self, number: int, side: str) -> bool:
        return self.nodes[number].kind in ("P", side)

    def factors(self, number: int) -> tuple[list[int], list[int]]:
        """Return the values whose product, over the product of the second list, is the given value."""
        node = self.nodes[number]
        if node.op == "mul":
            (left, left_below), (right, right_below) = (self.factors(arg) for arg in node.args)
            return left + right, left_below + right_below
        if node.op == "div":
            (left, left_below), (right, right_below) = (self.factors(arg) for arg in node.args)
            return left + right_below, left_below + right
        if node.op == "neg":
            above, below = self.factors(node.args[0])
            return [self.const(-1.0), *above], below
        return [number], []

    def product(self, above: list[int], below: list[int]) -> int:
        """Return a product in normal form: narrow factors and their divisors first, then wide ones."""

        def order(number: int) -> tuple:
            node = self.nodes[number]
            shape = node.shape or (0, 0)
            return shape[1] > 0, shape[0], node.kind == "E", number

        result = None
        for wide in (False, True):
            for factors, op in ((above, "mul"), (below, "div")):
                for factor in sorted((f for f in factors if self.nodes[f].is_wide == wide), key=order):
                    if result is None:
                        result = factor if op == "mul" else self.emit("div", self.const(1.0), factor)
                    else:
                        result = self.emit(op, result, factor)
        return self.const(1.0) if result is None else result

    def _simplify(self, op: str, args: tuple[int, ...], attr: float | None) -> int | None:
        constants = [self._constant(arg) for arg in args]
        if op in OPERATIONS and all(value is not None for value in constants):
            extra = () if attr is None else (attr,)
            try:
                return self.const(OPERATIONS[op](*constants, *extra))
            except (ArithmeticError, ValueError):
                return None  # left to the kernel, which gives inf or nan as torch does
        if op == "neg":
            inner = self.nodes[args[0]]
            return inner.args[0] if inner.op == "neg" else None
        if op in ("add", "mul") and constants[0] is not None:
            args, constants = args[::-1], constants[::-1]
        if len(args) != 2 or constants[1] is None:
            return None
        if (op in ("add", "sub") and constants[1] == 0.0) or (op in ("mul", "div") and constants[1] == 1.0):
            return args[0]
        if op in ("mul", "div") and constants[1] == -1.0:
            return self.emit("neg", args[0])
        return None

    def _constant(self, number: int) -> float | None:
        node = self.nodes[number]
        return float(node.number) if node.op == "const" else None
