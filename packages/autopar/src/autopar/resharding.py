"""Re-scheduling a tensor from one layout to another: the steps, what each sends, forward and backward.

A step changes the form on one axis. Forward and backward communication of a step follow from the two forms:

=============  ==============  ==============
from -> to     forward         backward
=============  ==============  ==============
S -> S'        all_to_all      all_to_all
S -> R         all_gather      slice
S -> Q         all_gather      reduce_scatter
R -> S         slice           all_gather
Q -> S         slice           pad
R -> Q         nothing         all_reduce
Q -> R         nothing         mask
P -> R         all_reduce      nothing
P -> Q         all_reduce      all_reduce
P -> S         reduce_scatter  all_gather
=============  ==============  ==============

Nothing leads to ``P`` from another form. The same steps are priced by the planner and run by the executor, so what is
predicted is what is executed. Where a dim is sharded over several axes, an axis may only join or leave it innermost
first; an axis in the way is gathered for a while.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.placement import Layout, P, Q, R, divides, local_shape, value_layout
from core_kernels.comm.counters import ring_all_reduce_bytes

__all__ = ["Message", "Step", "message_of", "plan_steps", "step_messages"]

_COMMUNICATION = {
    ("S", "S"): ("all_to_all", "all_to_all"),
    ("S", "R"): ("all_gather", "slice"),
    ("S", "Q"): ("all_gather", "reduce_scatter"),
    ("R", "S"): ("slice", "all_gather"),
    ("Q", "S"): ("slice", "pad"),
    ("R", "Q"): ("nothing", "all_reduce"),
    ("Q", "R"): ("nothing", "mask"),
    ("P", "R"): ("all_reduce", "nothing"),
    ("P", "Q"): ("all_reduce", "all_reduce"),
    ("P", "S"): ("reduce_scatter", "all_gather"),
}
# Steps that shrink the tensor come first, those that grow it last.
_TURN = ("slice", "reduce_scatter", "all_to_all", "nothing", "all_gather", "all_reduce")
_COLLECTIVES = ("all_to_all", "all_gather", "reduce_scatter", "all_reduce")


@dataclass(frozen=True)
class Step:
    """One change of form on one axis; ``before`` and ``after`` are whole layouts."""

    axis: int
    before: Layout
    after: Layout
    forward: str
    backward: str


@dataclass(frozen=True)
class Message:
    """One collective.

    Attributes:
        collective: ``all_gather``, ``reduce_scatter``, ``all_to_all`` or ``all_reduce``.
        axis: Mesh axis whose ranks take part.
        num_bytes: The number :meth:`core_kernels.interconnect.Interconnect.seconds` asks for.
        sent_bytes: Payload that leaves one rank of the axis, as the group's counters count it.
        backward: Whether it runs in the backward pass.
    """

    collective: str
    axis: int
    num_bytes: int
    sent_bytes: int
    backward: bool


def _kind(form: int) -> str:
    return "S" if form >= 0 else {R: "R", P: "P", Q: "Q"}[form]


def _may_act(state: Layout, target: Layout, axis: int) -> bool:
    """Whether the axis can change its form now without cutting a dim in another order than the target's."""
    leaves, joins = state[axis], target[axis]
    inner = range(axis + 1, len(state))
    if leaves >= 0 and any(state[other] == leaves for other in inner):
        return False
    if joins >= 0:
        if any(state[other] == joins for other in inner):
            return False
        return all((state[other] == joins) == (target[other] == joins) for other in range(axis))
    return True


@functools.lru_cache(maxsize=1 << 18)
def plan_steps(source: Layout, target: Layout) -> tuple[Step, ...] | None:
    """Return the steps from one layout to another, or ``None`` when there is no way.

    >>> [(step.axis, step.forward, step.backward) for step in plan_steps((0, R), (R, 1))]
    [(1, 'slice', 'all_gather'), (0, 'all_gather', 'slice')]
    >>> plan_steps((R,), (P,)) is None
    True
    """
    if any(to == P and form != P for form, to in zip(source, target, strict=True)):
        return None
    state, steps = source, []
    while state != target:
        able = [axis for axis in range(len(state)) if state[axis] != target[axis] and _may_act(state, target, axis)]
        if able:
            axis = min(able, key=lambda a: (_TURN.index(_forward(state[a], target[a])), -a))
            to = target[axis]
        else:  # an inner axis of some dim is in the way of an outer one
            axis = max(a for a in range(len(state)) if state[a] >= 0)
            to = R
        after = (*state[:axis], to, *state[axis + 1 :])
        steps.append(Step(axis, state, after, *_COMMUNICATION[_kind(state[axis]), _kind(to)]))
        state = after
    return tuple(steps)


def _forward(form: int, to: int) -> str:
    return _COMMUNICATION[_kind(form), _kind(to)][0]


def message_of(
    collective: str, axis: int, axis_size: int, num_elements: int, element_bytes: int, backward: bool, place: int = 0
) -> Message:
    """Describe a collective on a local tensor of ``num_elements`` (before it) as the rank at ``place`` sees it."""
    num_bytes = num_elements * element_bytes
    if collective == "all_reduce":
        sent, _ = ring_all_reduce_bytes(num_elements, element_bytes, place, axis_size)
        return Message(collective, axis, num_bytes, sent, backward)
    sent = num_bytes * (axis_size - 1) if collective == "all_gather" else num_bytes * (axis_size - 1) // axis_size
    return Message(collective, axis, sent, sent, backward)


def step_messages(
    step: Step,
    shape: Sequence[int],
    element_bytes: int,
    mesh: Sequence[int],
    has_gradient: bool,
    coordinate: Sequence[int] | None = None,
) -> list[Message]:
    """Return the collectives of one step, forward then backward, as one rank sees them (the first when left out)."""
    place = coordinate[step.axis] if coordinate else 0
    size = mesh[step.axis]
    if size == 1:
        return []
    messages = []
    if step.forward in _COLLECTIVES:
        before = math.prod(local_shape(shape, step.before, mesh))
        messages.append(message_of(step.forward, step.axis, size, before, element_bytes, False, place))
    if has_gradient and step.backward in _COLLECTIVES:
        after = math.prod(local_shape(shape, step.after, mesh))
        messages.append(message_of(step.backward, step.axis, size, after, element_bytes, True, place))
    return messages


def steps_between(
    source: Layout, target: Layout, shape: Sequence[int], mesh: Sequence[int], has_gradient: bool
) -> tuple[Step, ...] | None:
    """Return the steps for a tensor of this shape; ``None`` when none exist or a layout on the way does not divide it.

    Without gradient, ``Q`` means ``R``.
    """
    if not has_gradient:
        source, target = value_layout(source), value_layout(target)
    steps = plan_steps(source, target)
    if steps is None or not all(divides(shape, step.after, mesh) for step in steps):
        return None
    return steps
