"""From the traced program to the typed one: widths are given names, softmax and mean become plain aggregations.

The program is rebuilt value by value through :class:`~core_kernels.vertex.builder.Builder`, which folds constants,
shares equal values and normalises sums on the way; dead values are dropped at the end.

A softmax over in-edges becomes ``exp(x - shift) / total`` with the row's maximum as ``shift`` (so nothing overflows)
and ``total`` at least one; ``shift`` carries no gradient because the result does not depend on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from core_kernels.errors import ArgumentError
from core_kernels.vertex.builder import Builder
from core_kernels.vertex.ir import AGGREGATIONS, Program, Shape, number_reachable

__all__ = ["Widths", "name_widths", "rank_of", "specialise"]


class Widths:
    """The numbers behind the symbolic axes of one call: number of heads, and each feature width.

    Attributes:
        num_heads: Length of the head axis.
        features: Feature widths in order of their numbers; width number ``k`` is ``features[k - 1]``.
    """

    def __init__(self, num_heads: int = 1, features: Sequence[int] = ()):
        self.num_heads, self.features = num_heads, tuple(features)

    def of(self, shape: Shape) -> tuple[int, int]:
        """Return (heads, features) of a symbolic shape."""
        return (self.num_heads if shape[0] else 1), (self.features[shape[1] - 1] if shape[1] else 1)

    def size(self, shape: Shape) -> int:
        """Return the numbers per entity."""
        heads, features = self.of(shape)
        return heads * features


def name_widths(entity_shapes: Sequence[tuple[int, ...]], names: Sequence[str]) -> tuple[list[Shape], Widths]:
    """Return a symbolic shape for each per-entity shape, and what the symbols stand for.

    Args:
        entity_shapes: Per-entity shapes: (), (features,) or (heads, features).
        names: Names of the inputs, for messages.

    Raises:
        ArgumentError: A shape has more than two axes, or two different numbers of heads occur.
    """
    num_heads, features, shapes = 1, [], []
    for shape, name in zip(entity_shapes, names, strict=True):
        if len(shape) > 2:
            raise ArgumentError(
                f"{name} has {len(shape)} axes per entity, {tuple(shape)}; expected at most [heads, features]; "
                "flatten the others into one"
            )
        heads, width = (1, 1, *shape)[-2:]
        if heads != 1 and num_heads not in (1, heads):
            raise ArgumentError(f"{name} has {heads} heads, another input {num_heads}; expected equal numbers or 1")
        num_heads = max(num_heads, heads) if heads else 0
        if width != 1 and width not in features:
            features.append(width)
        shapes.append((int(heads != 1), features.index(width) + 1 if width != 1 else 0))
    if num_heads == 1:
        # One head is a number of heads like any other: what has a head axis keeps it, and kernels serve both.
        shapes = [(int(len(of) == 2), width) for of, (_, width) in zip(entity_shapes, shapes, strict=True)]
    return shapes, Widths(num_heads, features)


def specialise(program: Program, shapes: Mapping[tuple[str, str, str], Shape]) -> Program:
    """Return the typed, lowered and simplified program.

    Args:
        program: As traced.
        shapes: Shape of each input by (kind, relation, name).
    """
    builder = Builder()
    new: list[int] = []
    for node in program.nodes:
        args = [new[arg] for arg in node.args]
        if node.op == "input":
            number = builder.input(node.kind, str(node.attr), shapes[node.key], node.relation)
        elif node.op == "const":
            number = builder.const(node.number)
        elif node.op == "degree":
            number = builder.degree(node.relation)
        elif node.op == "feature_sum":
            number = builder.feature_sum(*args)
        elif node.op == "softmax":
            number = _lower_softmax(builder, args[0], node.relation)
        elif node.op == "mean_dst":
            total = builder.aggregate("sum_dst", args[0], node.relation)
            count = builder.emit("maximum", builder.degree(node.relation), builder.const(1.0))
            number = builder.emit("div", total, count)
        elif node.op in AGGREGATIONS:
            number = builder.aggregate(node.op, args[0], node.relation, node.number)
        else:
            number = builder.emit(node.op, *args, attr=node.slope)
        new.append(number)
    return number_reachable(builder.nodes, [new[number] for number in program.outputs])


def _lower_softmax(builder: Builder, logits: int, relation: str) -> int:
    shift = builder.aggregate("shift_dst", logits, relation)
    weights = builder.emit("exp", builder.emit("sub", logits, shift))
    total = builder.aggregate("sum_dst", weights, relation, empty=1.0)
    return builder.emit("div", weights, total)


def rank_of(program: Program, number: int, input_ranks: Mapping[tuple[str, str, str], int]) -> int:
    """Return how many axes per entity a value shows to the user: the most among the inputs it is computed from."""
    node = program.nodes[number]
    if node.op == "input":
        return input_ranks[node.key]
    return max((rank_of(program, arg, input_ranks) for arg in node.args), default=0)
