"""GDP, graph data parallel: every rank computes the input layer of its own destinations.

The plain data-parallel way. Nothing travels but the feature rows a rank reads and, where features are sharded, their
ids.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gnn_parallel.layers import View
from gnn_parallel.strategies.base import Strategy

__all__ = ["GraphDataParallel"]


@dataclass
class OwnBatch:
    """The sampled in-edges of this rank's destinations."""

    destinations: Tensor
    indptr: Tensor
    sources: Tensor


class GraphDataParallel(Strategy):
    """Each rank samples, reads and computes for its own seeds."""

    name = "gdp"
    summary = "graph data parallel: each rank reads all features its seeds need"

    def permute(self, destinations: Tensor, step: int) -> OwnBatch:
        """Sample; nothing leaves this rank."""
        return OwnBatch(destinations, *self.context.sample(destinations, step))

    def reads_ahead(self, parcel: OwnBatch) -> Tensor:
        """Return sources and destinations."""
        return torch.cat([parcel.destinations, parcel.sources.to(parcel.destinations.dtype)])

    def shuffle(self, parcel: OwnBatch) -> View:
        """Read features, remote ones from their owners."""
        return self.context.view(parcel.indptr, parcel.sources, parcel.destinations)

    def execute(self, work: View) -> Tensor:
        """Compute the whole layer."""
        return self.context.layer.whole(work)

    def reshuffle(self, work: View, rows: Tensor) -> Tensor:
        """Return the rows: they are at home."""
        return rows
