"""Rules of operators that treat every element alike: activations, arithmetic, masks, dropout, casts."""

from __future__ import annotations

from autopar.graph import Operator
from autopar.placement import P, R
from autopar.rules.registry import Split, rule

__all__ = ["broadcast_dims"]


def broadcast_dims(operator: Operator, out_dim: int) -> tuple[int, ...]:
    """Return the form of every input when the output is sharded along ``out_dim``; broadcast inputs stay whole."""
    rank = len(operator.output.shape)
    forms = []
    for info in operator.input_info:
        dim = out_dim - (rank - len(info.shape))
        forms.append(dim if dim >= 0 and info.shape[dim] == operator.output.shape[out_dim] else R)
    return tuple(forms)


def _along_dims(operator: Operator) -> list[Split]:
    return [(broadcast_dims(operator, dim), dim) for dim in range(len(operator.output.shape))]


@rule("relu", "relu_", "sigmoid", "tanh", "exp", "sqrt", "rsqrt", "reciprocal", saves_output=True)
def _split_by_output(operator: Operator) -> list[Split]:
    return _along_dims(operator)


@rule("gelu", "silu", "silu_", "leaky_relu", "elu", "hardtanh", "abs", "log", "sin", "cos", "pow", "clamp", saves=(0,))
def _split_by_input(operator: Operator) -> list[Split]:
    return _along_dims(operator)


@rule("neg", "detach_", "alias", is_view=False)
def _split_linear(operator: Operator) -> list[Split]:
    return [*_along_dims(operator), ((P,), P)]


@rule("_to_copy", "to", "clone", "contiguous", "detach")
def _split_copy(operator: Operator) -> list[Split]:
    return [*_along_dims(operator), *([((P,), P)] if operator.output.dtype.is_floating_point else [])]


@rule("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "bitwise_not", "sign", "floor")
def _split_comparison(operator: Operator) -> list[Split]:
    return _along_dims(operator)


@rule("dropout", "dropout_", saves_bytes_per_output=1)
def _split_dropout(operator: Operator) -> list[Split]:
    return [*_along_dims(operator), ((P,), P)]


@rule("add", "add_", "sub", "rsub")
def _split_sum(operator: Operator) -> list[Split]:
    splits = _along_dims(operator)
    if len(operator.inputs) == 2 and operator.output.dtype.is_floating_point:
        splits.append(((P, P), P))
    return splits


@rule("mul", "mul_", saves=(0, 1))
def _split_product(operator: Operator) -> list[Split]:
    splits = _along_dims(operator)
    if len(operator.inputs) == 1:
        return [*splits, ((P,), P)]
    return [*splits, ((P, R), P), ((R, P), P)]


@rule("div", "div_", saves=(0, 1))
def _split_quotient(operator: Operator) -> list[Split]:
    return [*_along_dims(operator), ((P, R)[: len(operator.inputs)], P)]


@rule("maximum", "minimum", saves=(0, 1))
def _split_extremum(operator: Operator) -> list[Split]:
    return _along_dims(operator)


@rule("where", saves=(0,))
def _split_where(operator: Operator) -> list[Split]:
    return _along_dims(operator)


@rule("masked_fill", saves=(1,))
def _split_masked_fill(operator: Operator) -> list[Split]:
    return _along_dims(operator)


@rule("arange", "full", "zeros", "ones", "zeros_like", "ones_like", "full_like", "scalar_tensor", "tril", "triu")
def _split_creation(operator: Operator) -> list[Split]:
    return []
