"""Softmax over one segment of logits, emitted as LLVM vectors with its own exponential.

A segment of ``n`` rows with ``H`` columns is one flat run of ``n * H`` numbers. With ``H`` a power of two that divides
the vector length, the column of a lane never changes along the run: one vector maximum and one vector sum serve all
columns, folded at the end over lanes of equal column.

The exponential: ``x = k ln 2 + r`` with ``|r| <= ln 2 / 2``, the Taylor polynomial of ``exp r`` by Horner (degree 7 for
fp32, 13 for fp64: the remainder is below half a unit in the last place), times ``2**k`` through the exponent bits.
Arguments are at most 0 here; below the smallest normal result they give 0.
"""

from __future__ import annotations

import math

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from core_kernels.kernels.numba._vectors import I64, Lanes, Rows

__all__ = ["PERIODS", "softmax_backward_run", "softmax_run"]

#: Per element bits: polynomial degree, bits of the fraction, exponent bias, ln 2 cut to few bits, the rest of ln 2.
_EXP_FORMATS = {
    32: (7, 23, 127, math.floor(math.log(2) * 2**12) / 2**12, math.log(2) - math.floor(math.log(2) * 2**12) / 2**12),
    64: (13, 52, 1023, math.floor(math.log(2) * 2**32) / 2**32, 1.9082149292705877e-10),
}


def _exp(lanes, x):
    builder, bits = lanes.builder, 512 // lanes.lanes
    degree, fraction_bits, bias, upper, lower = _EXP_FORMATS[bits]
    lowest = lanes.constant(math.log(2) * (1.0 - bias))
    underflow = builder.fcmp_ordered("<", x, lowest)
    x = builder.select(underflow, lowest, x)
    power = lanes.call(f"llvm.rint.{lanes.suffix}", lanes.type, [builder.fmul(x, lanes.constant(1 / math.log(2)))])
    rest = lanes.fma(power, lanes.constant(-upper), x)
    rest = lanes.fma(power, lanes.constant(-lower), rest)
    result = lanes.constant(1 / math.factorial(degree))
    for term in reversed(range(degree)):
        result = lanes.fma(result, rest, lanes.constant(1 / math.factorial(term)))
    # A NaN has no integer part; with any scale its product stays NaN.
    power = builder.select(builder.fcmp_ordered("ord", power, power), power, lanes.zero())
    whole = ir.VectorType(ir.IntType(bits), lanes.lanes)
    exponent = builder.add(builder.fptosi(power, whole), ir.Constant(whole, [bias] * lanes.lanes))
    scale = builder.bitcast(builder.shl(exponent, ir.Constant(whole, [fraction_bits] * lanes.lanes)), lanes.type)
    return builder.select(underflow, lanes.zero(), builder.fmul(result, scale))


class _Run:
    """A flat run ``[begin, end)`` through vectors (1-D arrays), one masked vector at a time."""

    def __init__(self, context, builder, sig, args):
        self.builder, (self.begin, self.end) = builder, args[-2:]
        self.arrays = [
            Rows(context, builder, kind, value) for kind, value in zip(sig.args[:-2], args[:-2], strict=True)
        ]
        self.lanes = Lanes(builder, self.arrays[0].element, 0, self.begin)

    def each(self, body):
        """Call ``body`` with the address of the current vector in every array, inside a loop over the run."""
        step = ir.Constant(I64, self.lanes.lanes)
        with cgutils.for_range_slice(self.builder, self.begin, self.end, step) as (place, _):
            self.lanes.masks = [self.lanes.mask(self.builder.sub(self.end, place))]
            body(*(rows.at(place) for rows in self.arrays))

    def variable(self, initial):
        """Return a vector variable that the optimiser keeps in a register."""
        slot = cgutils.alloca_once_value(self.builder, initial)
        self.builder.store(initial, slot)
        return slot

    def update(self, slot, combine, value):
        self.builder.store(combine(self.builder.load(slot), value), slot)


def _make_softmax_run(period):
    @intrinsic
    def softmax_run(typingctx, logits, out, begin, end):
        """Write the softmax of ``logits[begin:end]`` over elements of equal ``index % period``."""

        def codegen(context, builder, sig, args):
            run = _Run(context, builder, sig, args)
            lanes, infinity = run.lanes, run.lanes.constant(float("-inf"))
            best, total = run.variable(infinity), run.variable(lanes.zero())
            run.each(lambda logit, _: run.update(best, lanes.larger, lanes.load(logit, 0, filler=infinity)))
            peak = lanes.fold(builder.load(best), lanes.larger, period)
            peak = builder.select(builder.fcmp_ordered("==", peak, infinity), lanes.zero(), peak)

            def exponentiate(logit, result):
                value = _exp(lanes, builder.fsub(lanes.load(logit, 0, filler=infinity), peak))
                lanes.store(value, result, 0)
                run.update(total, builder.fadd, value)

            run.each(exponentiate)
            divisor = lanes.fold(builder.load(total), builder.fadd, period)
            empty = builder.fcmp_ordered("==", divisor, lanes.zero())
            divisor = builder.select(empty, lanes.constant(1.0), divisor)
            run.each(lambda _, result: lanes.store(builder.fdiv(lanes.load(result, 0), divisor), result, 0))
            return context.get_dummy_value()

        return types.void(logits, out, types.int64, types.int64), codegen

    return softmax_run


def _make_softmax_backward_run(period):
    @intrinsic
    def softmax_backward_run(typingctx, grad, soft, out, begin, end):
        """Write ``soft * (grad - sum(soft * grad))`` for ``[begin, end)``, sums over equal ``index % period``."""

        def codegen(context, builder, sig, args):
            run = _Run(context, builder, sig, args)
            lanes, total = run.lanes, run.variable(run.lanes.zero())

            def accumulate(upstream, value, _):
                builder.store(lanes.fma(lanes.load(upstream, 0), lanes.load(value, 0), builder.load(total)), total)

            run.each(accumulate)
            mean = lanes.fold(builder.load(total), builder.fadd, period)

            def finish(upstream, value, result):
                centred = builder.fsub(lanes.load(upstream, 0), mean)
                lanes.store(builder.fmul(lanes.load(value, 0), centred), result, 0)

            run.each(finish)
            return context.get_dummy_value()

        return types.void(grad, soft, out, types.int64, types.int64), codegen

    return softmax_backward_run


#: Columns per row for which loops exist; more are taken in groups.
PERIODS = (1, 2, 4, 8)
softmax_run = tuple(_make_softmax_run(period) for period in PERIODS)
softmax_backward_run = tuple(_make_softmax_backward_run(period) for period in PERIODS)
