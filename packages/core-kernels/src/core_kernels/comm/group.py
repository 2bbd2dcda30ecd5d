"""Collectives for uneven data over a ``torch.distributed`` process group, with byte counters and errors that say who.

A :class:`Group` moves rows: every collective takes any dtype, non-contiguous inputs, zero rows and uneven splits,
returns fresh tensors and never changes its inputs. Row exchange travels as bytes, so it is bitwise exact.
``reduce_scatter_v`` and ``all_reduce(ordered=True)`` sum in rank order, so they are bitwise repeatable for any
transport. A group of one rank works without ``torch.distributed``.

A collective that fails, or takes longer than the group's time-out, raises ``CollectiveError`` on every rank that waits.
After that the group must not be used again. These functions do not record gradients: see
``core_kernels.comm.autograd``.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from core_kernels.comm._rows import as_bytes, check_counts, combine_in_order, num_rows_of, row_bytes
from core_kernels.comm.counters import broadcast_bytes, ring_all_reduce_bytes
from core_kernels.comm.handle import Handle, Recv, Send
from core_kernels.comm.membership import Membership
from core_kernels.errors import argument_error

__all__ = ["Group"]

_REDUCTIONS = ("sum", "mean", "max", "min")


class Group(Membership):
    """The ranks that work together, and what they can do together.

    Args:
        process_group: A ``torch.distributed`` process group; ``None`` takes the default group.
        timeout_seconds: Longest wait for one collective.

    Attributes:
        rank: This process's number in ``[0, size)``.
        size: Number of ranks.
        backend: ``"gloo"``, ``"nccl"`` or ``"single"``.
        device: Where tensors of this group live.
        counters: Payload bytes of this rank per tag, see :class:`~core_kernels.comm.ByteCounters`.
        step: Last step announced by :meth:`set_step`.

    Collective: every method that communicates must be called by all ranks, in the same order, with the same dtype and
    trailing shape.

    >>> group = Group.single()
    >>> rows, counts = group.all_gather_v(torch.tensor([[1, 2], [3, 4]]))
    >>> rows.tolist(), counts, group.counters.sent()
    ([[1, 2], [3, 4]], [2], 0)
    """

    def all_reduce(
        self,
        x: Tensor,
        op: str = "sum",
        tag: str = "all_reduce",
        async_op: bool = False,
        out: Tensor | None = None,
        ordered: bool = False,
    ) -> Any:
        """Combine a tensor of equal shape over all ranks; every rank gets the same bits.

        Args:
            x: This rank's value, any shape.
            op: ``"sum"``, ``"mean"``, ``"max"`` or ``"min"``; booleans take max (any) and min (all).
            tag: Label in counters and errors.
            async_op: Return a :class:`Handle` at once instead of the result.
            out: Contiguous tensor for the result; may be ``x`` itself.
            ordered: Combine in rank order (16-bit floats in float32), bitwise repeatable on any transport.

        Returns:
            The combined tensor, or a handle that waits for it.
        """
        if op not in _REDUCTIONS:
            raise argument_error("op", op, f"one of {', '.join(_REDUCTIONS)}", "choose one of them")
        if x.dtype == torch.bool and op in ("sum", "mean"):
            raise argument_error("op", op, "'max' (any) or 'min' (all) for a boolean tensor", "convert x to integers")
        if out is None:
            out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if out.shape != x.shape or out.dtype != x.dtype or not out.is_contiguous():
            raise argument_error("out", tuple(out.shape), f"a contiguous {x.dtype} of {tuple(x.shape)}", "leave it out")
        out = out.detach().copy_(x.detach()) if out is not x else x.detach()
        if self.size == 1 or x.numel() == 0:
            return self._start("all_reduce", tag, list, lambda: out, async_op)
        if ordered or not (self._wire.can_reduce(x.dtype) or x.dtype == torch.bool):
            return self._ordered_all_reduce(out, op, tag, async_op)
        self.counters.add(tag, *ring_all_reduce_bytes(x.numel(), x.element_size(), self.rank, self.size))
        buffer = out.view(torch.uint8) if x.dtype == torch.bool else out
        post = lambda: self._wire.all_reduce(buffer, "sum" if op == "mean" else op)  # noqa: E731
        return self._start("all_reduce", tag, post, lambda: out.div_(self.size) if op == "mean" else out, async_op)

    def _ordered_all_reduce(self, out: Tensor, op: str, tag: str, async_op: bool) -> Any:
        flat = out.view(-1)
        counts = [len(block) for block in flat.tensor_split(self.size)]
        reduced = self.reduce_scatter_v(flat, counts, op, tag, async_op=True, collective="all_reduce")

        def gather() -> Tensor:
            rows = self.all_gather_v(reduced.wait(), tag, counts=counts, collective="all_reduce")[0]
            return out.view(-1).copy_(rows).view(out.shape)

        handle = Handle(self, "all_reduce", tag, [], gather)
        return handle if async_op else handle.wait()

    def all_gather_v(
        self,
        x: Tensor,
        tag: str = "all_gather_v",
        async_op: bool = False,
        counts: Sequence[int] | None = None,
        collective: str = "all_gather_v",
    ) -> Any:
        """Concatenate the rows of all ranks, in rank order, on every rank.

        Args:
            x: ``[num_rows_here, ...]``; the number of rows may differ per rank and may be 0.
            tag: Label in counters and errors.
            async_op: Return a :class:`Handle` at once instead of the result.
            counts: Rows of every rank, when all ranks know them already; saves one small exchange.
            collective: Name shown in errors, for collectives built on this one.

        Returns:
            ``(rows [sum(counts), ...], counts)``, or a handle that waits for it.
        """
        num_rows_of("x", x)
        if counts is None:
            counts = self._gather_counts(x.shape[0], tag, collective)
        counts = check_counts("counts", counts, self.size)
        if counts[self.rank] != x.shape[0]:
            raise argument_error("counts", counts, f"{x.shape[0]} rows for rank {self.rank}", "pass the rows of x")
        out = torch.empty((sum(counts), *x.shape[1:]), dtype=x.dtype, device=x.device)
        mine = x.detach().contiguous()
        if self.size == 1:
            return self._start(collective, tag, list, lambda: (out.copy_(mine), counts), async_op)
        width, others = row_bytes(x), sum(counts) - counts[self.rank]
        self.counters.add(tag, counts[self.rank] * width * (self.size - 1), others * width)
        if out.numel() == 0:
            return self._start(collective, tag, list, lambda: (out, counts), async_op)
        if len(set(counts)) == 1:
            post = lambda: self._wire.all_gather(as_bytes(out), as_bytes(mine))  # noqa: E731
            return self._start(collective, tag, post, lambda: (out, counts), async_op)
        blocks = as_bytes(out).split(counts)
        blocks[self.rank].copy_(as_bytes(mine))
        peers = [(self.rank + shift) % self.size for shift in range(1, self.size)]
        sends = [(peer, as_bytes(mine)) for peer in peers if len(mine)]
        receives = [(peer, blocks[peer]) for peer in peers if counts[peer]]
        post = lambda: self._wire.exchange(sends, receives)  # noqa: E731
        return self._start(collective, tag, post, lambda: (out, counts), async_op)

    def reduce_scatter_v(
        self,
        x: Tensor,
        counts: Sequence[int],
        op: str = "sum",
        tag: str = "reduce_scatter_v",
        async_op: bool = False,
        collective: str = "reduce_scatter_v",
    ) -> Any:
        """Combine rows over all ranks and leave each rank its own share of them.

        Args:
            x: ``[sum(counts), ...]``; rows meant for rank 0 first.
            counts: Rows that each rank keeps, the same list on every rank.
            op: ``"sum"``, ``"mean"``, ``"max"`` or ``"min"``.
            tag: Label in counters and errors.
            async_op: Return a :class:`Handle` at once instead of the result.
            collective: Name shown in errors, for collectives built on this one.

        Returns:
            ``[counts[rank], ...]``, or a handle that waits for it.

        Determinism: contributions are combined in rank order, 16-bit floats in float32.
        """
        if op not in _REDUCTIONS:
            raise argument_error("op", op, f"one of {', '.join(_REDUCTIONS)}", "choose one of them")
        counts = check_counts("counts", counts, self.size, num_rows_of("x", x))
        share = [counts[self.rank]] * self.size
        received = self.all_to_all_v(x, counts, share, tag, async_op=True, collective=collective)

        def combine() -> Tensor:
            return combine_in_order(received.wait()[0].view(self.size, counts[self.rank], *x.shape[1:]), op)

        handle = Handle(self, collective, tag, [], combine)
        return handle if async_op else handle.wait()

    def all_to_all_v(
        self,
        x: Tensor,
        send_counts: Sequence[int],
        recv_counts: Sequence[int] | None = None,
        tag: str = "all_to_all_v",
        async_op: bool = False,
        collective: str = "all_to_all_v",
    ) -> Any:
        """Send a different run of rows to every rank.

        Args:
            x: ``[sum(send_counts), ...]``; rows for rank 0 first.
            send_counts: Rows for each rank, 0 allowed.
            recv_counts: Rows that come from each rank, when known; saves one small exchange.
            tag: Label in counters and errors.
            async_op: Return a :class:`Handle` at once instead of the result.
            collective: Name shown in errors, for collectives built on this one.

        Returns:
            ``(rows [sum(recv_counts), ...] in order of the sending rank, recv_counts)``, or a handle that waits for it.
        """
        send = check_counts("send_counts", send_counts, self.size, num_rows_of("x", x))
        if recv_counts is None:
            recv_counts = self._swap_counts(send, tag, collective)
        receive = check_counts("recv_counts", recv_counts, self.size)
        if receive[self.rank] != send[self.rank]:
            raise argument_error(
                "recv_counts", receive, f"{send[self.rank]} rows from rank {self.rank} itself", "pass what peers send"
            )
        out = torch.empty((sum(receive), *x.shape[1:]), dtype=x.dtype, device=x.device)
        mine = x.detach().contiguous()
        if self.size == 1:
            return self._start(collective, tag, list, lambda: (out.copy_(mine), receive), async_op)
        width, kept = row_bytes(x), send[self.rank]
        self.counters.add(tag, (sum(send) - kept) * width, (sum(receive) - kept) * width)
        if width == 0:
            return self._start(collective, tag, list, lambda: (out, receive), async_op)
        post = lambda: self._wire.all_to_all(as_bytes(out), as_bytes(mine), receive, send)  # noqa: E731
        return self._start(collective, tag, post, lambda: (out, receive), async_op)

    def broadcast(self, x: Tensor, root: int = 0, tag: str = "broadcast", async_op: bool = False) -> Any:
        """Return the tensor of ``root`` on every rank.

        Args:
            x: On the root the value, elsewhere any tensor of the same shape and dtype.
            root: The rank that has the value.
            tag: Label in counters and errors.
            async_op: Return a :class:`Handle` at once instead of the result.

        Returns:
            A new tensor equal to the root's, or a handle that waits for it.
        """
        if not 0 <= root < self.size:
            raise argument_error("root", root, f"a rank below {self.size}", "pass the rank that holds the value")
        out = x.detach().clone(memory_format=torch.contiguous_format)
        if self.size == 1 or out.numel() == 0:
            return self._start("broadcast", tag, list, lambda: out, async_op)
        self.counters.add(tag, *broadcast_bytes(out.numel() * out.element_size(), self.rank, root, self.size))
        post = lambda: self._wire.broadcast(as_bytes(out.view(-1)), root)  # noqa: E731
        return self._start("broadcast", tag, post, lambda: out, async_op)

    def send_recv(self, ops: Sequence[Send | Recv], tag: str = "send_recv", async_op: bool = False) -> Any:
        """Run a batch of sends and receives together; between two ranks they meet in the order given.

        Args:
            ops: :class:`Send` and :class:`Recv` items, in any order; a receive fills its tensor.
            tag: Label in counters and errors.
            async_op: Return a :class:`Handle` at once instead of the result.

        Returns:
            The tensors of the receives, in their order, or a handle that waits for them.

        Collective: the ranks named; a rank without items need not call.
        """
        for op in ops:
            if not (isinstance(op, Send | Recv) and 0 <= op.peer < self.size and op.peer != self.rank):
                expected = f"Send or Recv with another rank below {self.size}"
                raise argument_error("ops", op, expected, "copy rows that stay here yourself")
            if isinstance(op, Recv) and not op.tensor.is_contiguous():
                raise argument_error("ops", op, "a contiguous tensor to receive into", "pass a contiguous buffer")
        # Flat views, so that scalars travel as well; both sides skip empty messages.
        sends = [
            (op.peer, as_bytes(op.tensor.detach().contiguous().view(-1)))
            for op in ops
            if isinstance(op, Send) and op.tensor.numel()
        ]
        receives = [(op.peer, as_bytes(op.tensor.detach().view(-1))) for op in ops if isinstance(op, Recv)]
        receives = [(peer, buffer) for peer, buffer in receives if buffer.numel()]
        self.counters.add(tag, sum(b.numel() for _, b in sends), sum(b.numel() for _, b in receives))
        post = lambda: self._wire.exchange(sends, receives)  # noqa: E731
        results = [op.tensor for op in ops if isinstance(op, Recv)]
        return self._start("send_recv", tag, post if sends or receives else list, lambda: results, async_op)

    def barrier(self, tag: str = "barrier") -> None:
        """Return when all ranks have called this."""
        self._start("barrier", tag, self._wire.barrier if self.size > 1 else list, lambda: None, False)

    def all_gather_object(self, value: Any, tag: str = "object") -> list[Any]:
        """Return the small Python object of every rank, in rank order (pickled; for peers that trust each other)."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(self.device)
        rows, counts = self.all_gather_v(data, tag)
        return [pickle.loads(bytes(block.cpu().numpy())) for block in rows.split(counts)]

    def broadcast_object(self, value: Any, root: int = 0, tag: str = "object") -> Any:
        """Return the root's small Python object on every rank; other ranks pass anything."""
        return self.all_gather_object(value if self.rank == root else None, tag)[root]

    # -- row counts --------------------------------------------------------------------------------------------------

    def _gather_counts(self, num_rows: int, tag: str, collective: str) -> list[int]:
        """Tell all ranks how many rows this one has."""
        if self.size == 1:
            return [num_rows]
        mine = torch.tensor([num_rows], dtype=torch.int64, device=self.device)
        return self.all_gather_v(mine, f"{tag}.counts", counts=[1] * self.size, collective=collective)[0].tolist()

    def _swap_counts(self, send: list[int], tag: str, collective: str) -> list[int]:
        """Tell every rank how many rows this one will send it."""
        if self.size == 1:
            return send
        ones, mine = [1] * self.size, torch.tensor(send, dtype=torch.int64, device=self.device)
        return self.all_to_all_v(mine, ones, ones, f"{tag}.counts", collective=collective)[0].tolist()
