"""The steps of a re-scheduling run on real tensors, forward and backward.

Each step is one autograd function whose forward and backward do what :mod:`autopar.resharding` states. Collectives are
those of ``core_kernels.comm``; their bytes are counted there under the tags ``"forward"`` and ``"backward"``, so that
they can be compared with the plan.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.placement import P, Q, R
from autopar.resharding import Step
from core_kernels.comm import Group

__all__ = ["MeshGroups", "convert"]


class MeshGroups:
    """The groups of this rank along every axis of a mesh.

    Args:
        group: All ranks of the mesh, numbered row by row.
        mesh: Sizes of the axes.

    Collective: all ranks of ``group``.
    """

    def __init__(self, group: Group, mesh: Sequence[int]):
        self.world, self.mesh = group, tuple(mesh)
        self.coordinate: tuple[int, ...] = ()
        self.axes: list[Group] = []
        stride = group.size
        for size in self.mesh:
            stride //= size
            place = group.rank // stride % size
            self.coordinate += (place,)
            first = group.rank - place * stride
            members = [first + stride * index for index in range(size)]
            self.axes.append(Group.single(group.device) if size == 1 else group.subgroup(members))

    def behind_time(self) -> MeshGroups:
        """Return the same groups behind one more axis of a single rank: micro-batches, which follow in time."""
        found = copy.copy(self)
        found.mesh, found.coordinate = (1, *self.mesh), (0, *self.coordinate)
        found.axes = [Group.single(self.world.device), *self.axes]
        return found

    def reset_counters(self) -> None:
        """Forget the bytes counted so far."""
        for axis in self.axes:
            axis.counters.reset()

    def counted(self) -> dict[str, dict[str, int]]:
        """Return calls and bytes sent by this rank, per ``"<axis>.<collective>.<phase>"``."""
        found = {}
        for axis, group in enumerate(self.axes):
            for tag, counts in group.counters.snapshot().items():
                found[f"{axis}.{tag}"] = {"calls": counts["calls"], "sent_bytes": counts["sent_bytes"]}
        return found


def convert(x: Tensor, steps: Sequence[Step], groups: MeshGroups, keeps_view: bool = False) -> Tensor:
    """Run the steps of a re-scheduling on this rank's part.

    Args:
        x: Local part in the layout before the first step.
        steps: What to do.
        groups: Groups along the axes.
        keeps_view: Leave a slice as a view of ``x`` (parameters, whose memory stays anyway).
    """
    for step in steps:
        if groups.mesh[step.axis] > 1:
            x = _StepFunction.apply(x, step, groups, keeps_view)
    return x


class _StepFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, step: Step, groups: MeshGroups, keeps_view: bool) -> Tensor:
        ctx.step, ctx.groups = step, groups
        form, to = step.before[step.axis], step.after[step.axis]
        result = _ACTIONS[step.forward](x, form, to, groups, step.axis, "forward")
        if step.forward == "slice" and not keeps_view:
            result = result.clone(memory_format=torch.contiguous_format)
        return result.view_as(result) if result is x else result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        step = ctx.step
        form, to = step.before[step.axis], step.after[step.axis]
        action = _ACTIONS[step.backward]
        forms = _gradient_form(to), _gradient_form(form)
        return action(grad, *forms, ctx.groups, step.axis, "backward"), None, None, None


def _gradient_form(form: int) -> int:
    """Return how the gradient of a value lies: whole for a partial sum, a partial sum for ``Q``."""
    return {Q: P, P: R}.get(form, form)


def _move_front(x: Tensor, dim: int) -> Tensor:
    return x.movedim(dim, 0).contiguous() if dim else x.contiguous()


def _move_back(x: Tensor, dim: int) -> Tensor:
    return x.movedim(0, dim).contiguous() if dim else x


def _all_gather(x: Tensor, form: int, to: int, groups: MeshGroups, axis: int, phase: str) -> Tensor:
    group = groups.axes[axis]
    counts = [x.shape[form]] * group.size
    # The copy that is sent is let go of before the result is moved back.
    gathered, _ = group.all_gather_v(_move_front(x, form), tag=f"all_gather.{phase}", counts=counts)
    return _move_back(gathered, form)


def _reduce_scatter(x: Tensor, form: int, to: int, groups: MeshGroups, axis: int, phase: str) -> Tensor:
    group = groups.axes[axis]
    rows = _move_front(x, to)
    counts = [rows.shape[0] // group.size] * group.size
    return _move_back(group.reduce_scatter_v(rows, counts, tag=f"reduce_scatter.{phase}"), to)


def _all_to_all(x: Tensor, form: int, to: int, groups: MeshGroups, axis: int, phase: str) -> Tensor:
    """Cut along ``to``, exchange, join along ``form``."""
    group = groups.axes[axis]
    ones = [1] * group.size
    received, _ = group.all_to_all_v(torch.stack(x.chunk(group.size, to)), ones, ones, tag=f"all_to_all.{phase}")
    return torch.cat(received.unbind(0), form)


def _all_reduce(x: Tensor, form: int, to: int, groups: MeshGroups, axis: int, phase: str) -> Tensor:
    return groups.axes[axis].all_reduce(x.contiguous(), tag=f"all_reduce.{phase}")


def _slice(x: Tensor, form: int, to: int, groups: MeshGroups, axis: int, phase: str) -> Tensor:
    length = x.shape[to] // groups.mesh[axis]
    return x.narrow(to, groups.coordinate[axis] * length, length)


def _pad(x: Tensor, form: int, to: int, groups: MeshGroups, axis: int, phase: str) -> Tensor:
    """Put a shard's gradient in its place, zeros elsewhere: a partial sum."""
    shape = list(x.shape)
    shape[form] *= groups.mesh[axis]
    whole = x.new_zeros(shape)
    whole.narrow(form, groups.coordinate[axis] * x.shape[form], x.shape[form]).copy_(x)
    return whole


def _mask(x: Tensor, form: int, to: int, groups: MeshGroups, axis: int, phase: str) -> Tensor:
    """Let one rank contribute a value that all ranks have: a partial sum."""
    return x if groups.coordinate[axis] == 0 else torch.zeros_like(x)


def _nothing(x: Tensor, form: int, to: int, groups: MeshGroups, axis: int, phase: str) -> Tensor:
    return x


_ACTIONS: dict[str, Callable[..., Tensor]] = {
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "all_reduce": _all_reduce,
    "slice": _slice,
    "pad": _pad,
    "mask": _mask,
    "nothing": _nothing,
}
