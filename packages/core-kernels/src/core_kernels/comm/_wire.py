"""Moves contiguous tensors over a ``torch.distributed`` process group; the only place that knows a backend's quirks.

Methods post an operation and return its works; nothing here waits, counts or names errors (``Group`` does). They call
the process group object itself, not the functions of ``torch.distributed``, so that a group outside the global registry
works too.

Backend facts relied on: gloo has uneven ``alltoall_base`` but no uneven all-gather, and no 16-bit integers or booleans
in reductions; on NCCL, sends and receives must be posted as one group or they can deadlock.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Wire"]

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_GLOO_REDUCES = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32}
_GLOO_REDUCES |= {torch.int64, torch.complex64, torch.complex128}

_open: weakref.WeakSet[Wire] = weakref.WeakSet()


@atexit.register
def _release_transports() -> None:
    """Let go of every process group before the interpreter shuts down.

    A gloo thread drops a finished work a moment after its waiter has gone on. If the interpreter is shutting down by
    then, that thread cannot take the GIL to free the tensors and the process aborts; ending the group joins it first.
    """
    for wire in list(_open):
        wire.process_group = None


class Wire:
    """One process group seen as a mover of bytes.

    Args:
        process_group: A ``torch.distributed`` process group, registered or not.
    """

    def __init__(self, process_group: Any):
        self.process_group = process_group
        _open.add(self)
        self.rank, self.size = process_group.rank(), process_group.size()
        self.backend = str(process_group.name()).lower().removeprefix("processgroup")
        self.is_nccl = "nccl" in self.backend
        self._num_sent = [0] * self.size
        self._num_received = [0] * self.size

    def device(self) -> torch.device:
        """Return where tensors have to live for this backend."""
        return torch.device("cuda", torch.cuda.current_device()) if self.is_nccl else torch.device("cpu")

    def can_reduce(self, dtype: torch.dtype) -> bool:
        """Whether the backend sums this dtype itself."""
        return self.is_nccl or dtype in _GLOO_REDUCES

    def all_reduce(self, buffer: Tensor, op: str) -> list[Any]:
        """Reduce ``buffer`` over all ranks, in place."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(_OPS[op])
        return [self.process_group.allreduce([buffer], options)]

    def all_to_all(self, out: Tensor, x: Tensor, receive_counts: list[int], send_counts: list[int]) -> list[Any]:
        """Send ``send_counts[p]`` rows of ``x`` to rank ``p`` and receive into ``out``, in rank order."""
        return [self.process_group.alltoall_base(out, x, receive_counts, send_counts)]

    def all_gather(self, out: Tensor, x: Tensor) -> list[Any]:
        """Concatenate equally large ``x`` of all ranks into ``out``."""
        return [self.process_group._allgather_base(out, x)]

    def broadcast(self, buffer: Tensor, root: int) -> list[Any]:
        """Overwrite ``buffer`` with that of ``root``."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        return [self.process_group.broadcast([buffer], options)]

    def exchange(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> list[Any]:
        """Post all receives, then all sends; the n-th send of a pair of ranks meets the n-th receive of that pair."""
        if self.is_nccl:
            # The grouped form that dist.batch_isend_irecv uses; it also works for unregistered groups.
            self.process_group._start_coalescing(self.device())
            self._post(sends, receives)
            return [self.process_group._end_coalescing(self.device())]
        return self._post(sends, receives)

    def barrier(self) -> list[Any]:
        """Post a barrier."""
        return [self.process_group.barrier()]

    def wait(self, work: Any, seconds: float) -> None:
        """Wait for one work; NCCL only orders the current stream and leaves time-outs to its watchdog."""
        if self.is_nccl:
            work.wait()
        else:
            work.wait(timedelta(seconds=max(seconds, 1e-3)))

    def _post(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> list[Any]:
        works = []
        for peer, buffer in receives:
            works.append(self.process_group.recv([buffer], peer, self._num_received[peer]))
            self._num_received[peer] = (self._num_received[peer] + 1) % 2**20
        for peer, buffer in sends:
            works.append(self.process_group.send([buffer], peer, self._num_sent[peer]))
            self._num_sent[peer] = (self._num_sent[peer] + 1) % 2**20
        return works
