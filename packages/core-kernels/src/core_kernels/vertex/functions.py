"""What a vertex program is written with: aggregations over in-edges and functions of traced values."""

from __future__ import annotations

from collections.abc import Iterable

from core_kernels.vertex.trace import Symbol, _elementwise, elu, leaky_relu, reduce_edges, relu

__all__ = [
    "dot",
    "elu",
    "exp",
    "feature_sum",
    "leaky_relu",
    "log",
    "max",
    "maximum",
    "mean",
    "min",
    "minimum",
    "relu",
    "sigmoid",
    "softmax",
    "sqrt",
    "sum",
    "tanh",
]

exp = _elementwise("exp")
log = _elementwise("log")
sqrt = _elementwise("sqrt")
tanh = _elementwise("tanh")
sigmoid = _elementwise("sigmoid")
maximum = _elementwise("maximum")
minimum = _elementwise("minimum")


def sum(values: Iterable[Symbol]) -> Symbol:
    """Sum a value over the in-edges; 0 where there are none."""
    return reduce_edges("sum", values)


def mean(values: Iterable[Symbol]) -> Symbol:
    """Average a value over the in-edges; 0 where there are none."""
    return reduce_edges("mean", values)


def max(values: Iterable[Symbol]) -> Symbol:
    """Take the maximum over the in-edges; 0 where there are none."""
    return reduce_edges("max", values)


def min(values: Iterable[Symbol]) -> Symbol:
    """Take the minimum over the in-edges; 0 where there are none."""
    return reduce_edges("min", values)


def softmax(values: Iterable[Symbol]) -> Symbol:
    """Normalise a value over the in-edges of each destination; stays one value per edge and never overflows."""
    return reduce_edges("softmax", values)


def feature_sum(x: Symbol) -> Symbol:
    """Sum over the feature axis, which stays with length one: [heads, features] becomes [heads, 1]."""
    return Symbol(x._builder, x._builder.feature_sum(x._number))


def dot(x: Symbol, y: Symbol) -> Symbol:
    """Return the inner product over the feature axis, per head."""
    return feature_sum(x * y)
