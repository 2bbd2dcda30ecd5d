"""The exchange of rows between the ranks that need them and the ranks that own them.

A :class:`Request` is one batch seen by one rank: its distinct cold rows by owner, its hot slots, and on the owner's
side the rows that peers ask for. :class:`RowSpace` moves rows and gradients for requests, either at once or, when the
next request is already known, in two parts:

* a row of the next batch is *late* if any rank touches it in the current batch; it is read after the current update.
  All other rows are *free*: no update is pending that could change them, so they travel early;
* a gradient of the current batch is *urgent* if any rank reads its row in the next batch; the others are *deferred*
  until just before rows are read for the batch after that.

Only the owner sees the requests of all ranks, so it decides (``last_touch``), and tells each rank with one bit per row.
The rule must use the union over ranks: judging by one rank's own batch would return stale rows.

Source: "FEC: Efficient Deep Recommendation Model Training with Flexible Embedding Communication", SIGMOD 2023, for
early rows; EmbRace for the split of gradients. We classify online at the owner instead of rewriting the data set.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from core_kernels.comm import Group
from core_kernels.ops import gather, unique_relabel
from recsys_embed.clock import Clock
from recsys_embed.kernels.rows import merge_tree, split_by_owner
from recsys_embed.optimizers import RowOptimizer
from recsys_embed.tables import RowLayout

__all__ = ["Channels", "Request", "RowSpace", "find_late", "merge_partials"]

_channels: weakref.WeakKeyDictionary[Group, tuple[Group, Group]] = weakref.WeakKeyDictionary()


@dataclass
class Channels:
    """Groups of the same ranks: rows of the current step, early and deferred rows, and small messages.

    Attributes:
        now: What the step waits for.
        ahead: What may hide behind compute.
        control: Ids, counts and bits.
    """

    now: Group
    ahead: Group
    control: Group

    @classmethod
    def over(cls, group: Group) -> Channels:
        """Return the channels over the ranks of a group, made once per group. Collective: all of them."""
        if group.size == 1:
            return cls(group, group, group)
        if group not in _channels:
            ranks = range(group.size)
            _channels[group] = group.subgroup(ranks), group.subgroup(ranks)
        return cls(group, *_channels[group])


@dataclass
class Request:
    """The rows of one batch on one rank.

    Attributes:
        local: Number of every id's row in the buffer (cold rows by owner, then hot rows), int64 [ids].
        cold: Places of the distinct cold rows, by owner.
        hot: Slots of the distinct hot rows.
        send_counts: Cold rows per owner.
        step: Number of the batch; set when it is classified.
        lr: Learning rate of its update; set in its backward pass, before a scheduler changes it.
        slots: Owner's side: local slots that peers ask for, in rank order.
        recv_counts: Owner's side: how many from each.
        late_in: Which of ``cold`` come late; late_out: which of ``slots``; likewise urgent.
        offsets: Bags over ``local``; those of the batch when None.

    A request for partial pools counts pools as ``cold``, and has ``ids`` and ``weights`` by owner and bag, the
    ``lengths`` of pools, ``id_counts`` per peer; on the owner's side ``pool_offsets`` and ``pool_weights`` of
    ``slots``, and which peers sent factors.
    """

    local: Tensor
    cold: Tensor
    hot: Tensor
    send_counts: list[int]
    step: int = -1
    lr: float = 0.0
    slots: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    recv_counts: list[int] = field(default_factory=list)
    late_in: Tensor | None = None
    late_out: Tensor | None = None
    urgent_in: Tensor | None = None
    urgent_out: Tensor | None = None
    pending: dict[str, Any] = field(default_factory=dict)
    offsets: Tensor | None = None
    ids: Any = None
    weights: Tensor | None = None
    lengths: Any = None
    id_counts: list[int] = field(default_factory=list)
    has_factors: list[bool] = field(default_factory=list)
    pool_offsets: Any = None
    pool_weights: Tensor | None = None


def find_late(last_touch: Tensor, request: Request, previous: Request) -> Tensor:
    """Say which rows asked of this owner are touched by any rank in the previous batch, whose update is pending."""
    return last_touch[request.slots] == previous.step


def merge_partials(slots: Tensor, rows: Tensor, counts: list[int]) -> tuple[Tensor, Tensor]:
    """Sum the rows that ranks sent for the same slot, in the order of a binary tree over ranks.

    Args:
        slots: Slot of every row, distinct within a rank.
        rows: Partial sums, rank by rank.
        counts: Rows of each rank.

    Returns:
        (distinct slots, summed rows).

    >>> merge_partials(torch.tensor([4, 7, 4]), torch.tensor([[1.0], [2.0], [3.0]]), [2, 1])
    (tensor([4, 7]), tensor([[4.],
            [2.]]))
    """
    if len(counts) == 1:
        return slots, rows
    unique, local = unique_relabel(slots[:0], slots)
    leaves = 1 << (len(counts) - 1).bit_length()
    sources = torch.full((len(unique), leaves), -1, dtype=torch.int64)
    ranks = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    sources[local, ranks] = torch.arange(len(slots))
    merged = rows.new_empty(len(unique), rows.shape[1])
    merge_tree(rows.numpy(), sources.numpy(), merged.numpy())
    return unique, merged


class RowSpace:
    """All rows of one width: this rank's shard of them, and the ways to move rows.

    Args:
        layout: Which rank owns which row.
        weight: The rows of this rank, in slot order.
        optimizer: Its rule and rates.
        channels: The ranks.
        clock: Where waiting is counted.
    """

    num_counts = 1

    def __init__(self, layout: RowLayout, weight: Tensor, optimizer: RowOptimizer, channels: Channels, clock: Clock):
        self.layout, self.weight, self.optimizer, self.channels, self.clock = layout, weight, optimizer, channels, clock
        self.states = optimizer.make_states(weight)
        self.hot: Any = None
        self.last_touch = torch.full((len(weight),), -1, dtype=torch.int32)
        self._first = int(layout.bounds[channels.now.rank])
        self._narrow = layout.num_rows < 2**31

    @property
    def is_replicated(self) -> bool:
        """Whether the hot tier holds every row, so that nothing is asked of owners; the same on all ranks."""
        return self.hot is not None and len(self.hot) == self.layout.num_rows

    # -- asking ------------------------------------------------------------------------------------------------------

    def plan(self, places: Tensor, offsets: Tensor, weights: Tensor | None) -> Request:
        """Find the distinct rows of a batch and sort them by owner; no communication."""
        unique, local = unique_relabel(places[:0], places)
        found = self.hot.find(unique)
        cold, hot = torch.empty_like(unique), torch.empty_like(unique)
        counts = np.empty(self.channels.now.size + 1, np.int64)
        arrays = (local.numpy(), cold.numpy(), hot.numpy(), counts)
        split_by_owner(unique.numpy(), found, self.layout.bounds, *arrays)
        num_cold = len(unique) - int(counts[-1])
        return Request(local, cold[:num_cold], hot[: int(counts[-1])], counts[:-1].tolist())

    def counts_of(self, request: Request) -> list[list[int]]:
        """Return what every owner must know before :meth:`post_ids`: ``num_counts`` numbers per owner."""
        return [request.send_counts]

    def post_ids(self, request: Request, received: Sequence[list[int]]) -> None:
        """Send the distinct cold places to their owners, whose own counts were ``received``."""
        request.recv_counts = recv_counts = received[0]
        if self.is_replicated:
            return
        ids = request.cold.to(torch.int32) if self._narrow else request.cold
        control = self.channels.control
        request.pending["ids"] = control.all_to_all_v(ids, request.send_counts, recv_counts, "ids", async_op=True)

    def finish_ids(self, request: Request) -> None:
        """Wait for what peers ask of this rank."""
        if self.is_replicated:
            return
        places = self.clock.wait("control", request.pending.pop("ids"))[0]
        request.slots = places.long() - self._first

    def classify(self, request: Request, previous: Request | None, step: int) -> None:
        """Mark the rows touched in ``step``; with a batch in flight, find late rows and its urgent gradients."""
        request.step = step
        if self.is_replicated:
            return
        if previous is not None:
            request.late_out = find_late(self.last_touch, request, previous)
        self.last_touch[request.slots] = step
        if previous is None:
            return
        previous.urgent_out = self.last_touch[previous.slots] == step
        assert request.late_out is not None
        blocks = zip(
            request.late_out.split(request.recv_counts), previous.urgent_out.split(previous.recv_counts), strict=True
        )
        packed = [np.packbits(torch.cat(pair).numpy()) for pair in blocks]
        mine = [late + urgent for late, urgent in zip(request.send_counts, previous.send_counts, strict=True)]
        sizes, expected = [len(p) for p in packed], [-(-bits // 8) for bits in mine]
        bits = torch.from_numpy(np.concatenate(packed))
        request.pending["bits"] = self.channels.control.all_to_all_v(bits, sizes, expected, "bits", async_op=True)

    def finish_bits(self, request: Request, previous: Request) -> None:
        """Wait for the owners' verdicts on this rank's rows."""
        if self.is_replicated:
            return
        received, counts = self.clock.wait("control", request.pending.pop("bits"))
        late, urgent = [], []
        for block, num_late, num_urgent in zip(
            received.split(counts), request.send_counts, previous.send_counts, strict=True
        ):
            bits = torch.from_numpy(np.unpackbits(block.numpy(), count=num_late + num_urgent)).bool()
            late.append(bits[:num_late])
            urgent.append(bits[num_late:])
        request.late_in, previous.urgent_in = torch.cat(late), torch.cat(urgent)

    # -- rows --------------------------------------------------------------------------------------------------------

    def post_rows(self, request: Request, part: str, channel: Group) -> None:
        """Send rows to those who asked: ``part`` is ``"all"``, ``"free"`` or ``"late"``."""
        if self.is_replicated:
            return
        out, send = _select(request.slots, request.recv_counts, request.late_out, part)
        _, receive = _select(request.cold, request.send_counts, request.late_in, part)
        rows = gather(self.weight, out, bounds="unchecked")
        request.pending[part] = channel.all_to_all_v(rows, send, receive, f"rows.{part}", async_op=True)

    def finish_rows(self, request: Request) -> Tensor:
        """Return the buffer of the batch's distinct rows, cold then hot, once all of them are here."""
        num_cold = len(request.cold)
        shape = (num_cold + len(request.hot), self.layout.width)
        parts = [part for part in ("all", "free", "late") if part in request.pending]
        if parts == ["all"] and not len(request.hot):
            return self.clock.wait("rows", request.pending.pop("all"))[0]
        buffer = self.weight.new_empty(shape)
        if len(request.hot):
            gather(self.hot.weight, request.hot, out=buffer[num_cold:], bounds="unchecked")
        for part in parts:
            rows = self.clock.wait("rows", request.pending.pop(part))[0]
            if part == "all":
                buffer[:num_cold] = rows
            else:
                assert request.late_in is not None
                wanted = request.late_in if part == "late" else ~request.late_in
                buffer.numpy()[wanted.nonzero().view(-1).numpy()] = rows.numpy()  # three times as fast as torch
        return buffer

    def forget(self, request: Request) -> None:
        """Let what is in flight for a batch arrive, and drop it."""
        for part in list(request.pending):
            pending = request.pending.pop(part)
            (pending[0] if isinstance(pending, tuple) else pending).wait()

    # -- gradients ---------------------------------------------------------------------------------------------------

    def post_gradients(self, request: Request, rows: Tensor, part: str, channel: Group) -> None:
        """Send partial sums to their owners: ``part`` is ``"all"``, ``"urgent"`` or ``"deferred"``."""
        if self.is_replicated:
            return
        chosen = rows
        index, send = _select(torch.arange(len(rows)), request.send_counts, request.urgent_in, part)
        if part != "all":
            chosen = gather(rows, index, bounds="unchecked")
        slots, receive = _select(request.slots, request.recv_counts, request.urgent_out, part)
        handle = channel.all_to_all_v(chosen, send, receive, f"gradients.{part}", async_op=True)
        request.pending[part] = (handle, slots, receive)

    def finish_gradients(self, request: Request, part: str) -> None:
        """Merge the partial sums of one part and update its rows."""
        if part not in request.pending:
            return
        handle, slots, counts = request.pending.pop(part)
        rows = self.clock.wait("gradients", handle)[0]
        unique, merged = merge_partials(slots, rows, counts)
        if len(unique):
            bags = (unique, None, None, "sum")
            self.optimizer.update(self.weight, self.states, bags, merged, request.step + 1, request.lr)


def _select(items: Tensor, counts: list[int], mask: Tensor | None, part: str) -> tuple[Tensor, list[int]]:
    """Return the items of one part, and how many of each block remain."""
    if part == "all" or mask is None:
        return items, counts
    chosen = mask if part in ("late", "urgent") else ~mask
    ends = [0, *accumulate(counts)]
    running = torch.cat([torch.zeros(1, dtype=torch.int64), chosen.cumsum(0)])
    kept = running[torch.tensor(ends)].diff().tolist()
    return items[chosen], kept
