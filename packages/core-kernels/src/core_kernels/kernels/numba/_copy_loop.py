"""Copying rows of bytes between addresses: prefetch, plain copy, and streaming stores that bypass the cache.

A large gather is bound by memory. Plain stores first read the lines they overwrite; streaming stores do not, which
saves a third of the traffic. They pay when the result is too large to be found in a cache afterwards.

Callers may not assume any check: addresses and lengths must be valid.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = ["LINE_BYTES", "copy_row", "prefetch_row", "stream_row"]

LINE_BYTES = 64

_I1, _I8, _I32, _I64 = ir.IntType(1), ir.IntType(8), ir.IntType(32), ir.IntType(64)


def _pointer(builder, address, offset=None):
    return builder.inttoptr(address if offset is None else builder.add(address, offset), _I8.as_pointer())


def _call(builder, name, *arguments):
    kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


@intrinsic
def copy_row(typingctx, target, source, num_bytes):
    """Copy ``num_bytes`` from one address to another; they do not overlap."""

    def codegen(context, builder, sig, args):
        target, source, num_bytes = args
        plain = ir.Constant(_I1, 0)
        _call(builder, "llvm.memcpy.p0.p0.i64", _pointer(builder, target), _pointer(builder, source), num_bytes, plain)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def stream_row(typingctx, target, source, num_bytes):
    """Copy whole lines with streaming stores; ``target`` is aligned to a line, ``num_bytes`` a multiple of it."""

    def codegen(context, builder, sig, args):
        target, source, num_bytes = args
        line = ir.VectorType(_I64, LINE_BYTES // 8)
        hint = builder.module.add_metadata([ir.Constant(_I32, 1)])
        zero, step = ir.Constant(_I64, 0), ir.Constant(_I64, LINE_BYTES)
        with cgutils.for_range_slice(builder, zero, num_bytes, step) as (offset, _):
            value = builder.load(builder.bitcast(_pointer(builder, source, offset), line.as_pointer()), align=1)
            where = builder.bitcast(_pointer(builder, target, offset), line.as_pointer())
            builder.store(value, where, align=LINE_BYTES).set_metadata("nontemporal", hint)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic(prefer_literal=True)
def prefetch_row(typingctx, address, num_bytes, for_writing):
    """Ask for the lines of a row, into the second-level cache: it takes more requests than the first."""

    def codegen(context, builder, sig, args):
        address, num_bytes, _ = args
        mode = ir.Constant(_I32, 1 if sig.args[2].literal_value else 0)
        step = ir.Constant(_I64, LINE_BYTES)
        with cgutils.for_range_slice(builder, ir.Constant(_I64, 0), num_bytes, step) as (offset, _):
            flags = (mode, ir.Constant(_I32, 2), ir.Constant(_I32, 1))
            _call(builder, "llvm.prefetch.p0", _pointer(builder, address, offset), *flags)
        return context.get_dummy_value()

    if not isinstance(for_writing, types.Literal):
        return None
    return types.void(types.int64, types.int64, for_writing), codegen
