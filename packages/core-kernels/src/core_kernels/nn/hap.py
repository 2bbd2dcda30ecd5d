"""Adaptive coarsening of one graph to a fixed number of clusters, in plain torch.

A global content matrix ``C = H W`` scores every vertex for every cluster; attention between content rows and cluster
columns gives the assignment ``M`` (rows sum to one), and the coarse graph is ``A' = M^T A M``, ``H' = M^T H``. Coarse
edges are sharpened by a Gumbel softmax in training.

Source: Liu et al., Hierarchical Adaptive Pooling by Capturing High-order Dependency for Graph Representation Learning,
TKDE 2021 (https://arxiv.org/abs/2104.05960), section 4, as far as its abstract and formulas are public. We differ: the
soft sampling of edges is off unless a temperature is given.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core_kernels import ops
from core_kernels.graph import Graph
from core_kernels.nn.init import glorot_

__all__ = ["HAPCoarsening"]


class HAPCoarsening(nn.Module):
    """Pool a graph to ``num_clusters`` vertices.

    Args:
        in_channels: Width of vertex features.
        num_clusters: Vertices of the coarse graph.
        negative_slope: Slope of the leaky ReLU on scores.
        temperature: Temperature of the Gumbel softmax that sharpens coarse edges in training; None: no sharpening.

    >>> graph = Graph.from_edge_index(torch.tensor([[0, 1, 2], [1, 2, 0]]))
    >>> features, adjacency, assignment = HAPCoarsening(4, 2)(graph, torch.ones(3, 4))
    >>> features.shape, adjacency.shape, assignment.sum(1).round(decimals=3).tolist()
    (torch.Size([2, 4]), torch.Size([2, 2]), [1.0, 1.0, 1.0])
    """

    def __init__(
        self, in_channels: int, num_clusters: int, negative_slope: float = 0.2, temperature: float | None = None
    ):
        super().__init__()
        self.in_channels, self.num_clusters = in_channels, num_clusters
        self.negative_slope, self.temperature = negative_slope, temperature
        self.content = nn.Parameter(torch.empty(in_channels, num_clusters))
        self.attention = nn.Parameter(torch.empty(2 * num_clusters, 1))
        glorot_(self.content)
        glorot_(self.attention)

    def forward(self, graph: Graph, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return coarse features, coarse adjacency and assignment.

        Args:
            graph: A square graph.
            x: [num_nodes, in_channels].

        Returns:
            [num_clusters, in_channels], [num_clusters, num_clusters] (row = destination) and
            [num_nodes, num_clusters] whose rows sum to one.
        """
        content = x @ self.content
        own, of_cluster = self.attention[: self.num_clusters], self.attention[self.num_clusters :]
        # A column of the content matrix describes a cluster; summed with itself as weights it has cluster length.
        columns = content.t() @ content / max(graph.num_nodes, 1)
        scores = content @ own + (columns @ of_cluster).t()
        assignment = F.softmax(F.leaky_relu(scores * content, self.negative_slope), dim=1)
        features = assignment.t() @ x
        adjacency = assignment.t() @ ops.spmm(graph, assignment)
        if self.temperature is not None and self.training:
            adjacency = F.gumbel_softmax(adjacency.clamp(min=1e-12).log(), self.temperature, dim=1)
        return features, adjacency, assignment

    def extra_repr(self) -> str:
        """Return sizes."""
        return f"{self.in_channels}, num_clusters={self.num_clusters}"
