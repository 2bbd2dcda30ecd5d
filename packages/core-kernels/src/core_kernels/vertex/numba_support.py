"""What generated CPU code calls: element access without index checks, and an exponential that vectorises."""

from __future__ import annotations

import math

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from core_kernels.kernels.numba._elements import get, get_written, put

__all__ = ["exp", "get", "get_written", "prefetch", "put"]


@intrinsic
def prefetch(typingctx, array, index, count):
    """Bring ``array[index : index + count]`` into the second-level cache."""

    def codegen(context, builder, signature, args):
        array_type = signature.args[0]
        data = context.make_array(array_type)(context, builder, args[0]).data
        i32, byte = ir.IntType(32), ir.IntType(8).as_pointer()
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.VoidType(), [byte, i32, i32, i32]), "llvm.prefetch.p0"
        )
        step = ir.Constant(ir.IntType(64), 64 * 8 // array_type.dtype.bitwidth)
        stop = builder.add(args[1], args[2])
        with cgutils.for_range_slice(builder, args[1], stop, step) as (at, _):
            where = builder.bitcast(builder.gep(data, [at]), byte)
            builder.call(function, [where, *(ir.Constant(i32, flag) for flag in (0, 2, 1))])
        return context.get_dummy_value()

    return types.void(array, types.int64, types.int64), codegen


@intrinsic
def _power_of_two(typingctx, exponent):
    """Return 2**exponent as float32, exponent an int32 in [-126, 127]."""

    def codegen(context, builder, signature, args):
        bits = builder.shl(builder.add(args[0], ir.Constant(ir.IntType(32), 127)), ir.Constant(ir.IntType(32), 23))
        return builder.bitcast(bits, ir.FloatType())

    return types.float32(types.int32), codegen


_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_SMALLEST, _LARGEST = np.float32(-87.0), np.float32(88.0)
_HALF, _ONE = np.float32(0.5), np.float32(1.0)
# Coefficients of (exp(r) - 1 - r) / r**2 on |r| <= ln(2) / 2: Taylor's, the last two fitted.
_C2, _C3, _C4, _C5, _C6 = (np.float32(value) for value in (0.5, 0.16666665, 0.041666485, 0.008336239, 0.0013930436))


def exp(x):
    """Return e**x: to about one unit in the last place for float32, the library's for float64."""
    return math.exp(x)


def _exp_float32(x):
    bounded = min(max(x, _SMALLEST), _LARGEST)
    whole = np.int32(math.floor(bounded * _LOG2_E + _HALF))
    n = np.float32(whole)
    r = (bounded - n * _LN2_HIGH) - n * _LN2_LOW
    series = (((_C6 * r + _C5) * r + _C4) * r + _C3) * r + _C2
    # numba's decorator is untyped: it passes the typing context itself.
    result = _power_of_two(whole) * (_ONE + (r + r * r * series))  # pyright: ignore[reportCallIssue]
    if x < _SMALLEST:
        result = np.float32(0.0)
    if x > _LARGEST:
        result = np.float32(math.exp(x))
    return x if x != x else result


@overload(exp, jit_options={"error_model": "numpy"})
def _exp(x):
    return _exp_float32_implementation if x == types.float32 else (lambda x: math.exp(x))


_exp_float32_jit = njit(_exp_float32)


def _exp_float32_implementation(x):
    return _exp_float32_jit(x)
