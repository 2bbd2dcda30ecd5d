"""Two models of who takes what: matrix factorisation, and LightGCN's propagation over the user-item graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from core_kernels import Graph, ops

__all__ = ["BPRMF", "LightGCN"]


class BPRMF(nn.Module):
    """A vector per user and item; the score is their dot product.

    Args:
        taken: 0/1 matrix [users, items].
        width: Length of the vectors.
    """

    def __init__(self, taken: Any, width: int = 64):
        super().__init__()
        num_users, num_items = taken.shape
        self.users, self.items = nn.Embedding(num_users, width), nn.Embedding(num_items, width)
        nn.init.normal_(self.users.weight, std=0.1)
        nn.init.normal_(self.items.weight, std=0.1)

    def vectors(self) -> tuple[Tensor, Tensor]:
        """Return the vectors of all users and all items."""
        return self.users.weight, self.items.weight


class LightGCN(BPRMF):
    """Vectors averaged over 0 to ``num_layers`` hops of the graph, edges weighted by both degrees' roots.

    Source: "LightGCN: Simplifying and Powering Graph Convolution Network for Recommendation", SIGIR 2020.
    """

    def __init__(self, taken: Any, width: int = 64, num_layers: int = 2):
        super().__init__(taken, width)
        self.num_layers = num_layers
        coo = taken.tocoo()
        users, items = (torch.from_numpy(np.asarray(c, np.int64)) for c in coo.coords)
        num_users, num_nodes = taken.shape[0], sum(taken.shape)
        source, target = torch.cat([users, items + num_users]), torch.cat([items + num_users, users])
        self._graph = Graph.from_edge_index(torch.stack([source, target]), num_nodes)
        degrees = self._graph.in_degrees().clamp(min=1).float()
        self._edge_weight = (degrees[source] * degrees[target]).rsqrt()

    def vectors(self) -> tuple[Tensor, Tensor]:
        """Return the vectors of all users and all items."""
        x = total = torch.cat([self.users.weight, self.items.weight])
        for _ in range(self.num_layers):
            x = ops.spmm(self._graph, x, weight=self._edge_weight)
            total = total + x
        total = total / (self.num_layers + 1)
        return total[: self.users.num_embeddings], total[self.users.num_embeddings :]
