"""Loops over the edges of one row, emitted as LLVM: sum, extremum and dot of source rows.

Each comes for 1, 2, 4 and 8 vectors of 64 bytes held in registers (:data:`VECTOR_COUNTS`); a wider row takes several
passes. Source rows are prefetched some edges ahead, also into the next rows up to ``limit``: with
random sources the loop waits for memory, not for arithmetic. Arguments typed ``none`` cost nothing.

Arguments shared by all: columns ``[column, width)`` of ``x``; positions ``[start, stop)``; ``indices`` (None: the edge
row itself) and ``edge_ids`` (None: the position itself).
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from core_kernels.kernels.numba._vectors import I1, I32, I64, Lanes, Rows

__all__ = ["VECTOR_COUNTS", "row_dot", "row_extremum", "row_sum"]

VECTOR_COUNTS = (1, 2, 4, 8)
#: Source rows are asked for so many cache lines, and at least so many edges, ahead of their use.
_LINES_AHEAD, _EDGES_AHEAD = 32, 16


class _EdgeLoop:
    """What the three loops share: arguments by name, edge and source rows, factors, prefetching."""

    def __init__(self, context, builder, names, kinds, values):
        self.context, self.builder = context, builder
        self.kinds = dict(zip(names, kinds, strict=True))
        self.values = dict(zip(names, values, strict=True))
        self.x, self.indices, self.edge_ids = self.rows("x"), self.rows("indices"), self.rows("edge_ids")
        self.column = self.values["column"]

    def rows(self, name):
        """Return the named matrix, None where the argument is."""
        kind = self.kinds[name]
        return None if isinstance(kind, types.NoneType) else Rows(self.context, self.builder, kind, self.values[name])

    def flag(self, name):
        """Return a boolean argument as one bit."""
        value = self.values[name]
        return value if value.type == I1 else self.builder.trunc(value, I1)

    def lanes(self, count):
        return Lanes(self.builder, self.x.element, count, self.builder.sub(self.values["width"], self.column))

    def positions(self):
        return cgutils.for_range_slice(self.builder, self.values["start"], self.values["stop"], ir.Constant(I64, 1))

    def edge_row(self, position):
        return position if self.edge_ids is None else self.edge_ids.scalar(position)

    def source_row(self, position):
        return self.edge_row(position) if self.indices is None else self.indices.scalar(position)

    def prefetch(self, lanes, position):
        ahead = self.builder.add(position, ir.Constant(I64, max(_EDGES_AHEAD, _LINES_AHEAD // lanes.count)))
        inside = self.builder.icmp_signed("<", ahead, self.values["limit"])
        with self.builder.if_then(inside, likely=True):
            pointer = self.x.at(self.source_row(ahead), self.column)
            for vector in range(lanes.count):
                lanes.prefetch(pointer, vector)

    def heads(self, lanes, weight):
        """Return the weight's column for each vector: the head that owns its first lane, the last head past the end."""
        builder, heads = self.builder, []
        last = builder.sub(weight.stride, ir.Constant(I64, 1)) if weight is not None else None
        for vector in range(0 if weight is None else lanes.count):
            column = builder.add(self.column, ir.Constant(I64, vector * lanes.lanes))
            head = builder.sdiv(column, self.values["head_width"])
            heads.append(builder.select(builder.icmp_signed("<", head, last), head, last))
        return heads

    def factors(self, lanes, heads, weight, src_scale, position, source):
        """Return one factor vector per vector (weight times source scale), or None where both are absent."""
        scale = None if src_scale is None else src_scale.scalar(source)
        if weight is None:
            return None if scale is None else [lanes.broadcast(scale)] * lanes.count
        edge = self.edge_row(position)
        scalars = [weight.scalar(edge, head) for head in heads]
        if scale is not None:
            scalars = [self.builder.fmul(scalar, scale) for scalar in scalars]
        return [lanes.broadcast(scalar) for scalar in scalars]


_INT, _FLAG = types.int64, types.boolean


def _argument_names(function):
    """Return the names of an intrinsic's arguments, the typing context left out."""
    return function.__code__.co_varnames[1 : function.__code__.co_argcount]


def _make_row_sum(count):
    def row_sum(
        typingctx, x, column, width, indices, start, stop, limit, weight, head_width, edge_ids, src_scale, out, row,
        scale, first,
    ):  # fmt: skip
        """Write (add, unless ``first``) ``scale`` times the weighted sum of source rows to ``out[row]``."""

        def codegen(context, builder, sig, args):
            loop = _EdgeLoop(context, builder, names, sig.args, args)
            lanes, weight_rows, scale_rows = loop.lanes(count), loop.rows("weight"), loop.rows("src_scale")
            sums = [cgutils.alloca_once_value(builder, lanes.zero()) for _ in range(count)]
            # The allocation is hoisted to the function's entry; the reset belongs here.
            for total in sums:
                builder.store(lanes.zero(), total)
            heads = loop.heads(lanes, weight_rows)
            with loop.positions() as (position, _):
                loop.prefetch(lanes, position)
                source = loop.source_row(position)
                pointer = loop.x.at(source, loop.column)
                factors = loop.factors(lanes, heads, weight_rows, scale_rows, position, source)
                for vector, total in enumerate(sums):
                    value, old = lanes.load(pointer, vector), builder.load(total)
                    new = builder.fadd(old, value) if factors is None else lanes.fma(factors[vector], value, old)
                    builder.store(new, total)
            pointer, factor = (
                loop.rows("out").at(loop.values["row"], loop.column),
                lanes.broadcast(loop.values["scale"]),
            )
            with builder.if_else(loop.flag("first")) as (write, add):
                with write:
                    for vector, total in enumerate(sums):
                        lanes.store(builder.fmul(factor, builder.load(total)), pointer, vector)
                with add:
                    for vector, total in enumerate(sums):
                        so_far = lanes.load(pointer, vector)
                        lanes.store(lanes.fma(factor, builder.load(total), so_far), pointer, vector)
            return context.get_dummy_value()

        return types.void(x, _INT, _INT, indices, _INT, _INT, _INT, weight, _INT, edge_ids, src_scale, out, _INT,
                          x.dtype, _FLAG), codegen  # fmt: skip

    names = _argument_names(row_sum)
    return intrinsic(row_sum)


def _make_row_extremum(count):
    def row_extremum(
        typingctx, x, column, width, indices, start, stop, limit, weight, head_width, edge_ids, out, arg, row,
        largest,
    ):  # fmt: skip
        """Write the extremum of (weighted) source rows and the slot of its first occurrence; NaN wins."""

        def codegen(context, builder, sig, args):
            loop = _EdgeLoop(context, builder, names, sig.args, args)
            lanes, weight_rows = loop.lanes(count), loop.rows("weight")
            slots_type = ir.VectorType(I32, lanes.lanes)
            none = ir.Constant(slots_type, [-1] * lanes.lanes)
            best = [cgutils.alloca_once_value(builder, lanes.zero()) for _ in range(count)]
            slot = [cgutils.alloca_once_value(builder, none) for _ in range(count)]
            for vector in range(count):
                builder.store(lanes.zero(), best[vector])
                builder.store(none, slot[vector])
            heads, largest_bit = loop.heads(lanes, weight_rows), lanes.broadcast(loop.flag("largest"), I1)
            with loop.positions() as (position, _):
                loop.prefetch(lanes, position)
                source = loop.source_row(position)
                pointer = loop.x.at(source, loop.column)
                factors = loop.factors(lanes, heads, weight_rows, None, position, source)
                here = lanes.broadcast(builder.trunc(builder.sub(position, loop.values["start"]), I32), I32)
                for vector in range(count):
                    value = lanes.load(pointer, vector)
                    old, old_slot = builder.load(best[vector]), builder.load(slot[vector])
                    if factors is not None:
                        value = builder.fmul(factors[vector], value)
                    # The unordered comparison is true for NaN; `fcmp ord` keeps the first NaN found.
                    above, below = builder.fcmp_unordered(">", value, old), builder.fcmp_unordered("<", value, old)
                    better = builder.and_(
                        builder.select(largest_bit, above, below), builder.fcmp_ordered("ord", old, old)
                    )
                    wins = builder.or_(
                        better, builder.icmp_signed("<", old_slot, ir.Constant(slots_type, [0] * lanes.lanes))
                    )
                    builder.store(builder.select(wins, value, old), best[vector])
                    builder.store(builder.select(wins, here, old_slot), slot[vector])
            out_pointer = loop.rows("out").at(loop.values["row"], loop.column)
            arg_pointer = loop.rows("arg").at(loop.values["row"], loop.column)
            for vector in range(count):
                lanes.store(builder.load(best[vector]), out_pointer, vector)
                lanes.store(builder.load(slot[vector]), arg_pointer, vector)
            return context.get_dummy_value()

        return types.void(x, _INT, _INT, indices, _INT, _INT, _INT, weight, _INT, edge_ids, out, arg, _INT,
                          _FLAG), codegen  # fmt: skip

    names = _argument_names(row_extremum)
    return intrinsic(row_extremum)


def _make_row_dot(count):
    def row_dot(typingctx, x, column, width, indices, start, stop, limit, edge_ids, b, row, out, head, first):
        """Write (add, unless ``first``) the dot product of each source row with ``b[row]`` to ``out[edge, head]``."""

        def codegen(context, builder, sig, args):
            loop = _EdgeLoop(context, builder, names, sig.args, args)
            lanes, out_rows = loop.lanes(count), loop.rows("out")
            fixed_pointer = loop.rows("b").at(loop.values["row"], loop.column)
            fixed = [lanes.load(fixed_pointer, vector) for vector in range(count)]
            first_bit = loop.flag("first")
            with loop.positions() as (position, _):
                loop.prefetch(lanes, position)
                pointer = loop.x.at(loop.source_row(position), loop.column)
                total = builder.fmul(lanes.load(pointer, 0), fixed[0])
                for vector in range(1, count):
                    total = lanes.fma(lanes.load(pointer, vector), fixed[vector], total)
                cell = out_rows.at(loop.edge_row(position), loop.values["head"])
                so_far = builder.select(first_bit, ir.Constant(lanes.element, 0.0), builder.load(cell))
                builder.store(builder.fadd(so_far, lanes.total(total)), cell)
            return context.get_dummy_value()

        return types.void(x, _INT, _INT, indices, _INT, _INT, _INT, edge_ids, b, _INT, out, _INT, _FLAG), codegen

    names = _argument_names(row_dot)
    return intrinsic(row_dot)


#: ``row_sum[k]`` runs on ``VECTOR_COUNTS[k]`` vectors; likewise the others.
row_sum = tuple(_make_row_sum(count) for count in VECTOR_COUNTS)
row_extremum = tuple(_make_row_extremum(count) for count in VECTOR_COUNTS)
row_dot = tuple(_make_row_dot(count) for count in VECTOR_COUNTS)
