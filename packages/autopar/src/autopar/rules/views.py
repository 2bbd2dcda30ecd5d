"""Rules of operators that only change how a tensor is read: reshapes, permutations, splits, joins."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.graph import Operator
from autopar.placement import P
from autopar.rules.registry import Split, rule

__all__ = ["reshape_dims"]


def reshape_dims(before: Sequence[int], after: Sequence[int]) -> list[tuple[int, int]]:
    """Return which dim of a reshape's input may be sharded with which dim of its output.

    Sizes are matched from the left in groups of equal product. Inside a group only the outermost dims, which a
    contiguous cut leaves whole, correspond.

    >>> reshape_dims((4, 8, 32), (4, 8, 4, 8)), reshape_dims((4, 8, 6), (32, 6)), reshape_dims((4, 1, 6), (4, 6))
    ([(0, 0), (1, 1), (2, 2)], [(0, 0), (2, 1)], [(0, 0), (2, 1)])
    """
    pairs, i, j = [], 0, 0
    while i < len(before) and j < len(after):
        start_i, start_j = i, j
        left, right = before[i], after[j]
        i, j = i + 1, j + 1
        while left != right:
            if left < right:
                left *= before[i]
                i += 1
            else:
                right *= after[j]
                j += 1
        if left == 1:
            continue
        first_i = next(k for k in range(start_i, i) if before[k] > 1)
        first_j = next(k for k in range(start_j, j) if after[k] > 1)
        pairs.append((first_i, first_j))
    return pairs


@rule("view", "reshape", "flatten", "unflatten", "_unsafe_view", "unsqueeze", "squeeze", is_view=True)
def _split_reshape(operator: Operator) -> list[Split]:
    pairs = reshape_dims(operator.input_info[0].shape, operator.output.shape)
    return [*(((i,), j) for i, j in pairs), ((P,), P)]


@rule("transpose", "permute", "t", "numpy_T", "movedim", "swapaxes", is_view=True)
def _split_permutation(operator: Operator) -> list[Split]:
    rank = len(operator.output.shape)
    if operator.kind == "permute":
        order = [dim % rank for dim in operator.node.args[1]]
    else:
        order = list(range(rank))
        first, second = (0, 1) if operator.kind in ("t", "numpy_T") else (d % rank for d in operator.node.args[1:3])
        if operator.kind == "movedim":
            order.insert(second, order.pop(first))
        else:
            order[first], order[second] = order[second], order[first]
    return [*(((source,), dim) for dim, source in enumerate(order)), ((P,), P)]


@rule("expand", "expand_as", is_view=True)
def _split_expand(operator: Operator) -> list[Split]:
    source, out = operator.input_info[0].shape, operator.output.shape
    shift = len(out) - len(source)
    kept = [(dim,) for dim in range(len(source)) if source[dim] == out[dim + shift]]
    rest = ((-1,) * (len(operator.inputs) - 1),)
    return [*((dim + rest[0], dim[0] + shift) for dim in kept), ((P,) + rest[0], P)]


@rule("split", "split_with_sizes", "chunk", is_view=True)
def _split_pieces(operator: Operator) -> list[Split]:
    rank = len(operator.output.shape)
    along = operator.argument(2, "dim", 0) % rank
    return [*(((dim,), dim) for dim in range(rank) if dim != along), ((P,), P)]


@rule("unbind", "select", is_view=True)
def _split_rows(operator: Operator) -> list[Split]:
    rank = len(operator.input_info[0].shape)
    along = operator.argument(1, "dim", 0) % rank
    return [*(((dim,), dim - (dim > along)) for dim in range(rank) if dim != along), ((P,), P)]


@rule("getitem", is_view=True)
def _split_getitem(operator: Operator) -> list[Split]:
    return [*(((dim,), dim) for dim in range(len(operator.output.shape))), ((P,), P)]


@rule("slice", is_view=True)
def _split_slice(operator: Operator) -> list[Split]:
    before, after = operator.input_info[0].shape, operator.output.shape
    return [*(((dim,), dim) for dim in range(len(after)) if before[dim] == after[dim]), ((P,), P)]


@rule("cat", "concat")
def _split_join(operator: Operator) -> list[Split]:
    rank, count = len(operator.output.shape), len(operator.inputs)
    along = operator.argument(1, "dim", 0) % rank
    return [*(((dim,) * count, dim) for dim in range(rank) if dim != along), ((P,) * count, P)]


@rule("stack")
def _split_stack(operator: Operator) -> list[Split]:
    rank, count = len(operator.output.shape), len(operator.inputs)
    along = operator.argument(1, "dim", 0) % rank
    kept = [dim for dim in range(rank) if dim != along]
    return [*(((dim - (dim > along),) * count, dim) for dim in kept), ((P,) * count, P)]


@rule("pad", "constant_pad_nd")
def _split_pad(operator: Operator) -> list[Split]:
    before, after = operator.input_info[0].shape, operator.output.shape
    return [((dim,), dim) for dim in range(len(after)) if before[dim] == after[dim]]
