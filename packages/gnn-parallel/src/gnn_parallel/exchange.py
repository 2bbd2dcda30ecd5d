"""Row exchange between ranks with gradients, one tag per kind of traffic.

Every byte a step moves carries one of :data:`TAGS`, and :mod:`gnn_parallel.cost_model` has a formula for each tag, so
that counters and formulas can be compared tag by tag. Nothing else in this package talks to other ranks in a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from core_kernels.comm import Group
from gnn_parallel.clock import TermClock

__all__ = ["TAGS", "exchange_ids", "exchange_rows", "exchange_sizes"]

TAGS = ("sizes", "ids", "features", "activations", "activation_gradients", "parameter_gradients")


def exchange_sizes(group: Group, sizes: Tensor, clock: TermClock) -> Tensor:
    """Send row ``q`` of ``sizes`` int64 [world_size, k] to rank ``q``; return the rows received, one per rank."""
    if group.size == 1:
        return sizes
    ones = [1] * group.size
    with clock("shuffle"):
        return group.all_to_all_v(sizes, ones, ones, tag="sizes")[0]


def exchange_ids(
    group: Group, ids: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], clock: TermClock
) -> Tensor:
    """Send a run of ids to every rank; both sides know the counts."""
    if group.size == 1:
        return ids
    with clock("shuffle"):
        return group.all_to_all_v(ids, send_counts, recv_counts, tag="ids")[0]


def exchange_rows(
    group: Group,
    rows: Tensor,
    send_counts: Sequence[int],
    recv_counts: Sequence[int],
    clock: TermClock,
    travel: torch.dtype | None = None,
) -> Tensor:
    """Send a run of activation rows to every rank; gradients travel the opposite way in the backward pass.

    Args:
        group: The ranks.
        rows: ``[sum(send_counts), width]``, rows for rank 0 first.
        send_counts: Rows for each rank.
        recv_counts: Rows from each rank.
        clock: Takes the seconds of both directions as ``shuffle``.
        travel: Type in which rows and gradients travel, theirs when left out.

    Returns:
        ``[sum(recv_counts), width]``, rows of rank 0 first, of the type of ``rows``.

    Collective: all ranks, in the forward pass and, where ``rows`` requires a gradient, in the backward pass.
    """
    if group.size == 1:
        return rows
    carried = rows if travel is None else rows.to(travel)
    received: Tensor = _ExchangeRows.apply(carried, group, list(send_counts), list(recv_counts), clock)  # type: ignore
    return received.to(rows.dtype)


class _ExchangeRows(torch.autograd.Function):
    """An all-to-all and its transpose."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Group, send: list[int], recv: list[int], clock: TermClock) -> Tensor:
        ctx.group, ctx.send, ctx.recv, ctx.clock = group, send, recv, clock
        with clock("shuffle"):
            return group.all_to_all_v(rows, send, recv, tag="activations")[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with ctx.clock("shuffle"):
            returned = ctx.group.all_to_all_v(grad, ctx.recv, ctx.send, tag="activation_gradients")[0]
        return returned, None, None, None, None
