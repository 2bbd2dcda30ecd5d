"""DNP, destination-node parallel: the owner of a destination computes its row for every rank that asks.

A destination that several ranks need is sampled and computed once, by its owner, and sent to each of them; autograd
adds up the gradients that come back. Stateless sampling makes the owner draw what the asking rank would have drawn.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from core_kernels import ops
from gnn_parallel.exchange import exchange_ids, exchange_rows, exchange_sizes
from gnn_parallel.layers import View
from gnn_parallel.strategies.base import Strategy

__all__ = ["DestinationNodeParallel"]


@dataclass
class Request:
    """Destinations ordered by owner.

    Attributes:
        ids: Node ids, those owned by rank 0 first.
        home: Where each of them stands in the batch.
        counts: Ids per owner.
        step: Step of the sampler.
    """

    ids: Tensor
    home: Tensor
    counts: list[int]
    step: int


@dataclass
class Work:
    """Distinct destinations computed here and who gets them.

    Attributes:
        view: Their in-edges.
        rows_for_ranks: Row of ``view`` for each row sent, rank 0's first.
        send_counts: Rows for each rank.
        request: What this rank asked for.
    """

    view: View
    rows_for_ranks: Tensor
    send_counts: list[int]
    request: Request


class DestinationNodeParallel(Strategy):
    """Each rank computes the destinations it owns, for all ranks."""

    name = "dnp"
    summary = "destination-node parallel: the owner of a destination computes it once for all"

    def permute(self, destinations: Tensor, step: int) -> Request:
        """Bucket destinations by owner."""
        context = self.context
        with context.early_clock("sample"):
            home, counts = ops.bucket_by_owner(context.owner[destinations], torch.arange(context.group.size + 1))
            return Request(destinations[home], home, counts.tolist(), step)

    def shuffle(self, parcel: Request) -> Work:
        """Send ids to owners, who drop duplicates, sample and read features."""
        context = self.context
        sizes = torch.tensor(parcel.counts, dtype=torch.int64).view(-1, 1)
        group, clock = context.early_group, context.early_clock
        asked = exchange_sizes(group, sizes, clock).view(-1).tolist()
        ids = exchange_ids(group, parcel.ids.to(context.id_dtype), parcel.counts, asked, clock)
        with clock("sample"):
            ids = ids.long()
            unique, rows_for_ranks = ops.unique_relabel(ids[:0], ids)
        indptr, sources = context.sample(unique, parcel.step)
        return Work(context.view(indptr, sources, unique), rows_for_ranks, asked, parcel)

    def execute(self, work: Work) -> Tensor:
        """Compute the whole layer for the distinct destinations and copy rows out per rank."""
        return ops.gather(self.context.layer.whole(work.view), work.rows_for_ranks)

    def reshuffle(self, work: Work, rows: Tensor) -> Tensor:
        """Send the rows to whoever asked and put them in the batch's order."""
        context, request = self.context, work.request
        received = exchange_rows(context.group, rows, work.send_counts, request.counts, context.clock, context.travel)
        place = torch.empty_like(request.home)
        place[request.home] = torch.arange(len(place))
        return ops.gather(received, place)
