"""Run a plan on real ranks: hand out rows, gather remote ones with gradients, collect results.

Row layout of a rank: its own rows first, then the remote rows it needs, each ascending in the partition's numbering.
``local_graph`` is the block of in-edges of its own vertices over that layout, so any layer that takes a block runs on
``communicator.graph_all_gather(x)`` unchanged.

Callers may not assume that a rank waits for others anywhere but where it needs their rows. Inputs and gradients
passed in are never changed.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from core_kernels import launch, ops
from core_kernels.comm import Group
from core_kernels.graph import Block
from gnn_comm.errors import GnnCommArgumentError, PlanMismatchError
from gnn_comm.exchange import gather_rows, return_gradients
from gnn_comm.layout import DeviceLayout
from gnn_comm.local_graphs import boundary_split, local_block
from gnn_comm.plan import Plan

__all__ = ["Communicator", "GatherHandle"]

FORWARD_TAG, BACKWARD_TAG = "gnn_comm.forward", "gnn_comm.backward"


class Communicator:
    """One rank's end of a plan.

    Args:
        plan: The plan, with its partition attached (see :meth:`Plan.attach`).
        group: One rank per device; the group this process was started in when left out.
        validate: Check the plan against graph and topology first; costs one pass over its rows.
        quantize_bits: Send rows as 8- or 4-bit codes (4 to 8 times fewer bytes, no longer exact); gradients stay exact.

    Attributes:
        plan: The plan.
        group: A group of the same ranks, for this communicator alone.
        layout: Row numbers of this rank.
        exchange_seconds: Time spent inside exchanges so far, also while this rank computed.

    Raises:
        PlanMismatchError: Ranks hold different plans, or their number is not that of the devices.
        PlanCheckError: The plan is wrong.

    Collective: the constructor and every method that says so.
    """

    def __init__(self, plan: Plan, group: Group | None = None, validate: bool = True, quantize_bits: int | None = None):
        group = launch.current_group() if group is None else group
        if group.size != plan.num_devices:
            raise PlanMismatchError(
                f"the plan is for {plan.num_devices} devices but the group has {group.size} ranks; expected one rank "
                f"per device; start {plan.num_devices} ranks or plan for a topology of {group.size} devices"
            )
        if quantize_bits not in (None, 4, 8):
            raise GnnCommArgumentError(f"quantize_bits={quantize_bits}: expected None, 8 or 4; choose one of them")
        _agree(plan, group)
        if validate:
            plan.validate()
        self.plan, self.quantize_bits = plan, quantize_bits
        # A group of its own: exchanges in flight on the worker thread must not meet the caller's messages.
        self.group = group.subgroup(range(group.size)) if group.size > 1 else group
        self.layout = DeviceLayout(plan, group.rank).to(self.group.device)
        self._worker: ThreadPoolExecutor | None = None
        self._kept: dict[str, tuple[Any, Tensor]] = {}
        self.exchange_seconds = 0.0

    # ---- rows of this rank -------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This rank, which is its device and part."""
        return self.group.rank

    @property
    def num_local(self) -> int:
        """Rows this rank owns."""
        return self.layout.num_local

    @property
    def num_rows(self) -> int:
        """Rows after a gather: own and remote."""
        return self.layout.num_rows

    @cached_property
    def local_ids(self) -> Tensor:
        """int64 ``[num_local]``: the user's ids of the own rows."""
        return self._user_ids(self.layout.global_rows[: self.num_local])

    @cached_property
    def remote_ids(self) -> Tensor:
        """int64 ``[num_rows - num_local]``: the user's ids of the remote rows."""
        return self._user_ids(self.layout.global_rows[self.num_local :])

    def _user_ids(self, rows: np.ndarray) -> Tensor:
        return self.plan._attached("user ids").book.to_old(torch.from_numpy(rows))

    @cached_property
    def local_graph(self) -> Block:
        """In-edges of the own vertices over the rows of a gather; with replication, of all rows held."""
        block = local_block(self.plan._attached("local_graph").graph, self.layout)
        return cast(Block, block.to(self.group.device))

    @cached_property
    def split(self) -> tuple[tuple[Block, Tensor], tuple[Block, Tensor]]:
        """Interior and boundary, each a block and its own rows: interior vertices read own rows only."""
        interior, boundary = boundary_split(self.local_graph, self.num_local)
        return interior, boundary

    # ---- data in and out ---------------------------------------------------------------------------------------------

    def dispatch(self, data: Any, src: int | None = None, own_only: bool = False) -> Tensor:
        """Hand out per-vertex data.

        Args:
            data: ``[num_nodes, ...]`` in the user's numbering: a tensor, array or memory map. With ``src`` only that
                rank passes it.
            src: Rank that holds the data; every rank reads for itself when left out.
            own_only: Leave out the copies that replication holds, for example for labels.

        Returns:
            This rank's rows: own ones, and with replication its copies.

        Raises:
            GnnCommArgumentError: The data have another number of rows than the graph, or ``src`` is no rank.

        Collective: with ``src``.
        """
        if src is not None and not 0 <= src < self.group.size:
            raise GnnCommArgumentError(
                f"src={src}: expected a rank below {self.group.size}; pass the rank that holds the data"
            )
        if src in (None, self.rank):
            self._check_table(data)
        ids = self._input_ids(own_only)
        if src is None or self.group.size == 1:
            return _take(data, ids).to(self.group.device)
        wanted, counts = self.group.all_gather_v(ids.to(self.group.device), "gnn_comm.dispatch")
        spec = None
        if self.rank == src:
            table = data if isinstance(data, Tensor) else torch.as_tensor(np.asarray(data))
            spec = (tuple(table.shape[1:]), str(table.dtype).removeprefix("torch."))
        shape, dtype = self.group.broadcast_object(spec, src)
        rows = torch.empty((0, *shape), dtype=getattr(torch, dtype), device=self.group.device)
        send = [0] * self.group.size
        if self.rank == src:
            rows, send = table[wanted.cpu()].to(self.group.device), counts
        receive = [len(ids) if peer == src else 0 for peer in range(self.group.size)]
        return self.group.all_to_all_v(rows, send, receive, "gnn_comm.dispatch")[0]

    def _check_table(self, data: Any) -> None:
        """Refuse data of another graph: rows beyond the last would be left out without a word."""
        num_nodes, shape = int(self.plan.offsets[-1]), getattr(data, "shape", None)
        if not shape or shape[0] != num_nodes:
            shown = f"a {type(data).__name__}" if shape is None else f"of shape {tuple(shape)}"
            raise GnnCommArgumentError(
                f"data is {shown}; expected a tensor or array of {num_nodes} rows, one per vertex of the graph; "
                "pass the data of this graph"
            )

    def _input_ids(self, own_only: bool) -> Tensor:
        if self.layout.is_replicated and not own_only:
            return torch.cat([self.local_ids, self.remote_ids])
        return self.local_ids

    def collect(self, x_local: Tensor) -> Tensor:
        """Return the own rows of all ranks in the user's numbering, on every rank.

        Args:
            x_local: The own rows, or any rows that begin with them, as a gather or dispatch returns.

        Collective: all ranks.
        """
        if x_local.dim() == 0 or x_local.shape[0] < self.num_local:
            raise GnnCommArgumentError(
                f"x_local has shape {tuple(x_local.shape)} on rank {self.rank}; expected at least its "
                f"{self.num_local} own rows; pass a layer's output"
            )
        rows, _ = self.group.all_gather_v(x_local[: self.num_local].detach(), "gnn_comm.collect")
        result = torch.empty_like(rows)
        result[self.plan._attached("collect").book.perm.to(rows.device)] = rows
        return result

    # ---- the exchange ------------------------------------------------------------------------------------------------

    def graph_all_gather(self, x_local: Tensor) -> Tensor:
        """Return own and remote rows.

        Args:
            x_local: ``[num_local, ...]``, any dtype; a real one where a gradient is required.

        Returns:
            ``[num_rows, ...]``. Gradients of remote rows travel back to their owners and are summed there, in an order
            fixed by the plan. With replication this returns its input.

        Collective: all ranks, forward and backward.
        """
        return self.graph_all_gather_async(x_local).wait()

    def graph_all_gather_async(self, x_local: Tensor) -> GatherHandle:
        """Start :meth:`graph_all_gather` and return a handle at once; compute on own rows, then ``wait()``."""
        expected = self.num_rows if self.layout.is_replicated else self.num_local
        if x_local.dim() == 0 or x_local.shape[0] != expected:
            raise GnnCommArgumentError(
                f"x_local has shape {tuple(x_local.shape)} on rank {self.rank}; expected {expected} rows, one per row "
                "dispatch() returns; pass its result or a layer's output"
            )
        if x_local.requires_grad and x_local.is_complex():
            # refused on every rank: summing gradients would only fail where there are any to sum
            raise GnnCommArgumentError(
                f"x_local is {x_local.dtype} and requires a gradient on rank {self.rank}; expected real numbers, whose "
                "gradients the exchange can sum; use torch.view_as_real(x)"
            )
        return GatherHandle(self, x_local)

    def gather_once(self, name: str, x_local: Tensor) -> Tensor:
        """Return :meth:`graph_all_gather` of a constant, exchanged at the first call and kept under ``name``.

        Args:
            name: Name of the constant, for example ``"features"``.
            x_local: The constant, without gradient; a tensor other than last time is exchanged anew.

        Collective: all ranks, with the same decision to pass a new tensor.
        """
        if x_local.requires_grad:
            raise GnnCommArgumentError(
                f"{name!r} requires a gradient; expected a constant, since a kept copy has no way back; "
                "use graph_all_gather, or detach it"
            )
        kept = self._kept.get(name)
        if kept is None or kept[0] is not x_local:
            kept = (x_local, self.graph_all_gather(x_local))
            self._kept[name] = kept
        return kept[1]

    def _submit(self, function, *args) -> Future | _Done:
        """Run on the worker thread (one, so exchanges keep their order); at once where the transport need not wait."""
        if self.group.backend == "nccl" or self.group.size == 1:
            return _Done(self._clocked(function, *args))
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="gnn_comm")
        return self._worker.submit(self._clocked, function, *args)

    def _clocked(self, function, *args) -> Tensor:
        start = time.perf_counter()
        try:
            return function(*args)
        finally:
            self.exchange_seconds += time.perf_counter() - start

    def sent_bytes(self) -> int:
        """Return the payload bytes this rank has sent in exchanges, forward and backward."""
        return self.group.counters.sent(FORWARD_TAG) + self.group.counters.sent(BACKWARD_TAG)

    @torch.no_grad()
    def _gather(self, x_local: Tensor) -> Tensor:
        layout = self.layout
        flat = x_local.reshape(len(x_local), x_local.shape[1:].numel())
        if self.quantize_bits is not None and flat.is_floating_point() and flat.shape[1]:
            return self._gather_codes(flat, self.quantize_bits).view(layout.num_rows, *x_local.shape[1:])
        buffer = flat.new_empty((layout.num_rows + layout.num_relay, flat.shape[1]))
        buffer[: layout.num_local] = flat
        if flat.shape[1]:
            gather_rows(layout, self.group, buffer, FORWARD_TAG)
        return buffer[: layout.num_rows].view(layout.num_rows, *x_local.shape[1:])

    def _gather_codes(self, flat: Tensor, bits: int) -> Tensor:
        """Send rows as codes with their scale and offset in one byte row; own rows stay as they are."""
        layout = self.layout
        codes, scale, offset = ops.quantize_rows(flat, bits)
        parts = [part.reshape(len(flat), part.shape[1:].numel()).contiguous() for part in (codes, scale, offset)]
        widths = [part.shape[1] * part.element_size() for part in parts]
        buffer = torch.empty((layout.num_rows + layout.num_relay, sum(widths)), dtype=torch.uint8, device=flat.device)
        for part, block in zip(parts, buffer[: layout.num_local].split(widths, dim=1), strict=True):
            block.copy_(part.view(torch.uint8))
        gather_rows(layout, self.group, buffer, FORWARD_TAG)
        received = buffer[layout.num_local : layout.num_rows].split(widths, dim=1)
        codes, scale, offset = (
            block.contiguous().view(part.dtype).view(layout.num_remote, *whole.shape[1:])
            for block, part, whole in zip(received, parts, (codes, scale, offset), strict=True)
        )
        remote = ops.dequantize_rows(codes, scale, offset, bits, flat.shape[1]).to(flat.dtype)
        return torch.cat([flat, remote])

    @torch.no_grad()
    def _return(self, gradient: Tensor) -> Tensor:
        layout = self.layout
        flat = gradient.reshape(len(gradient), gradient.shape[1:].numel())
        if flat.shape[1] == 0:
            return gradient[: layout.num_local].clone()
        summed = return_gradients(layout, self.group, flat, BACKWARD_TAG)
        return summed.view(layout.num_local, *gradient.shape[1:])

    def close(self) -> None:
        """End the worker thread; the communicator must not be used afterwards."""
        if self._worker is not None:
            self._worker.shutdown()
            self._worker = None


class GatherHandle:
    """An exchange in flight; :meth:`wait` returns own and remote rows, differentiable in the own ones."""

    def __init__(self, communicator: Communicator, x_local: Tensor):
        self._communicator, self._x_local = communicator, x_local
        self._result: Tensor | None = x_local if communicator.layout.is_replicated else None
        if self._result is None:
            self._future = communicator._submit(communicator._gather, x_local.detach())

    def is_done(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        return self._result is not None or self._future.done()

    def wait(self) -> Tensor:
        """Wait for the exchange; further calls return the same tensor."""
        result = self._result
        if result is None:
            result = cast(Tensor, _Gathered.apply(self._x_local, self._future.result(), self._communicator))
            self._result = result
        return result


class _Gathered(torch.autograd.Function):
    """Ties the result of an exchange to its input; the backward pass sends gradients home."""

    @staticmethod
    def forward(ctx, x_local: Tensor, gathered: Tensor, communicator: Communicator) -> Tensor:
        ctx.communicator = communicator
        return gathered.view_as(gathered)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        communicator = ctx.communicator
        return communicator._submit(communicator._return, gradient).result(), None, None


class _Done:
    """A result that is there already, with the two methods of a future that are used."""

    def __init__(self, value: Any):
        self._value = value

    def result(self) -> Any:
        return self._value

    def done(self) -> bool:
        return True


def _agree(plan: Plan, group: Group) -> None:
    prints = group.all_gather_object(plan.fingerprint(), "gnn_comm.agree")
    for rank, other in enumerate(prints):
        if other != prints[0]:
            raise PlanMismatchError(
                f"rank {rank} holds plan {other} but rank 0 holds {prints[0]}; expected the same plan everywhere; "
                "plan once, save it, and load that file on every rank"
            )


def _take(data: Any, ids: Tensor) -> Tensor:
    if isinstance(data, Tensor):
        return data[ids.to(data.device)]
    # A memory map reads only the pages of these rows.
    return torch.from_numpy(np.ascontiguousarray(data[ids.numpy()]))
