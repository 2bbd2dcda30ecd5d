"""Tracing: run the user's function once on symbols and write down what it computes.

``v.in_edges`` yields one symbolic edge, so a comprehension over it builds the value of a typical edge. Symbols answer
Python operators and, through ``__torch_function__``, the torch functions listed here; torch itself is not patched and
there is no global state, so programs may be traced from several threads.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from core_kernels.errors import ArgumentError, ArgumentTypeError
from core_kernels.vertex.builder import Builder
from core_kernels.vertex.ir import Node, Program, number_reachable

__all__ = ["Edge", "EdgeSet", "Symbol", "Vertex", "reduce_edges", "trace"]


class Symbol:
    """A value of the program being traced; use it like a tensor."""

    __array_priority__ = 1000  # numpy scalars on the left leave the operation to us

    def __init__(self, builder: Builder, number: int):
        self._builder, self._number = builder, number

    @property
    def kind(self) -> str:
        """``S`` on sources, ``D`` on destinations, ``E`` on edges, ``P`` for parameters and constants."""
        return self._builder.nodes[self._number].kind

    def _emit(self, op: str, *others: Any, attr: float | None = None, swap: bool = False) -> Symbol:
        numbers = [self._number, *(self._lift(other) for other in others)]
        return Symbol(self._builder, self._builder.emit(op, *(numbers[::-1] if swap else numbers), attr=attr))

    def _lift(self, other: Any) -> int:
        if isinstance(other, Symbol):
            if other._builder is not self._builder:
                raise ArgumentError("a value of another vertex program is used here; expected values of this trace")
            return other._number
        if isinstance(other, int | float):
            return self._builder.const(other)
        raise ArgumentTypeError(
            f"a {type(other).__name__} meets a value of a vertex program; expected a number or another such value; "
            "pass tensors by name as src, dst, edge or params when the program is called"
        )

    def __iter__(self) -> Iterator[Symbol]:
        """Yield the value at the one symbolic edge, so that ``zip(alpha, v.in_edges)`` pairs them."""
        if self.kind != "E":
            raise ArgumentTypeError(
                f"a value of kind {self.kind} is not one per edge; only edge values can be iterated"
            )
        yield self

    def __bool__(self) -> bool:
        raise ArgumentTypeError(
            "the truth of a traced value is unknown; expected no if, while, and, or on it; use vertex.maximum or relu"
        )

    def __add__(self, other: Any) -> Symbol:
        return self._emit("add", other)

    def __sub__(self, other: Any) -> Symbol:
        return self._emit("sub", other)

    def __rsub__(self, other: Any) -> Symbol:
        return self._emit("sub", other, swap=True)

    def __mul__(self, other: Any) -> Symbol:
        return self._emit("mul", other)

    def __truediv__(self, other: Any) -> Symbol:
        return self._emit("div", other)

    def __rtruediv__(self, other: Any) -> Symbol:
        return self._emit("div", other, swap=True)

    def __neg__(self) -> Symbol:
        return self._emit("neg")

    def __abs__(self) -> Symbol:
        return self._emit("abs")

    def __pow__(self, exponent: Any) -> Symbol:
        if exponent == 0.5:
            return self._emit("sqrt")
        if exponent == -0.5:
            return 1.0 / self._emit("sqrt")
        if not isinstance(exponent, int) or exponent < 1:
            raise ArgumentError(
                f"exponent={exponent!r} is not valid: expected 1, 2, 3, ..., 0.5 or -0.5; use exp and log"
            )
        result = self
        for _ in range(exponent - 1):
            result = result * self
        return result

    __radd__, __rmul__ = __add__, __mul__

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        handler = _TORCH_FUNCTIONS.get(function)
        if handler is None:
            known = ", ".join(sorted({function.__name__ for function in _TORCH_FUNCTIONS}))
            raise ArgumentTypeError(
                f"torch function {getattr(function, '__name__', function)} cannot be traced; expected one of {known}; "
                "compute it outside of the vertex program and pass the result"
            )
        return handler(*args, **(kwargs or {}))


def _elementwise(op: str) -> Callable[..., Symbol]:
    def apply(x: Any, *others: Any) -> Symbol:
        if isinstance(x, Symbol):
            return x._emit(op, *others)
        return others[0]._emit(op, x, swap=True)

    return apply


def leaky_relu(x: Symbol, negative_slope: float = 0.01, inplace: bool = False) -> Symbol:
    """Return ``x`` where positive, ``negative_slope * x`` elsewhere."""
    return x._emit("leaky_relu", attr=float(negative_slope))


def elu(x: Symbol, alpha: float = 1.0, inplace: bool = False) -> Symbol:
    """Return ``x`` where positive, ``alpha * (exp(x) - 1)`` elsewhere."""
    return x._emit("elu", attr=float(alpha))


def relu(x: Symbol, inplace: bool = False) -> Symbol:
    """Return ``max(x, 0)``."""
    return x._emit("relu")


_TORCH_FUNCTIONS: dict[Any, Callable[..., Symbol]] = {
    torch.add: _elementwise("add"),
    torch.sub: _elementwise("sub"),
    torch.mul: _elementwise("mul"),
    torch.div: _elementwise("div"),
    torch.neg: _elementwise("neg"),
    torch.maximum: _elementwise("maximum"),
    torch.minimum: _elementwise("minimum"),
    torch.exp: _elementwise("exp"),
    torch.log: _elementwise("log"),
    torch.sqrt: _elementwise("sqrt"),
    torch.tanh: _elementwise("tanh"),
    torch.sigmoid: _elementwise("sigmoid"),
    torch.abs: _elementwise("abs"),
    torch.relu: relu,
    F.relu: relu,
    F.leaky_relu: leaky_relu,
    F.elu: elu,
    F.sigmoid: _elementwise("sigmoid"),
    F.tanh: _elementwise("tanh"),
}


class _Reader:
    """Turns attribute access into inputs of one kind."""

    _kind = "P"

    def __init__(self, builder: Builder, relation: str = ""):
        self._builder, self._relation = builder, relation

    def __getattr__(self, name: str) -> Symbol:
        if name.startswith("_"):
            raise AttributeError(name)
        return Symbol(self._builder, self._builder.input(self._kind, name, None, self._relation))


class _Source(_Reader):
    _kind = "S"


class Edge(_Reader):
    """The symbolic in-edge: ``e.src.name`` reads its source, ``e.name`` the edge itself."""

    _kind = "E"

    def __init__(self, builder: Builder, relation: str = ""):
        super().__init__(builder, relation)
        self.src = _Source(builder, relation)


class EdgeSet:
    """The in-edges of the symbolic vertex; ``v.in_edges["follows"]`` are those of one edge type."""

    def __init__(self, builder: Builder, relation: str = ""):
        self._builder, self._relation = builder, relation

    def __iter__(self) -> Iterator[Edge]:
        yield Edge(self._builder, self._relation)

    def __getitem__(self, relation: str) -> EdgeSet:
        return EdgeSet(self._builder, relation)

    @property
    def count(self) -> Symbol:
        """The number of these edges."""
        return Symbol(self._builder, self._builder.degree(self._relation))


class Vertex(_Reader):
    """The symbolic destination: ``v.name`` reads it, ``v.in_edges`` are its in-edges, ``v.in_degree`` their number."""

    _kind = "D"

    @property
    def in_edges(self) -> EdgeSet:
        """The in-edges of this vertex."""
        return EdgeSet(self._builder)

    @property
    def in_degree(self) -> Symbol:
        """The number of in-edges of this vertex, in programs with one edge type."""
        return self.in_edges.count


def reduce_edges(op: str, values: Iterable[Any]) -> Symbol:
    """Aggregate what a comprehension over in-edges yields; ``softmax`` stays one value per edge."""
    found = list(itertools.islice(values, 2))
    if len(found) != 1 or not isinstance(found[0], Symbol):
        raise ArgumentError(
            f"vertex.{op} got {len(found)} values of type {[type(value).__name__ for value in found]}; expected a "
            "comprehension with one traced value per edge; write it over v.in_edges"
        )
    value, builder = found[0], found[0]._builder
    node = builder.nodes[value._number]
    if node.kind not in "SE":
        raise ArgumentError(
            f"vertex.{op} got a value of kind {node.kind}, the same for all edges; expected one that reads e or e.src; "
            "for a sum multiply it by v.in_degree instead"
        )
    if op == "softmax":
        return Symbol(builder, builder.add(Node("softmax", (value._number,), "E", None, None, node.relation)))
    return Symbol(builder, builder.aggregate(f"{op}_dst", value._number, node.relation))


def trace(function: Callable[..., Any], params: Iterable[str], constants: dict[str, Any]) -> Program:
    """Return the program ``function`` computes.

    Args:
        function: Takes the vertex, then parameters by position, then constants by keyword.
        params: Names of the parameters.
        constants: Values of the keyword-only arguments.

    Raises:
        ArgumentTypeError: The function returns something else than values per vertex or per edge.
    """
    builder = Builder()
    symbols = [Symbol(builder, builder.input("P", name, None)) for name in params]
    result = function(Vertex(builder), *symbols, **constants)
    results = result if isinstance(result, tuple) else (result,)
    for value in results:
        if not isinstance(value, Symbol) or value.kind not in "DE":
            shown = f"kind {value.kind}" if isinstance(value, Symbol) else type(value).__name__
            raise ArgumentTypeError(
                f"the vertex program returns a {shown}; expected values per destination or per edge; "
                "aggregate over v.in_edges with vertex.sum, mean, max or min"
            )
    return number_reachable(builder.nodes, [value._number for value in results])
