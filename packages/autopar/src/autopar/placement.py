"""How a tensor lies on a device mesh: one form per mesh axis, and the shapes and slices that follow.

A form says two things about one axis: how the value lies there, and how its gradient does.

=====  =====================================  ==========================
form   value                                  gradient
=====  =====================================  ==========================
``d``  sharded along dim ``d`` (d >= 0)       sharded alike
``R``  equal on all ranks                     equal on all ranks
``Q``  equal on all ranks                     a sum over the ranks, due
``P``  a sum over the ranks, due              equal on all ranks
=====  =====================================  ==========================

``Q`` is what an operator wants whose ranks use the same value for different work, such as the input of a
column-parallel product: forward nothing happens, backward the ranks' gradients must be added. A *layout* is a tuple of
forms, one per axis. A dim sharded over several axes is cut by the first of them first.

Source: the placements of GSPMD (arXiv 2105.04663) and of DTensor; ``Q`` is ours, so that forward and backward
re-scheduling are priced by one pair of layouts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from autopar.errors import ProblemError

__all__ = ["Layout", "P", "Q", "R", "divides", "format_layout", "local_shape", "num_shards", "shard", "value_layout"]

R, P, Q = -1, -2, -3
Layout = tuple[int, ...]
_NAMES = {R: "R", P: "P(sum)", Q: "R*"}


def format_layout(layout: Layout) -> str:
    """Write a layout as DTensor does, ``R*`` standing for a copy whose gradient is a partial sum.

    >>> format_layout((0, R, Q, P))
    'S(0),R,R*,P(sum)'
    """
    return ",".join(_NAMES.get(form, f"S({form})") for form in layout)


def parse_layout(text: str) -> Layout:
    """Read what :func:`format_layout` wrote.

    Raises:
        ProblemError: A form is not known.

    >>> parse_layout("S(1),R*")
    (1, -3)
    """
    codes = {name: form for form, name in _NAMES.items()}
    forms = []
    for word in text.split(","):
        word = word.strip()
        if word in codes:
            forms.append(codes[word])
        elif word.startswith("S(") and word.endswith(")") and word[2:-1].isdigit():
            forms.append(int(word[2:-1]))
        else:
            raise ProblemError(f"placement {word!r} is not known; expected R, R*, P(sum) or S(d); check the plan")
    return tuple(forms)


def num_shards(layout: Layout, mesh: Sequence[int]) -> int:
    """Return into how many shards a layout cuts a tensor."""
    return math.prod(size for form, size in zip(layout, mesh, strict=True) if form >= 0)


def divides(shape: Sequence[int], layout: Layout, mesh: Sequence[int]) -> bool:
    """Whether every sharded dim exists and is divisible by the number of its shards.

    >>> divides((8, 6), (0, 1), (4, 2)), divides((8, 6), (1, 1), (4, 2))
    (True, False)
    """
    shards: dict[int, int] = {}
    for form, size in zip(layout, mesh, strict=True):
        if form >= 0:
            shards[form] = shards.get(form, 1) * size
    return all(dim < len(shape) and shape[dim] % count == 0 and shape[dim] > 0 for dim, count in shards.items())


def local_shape(shape: Sequence[int], layout: Layout, mesh: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of one rank's part.

    >>> local_shape((8, 6), (0, 1), (4, 2))
    (2, 3)
    """
    sizes = list(shape)
    for form, size in zip(layout, mesh, strict=True):
        if form >= 0:
            sizes[form] //= size
    return tuple(sizes)


def value_layout(layout: Layout) -> Layout:
    """Return the layout with ``Q`` written as ``R``: what can be said of a value without gradient."""
    return tuple(R if form == Q else form for form in layout)


def shard(full: Tensor, layout: Layout, mesh: Sequence[int], coordinate: Sequence[int]) -> Tensor:
    """Return the part of a full tensor that one coordinate of the mesh holds (a view)."""
    for form, size, index in zip(layout, mesh, coordinate, strict=True):
        if form >= 0:
            length = full.shape[form] // size
            full = full.narrow(form, index * length, length)
    return full
