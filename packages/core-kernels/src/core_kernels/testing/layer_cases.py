"""Every shipped layer with the options that change what it computes, for the tests of all implementations.

One list serves the comparison with PyTorch Geometric, gradient checks, ``torch.export`` and ``torch.compile``, and the
runs on a device. A case makes its layer from a namespace, ours (:mod:`core_kernels.nn`) or ``torch_geometric.nn``,
whose constructors agree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from core_kernels.graph import Graph

__all__ = ["LAYER_CASES", "NUM_EDGE_TYPES", "LayerCase", "layer_edges", "layer_inputs"]

NUM_EDGE_TYPES = 4
_EDGE_WIDTH = 3


@dataclass(frozen=True)
class LayerCase:
    """One layer with one choice of options.

    Attributes:
        make: Takes the namespace and the width of the input; returns the layer.
        edge_input: What it reads of edges: ``"weight"``, ``"features"``, ``"type"`` or nothing.
        is_common: Whether this is the layer as most use it.
        in_pyg: Whether PyTorch Geometric has it.
    """

    make: Callable[[Any, int], nn.Module]
    edge_input: str = ""
    is_common: bool = False
    in_pyg: bool = True


def _perceptron(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width + 2), nn.Tanh(), nn.Linear(width + 2, 5))


LAYER_CASES: dict[str, LayerCase] = {
    "gcn": LayerCase(lambda m, w: m.GCNConv(w, w + 2), is_common=True),
    "gcn narrowing": LayerCase(lambda m, w: m.GCNConv(w, max(1, w // 2))),
    "gcn improved, weights": LayerCase(lambda m, w: m.GCNConv(w, w + 2, improved=True), "weight"),
    "gcn no self-loops, weights": LayerCase(lambda m, w: m.GCNConv(w, 5, add_self_loops=False), "weight"),
    "gcn not normalised": LayerCase(lambda m, w: m.GCNConv(w, w + 2, normalize=False, bias=False), "weight"),
    "sage mean": LayerCase(lambda m, w: m.SAGEConv(w, w + 2), is_common=True),
    "sage mean, narrowing": LayerCase(lambda m, w: m.SAGEConv(w, max(1, w // 2), bias=False)),
    "sage max": LayerCase(lambda m, w: m.SAGEConv(w, w + 2, aggr="max"), is_common=True),
    "sage min, projected": LayerCase(lambda m, w: m.SAGEConv(w, 9, aggr="min", project=True, normalize=True)),
    "sage sum, no root": LayerCase(lambda m, w: m.SAGEConv(w, 5, aggr="sum", root_weight=False)),
    "gin": LayerCase(lambda m, w: m.GINConv(_perceptron(w)), is_common=True),
    "gin, trained eps": LayerCase(lambda m, w: m.GINConv(_perceptron(w), eps=0.3, train_eps=True)),
    "gat": LayerCase(lambda m, w: m.GATConv(w, 5, heads=3), is_common=True),
    "gat, mean of heads": LayerCase(
        lambda m, w: m.GATConv(w, 1, heads=3, concat=False, negative_slope=0.1, bias=False)
    ),
    "gat no self-loops": LayerCase(lambda m, w: m.GATConv(w, 4, heads=2, add_self_loops=False)),
    "gat edge features": LayerCase(
        lambda m, w: m.GATConv(w, 5, heads=3, edge_dim=_EDGE_WIDTH, residual=True), "features"
    ),
    "gat edge features, filled": LayerCase(
        lambda m, w: m.GATConv(w, 5, edge_dim=_EDGE_WIDTH, fill_value="max"), "features"
    ),
    "gatv2": LayerCase(lambda m, w: m.GATv2Conv(w, 5, heads=3), is_common=True),
    "gatv2 shared": LayerCase(lambda m, w: m.GATv2Conv(w, 5, share_weights=True, concat=False, bias=False)),
    "gatv2 no self-loops": LayerCase(lambda m, w: m.GATv2Conv(w, 4, heads=2, add_self_loops=False)),
    "gatv2 edge features": LayerCase(
        lambda m, w: m.GATv2Conv(w, 5, heads=3, edge_dim=_EDGE_WIDTH, residual=True), "features"
    ),
    "appnp": LayerCase(lambda m, w: m.APPNP(3, 0.2), is_common=True),
    "appnp weights": LayerCase(lambda m, w: m.APPNP(2, 0.2), "weight"),
    "appnp no self-loops": LayerCase(lambda m, w: m.APPNP(2, 0.2, add_self_loops=False), "weight"),
    "appnp not normalised": LayerCase(lambda m, w: m.APPNP(2, 0.2, normalize=False), "weight"),
    "rgcn": LayerCase(lambda m, w: m.RGCNConv(w, 9, NUM_EDGE_TYPES), "type", is_common=True),
    "rgcn bases": LayerCase(lambda m, w: m.RGCNConv(w, 9, NUM_EDGE_TYPES, num_bases=2), "type"),
    "rgcn blocks": LayerCase(lambda m, w: m.RGCNConv(w, 2 * w, NUM_EDGE_TYPES, num_blocks=w, aggr="max"), "type"),
    "rgcn sum, no root": LayerCase(
        lambda m, w: m.RGCNConv(w, 4, NUM_EDGE_TYPES, aggr="add", root_weight=False, bias=False), "type"
    ),
    "hap coarsening": LayerCase(lambda m, w: m.HAPCoarsening(w, 3), is_common=True, in_pyg=False),
}


def layer_edges(num_nodes: int = 30, num_edges: int = 150, seed: int = 0) -> Tensor:
    """Return an edge list, int64 [2, edges], with duplicates, two self-loops and vertices without in-edges.

    Args:
        num_nodes: Number of vertices, at least 3.
        num_edges: Edges drawn; duplicates and loops come on top.
        seed: Seed of the edges.
    """
    generator = torch.Generator().manual_seed(seed)
    edges = torch.randint(0, num_nodes, (2, num_edges), generator=generator)
    edges[1][edges[1] == 2] = 1
    edges = edges[:, edges[0] != edges[1]]
    loops = torch.tensor([[0, num_nodes - 1], [0, num_nodes - 1]])
    return torch.cat([edges, edges[:, :10], loops], 1)


def layer_inputs(
    case: LayerCase, graph: Graph, width: int, dtype: torch.dtype = torch.float64, seed: int = 0
) -> list[Tensor]:
    """Return the arguments of a layer behind the graph: vertex features, then what it reads of edges.

    Args:
        case: The case.
        graph: A square graph.
        width: Width of the vertex features.
        dtype: Dtype of all but edge types.
        seed: Seed of the values.

    Returns:
        Tensors of the graph's device; floating-point ones want gradients.
    """
    generator = torch.Generator().manual_seed(seed)
    count = graph.num_edges
    made = [torch.randn(graph.num_nodes, width, generator=generator, dtype=torch.float64)]
    if case.edge_input == "weight":
        made.append(torch.rand(count, generator=generator, dtype=torch.float64) + 0.1)
    elif case.edge_input == "features":
        made.append(torch.randn(count, _EDGE_WIDTH, generator=generator, dtype=torch.float64))
    inputs = [one.to(graph.device, dtype).requires_grad_() for one in made]
    if case.edge_input == "type":
        types = torch.randint(0, NUM_EDGE_TYPES - 1, (count,), generator=generator)  # the last type has no edge
        inputs.append(types.to(graph.device))
    return inputs
