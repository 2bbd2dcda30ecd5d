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
from core_kernels.comm import CollectiveError, Group, Handle, Recv, Send
from gnn_comm.layout import DeviceLayout, Message

__all__ = ["gather_rows", "return_gradients"]

_POSTED_AHEAD = 2


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
    arrivals = _Arrivals(layout.receives, group, buffer, tag)
    leaving = _Leaving(group, tag)
    for message in layout.sends:
        arrivals.post_until(message.stage + _POSTED_AHEAD)
        arrivals.finish(message.waits_for)
        leaving.send(message.stage, ops.pack_rows(buffer, message.index, bounds="unchecked"), message.peer)
    arrivals.finish(range(len(layout.receives)))
    leaving.finish()


def _finish(handle: Handle, group: Group, peer: int, stage: int) -> None:
    """Wait for one message; what goes wrong there names the other end and the stage."""
    try:
        handle.wait()
    except CollectiveError as error:
        reason = str(error).partition(" s: ")[2]
        raise CollectiveError(
            f"the message of stage {stage} with rank {peer} did not get through: {reason}; begin with rank {peer}, "
            "which is dead or stopped, or waits for another itself",
            rank=group.rank,
            world_size=group.size,
            collective=error.collective,
            tag=error.tag,
            seconds=error.seconds,
        ) from error


class _Leaving:
    """Sends in flight: those of one stage together, the next stage when they have left."""

    def __init__(self, group: Group, tag: str):
        self._group, self._tag = group, tag
        self._stage = -1
        self._handles: list[tuple[Handle, int]] = []

    def send(self, stage: int, rows: Tensor, peer: int) -> None:
        if stage != self._stage:
            self.finish()
            self._stage = stage
        self._handles.append((self._group.send_recv([Send(rows, peer)], self._tag, async_op=True), peer))

    def finish(self) -> None:
        for handle, peer in self._handles:
            _finish(handle, self._group, peer, self._stage)
        self._handles.clear()


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
                message = self._messages[position]
                _finish(handle, self._group, message.peer, message.stage)
                ops.unpack_rows(self._buffer, message.index, staging, bounds="unchecked")


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
    if group.backend == "nccl":
        _return_grouped(layout, group, buffer, tag)
        return buffer[: layout.num_local].clone()
    sums = _Sums(layout, group, buffer, tag)
    leaving = _Leaving(group, tag)
    for position in reversed(range(len(layout.receives))):
        message = layout.receives[position]
        sums.post_down_to(message.stage - _POSTED_AHEAD)
        sums.finish_down_to(layout.first_passed_on[position])
        leaving.send(message.stage, ops.pack_rows(buffer, message.index, bounds="unchecked"), message.peer)
        _clear_relays(layout, buffer, message)
    sums.finish_down_to(0)
    leaving.finish()
    return buffer[: layout.num_local].clone()


class _Sums:
    """Gradients that come back: received into staging, summed stage by stage from the last to the first."""

    def __init__(self, layout: DeviceLayout, group: Group, buffer: Tensor, tag: str):
        self._layout, self._group, self._buffer, self._tag = layout, group, buffer, tag
        self._stages = sorted(layout.sums_back, reverse=True)
        self._posted: deque[tuple[int, Tensor, list[tuple[Handle, int]]]] = deque()
        self._next = 0

    def post_down_to(self, stage: int) -> None:
        while self._next < len(self._stages) and self._stages[self._next] >= stage:
            coming = self._stages[self._next]
            staging, receives = _staging(self._layout, self._buffer, coming)
            handles = [
                (self._group.send_recv([receive], self._tag, async_op=True), receive.peer) for receive in receives
            ]
            self._posted.append((coming, staging, handles))
            self._next += 1

    def finish_down_to(self, stage: int) -> None:
        self.post_down_to(stage)
        while self._posted and self._posted[0][0] >= stage:
            done, staging, handles = self._posted.popleft()
            for handle, peer in handles:
                _finish(handle, self._group, peer, done)
            _add_sums(self._layout, self._buffer, done, staging)


def _staging(layout: DeviceLayout, buffer: Tensor, stage: int) -> tuple[Tensor, list[Recv]]:
    """Make room for the gradients of one stage's sent rows, one block per receiver."""
    messages = [message for message in layout.sends if message.stage == stage]
    staging = buffer.new_empty((sum(len(m.index) for m in messages), buffer.shape[1]))
    blocks = staging.split([len(m.index) for m in messages]) if messages else ()
    return staging, [Recv(block, m.peer) for block, m in zip(blocks, messages, strict=True)]


def _add_sums(layout: DeviceLayout, buffer: Tensor, stage: int, staging: Tensor) -> None:
    sums = layout.sums_back[stage]
    ops.unpack_rows(buffer, sums.rows, ops.spmm(sums.slots, staging), accumulate=True, bounds="unchecked")


def _clear_relays(layout: DeviceLayout, buffer: Tensor, returned: Message) -> None:
    """Zero the slots whose sums have left: another row used them in an earlier stage."""
    if layout.num_relay:
        buffer[returned.index[returned.index >= layout.num_rows]] = 0


def _return_grouped(layout: DeviceLayout, group: Group, buffer: Tensor, tag: str) -> None:
    for stage in reversed(range(layout.num_stages)):
        staging, receives = _staging(layout, buffer, stage)
        returned = [message for message in layout.receives if message.stage == stage]
        sends = [Send(ops.pack_rows(buffer, m.index, bounds="unchecked"), m.peer) for m in returned]
        if receives or sends:
            group.send_recv([*receives, *sends], tag)
        for message in returned:
            _clear_relays(layout, buffer, message)
        if receives:
            _add_sums(layout, buffer, stage, staging)
