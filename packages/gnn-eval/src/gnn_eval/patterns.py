"""Recognition of the two operators that connect rows: gathers by an index and reductions by an index.

A gather reads, for each row of the index, one row of its source. A reduction combines the rows of its source that
share an index value. Both come in several spellings; this module is the one place that knows them.
"""

from __future__ import annotations

from dataclasses import dataclass

from gnn_eval.program import Program, Ref, Value
from gnn_eval.simplify import index_base

__all__ = ["Gather", "Reduction", "gather_of", "reduction_of"]


@dataclass(frozen=True)
class Gather:
    """``source[index]`` along the source's rows.

    Args:
        source: Name of the value whose rows are read.
        index: Name of the index vector.
        dim: Dimension of the rows in the source.
    """

    source: str
    index: str
    dim: int


@dataclass(frozen=True)
class Reduction:
    """Rows of ``source`` combined by ``index`` into ``base``.

    Args:
        base: Name of the value the rows are combined into.
        source: Name of the value whose rows are combined.
        index: Name of the index vector, one entry per row of the source.
        dim: Dimension of the rows in source, base and result.
        reduce: ``"sum"``, ``"mean"``, ``"amax"``, ``"amin"`` or ``"prod"``.
        include_self: Whether the base takes part where rows are combined.
    """

    base: str
    source: str
    index: str
    dim: int
    reduce: str
    include_self: bool


def gather_of(program: Program, value: Value) -> Gather | None:
    """Return the gather that ``value`` is, or ``None``."""
    name, args = value.short_op, value.args
    if not value.op.startswith("aten."):
        return None
    if name == "index_select":
        source, dim, index = args[0], args[1], args[2]
    elif name == "index":
        chosen = [(dim, ref) for dim, ref in enumerate(args[1]) if ref is not None]
        if len(chosen) != 1 or program[chosen[0][1].name].dtype.itemsize < 4:
            return None
        source, (dim, index) = args[0], chosen[0]
    elif name == "gather":
        source, dim, index = args[0], args[1], args[2]
    elif name == "embedding":
        source, dim, index = args[0], 0, args[1]
    else:
        return None
    vector = program[index_base(program, index.name)]
    if vector.shape is None or len(vector.shape) != 1:
        return None
    source_value = program[source.name]
    return Gather(source.name, vector.name, dim % len(source_value.dims))


def reduction_of(program: Program, value: Value) -> Reduction | None:
    """Return the reduction that ``value`` is, or ``None``."""
    name, args, kwargs = value.short_op, value.args, value.kwargs
    if not value.op.startswith("aten."):
        return None
    include_self = True
    if name in ("scatter_add", "index_add"):
        base, dim, index, source, reduce = args[0], args[1], args[2], args[3], "sum"
        if kwargs.get("alpha", 1) != 1:
            return None
    elif name == "scatter_reduce":
        base, dim, index, source, reduce = args[:5]
        include_self = kwargs.get("include_self", args[5] if len(args) > 5 else True)
    elif name == "index_reduce":
        base, dim, index, source, reduce = args[:5]
        include_self = kwargs.get("include_self", True)
    elif name == "index_put" and len(args) > 3 and args[3] and len(args[1]) == 1 and isinstance(args[1][0], Ref):
        base, dim, index, source, reduce = args[0], 0, args[1][0], args[2], "sum"
    else:
        return None
    vector = program[index_base(program, index.name)]
    if vector.shape is None or len(vector.shape) != 1:
        return None
    return Reduction(base.name, source.name, vector.name, dim % len(value.dims), reduce, include_self)
