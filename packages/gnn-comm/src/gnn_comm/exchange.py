"""Run the stages of a plan on one device: pack, send, receive, unpack, and the reverse with sums.

On a transport that matches messages as they come (gloo), every pair makes progress on its own: receives are posted
one stage ahead, a message leaves as soon as the rows it passes on are in, and a slow pair delays only what depends
on it. On NCCL a stage is one grouped launch and the stream keeps the order; nothing waits on the host.

Gradients that come back are received into staging and summed by one kernel in the order the plan fixes, so two runs
give the same bits.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from core_kernels import ops
from core_kernels.comm import Group, Handle, Recv, Send
from gnn_comm.layout import DeviceLayout, Message

__all__ = ["gather_rows", "return_gradients"]

_STAGES_AHEAD = 2


def gather_rows(layout: DeviceLayout, group: Group, buffer: Tensor, tag: str) -> None:
    """Fill the remote rows of ``buffer``.

    Args:
        layout: What this device does.
        group: The ranks, one per device.
        buffer: ``[num_rows + num_relay, width]``, own rows filled; changed in place.
        tag: Label in counters and errors.

    Collective: all ranks of the group.
    """
    if group.backend == "nccl":
        _gather_grouped(layout, group, buffer, tag)
        return
    width = buffer.shape[1:]
    arrivals = _Arrivals(layout.receives, group, buffer, tag)
    leaving: deque[tuple[int, Handle]] = deque()
    for message in layout.sends:
        arrivals.post_until(message.stage + _STAGES_AHEAD)
        arrivals.finish(message.waits_for)
        while leaving and leaving[0][0] <= message.stage - _STAGES_AHEAD:
            leaving.popleft()[1].wait()
        packed = ops.pack_rows(buffer, message.index, bounds="unchecked") if message.index.numel() else None
        if packed is None:
            packed = buffer.new_empty((0, *width))
        leaving.append((message.stage, group.send_recv([Send(packed, message.peer)], tag, async_op=True)))
    arrivals.finish(range(len(layout.receives)))
    while leaving:
        leaving.popleft()[1].wait()


class _Arrivals:
    """Receives of the forward pass: posted by stage, unpacked when somebody asks for them."""

    def __init__(self, messages: list[Message], group: Group, buffer: Tensor, tag: str):
        self._messages, self._group, self._buffer, self._tag = messages, group, buffer, tag
        self._posted: dict[int, tuple[Tensor, Handle]] = {}
        self._next = 0

    def post_until(self, stage: int) -> None:
        while self._next < len(self._messages) and self._messages[self._next].stage <= stage:
            message = self._messages[self._next]
            staging = self._buffer.new_empty((len(message.index), *self._buffer.shape[1:]))
            handle = self._group.send_recv([Recv(staging, message.peer)], self._tag, async_op=True)
            self._posted[self._next] = (staging, handle)
            self._next += 1

    def finish(self, positions) -> None:
        for position in positions:
            self.post_until(self._messages[position].stage)
            if position in self._posted:
                staging, handle = self._posted.pop(position)
                handle.wait()
                ops.unpack_rows(self._buffer, self._messages[position].index, staging, bounds="unchecked")


def _gather_grouped(layout: DeviceLayout, group: Group, buffer: Tensor, tag: str) -> None:
    for stage in range(layout.num_stages):
        sends = [m for m in layout.sends if m.stage == stage]
        receives = [m for m in layout.receives if m.stage == stage]
        if not sends and not receives:
            continue
        staging = [buffer.new_empty((len(m.index), *buffer.shape[1:])) for m in receives]
        batch = [Recv(rows, m.peer) for rows, m in zip(staging, receives, strict=True)]
        batch += [Send(ops.pack_rows(buffer, m.index, bounds="unchecked"), m.peer) for m in sends]
        group.send_recv(batch, tag)
        for rows, message in zip(staging, receives, strict=True):
            ops.unpack_rows(buffer, message.index, rows, bounds="unchecked")


def return_gradients(layout: DeviceLayout, group: Group, gradient: Tensor, tag: str) -> Tensor:
    """Bring the gradients of all copies of a row back to its owner and sum them.

    Args:
        layout: What this device does.
        group: The ranks, one per device.
        gradient: ``[num_rows, width]``; not changed.
        tag: Label in counters and errors.

    Returns:
        ``[num_local, width]``.

    Collective: all ranks of the group.

    Determinism: sums follow the order of stages and receivers, fixed by the plan.
    """
    buffer = torch.cat([gradient, gradient.new_zeros((layout.num_relay, gradient.shape[1]))])
    grouped = group.backend == "nccl"
    leaving: deque[Handle] = deque()
    for stage in reversed(range(layout.num_stages)):
        returning = [m for m in layout.receives if m.stage == stage]
        coming = [m for m in layout.sends if m.stage == stage]
        if not returning and not coming:
            continue
        sums = layout.sums_back.get(stage)
        staging = buffer.new_empty((sums.num_staging if sums else 0, buffer.shape[1]))
        blocks = staging.split([len(m.index) for m in coming]) if coming else ()
        receives = [Recv(block, m.peer) for block, m in zip(blocks, coming, strict=True)]
        sends = [Send(ops.pack_rows(buffer, m.index, bounds="unchecked"), m.peer) for m in returning]
        if grouped:
            group.send_recv(receives + sends, tag)
        else:
            received = group.send_recv(receives, tag, async_op=True)
            leaving.append(group.send_recv(sends, tag, async_op=True))
            received.wait()
            while len(leaving) > _STAGES_AHEAD:
                leaving.popleft().wait()
        _clear_relays(layout, buffer, returning)
        if sums:
            ops.unpack_rows(buffer, sums.rows, ops.spmm(sums.slots, staging), accumulate=True, bounds="unchecked")
    while leaving:
        leaving.popleft().wait()
    return buffer[: layout.num_local].clone()


def _clear_relays(layout: DeviceLayout, buffer: Tensor, returning: list[Message]) -> None:
    """Zero the slots whose sums have left: another row may have used them in an earlier stage."""
    if layout.num_relay:
        for message in returning:
            buffer[message.index[message.index >= layout.num_rows]] = 0
