"""The hot tier: popular rows that every rank holds and updates alike.

A place finds its slot through a hash table of the size of the tier, not of the tables. In a step the gradient of all
ranks is summed, then every rank applies the same update to the same rows, so replicas stay bitwise equal.

Two ways to sum: *fast* all-reduces the dense tier in buckets, with one more column that says which rows were touched
when the optimiser needs to know; *ordered* sends touched rows to the rank that owns a slice of the slots, merges there
in the order of the leaves, and gathers the merged rows: independent of transport and of the tier's size.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch
from torch import Tensor

from core_kernels.comm import Group
from recsys_embed.clock import Clock
from recsys_embed.exchange import RowSpace, merge_partials
from recsys_embed.kernels.rows import build_slots, find_slots
from recsys_embed.optimizers import RowOptimizer

__all__ = ["HotTier", "build_tier", "sink_rows"]

_BUCKET_BYTES = 4 << 20


class HotTier:
    """Replicated rows of one row space.

    Args:
        places: Places of the rows, ascending, int64 [H].
        weight: Their values [H, width], the same on every rank.
        states: Their optimiser states.
        group: All ranks.
        ordered: Sum in the order of leaves.
        clock: Where waiting is counted.
    """

    def __init__(self, places: Tensor, weight: Tensor, states: list[Tensor], group: Group, ordered: bool, clock: Clock):
        self.places, self.weight, self.states, self.group = places, weight, states, group
        self.ordered, self.clock = ordered, clock
        size = 1 << max(4, (2 * len(places)).bit_length())
        self._keys, self._slots = np.full(size, -1, np.int64), np.zeros(size, np.int32)
        build_slots(places.numpy(), self._keys, self._slots)
        self._pending: tuple | None = None

    def __len__(self) -> int:
        return len(self.places)

    def find(self, places: Tensor) -> np.ndarray:
        """Return the slot of every place, -1 for cold ones."""
        found = np.empty(len(places), np.int32)
        find_slots(places.numpy(), self._keys, self._slots, found)
        return found

    def start_update(self, slots: Tensor, grad: Tensor, optimizer: RowOptimizer, step: int) -> None:
        """Begin to sum the gradient rows of all ranks; :meth:`finish_update` applies them.

        Collective: all ranks, also those with no row.
        """
        if not len(self):
            return
        if self.ordered:
            self._apply(*self._sum_in_order(slots, grad), optimizer, step, optimizer.lr)
            return
        masked = optimizer.needs_mask
        dense = torch.zeros(len(self), self.weight.shape[1] + masked, dtype=grad.dtype)
        dense[slots, : self.weight.shape[1]] = grad
        if masked:
            dense[slots, -1] = 1.0
        rows = max(1, _BUCKET_BYTES // (dense.shape[1] * dense.element_size()))
        handles = [self.group.all_reduce(b, tag="hot", async_op=True, out=b) for b in dense.split(rows)]
        self._pending = (handles, dense, masked, optimizer, step, optimizer.lr)

    def finish_update(self) -> None:
        """Wait for the sums and apply them."""
        if self._pending is None:
            return
        handles, dense, masked, optimizer, step, lr = self._pending
        self._pending = None
        for handle in handles:
            self.clock.wait("hot", handle)
        width = self.weight.shape[1]
        touched = dense[:, -1].nonzero().view(-1) if masked else torch.arange(len(self))
        grad = dense[touched, :width] if masked else dense
        self._apply(touched, grad, optimizer, step, lr)

    def _sum_in_order(self, slots: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Return (slots, summed rows) touched by any rank, the same on all."""
        order = slots.argsort()
        slots, grad = slots[order], grad[order]
        cuts = torch.tensor([len(self) * r // self.group.size for r in range(1, self.group.size)])
        ends = [0, *torch.searchsorted(slots, cuts).tolist(), len(slots)]
        counts = [stop - start for start, stop in itertools.pairwise(ends)]
        names, received = self.group.all_to_all_v(slots, counts, tag="hot")
        rows, _ = self.group.all_to_all_v(grad, counts, received, tag="hot")
        unique, merged = merge_partials(names, rows, received)
        all_names, per_rank = self.group.all_gather_v(unique, tag="hot")
        return all_names, self.group.all_gather_v(merged, tag="hot", counts=per_rank)[0]

    def _apply(self, slots: Tensor, grad: Tensor, optimizer: RowOptimizer, step: int, lr: float) -> None:
        if len(slots):
            optimizer.update(self.weight, self.states, (slots, None, None, "sum"), grad.contiguous(), step, lr)


def build_tier(space: RowSpace, hot_rows: dict[str, list[int]], ordered: bool) -> HotTier:
    """Copy the hot rows of all owners, with their states, to every rank. Collective.

    Args:
        space: The row space.
        hot_rows: Rows by table.
        ordered: Sum in the order of leaves.
    """
    layout, group = space.layout, space.channels.now
    rows = [layout.first_row[t.name] + torch.tensor(hot_rows.get(t.name, []), dtype=torch.int64) for t in layout.tables]
    places = layout.places(torch.cat(rows)).sort().values
    bounds = torch.searchsorted(places, torch.from_numpy(layout.bounds)).tolist()
    counts = [stop - start for start, stop in itertools.pairwise(bounds)]
    mine = places[bounds[group.rank] : bounds[group.rank + 1]] - int(layout.bounds[group.rank])
    copies = [
        group.all_gather_v(shard[mine], tag="retier", counts=counts)[0] for shard in (space.weight, *space.states)
    ]
    return HotTier(places, copies[0], copies[1:], group, ordered, space.clock)


def sink_rows(space: RowSpace) -> None:
    """Write the hot rows that this rank owns into its shard; every rank holds all of them, so nothing travels."""
    rank, hot = space.channels.now.rank, space.hot
    first, last = (int(b) for b in space.layout.bounds[rank : rank + 2])
    mine = ((hot.places >= first) & (hot.places < last)).nonzero().view(-1)
    slots = hot.places[mine] - first
    for shard, copy in zip([space.weight, *space.states], [hot.weight, *hot.states], strict=True):
        shard[slots] = copy[mine]
