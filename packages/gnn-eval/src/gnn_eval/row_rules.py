"""Which operators treat the rows of a tensor independently, and under which conditions.

Each rule looks at one operator whose arguments have rows in a known dimension and returns the reason why it is not
row-wise, or ``None``. Pointwise operators are known to torch by a tag; the others are listed here by family. An
operator in no family is not trusted. Rules look at where the rows are, never at sizes alone: a view that keeps the
number of rows but changes their order is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gnn_eval.program import Program, Type, Value, resolve_operator
from gnn_eval.sizes import Size

__all__ = ["bound_arguments", "is_row_wise_view", "is_view", "why_not_row_wise"]

Rule = Callable[[Program, Value, dict[str, Any]], "str | None"]

_UNTAGGED_POINTWISE = {"prelu", "_prelu_kernel", "_to_copy", "to", "type_as", "masked_fill", "where", "copy", "gelu"}
_UNTAGGED_POINTWISE |= {
    "selu",
    "celu",
    "softsign",
    "logsigmoid",
    "mish",
    "hardswish",
    "softmin",
    "threshold",
    "expand_as",
}
_UNTAGGED_POINTWISE |= {"dropout", "native_dropout", "feature_dropout", "alpha_dropout", "nan_to_num"}
_ALONG_DIM = {"sum", "mean", "amax", "amin", "max", "min", "prod", "any", "all", "argmax", "argmin", "var", "std"}
_ALONG_DIM |= {"logsumexp", "norm", "linalg_vector_norm", "softmax", "_softmax", "log_softmax", "_log_softmax", "topk"}
_ALONG_DIM |= {"cumsum", "cumprod", "sort", "median", "glu", "flip", "select", "slice", "narrow", "unbind", "split"}
_ALONG_DIM |= {"chunk", "split_with_sizes", "argsort", "cat", "squeeze", "concat", "mode"}
_ALONG_DIM |= {"cosine_similarity", "std_mean", "var_mean", "kthvalue", "unfold", "roll", "count_nonzero"}
_VIEWS = {"view", "reshape", "_unsafe_view", "flatten", "unflatten"}
_REARRANGE = {"expand", "permute", "transpose", "t", "unsqueeze", "movedim", "stack", "repeat", "numpy_T", "mT"}
_PRODUCTS = {"mm", "matmul", "bmm", "addmm", "baddbmm", "mv", "addbmm"}
_BATCH_NORMS = {"batch_norm", "native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm"}
_BATCH_NORMS |= {"_native_batch_norm_legit_no_training", "_batch_norm_no_update", "_native_batch_norm_legit_functional"}
_LEADING = {
    "group_norm",
    "native_group_norm",
    "conv1d",
    "conv2d",
    "convolution",
    "lstm_cell",
    "gru_cell",
    "rnn_tanh_cell",
}
_LEADING |= {"max_pool1d", "avg_pool1d", "adaptive_avg_pool1d", "adaptive_max_pool1d", "one_hot", "embedding_bag"}


def is_view(value: Value) -> bool:
    """Whether the operator only gives its argument another shape."""
    return value.short_op in _VIEWS


def bound_arguments(value: Value) -> dict[str, Any]:
    """Return the operator's arguments by their name in its schema, defaults filled in."""
    if not value.op.startswith("aten.") and value.op.count(".") != 2:
        return {}
    operator = resolve_operator(value.op)
    bound: dict[str, Any] = {}
    for place, argument in enumerate(operator._schema.arguments):
        if place < len(value.args):
            bound[argument.name] = value.args[place]
        elif argument.name in value.kwargs:
            bound[argument.name] = value.kwargs[argument.name]
        elif argument.has_default_value():
            bound[argument.name] = argument.default_value
    return bound


def why_not_row_wise(program: Program, value: Value) -> str | None:
    """Return why rows of the result depend on other rows of the arguments, or ``None`` if they do not."""
    name = value.short_op
    if value.op == "operator.getitem":
        return None
    bound = bound_arguments(value)
    for families, rule in _RULES:
        if name in families:
            return rule(program, value, bound)
    if value.op.startswith("aten.") and torch.Tag.pointwise in resolve_operator(value.op).tags:
        return _pointwise(program, value, bound)
    return "it is not known to treat rows independently"


def _row_arguments(program: Program, value: Value) -> list[tuple[Value, Type]]:
    found = [program[name] for name in value.refs()]
    return [(v, v.type) for v in found if v.type.space is not None]


def _pointwise(program: Program, value: Value, bound: dict[str, Any]) -> str | None:
    if "dropout" in value.short_op and (bound.get("train") or bound.get("training")):
        return "it draws random numbers because the model is in training mode"
    if not value.is_tensor:
        return None
    from_right = len(value.dims) - value.type.row_dim
    for argument, kind in _row_arguments(program, value):
        if argument.is_tensor and len(argument.dims) - kind.row_dim != from_right:
            return "its arguments have their rows in different dimensions, so it combines each row with every other"
        if kind.factor != value.type.factor:
            return "its arguments have different numbers of positions per row"
    return None


def _along_dim(program: Program, value: Value, bound: dict[str, Any]) -> str | None:
    dims = bound.get("dim", bound.get("dims"))
    if "dim" not in bound and "dims" not in bound:
        return "it reduces over all rows"
    for argument, kind in _row_arguments(program, value):
        if not argument.is_tensor:
            continue
        if dims is None or (isinstance(dims, (list, tuple)) and not dims):
            return "it reduces over all rows"
        chosen = [dims] if isinstance(dims, int) else list(dims)
        if kind.row_dim in [dim % len(argument.dims) for dim in chosen]:
            if value.short_op == "slice" and _keeps_all(argument, kind, bound):
                continue
            return f"it works along dimension {kind.row_dim}, which holds the rows"
    return None


def _keeps_all(argument: Value, kind: Type, bound: dict[str, Any]) -> bool:
    end = bound.get("end")
    whole = end is None or end == argument.shape[kind.row_dim] or (isinstance(end, int) and end >= 2**62)
    return bound.get("start") in (None, 0) and bound.get("step", 1) == 1 and whole


def is_row_wise_view(source: Value, kind: Type, target: Value, row_dim: int) -> bool:
    """Whether a view keeps rows whole and in order: the same number of items before and within the row dimension."""

    def before(shape: tuple[Size, ...], dim: int) -> int | None:
        product = 1
        for size in shape[:dim]:
            if not size.is_constant:
                return None
            product *= size.constant
        return product

    return before(source.dims, kind.row_dim) == before(target.dims, row_dim)


def _view(program: Program, value: Value, bound: dict[str, Any]) -> str | None:
    (source, kind), *_ = _row_arguments(program, value)
    if is_row_wise_view(source, kind, value, value.type.row_dim):
        return None
    return "it lays out items of different rows next to each other"


def _rearrange(program: Program, value: Value, bound: dict[str, Any]) -> str | None:
    for _, kind in _row_arguments(program, value):
        if kind.factor != value.type.factor:
            return "it repeats the rows as a whole"
    return None


def _linear(program: Program, value: Value, bound: dict[str, Any]) -> str | None:
    source = program[bound["input"].name]
    if source.type.space is None or any(
        kind.space is not None and v is not source for v, kind in _row_arguments(program, value)
    ):
        return "its weight has one row per node or edge"
    if source.type.row_dim == len(source.dims) - 1:
        return "it contracts over all rows"
    return None


def _product(program: Program, value: Value, bound: dict[str, Any]) -> str | None:
    names = {"addmm": ("mat1", "mat2"), "baddbmm": ("batch1", "batch2"), "mv": ("self", "vec")}
    left_name, right_name = names.get(value.short_op, ("self", "other" if "other" in bound else "mat2"))
    left, right = program[bound[left_name].name], program[bound[right_name].name]
    left_rows, right_rows = left.type.space is not None, right.type.space is not None
    in_batch = [len(v.dims) - v.type.row_dim > 2 for v in (left, right)]
    if left_rows and right_rows:
        aligned = len(left.dims) - left.type.row_dim == len(right.dims) - right.type.row_dim
        return None if all(in_batch) and aligned else "it multiplies rows with all other rows"
    if left_rows and left.type.row_dim == len(left.dims) - 1:
        return "it contracts over all rows"
    if right_rows and right.type.row_dim == max(len(right.dims) - 2, 0):
        return "it contracts over all rows"
    return None


def _einsum(program: Program, value: Value, bound: dict[str, Any]) -> str | None:
    equation = str(bound["equation"]).replace(" ", "")
    if "->" not in equation or "." in equation:
        return "its equation does not name all dimensions"
    left, result = equation.split("->")
    letters = set()
    for term, ref in zip(left.split(","), bound["tensors"], strict=True):
        kind = program[ref.name].type
        if kind.space is not None:
            letters.add(term[kind.row_dim])
    return None if len(letters) == 1 and letters <= set(result) else "it contracts over all rows"


def _batch_norm(program: Program, value: Value, bound: dict[str, Any]) -> str | None:
    if bound.get("training") or bound.get("use_input_stats"):
        return "in training mode it normalises by the mean and variance of all rows"
    if bound.get("running_mean") is None:
        return "it keeps no running statistics, so it normalises by the mean and variance of all rows"
    source = next(v for v, _ in _row_arguments(program, value))
    return None if source.type.row_dim != 1 else "its channels are the rows"


def _layer_norm(program: Program, value: Value, bound: dict[str, Any]) -> str | None:
    source, kind = _row_arguments(program, value)[0]
    normalised = bound["normalized_shape"]
    return None if kind.row_dim < len(source.dims) - len(normalised) else "it normalises over all rows"


def _recurrent(program: Program, value: Value, bound: dict[str, Any]) -> str | None:
    source = program[bound["input"].name]
    expected = 0 if bound.get("batch_first") else 1
    if bound.get("train") and bound.get("dropout"):
        return "it draws random numbers because the model is in training mode"
    return None if source.type.row_dim == expected else "it runs along the rows"


def _leading(program: Program, value: Value, bound: dict[str, Any]) -> str | None:
    for _, kind in _row_arguments(program, value):
        if kind.row_dim != 0:
            return "its rows are not in the first dimension"
    return None


def _embedding(program: Program, value: Value, bound: dict[str, Any]) -> str | None:
    return None if program[bound["weight"].name].type.space is None else "its table has one row per node"


def _lookup(program: Program, value: Value, bound: dict[str, Any]) -> str | None:
    source = program[bound["self"].name]
    if source.type.space is not None:
        return _along_dim(program, value, bound) if "dim" in bound else "it picks rows by position"
    return None


def _attention(program: Program, value: Value, bound: dict[str, Any]) -> str | None:
    for argument, kind in _row_arguments(program, value):
        if len(argument.dims) - kind.row_dim <= 2:
            return "every row attends to all rows"
    return None


_RULES: list[tuple[set[str], Rule]] = [
    (_UNTAGGED_POINTWISE, _pointwise),
    (_ALONG_DIM, _along_dim),
    (_VIEWS, _view),
    (_REARRANGE, _rearrange),
    ({"linear"}, _linear),
    (_PRODUCTS, _product),
    ({"einsum"}, _einsum),
    (_BATCH_NORMS | {"instance_norm"}, _batch_norm),
    ({"layer_norm", "native_layer_norm", "rms_norm"}, _layer_norm),
    ({"lstm", "gru", "rnn_tanh", "rnn_relu"}, _recurrent),
    (_LEADING, _leading),
    ({"embedding"}, _embedding),
    ({"index", "index_select", "gather"}, _lookup),
    ({"scaled_dot_product_attention"}, _attention),
]
