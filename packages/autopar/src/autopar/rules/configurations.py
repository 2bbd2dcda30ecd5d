"""Configurations of an operator on a mesh: the product of its rule over the axes, filtered by divisibility."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.graph import Operator
from autopar.placement import Layout, P, Q, R, divides
from autopar.rules.registry import ONCE, rule_of

__all__ = ["Configuration", "configurations"]


@dataclass(frozen=True)
class Configuration:
    """One way to run an operator on a mesh.

    Attributes:
        inputs: Layout wanted of each tensor input.
        output: Layout of the result.
        once: Per input the axes on which only the first rank contributes it.
        active: Axes over which the work is split.
    """

    inputs: tuple[Layout, ...]
    output: Layout
    once: tuple[tuple[int, ...], ...]
    active: tuple[int, ...]


# Configurations found so far, by rule, operator and mesh: operators of repeated layers, and of every plan that is read
# back, ask again and again.
_found: dict[tuple, list[Configuration]] = {}
_MOST_FOUND = 1 << 14


def configurations(operator: Operator, mesh: Sequence[int]) -> list[Configuration]:
    """Return every way to run an operator on a mesh, the unsplit one first; callers do not change the list.

    >>> from autopar import capture, models
    >>> linear = next(o for o in capture.trace(*models.mlp()).operators if o.kind == "linear")
    >>> [(config.inputs[0], config.output) for config in configurations(linear, (2,))]
    [((-1,), (-1,)), ((0,), (0,)), ((-1,), (1,)), ((1,), (-2,))]
    """
    key = (rule_of(operator.kind), operator.signature, tuple(mesh))
    if key not in _found:
        if len(_found) >= _MOST_FOUND:
            _found.clear()
        _found[key] = _enumerate(operator, mesh)
    return _found[key]


def _enumerate(operator: Operator, mesh: Sequence[int]) -> list[Configuration]:
    whole = ((R,) * len(operator.inputs), R)
    splits = [whole, *dict.fromkeys(rule_of(operator.kind).splits(operator))]
    if not operator.output.dtype.is_floating_point:  # integers are not summed over ranks
        splits = [split for split in splits if split[1] != P]
    per_axis = []
    for size in mesh:
        fitting = [split for split in splits if _fits(operator, [split], (size,))]
        per_axis.append([whole] if size == 1 else fitting)
    fitting = (combination for combination in itertools.product(*per_axis) if _fits(operator, combination, mesh))
    return list(dict.fromkeys(_configure(operator, combination) for combination in fitting))


def _fits(operator: Operator, combination: Sequence, mesh: Sequence[int]) -> bool:
    for slot, info in enumerate(operator.input_info):
        if not divides(info.shape, tuple(split[0][slot] for split in combination), mesh):
            return False
    return divides(operator.output.shape, tuple(split[1] for split in combination), mesh)


def _configure(operator: Operator, combination: Sequence) -> Configuration:
    """Put in which gradients are partial sums: those of whole inputs on axes where ranks differ in their work."""
    active = tuple(
        axis
        for axis, (inputs, output) in enumerate(combination)
        if output != R or any(form not in (R, ONCE) for form in inputs)
    )
    layouts, once = [], []
    for slot, info in enumerate(operator.input_info):
        forms = [split[0][slot] for split in combination]
        once.append(tuple(axis for axis, form in enumerate(forms) if form == ONCE))
        if info.has_gradient:
            forms = [Q if form == R and axis in active else form for axis, form in enumerate(forms)]
        layouts.append(tuple(R if form == ONCE else form for form in forms))
    output = tuple(split[1] for split in combination)
    return Configuration(tuple(layouts), output, tuple(once), active)
