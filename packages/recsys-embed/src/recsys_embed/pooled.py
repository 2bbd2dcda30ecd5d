"""Tables whose owners return partial pools instead of rows: for bags of many ids, sums are fewer than rows.

Every owner adds up its own rows of each bag and returns one vector per (owner, bag); the asking rank adds those up. The
gradient of a bag goes back once to each owner that holds a part of it, which spreads it over its rows. A sum cannot be
complete before its rows are, so nothing but the ids travels ahead of time.

Callers may not assume the bits of row-wise lookups: sums are added up owner by owner. Deterministic mode fetches rows.

Source: what TorchRec calls row-wise sharding with a reduce-scatter of pools; here chosen per table by the planner.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from core_kernels.comm import Group
from core_kernels.ops import embedding_bag
from recsys_embed.exchange import Request, RowSpace

__all__ = ["PooledSpace", "split_bags"]


def split_bags(
    places: np.ndarray, offsets: np.ndarray, bounds: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Divide bags by the owners of their ids.

    Args:
        places: Ids of all bags, bag by bag.
        offsets: Where bags start, [bags + 1].
        bounds: Owner r owns the places from ``bounds[r]`` to ``bounds[r + 1]``.

    Returns:
        ``order`` of the ids by owner, then bag; per partial pool in that order, ``keys`` (owner * bags + bag) and the
        ``lengths`` (ids).

    >>> order, keys, lengths = split_bags(np.array([5, 1, 6]), np.array([0, 2, 3]), np.array([0, 4, 8]))
    >>> order.tolist(), keys.tolist(), lengths.tolist()  # bag 0 at owner 0; bags 0 and 1 at owner 1
    ([1, 0, 2], [0, 2, 3], [1, 1, 1])
    """
    num_bags = len(offsets) - 1
    owners = np.searchsorted(bounds, places, side="right") - 1
    key_of_id = owners * num_bags + np.repeat(np.arange(num_bags), np.diff(offsets))
    order = np.argsort(key_of_id, kind="stable")
    keys, lengths = np.unique(key_of_id, return_counts=True)
    return order, keys, lengths


class PooledSpace(RowSpace):
    """A row space that moves partial pools. Its requests count pools where those of rows count distinct rows."""

    num_counts = 3

    def plan(self, places: Tensor, offsets: Tensor, weights: Tensor | None) -> Request:
        """Sort the ids of a batch by owner and bag; no communication."""
        num_bags, size = len(offsets) - 1, self.channels.now.size
        order, keys, lengths = split_bags(places.numpy(), offsets.numpy(), self.layout.bounds)
        by_owner = np.searchsorted(keys, np.arange(size + 1) * num_bags)
        bag_of_pool = keys % max(num_bags, 1)
        ends = np.concatenate([[0], np.cumsum(np.bincount(bag_of_pool, minlength=num_bags))])
        local = torch.from_numpy(np.argsort(bag_of_pool, kind="stable"))
        request = Request(local, torch.arange(len(keys)), places[:0], np.diff(by_owner).tolist())
        request.offsets = torch.from_numpy(ends)
        request.lengths = torch.from_numpy(lengths.astype(np.int32))
        request.ids, request.weights = places[order], None if weights is None else weights[order]
        per_owner = np.concatenate([[0], np.cumsum(lengths)])[by_owner]
        request.id_counts = np.diff(per_owner).tolist()
        return request

    def counts_of(self, request: Request) -> list[list[int]]:
        """Return pools, ids and weights per owner."""
        weights = [0] * len(request.id_counts) if request.weights is None else request.id_counts
        return [request.send_counts, request.id_counts, weights]

    def post_ids(self, request: Request, received: Sequence[list[int]]) -> None:
        """Send the lengths of pools, their ids and, if there are some, factors."""
        request.recv_counts, control = received[0], self.channels.control
        ids = request.ids.to(torch.int32) if self._narrow else request.ids
        factors = self.weight.new_empty(0) if request.weights is None else request.weights
        sent = zip(("lengths", "ids", "factors"), (request.lengths, ids, factors), self.counts_of(request), strict=True)
        for (name, items, counts), expected in zip(sent, received, strict=True):
            request.pending[name] = control.all_to_all_v(items, counts, expected, "ids", async_op=True)
        request.has_factors = [number > 0 for number in received[2]]
        request.id_counts = received[1]

    def finish_ids(self, request: Request) -> None:
        """Wait for what peers ask of this rank."""
        names = ("lengths", "ids", "factors")
        lengths, places, factors = (self.clock.wait("control", request.pending.pop(name))[0] for name in names)
        request.slots = places.long() - self._first
        request.pool_offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.long().cumsum(0)])
        if any(request.has_factors):
            request.pool_weights = torch.ones(len(request.slots), dtype=self.weight.dtype)  # of peers without factors
            given = torch.tensor(request.has_factors).repeat_interleave(torch.tensor(request.id_counts))
            request.pool_weights[given] = factors

    def classify(self, request: Request, previous: Request | None, step: int) -> None:
        """Number the request; every pool waits for the update before it."""
        request.step = step

    def finish_bits(self, request: Request, previous: Request) -> None:
        """Do nothing: owners pass no verdicts on pools."""

    def post_rows(self, request: Request, part: str, channel: Group) -> None:
        """Add up this owner's rows of every bag and send the sums; none of them is free to leave early."""
        if part == "free":
            return
        bags = (request.slots, request.pool_offsets, request.pool_weights)
        pools = embedding_bag(self.weight, *bags, bounds="unchecked")
        counts = (request.recv_counts, request.send_counts)
        request.pending["all"] = channel.all_to_all_v(pools, *counts, "rows.pools", async_op=True)

    def post_gradients(self, request: Request, rows: Tensor, part: str, channel: Group) -> None:
        """Send the gradient of every bag to the owners of its parts, all of them at once."""
        if part == "deferred":
            return
        counts = (request.send_counts, request.recv_counts)
        request.pending[part] = channel.all_to_all_v(rows, *counts, "gradients.pools", async_op=True)

    def finish_gradients(self, request: Request, part: str) -> None:
        """Spread the gradients of pools over this owner's rows, once per row."""
        if part not in request.pending:
            return
        grad = self.clock.wait("gradients", request.pending.pop(part))[0]
        if len(request.slots):
            bags = (request.slots, request.pool_offsets, request.pool_weights, "sum")
            self.optimizer.update(self.weight, self.states, bags, grad, request.step + 1, request.lr)
