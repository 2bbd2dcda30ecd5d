"""Raw NCCL communicators, for what process groups cannot do: split, shrink, grow and abort while a job runs.

:class:`Communicator` runs on the current CUDA stream through nccl4py or CuPy, chosen by one argument. A group (over
gloo, say) carries the id by which the ranks find each other. Importing this module loads no CUDA library.

After ``abort``, or a shrink that aborts, a communicator is only ever aborted again: destroying it can hang, because its
peers may be gone. :meth:`Communicator.close` knows which of the two is right.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor

from core_kernels.comm._nccl_libraries import CupyNccl, Nccl4py, NcclLibrary, NcclUnsupportedError, load_library
from core_kernels.comm._rows import as_bytes, check_counts, num_rows_of, row_bytes
from core_kernels.comm.counters import ByteCounters, broadcast_bytes, ring_all_reduce_bytes
from core_kernels.comm.group import Group
from core_kernels.comm.handle import Recv, Send
from core_kernels.errors import CollectiveError, CoreKernelsError, argument_error

__all__ = ["Communicator", "CupyNccl", "Nccl4py", "NcclLibrary", "NcclUnsupportedError"]


class Communicator:
    """One NCCL communicator.

    Args:
        library: The binding that made ``handle``.
        handle: The binding's communicator object.
        rank: This process's number in it.
        size: Number of ranks.

    Attributes:
        counters: Payload bytes per tag, as in :class:`~core_kernels.comm.Group`.
        is_aborted: Whether only :meth:`abort` is left.

    Make one with :meth:`create` or :meth:`join`. Operations are enqueued on the current stream and do not wait.
    """

    def __init__(self, library: NcclLibrary, handle: Any, rank: int, size: int):
        self._library, self._handle = library, handle
        self.rank, self.size = rank, size
        self.counters = ByteCounters()
        self.is_aborted = False

    @classmethod
    def create(cls, group: Group, library: str | NcclLibrary = "auto") -> Self:
        """Make a communicator of the ranks of ``group``.

        Args:
            group: Ranks that will be in it, with the same numbers.
            library: ``"auto"``, ``"nccl4py"``, ``"cupy"``, or an object with the methods of a binding.

        Collective: all ranks of ``group``, each with its CUDA device current.

        Raises:
            MissingDependencyError: The binding is not installed.
        """
        binding = load_library(library)
        unique_id = group.broadcast_object(binding.unique_id() if group.rank == 0 else None, tag="nccl")
        return cls(binding, binding.init(group.size, group.rank, unique_id), group.rank, group.size)

    @classmethod
    def join(cls, unique_id: Any, size: int, rank: int, library: str | NcclLibrary = "auto") -> Self:
        """Enter a communicator that is growing; see :meth:`grow`."""
        binding = load_library(library)
        return cls(binding, binding.grow(None, size, unique_id, rank), rank, size)

    def all_reduce(self, x: Tensor, op: str = "sum", tag: str = "all_reduce") -> Tensor:
        """Return the sum, max or min over ranks, in a new tensor."""
        if op not in ("sum", "max", "min"):
            raise argument_error("op", op, "'sum', 'max' or 'min'", "choose one of them")
        out = x.detach().clone(memory_format=torch.contiguous_format)
        with self._running("all_reduce", tag):
            self._library.all_reduce(self._handle, out, op, _stream(out))
        self.counters.add(tag, *ring_all_reduce_bytes(out.numel(), out.element_size(), self.rank, self.size))
        return out

    def broadcast(self, x: Tensor, root: int = 0, tag: str = "broadcast") -> Tensor:
        """Return the root's tensor, in a new one."""
        out = x.detach().clone(memory_format=torch.contiguous_format)
        with self._running("broadcast", tag):
            self._library.broadcast(self._handle, out, root, _stream(out))
        self.counters.add(tag, *broadcast_bytes(out.numel() * out.element_size(), self.rank, root, self.size))
        return out

    def send_recv(self, ops: Sequence[Send | Recv], tag: str = "send_recv") -> list[Tensor]:
        """Run a batch of sends and receives as one group; returns the tensors of the receives."""
        sent = received = 0
        with self._running("send_recv", tag), self._library.grouped():
            for op in ops:
                if op.tensor.numel() == 0:
                    continue
                if isinstance(op, Recv) and not op.tensor.is_contiguous():
                    raise argument_error("ops", op, "a contiguous tensor to receive into", "pass a contiguous buffer")
                # Bytes, so that every dtype travels.
                data = as_bytes(op.tensor.detach().contiguous().view(-1))
                if isinstance(op, Send):
                    self._library.send(self._handle, data, op.peer, _stream(data))
                    sent += data.numel()
                else:
                    self._library.recv(self._handle, data, op.peer, _stream(data))
                    received += data.numel()
        self.counters.add(tag, sent, received)
        return [op.tensor for op in ops if isinstance(op, Recv)]

    def all_to_all_v(
        self, x: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], tag: str = "all_to_all_v"
    ) -> Tensor:
        """Send ``send_counts[p]`` rows to every rank ``p`` and return the rows received, in rank order."""
        send = check_counts("send_counts", send_counts, self.size, num_rows_of("x", x))
        receive = check_counts("recv_counts", recv_counts, self.size)
        out = torch.empty((sum(receive), *x.shape[1:]), dtype=x.dtype, device=x.device)
        outgoing, incoming = x.detach().contiguous().split(send), out.split(receive)
        incoming[self.rank].copy_(outgoing[self.rank])
        peers = [peer for peer in range(self.size) if peer != self.rank]
        ops = [Recv(incoming[peer], peer) for peer in peers] + [Send(outgoing[peer], peer) for peer in peers]
        self.send_recv(ops if row_bytes(x) else [], tag)
        return out

    def split(self, color: int, key: int = 0, group: Group | None = None) -> Communicator | None:
        """Divide the ranks by colour.

        Args:
            color: Ranks of equal colour stay together; a negative one leaves this rank out.
            key: Orders the ranks of a part, by key and then by old number.
            group: Carries colours and keys, so that every rank knows its part's size and its number there.

        Returns:
            This rank's part, or ``None``.

        Collective: all ranks.
        """
        if group is None or group.size != self.size:
            raise argument_error("group", group, f"the group of the {self.size} ranks", "pass the group of create()")
        everyone = group.all_gather_object((color, key), tag="nccl")
        with self._running("split", "split"):
            handle = self._library.split(self._handle, color, key)
        if color < 0:
            return None
        part = sorted((k, rank) for rank, (c, k) in enumerate(everyone) if c == color)
        return Communicator(self._library, handle, part.index((key, self.rank)), len(part))

    def shrink(self, excluded: Sequence[int], abort: bool = False) -> Communicator:
        """Return a communicator without some ranks; the others keep their order.

        Args:
            excluded: Ranks to leave out; they must not call.
            abort: Stop what is in flight first, for when the excluded ranks have failed. This communicator is then
                aborted too.

        Collective: all ranks but the excluded.
        """
        left = [rank for rank in range(self.size) if rank not in excluded]
        if self.rank not in left or not set(excluded) <= set(range(self.size)):
            raise argument_error("excluded", list(excluded), f"other ranks below {self.size}", "leave this rank in")
        with self._running("shrink", "shrink"):
            handle = self._library.shrink(self._handle, sorted(excluded), abort)
        if abort:
            self.is_aborted = True
        return Communicator(self._library, handle, left.index(self.rank), len(left))

    def grow_id(self) -> Any:
        """Return the id that new ranks :meth:`join` with; one existing rank calls this and gives it to :meth:`grow`."""
        with self._running("grow", "grow"):
            return self._library.grow_id(self._handle)

    def grow(self, size: int, unique_id: Any = None) -> Communicator:
        """Return a communicator with more ranks, in which this rank keeps its number.

        Args:
            size: Number of ranks afterwards.
            unique_id: On the rank that called :meth:`grow_id`, what it returned; nothing on the others.

        Collective: all ranks, while the new ones call :meth:`join`.
        """
        if size <= self.size:
            raise argument_error("size", size, f"more than the {self.size} ranks there are", "use shrink to get fewer")
        with self._running("grow", "grow"):
            return Communicator(self._library, self._library.grow(self._handle, size, unique_id, None), self.rank, size)

    def abort(self) -> None:
        """Stop everything in flight and free the communicator; safe to call again."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            self._library.abort(handle)
        self.is_aborted = True

    def close(self) -> None:
        """Free the communicator: destroyed when intact (all ranks must call), aborted when it was aborted before."""
        if self.is_aborted:
            self.abort()
        elif self._handle is not None:
            handle, self._handle = self._handle, None
            self._library.destroy(handle)

    @contextmanager
    def _running(self, collective: str, tag: str) -> Iterator[None]:
        if self._handle is None or self.is_aborted:
            reason = "the communicator was aborted or closed; make a new one with create, shrink or grow"
            raise self._error(reason, collective, tag, 0.0)
        begin = time.monotonic()
        try:
            yield
        except CoreKernelsError:
            raise
        except Exception as error:  # the bindings' own exception classes, which are not importable here
            raise self._error(str(error) or type(error).__name__, collective, tag, time.monotonic() - begin) from error

    def _error(self, reason: str, collective: str, tag: str, seconds: float) -> CollectiveError:
        return CollectiveError(
            reason, rank=self.rank, world_size=self.size, collective=collective, tag=tag, seconds=seconds
        )


def _stream(tensor: Tensor) -> int:
    """Return the current stream of the tensor's device as a pointer; 0 where there are no streams."""
    return torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else 0
