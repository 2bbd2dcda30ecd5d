"""What crosses between two stages: every element once, whatever their meshes and layouts.

Activations lie on a stage in its boundary layout: samples split over some axes, whole on the others (*replicas*). For
the way, each rank of a stage owns one run of the flattened value: its block of samples, of which its replicas own equal
parts. The owner sends, the owner on the other side receives, and what was received is gathered among replicas there.
Gradients go the same way back. So the link carries a value once, and replicas cost one all-gather inside a stage
(scatter-gather, as Megatron-LM does between tensor-parallel stages).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.collectives import MeshGroups
from autopar.graph import TensorInfo
from autopar.placement import Layout, local_shape
from autopar.resharding import Message, message_of

__all__ = ["Boundary", "enter", "gather_messages", "leave", "meetings"]


@dataclass(frozen=True)
class Boundary:
    """One side of a cut: a value of one micro-batch as it lies on one stage.

    Attributes:
        info: Shape and dtype of the whole value.
        mesh: Mesh of the stage.
        layout: How it lies there: dim 0 split or whole on each axis.
    """

    info: TensorInfo
    mesh: tuple[int, ...]
    layout: Layout

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of a rank's block."""
        return local_shape(self.info.shape, self.layout, self.mesh)

    @property
    def replica_axes(self) -> list[int]:
        """Axes whose ranks hold the same block."""
        pairs = enumerate(zip(self.layout, self.mesh, strict=True))
        return [axis for axis, (form, size) in pairs if form < 0 and size > 1]

    def runs(self, coordinate: Sequence[int]) -> list[tuple[int, int]]:
        """Return the run of the block that is left after splitting it over no, the first, the first two ... axes."""
        found = [(0, math.prod(self.local_shape))]
        for axis in self.replica_axes:
            found.append(_part(found[-1], coordinate[axis], self.mesh[axis]))
        return found

    def owned(self, coordinate: Sequence[int]) -> tuple[int, int]:
        """Return the run of the whole flattened value that a rank owns."""
        block = 0
        for form, size, place in zip(self.layout, self.mesh, coordinate, strict=True):
            block = block * size + place if form >= 0 else block
        first = block * math.prod(self.local_shape)
        start, stop = self.runs(coordinate)[-1]
        return first + start, first + stop


def _part(run: tuple[int, int], place: int, count: int) -> tuple[int, int]:
    start, stop = run
    return start + (stop - start) * place // count, start + (stop - start) * (place + 1) // count


def meetings(mine: Boundary, coordinate: Sequence[int], other: Boundary) -> list[tuple[int, int, int]]:
    """Return with which ranks of the other side a rank shares elements: (rank, start, stop) in the run it owns.

    Args:
        mine: This side.
        coordinate: The rank's place on its mesh.
        other: The other side; its ranks are numbered row by row.

    >>> info = TensorInfo((4, 2), torch.float32, True)
    >>> meetings(Boundary(info, (1,), (-1,)), (0,), Boundary(info, (2,), (-1,)))
    [(0, 0, 4), (1, 4, 8)]
    """
    start, stop = mine.owned(coordinate)
    found = []
    for rank, place in enumerate(itertools.product(*map(range, other.mesh))):
        first, last = other.owned(place)
        first, last = max(first, start), min(last, stop)
        if first < last:
            found.append((rank, first - start, last - start))
    return found


def gather_messages(side: Boundary, coordinate: Sequence[int], backward: bool) -> list[Message]:
    """Return the collectives that gather a block among replicas, as one rank sees them."""
    size, found = side.info.dtype.itemsize, []
    for (start, stop), axis in reversed(list(zip(side.runs(coordinate)[1:], side.replica_axes, strict=True))):
        found.append(message_of("all_gather", axis, side.mesh[axis], stop - start, size, backward))
    return found


def enter(piece: Tensor, side: Boundary, groups: MeshGroups) -> Tensor:
    """Return the block of which each replica has received its run; the gradient is cut into runs again."""
    return _Enter.apply(piece, side, groups)


def leave(block: Tensor, side: Boundary, groups: MeshGroups) -> Tensor:
    """Return the run that this rank sends of its block; gradients of the runs are gathered among replicas."""
    return _Leave.apply(block, side, groups)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, piece: Tensor, side: Boundary, groups: MeshGroups) -> Tensor:
        ctx.side, ctx.groups = side, groups
        return _gather(piece, side, groups, "forward")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _cut(grad, ctx.side, ctx.groups), None, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, block: Tensor, side: Boundary, groups: MeshGroups) -> Tensor:
        ctx.side, ctx.groups = side, groups
        return _cut(block, side, groups)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _gather(grad, ctx.side, ctx.groups, "backward"), None, None


def _gather(piece: Tensor, side: Boundary, groups: MeshGroups, phase: str) -> Tensor:
    runs = side.runs(groups.coordinate)
    for depth, axis in reversed(list(enumerate(side.replica_axes))):
        parts = [_part(runs[depth], place, side.mesh[axis]) for place in range(side.mesh[axis])]
        counts = [stop - start for start, stop in parts]
        piece, _ = groups.axes[axis].all_gather_v(piece.contiguous(), tag=f"all_gather.{phase}", counts=counts)
    return piece.reshape(side.local_shape)


def _cut(block: Tensor, side: Boundary, groups: MeshGroups) -> Tensor:
    start, stop = side.runs(groups.coordinate)[-1]
    return block.reshape(-1)[start:stop].clone()
