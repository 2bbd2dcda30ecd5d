"""Typing: which values have rows of nodes or edges, which depend on structure alone, and what must be refused.

Structure is what depends on edges and edge data but on no node feature; it is computed once on the full graph and may
use any operator. Everything else is computed in parts, so it must be row-wise, a gather by a structural index, or a
reduction by one. What is none of these is refused here, with the operator and the line of the model that called it.
Wide structural values that are row-wise, such as an edge network's hidden layer, are computed in parts as well.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NoReturn

from gnn_eval.errors import UnsupportedModelError
from gnn_eval.patterns import Gather, Reduction, gather_of, reduction_of
from gnn_eval.program import Kind, Program, Type, Value
from gnn_eval.row_rules import is_view, why_not_row_wise
from gnn_eval.sizes import Size

__all__ = ["assign_types"]

_WIDE_ROW_BYTES = 64
_REMEDY = "rewrite the model without it, or evaluate it with a full forward"
_UNIFORM_OPS = {"full", "view", "reshape", "unsqueeze", "squeeze", "repeat", "expand", "transpose", "permute"}


def assign_types(program: Program) -> None:
    """Set the type of every value of ``program``.

    Raises:
        UnsupportedModelError: If rows of a computed value depend on each other in a way that is not along edges.
    """
    for value in program.values.values():
        value.type = _type_of(program, value)
    for name in program.outputs:
        kind = program[name].type
        if kind.space is None or (kind.kind is Kind.STRUCT and kind.static):
            _refuse(program[name], "the model's result has no row per node or edge", "return a value with one row each")


def _type_of(program: Program, value: Value) -> Type:
    if value.op == "input":
        return _type_of_input(program, value)
    if value.op in ("parameter", "constant"):
        return Type(Kind.CONST)
    if value.op == "conv":
        destination = program[value.args[0][value.kwargs["destination"]].name].type
        if destination.space is None or destination.row_dim != 0:
            _refuse(value, "its result has no row per node", _REMEDY)
        return Type(Kind.NODE, destination.space)
    kinds = [program[name].type for name in value.refs()]
    if any(kind.space is not None and not kind.static for kind in kinds):
        return _type_of_computed(program, value)
    if all(kind.kind is Kind.CONST for kind in kinds):
        return _type_of_constant(program, value)
    static = _type_of_structure(program, value, kinds)
    return _narrow_or_computed(program, value, static)


def _type_of_input(program: Program, value: Value) -> Type:
    role = program.roles[value.name]
    if role.kind == "node":
        return Type(Kind.NODE, program.node_space(role.space))
    if role.kind == "relation":
        return Type(Kind.STRUCT, Size.of(f"e_{role.space}"), row_dim=1, static=True)
    if role.kind == "edge":
        return Type(Kind.EDGE, Size.of(f"e_{role.space}"), static=True)
    return Type(Kind.CONST)


def _type_of_constant(program: Program, value: Value) -> Type:
    """Type a value made of parameters and numbers: rows appear only by filling or expanding."""
    open_dims = [dim for dim, size in enumerate(value.shape or ()) if not size.is_constant]
    if not open_dims:
        return Type(Kind.CONST)
    uniform = value.short_op in ("full", "expand", "repeat", "empty")
    if len(open_dims) > 1:
        return Type(Kind.STRUCT, static=True)
    space = value.shape[open_dims[0]]
    return Type(_kind_of(program, space), space, open_dims[0], static=True, uniform=uniform)


def _type_of_structure(program: Program, value: Value, kinds: list[Type]) -> Type:
    if value.shape is None:
        return Type(Kind.STRUCT if value.size is None else Kind.CONST, static=True)
    open_dims = [dim for dim, size in enumerate(value.shape) if not size.is_constant]
    if len(open_dims) != 1:
        return Type(Kind.STRUCT, static=True)
    space = value.shape[open_dims[0]]
    uniform = value.short_op in _UNIFORM_OPS and all(k.uniform or k.kind is Kind.CONST for k in kinds)
    kind = _kind_of(program, space)
    return Type(kind, space, open_dims[0], static=True, uniform=uniform)


def _narrow_or_computed(program: Program, value: Value, static: Type) -> Type:
    """Keep a narrow structural value; treat a wide one like a computed value where it is row-wise."""
    if static.space is None or static.uniform or not value.is_tensor:
        return static
    value.type = static
    if value.row_bytes() <= _WIDE_ROW_BYTES or value.dtype is None or not value.dtype.is_floating_point:
        return static
    narrow_view = is_view(value) or value.short_op in ("expand", "unsqueeze", "squeeze")
    if narrow_view or any(program[n].type.uniform for n in value.refs()) or reduction_of(program, value) is not None:
        return static
    try:
        return replace(_type_of_computed(program, value), static=False)
    except UnsupportedModelError:
        return static


def _type_of_computed(program: Program, value: Value) -> Type:
    reduction = reduction_of(program, value)
    if reduction is not None and program[reduction.source].type.space is not None:
        return _type_of_reduction(program, value, reduction)
    gather = gather_of(program, value)
    if gather is not None and program[gather.source].type.space is not None:
        return _type_of_gather(program, value, gather)
    return _type_of_row_wise(program, value)


def _type_of_reduction(program: Program, value: Value, reduction: Reduction) -> Type:
    source, index, base = program[reduction.source].type, program[reduction.index].type, program[reduction.base].type
    if index.uniform or index.kind is Kind.CONST:
        _refuse(value, "it pools all rows into a fixed number of groups", _REMEDY)
    if not index.static:
        _refuse(value, "its index is computed from features, so the graph itself would change with them", _REMEDY)
    if source.row_dim != reduction.dim or index.space != source.space or source.factor != 1:
        _refuse(value, "it reduces along a dimension that does not hold the rows", _REMEDY)
    space = value.shape[reduction.dim]
    if space.is_constant:
        _refuse(value, "it pools all rows into a fixed number of groups", _REMEDY)
    if base.space is not None and not base.uniform and base.space != space:
        _refuse(value, "it adds to rows of another kind", _REMEDY)
    return Type(_kind_of(program, space), space, reduction.dim)


def _type_of_gather(program: Program, value: Value, gather: Gather) -> Type:
    source, index = program[gather.source].type, program[gather.index].type
    if source.row_dim != gather.dim or source.factor != 1:
        if source.row_dim == gather.dim:
            _refuse(value, "it reads parts of rows that a view merged", _REMEDY)
        return _type_of_row_wise(program, value)
    if index.kind is Kind.CONST:
        _refuse(value, "it reads fixed rows whatever the graph", _REMEDY)
    if not index.static:
        _refuse(value, "its index is computed from features, so the graph itself would change with them", _REMEDY)
    if index.space is None:
        _refuse(value, "its index has no row per node or edge", _REMEDY)
    return Type(_kind_of(program, index.space), index.space, gather.dim)


def _type_of_row_wise(program: Program, value: Value) -> Type:
    rows = [program[name].type for name in value.refs() if program[name].type.space is not None]
    spaces = list(dict.fromkeys(kind.rows for kind in rows))
    if len(spaces) != 1:
        shown = " and ".join(str(space) for space in spaces)
        _refuse(value, f"it combines rows of different kinds ({shown})", _REMEDY)
    space = spaces[0]
    computed = next((kind for kind in rows if not kind.static), rows[0])
    kind = Type(_kind_of(program, space), space, computed.row_dim, computed.factor)
    if value.is_tensor:
        multiples = [(dim, size.multiple_of(space)) for dim, size in enumerate(value.dims)]
        places = [(dim, factor) for dim, factor in multiples if factor]
        if len(places) == 1:
            kind = replace(kind, row_dim=places[0][0], factor=places[0][1])
        value.type = kind
        if len(places) != 1 or any(not s.is_constant for d, s in enumerate(value.dims) if d != kind.row_dim):
            generic = "it pairs each row with every other" if len(places) > 1 else "it combines all rows into one"
            _refuse(value, why_not_row_wise(program, value) or generic, _REMEDY)
    value.type = kind
    reason = why_not_row_wise(program, value)
    if reason is not None:
        _refuse(value, reason, _remedy_for(value))
    return kind


def _kind_of(program: Program, space: Size) -> Kind:
    return Kind.NODE if space in program.node_spaces() else Kind.EDGE


def _remedy_for(value: Value) -> str:
    if "batch_norm" in value.short_op or "dropout" in value.short_op or value.short_op == "bernoulli":
        return "call model.eval() first, and keep running statistics in batch norm"
    return _REMEDY


def _refuse(value: Value, reason: str, remedy: str) -> NoReturn:
    raise UnsupportedModelError(value.op, reason, remedy, value.source)
