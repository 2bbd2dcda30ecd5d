"""Vocabulary for kernels written in LLVM vectors of 64 bytes: matrices, masked lanes, their arithmetic.

Numba alone reloads an accumulator array from memory at every edge. The intrinsics of :mod:`._row_loops` and
:mod:`._softmax_loop` emit their loops with these classes and keep vectors in registers. Lanes past the end of a row are
masked, so every width takes the same path. The arithmetic is explicit (fused multiply-add per lane, sums in a fixed
tree), hence the same whatever vectors the processor has.

Callers may not assume any bounds check: positions, ids and columns must be valid.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils

__all__ = ["I1", "I32", "I64", "Lanes", "Rows"]

I1, I32, I64 = ir.IntType(1), ir.IntType(32), ir.IntType(64)


class Rows:
    """A C-contiguous matrix (or vector) seen by the code generator."""

    def __init__(self, context, builder, array_type, value):
        array = context.make_array(array_type)(context, builder, value)
        self.builder, self.data = builder, array.data
        self.element = context.get_data_type(array_type.dtype)
        shape = cgutils.unpack_tuple(builder, array.shape)
        self.stride = shape[1] if array_type.ndim == 2 else ir.Constant(I64, 1)
        self.is_signed_32 = array_type.dtype == types.int32

    def at(self, row, column=None):
        """Return the address of (row, column), computed in 64 bits."""
        offset = self.builder.mul(row, self.stride)
        if column is not None:
            offset = self.builder.add(offset, column)
        return self.builder.gep(self.data, [offset])

    def scalar(self, row, column=None):
        """Return the element, integers widened to 64 bits."""
        value = self.builder.load(self.at(row, column))
        return self.builder.sext(value, I64) if self.is_signed_32 else value


class Lanes:
    """Vector arithmetic of one element type on ``count`` vectors with one mask each."""

    def __init__(self, builder, element, count, columns_left):
        self.builder, self.count, self.element = builder, count, element
        self.lanes = 16 if isinstance(element, ir.FloatType) else 8
        self.type = ir.VectorType(element, self.lanes)
        self.suffix = f"v{self.lanes}f{512 // self.lanes}"
        self.masks = [self.mask(columns_left, vector) for vector in range(count)]

    def mask(self, columns_left, vector=0):
        """Return which lanes of a vector lie before the end."""
        steps = ir.Constant(ir.VectorType(I64, self.lanes), [vector * self.lanes + lane for lane in range(self.lanes)])
        return self.builder.icmp_signed("<", steps, self.broadcast(columns_left, I64))

    def broadcast(self, scalar, element=None):
        """Return a vector with ``scalar`` in every lane."""
        vector = ir.VectorType(element or self.element, self.lanes)
        one = self.builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(I32, 0))
        zeros = ir.Constant(ir.VectorType(I32, self.lanes), [0] * self.lanes)
        return self.builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), zeros)

    def constant(self, number):
        """Return a vector with the same literal in every lane."""
        return ir.Constant(self.type, [number] * self.lanes)

    def zero(self):
        """Return the zero vector."""
        return self.constant(0.0)

    def call(self, name, result, arguments):
        """Call an LLVM intrinsic."""
        function = cgutils.get_or_insert_function(
            self.builder.module, ir.FunctionType(result, [argument.type for argument in arguments]), name
        )
        return self.builder.call(function, arguments)

    def step(self, pointer, vector):
        """Return the address of a vector behind ``pointer``."""
        return self.builder.gep(pointer, [ir.Constant(I64, vector * self.lanes)])

    def load(self, pointer, vector, element_type=None, filler=None):
        """Read a vector; masked lanes give ``filler``, zero by default."""
        kind = element_type or self.type
        suffix = self.suffix if element_type is None else f"v{self.lanes}i32"
        filler = ir.Constant(kind, None) if filler is None else filler
        where = self.builder.bitcast(self.step(pointer, vector), kind.as_pointer())
        align = ir.Constant(I32, 4)
        return self.call(f"llvm.masked.load.{suffix}.p0", kind, [where, align, self.masks[vector], filler])

    def store(self, value, pointer, vector):
        """Write a vector, masked lanes excepted."""
        suffix = self.suffix if value.type == self.type else f"v{self.lanes}i32"
        where = self.builder.bitcast(self.step(pointer, vector), value.type.as_pointer())
        align = ir.Constant(I32, 4)
        self.call(f"llvm.masked.store.{suffix}.p0", ir.VoidType(), [value, where, align, self.masks[vector]])

    def fma(self, a, b, c):
        """Return ``a * b + c``, rounded once."""
        return self.call(f"llvm.fma.{self.suffix}", self.type, [a, b, c])

    def prefetch(self, pointer, vector):
        """Ask for the cache line of a vector, into the second-level cache: it takes more requests than the first."""
        byte = ir.IntType(8).as_pointer()
        where = self.builder.bitcast(self.step(pointer, vector), byte)
        flags = [ir.Constant(I32, flag) for flag in (0, 2, 1)]
        self.call("llvm.prefetch.p0", ir.VoidType(), [where, *flags])

    def larger(self, a, b):
        """Return the maximum per lane; a NaN in ``a`` stays only if ``b`` is NaN too."""
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def fold(self, value, combine, period=1):
        """Combine all lanes of equal ``lane % period`` in a fixed tree; each of them gets the result."""
        half = self.lanes
        while half > period:
            half //= 2
            picks = [(lane + half) % self.lanes for lane in range(self.lanes)]
            turned = self.builder.shuffle_vector(value, value, ir.Constant(ir.VectorType(I32, self.lanes), picks))
            value = combine(value, turned)
        return value

    def total(self, value):
        """Return the sum of the lanes."""
        return self.builder.extract_element(self.fold(value, self.builder.fadd), ir.Constant(I32, 0))
