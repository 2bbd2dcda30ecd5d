"""Graph isomorphism layer: a network applied to ``(1 + eps) * h_i`` plus the sum of in-neighbours.

Source: Xu et al., How Powerful are Graph Neural Networks?, ICLR 2019 (https://arxiv.org/abs/1810.00826).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from core_kernels import vertex
from core_kernels.errors import argument_error
from core_kernels.graph import Graph

__all__ = ["GINConv"]


@vertex.program
def gin(v):
    """Sum of in-neighbours."""
    return vertex.sum(e.src.h for e in v.in_edges)


class GINConv(nn.Module):
    """Graph isomorphism layer; state-dict keys are those of ``torch_geometric.nn.GINConv``.

    Args:
        nn: The network applied to the sum.
        eps: Weight of the vertex itself, less one.
        train_eps: Make ``eps`` a parameter.

    >>> graph = Graph.from_edge_index(torch.tensor([[0, 1, 2], [1, 2, 0]]))
    >>> GINConv(torch.nn.Linear(4, 8))(graph, torch.ones(3, 4)).shape
    torch.Size([3, 8])
    """

    program = gin

    def __init__(self, nn: nn.Module, eps: float = 0.0, train_eps: bool = False):
        super().__init__()
        self.nn, self.initial_eps = nn, eps
        start = torch.full((1,), float(eps))
        if train_eps:
            self.eps = torch.nn.Parameter(start)
        else:
            self.register_buffer("eps", start)

    def forward(self, graph: Graph, x: Tensor, edge_weight: None = None) -> Tensor:
        """Return the new features of the destinations.

        Args:
            graph: A graph or block.
            x: [num_src, features].
            edge_weight: Must be None: this layer has no edge weights.
        """
        if edge_weight is not None:
            raise argument_error("edge_weight", type(edge_weight), "None", "use GCNConv or a vertex.program")
        total = self.program(graph, src={"h": x})
        return self.nn(total + (1 + self.eps) * x[: graph.num_dst])
