"""Graphs and models shared by the tests; PyG is imported only where a test asks for it."""

from __future__ import annotations

import pytest
import torch
from torch import nn


@pytest.fixture
def make_graph():
    """Return a function that makes ``(x, edge_index)`` with self-loops, duplicate edges and isolated nodes."""

    def make(num_nodes: int = 120, num_edges: int = 700, width: int = 10, seed: int = 0, dtype=torch.float32):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(num_nodes, width, generator=generator, dtype=dtype)
        edges = torch.randint(max(num_nodes - 5, 1), (2, num_edges), generator=generator)
        edges[0, :9] = edges[1, :9]
        edges[:, 9:18] = edges[:, 18:27]
        return x, edges

    return make


class SumNet(nn.Module):
    """Two rounds of weighted sums with a linear layer each, in plain torch."""

    def __init__(self, width: int = 10, hidden: int = 6, classes: int = 3):
        super().__init__()
        self.lin1, self.lin2 = nn.Linear(width, hidden), nn.Linear(hidden, classes)

    def forward(self, x, edge_index, edge_weight=None):
        for lin in (self.lin1, self.lin2):
            messages = lin(x)[edge_index[0]]
            if edge_weight is not None:
                messages = messages * edge_weight.unsqueeze(-1)
            x = torch.zeros(x.size(0), lin.out_features).index_add(0, edge_index[1], messages).relu()
        return x


@pytest.fixture
def sum_net():
    torch.manual_seed(0)
    return SumNet().eval()
