"""Element access without index checks.

Numba lets negative indices count from the end; the test for it keeps loops from being vectorised. These accessors
compile to a plain load and store.

Callers may not assume any check: an index must lie inside its 1-D, C-contiguous array.
"""

from __future__ import annotations

from numba import types
from numba.extending import intrinsic

__all__ = ["get", "get_written", "put"]


def _load(array, is_constant):
    def codegen(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        value = builder.load(builder.gep(data, [args[1]]))
        if is_constant:
            value.set_metadata("invariant.load", builder.module.add_metadata([]))
        return value

    return array.dtype(array, types.int64), codegen


@intrinsic
def get(typingctx, array, index):
    """Return ``array[index]`` of a 1-D C-contiguous array that the kernel never writes."""
    return _load(array, True)


@intrinsic
def get_written(typingctx, array, index):
    """Return ``array[index]`` of a 1-D C-contiguous array that the kernel writes as well."""
    return _load(array, False)


@intrinsic
def put(typingctx, array, index, value):
    """Set ``array[index] = value`` on a 1-D C-contiguous array."""

    def codegen(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        builder.store(args[2], builder.gep(data, [args[1]]))
        return context.get_dummy_value()

    return types.void(array, types.int64, array.dtype), codegen
