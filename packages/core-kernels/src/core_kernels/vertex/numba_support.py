"""What generated CPU code calls: element access without index checks, and an exponential that vectorises.

Numba lets negative indices count from the end; the test for it keeps loops from being vectorised. Generated indices are
never negative, so these accessors compile to a plain load and store.
"""

from __future__ import annotations

import math

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload

__all__ = ["exp", "get", "put"]


@intrinsic
def get(typingctx, array, index):
    """Return ``array[index]`` of a 1-D C-contiguous array."""

    def codegen(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.load(builder.gep(data, [args[1]]))

    return array.dtype(array, types.int64), codegen


@intrinsic
def put(typingctx, array, index, value):
    """Set ``array[index] = value`` on a 1-D C-contiguous array."""

    def codegen(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        builder.store(args[2], builder.gep(data, [args[1]]))
        return context.get_dummy_value()

    return types.void(array, types.int64, array.dtype), codegen


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
    result = _power_of_two(whole) * (_ONE + (r + r * r * series))
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
