"""Collectives that record gradients.

What is differentiated is the sum over ranks of each rank's own loss; every rank calls ``backward`` on its loss. Then
the backward of a collective is again a collective: all-to-all swaps its counts, all-gather becomes an ordered
reduce-scatter and the other way round, a sum all-reduce stays one. Backward traffic is counted under ``"<tag>.grad"``.

Collective: forward and backward, on all ranks. If the result does not reach the loss on one rank, that rank never joins
the backward and the others end with a ``CollectiveError``; multiply by zero instead of dropping the value.
Differentiating twice works, because each backward is written with the functions of this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from core_kernels.comm.group import Group
from core_kernels.errors import argument_error

__all__ = ["all_gather_v", "all_reduce", "all_to_all_v", "broadcast", "reduce_scatter_v"]


def all_to_all_v(
    group: Group,
    x: Tensor,
    send_counts: Sequence[int],
    recv_counts: Sequence[int] | None = None,
    tag: str = "all_to_all_v",
) -> tuple[Tensor, list[int]]:
    """Send a different run of rows to every rank; see :meth:`Group.all_to_all_v`.

    >>> x = torch.ones(2, 3, requires_grad=True)
    >>> rows, counts = all_to_all_v(Group.single(), x, [2])
    >>> rows.sum().backward()
    >>> counts, x.grad.sum().item()
    ([2], 6.0)
    """
    send = [int(count) for count in send_counts]
    rows, received = _AllToAll.apply(group, x, send, recv_counts, tag)
    return rows, received


def all_gather_v(
    group: Group, x: Tensor, counts: Sequence[int] | None = None, tag: str = "all_gather_v"
) -> tuple[Tensor, list[int]]:
    """Concatenate the rows of all ranks; see :meth:`Group.all_gather_v`."""
    rows, gathered = _AllGather.apply(group, x, counts, tag)
    return rows, gathered


def reduce_scatter_v(group: Group, x: Tensor, counts: Sequence[int], tag: str = "reduce_scatter_v") -> Tensor:
    """Sum rows over ranks, in rank order, and keep this rank's share; see :meth:`Group.reduce_scatter_v`."""
    return _ReduceScatter.apply(group, x, [int(count) for count in counts], tag)


def all_reduce(group: Group, x: Tensor, op: str = "sum", tag: str = "all_reduce", ordered: bool = False) -> Tensor:
    """Sum (or average) over ranks; see :meth:`Group.all_reduce`.

    Raises:
        ArgumentError: ``op`` is not ``"sum"`` or ``"mean"``, the two that have this gradient.
    """
    if op not in ("sum", "mean"):
        raise argument_error("op", op, "'sum' or 'mean'", "use Group.all_reduce where no gradient is needed")
    return _AllReduce.apply(group, x, op, tag, ordered)


def broadcast(group: Group, x: Tensor, root: int = 0, tag: str = "broadcast") -> Tensor:
    """Return the root's tensor; its gradient is the sum over ranks and goes to the root, others get zeros."""
    return _Broadcast.apply(group, x, root, tag)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, x: Tensor, send: list[int], receive: Any, tag: str) -> Any:
        rows, ctx.receive = group.all_to_all_v(x, send, receive, tag)
        ctx.group, ctx.send, ctx.tag = group, send, tag
        return rows, ctx.receive

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:
        rows, _ = all_to_all_v(ctx.group, grad, ctx.receive, ctx.send, f"{ctx.tag}.grad")
        return None, rows, None, None, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, x: Tensor, counts: Any, tag: str) -> Any:
        rows, ctx.counts = group.all_gather_v(x, tag, counts=counts)
        ctx.group, ctx.tag = group, tag
        return rows, ctx.counts

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:
        return None, reduce_scatter_v(ctx.group, grad, ctx.counts, f"{ctx.tag}.grad"), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, x: Tensor, counts: list[int], tag: str) -> Tensor:
        ctx.group, ctx.counts, ctx.tag = group, counts, tag
        return group.reduce_scatter_v(x, counts, "sum", tag)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, all_gather_v(ctx.group, grad, ctx.counts, f"{ctx.tag}.grad")[0], None, None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, x: Tensor, op: str, tag: str, ordered: bool) -> Tensor:
        ctx.group, ctx.op, ctx.tag, ctx.ordered = group, op, tag, ordered
        return group.all_reduce(x, op, tag, ordered=ordered)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        summed = all_reduce(ctx.group, grad, ctx.op, f"{ctx.tag}.grad", ctx.ordered)
        return None, summed, None, None, None


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, x: Tensor, root: int, tag: str) -> Tensor:
        ctx.group, ctx.root, ctx.tag = group, root, tag
        return group.broadcast(x, root, tag)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        summed = all_reduce(ctx.group, grad, "sum", f"{ctx.tag}.grad", ordered=True)
        # Masked, not replaced: every rank keeps the same graph, or differentiating twice would not meet its peers.
        return None, summed.masked_fill(torch.tensor(ctx.group.rank != ctx.root, device=summed.device), 0), None, None
