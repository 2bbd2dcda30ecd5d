"""Models whose layers run on one machine or over a communicator, with the same parameters and the same results.

A layer gathers the rows it reads and then calls an ordinary convolution on the local block. Two things make that
cheap: the narrower side of a linear map travels, and vertices that read own rows only are computed while the rest is
on its way. Input features have no gradient and are gathered once.

Models: graph convolution (GCN), CommNet, graph isomorphism network (GIN), GraphSAGE and graph attention (GAT). Any
module called as ``conv(block, rows)`` can be wrapped, also those of PyTorch Geometric through :class:`EdgeIndexConv`.

Source of CommNet: Sukhbaatar et al., Learning Multiagent Communication with Backpropagation, NeurIPS 2016
(https://arxiv.org/abs/1605.07736).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from core_kernels import vertex
from core_kernels.graph import Graph
from core_kernels.nn import GATConv, GCNConv, GINConv, SAGEConv, weighted_degrees
from gnn_comm.communicator import Communicator
from gnn_comm.errors import GnnCommArgumentError

__all__ = ["MODELS", "CommNetConv", "EdgeIndexConv", "FullGraphModel", "build_model", "exchanged"]

MODELS = ("gcn", "commnet", "gin", "sage", "gat")
_HEADS = 4


@vertex.program
def commnet(v):
    """Mean of what the in-neighbours say."""
    return vertex.mean(e.src.h for e in v.in_edges)


class CommNetConv(nn.Module):
    """CommNet's step: own state and mean message, each through its own linear map.

    Args:
        in_channels: Width of the input.
        out_channels: Width of the output.

    >>> ring = Graph.from_edge_index(torch.tensor([[0, 1, 2], [1, 2, 0]]))
    >>> CommNetConv(4, 8)(ring, torch.ones(3, 4)).shape
    torch.Size([3, 8])
    """

    program = commnet

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        self.own = nn.Linear(in_channels, out_channels)
        self.message = nn.Linear(in_channels, out_channels, bias=False)

    def forward(self, graph: Graph, x: Tensor) -> Tensor:
        """Return the new states of the destinations."""
        return self.own(x[: graph.num_dst]) + self.message(commnet(graph, src={"h": x}))


class EdgeIndexConv(nn.Module):
    """Call a convolution that takes ``((source rows, destination rows), edge_index)``, as PyTorch Geometric's do.

    Args:
        conv: Such a convolution. It must not count degrees itself, since a block holds only some edges.
    """

    def __init__(self, conv: nn.Module):
        super().__init__()
        self.conv = conv

    def forward(self, graph: Graph, x: Tensor) -> Tensor:
        """Return the new features of the destinations."""
        return self.conv((x, x[: graph.num_dst]), graph.edge_index())


def exchanged(
    communicator: Communicator,
    compute: Callable[[Graph, Tensor, Tensor], Tensor],
    x_local: Tensor,
    keep: str | None = None,
) -> Tensor:
    """Gather the rows of ``x_local`` and compute all own destinations.

    Args:
        communicator: The exchange.
        compute: ``compute(block, rows, sources)`` with the block, its source rows and their positions in a gather;
            returns one row per destination of the block.
        x_local: Rows of this rank.
        keep: Name under which the gathered rows are kept; only for constants.

    Returns:
        One row per destination of ``communicator.local_graph``. Interior vertices are computed during the exchange.

    Collective: all ranks.
    """
    block = communicator.local_graph
    everything = torch.arange(block.num_src, device=block.device)
    if communicator.layout.is_replicated or communicator.group.size == 1:
        return compute(block, communicator.graph_all_gather(x_local), everything)
    if keep is not None and not x_local.requires_grad:
        return compute(block, communicator.gather_once(keep, x_local), everything)
    handle = communicator.graph_all_gather_async(x_local)
    (interior, interior_rows), (boundary, boundary_rows) = communicator.split
    inside = compute(interior, x_local[interior_rows], interior_rows)
    rows = handle.wait()
    outside = compute(boundary, rows[boundary_rows], boundary_rows)
    order = torch.cat([interior_rows[: interior.num_dst], boundary_rows[: boundary.num_dst]])
    return torch.cat([inside, outside]).index_select(0, torch.argsort(order))


class FullGraphModel(nn.Module):
    """Convolutions with an activation between them, run on a graph or over a communicator.

    Args:
        convs: The convolutions, called as ``conv(graph, x)``.
        activation: Applied between layers.
    """

    def __init__(self, convs: list[nn.Module], activation: Callable[[Tensor], Tensor] = torch.relu):
        super().__init__()
        self.convs = nn.ModuleList(convs)
        self.activation = activation
        self._degrees: tuple[Any, Tensor] | None = None

    def forward(self, target: Graph | Communicator, x: Tensor) -> Tensor:
        """Return the output rows.

        Args:
            target: A whole graph, or a communicator.
            x: Features of all vertices, or ``communicator.dispatch(features)``.

        Returns:
            Rows of all vertices; over a communicator, of this rank's (with replication its copies follow, incomplete).

        Collective: all ranks, with a communicator.
        """
        if isinstance(target, Communicator) and 0 < target.plan.num_layers < len(self.convs):
            raise GnnCommArgumentError(
                f"the model has {len(self.convs)} layers, the plan holds copies for {target.plan.num_layers}; expected "
                f"copies for every layer; plan with num_layers={len(self.convs)}"
            )
        for number, conv in enumerate(self.convs):
            x = self._layer(target, conv, x, "features" if number == 0 else None)
            if number < len(self.convs) - 1:
                x = self.activation(x)
        return x

    def _layer(self, target: Graph | Communicator, conv: nn.Module, x: Tensor, keep: str | None) -> Tensor:
        if isinstance(conv, GCNConv):
            return self._graph_convolution(target, conv, x, keep)
        if isinstance(target, Graph):
            return conv(target, x)
        return exchanged(target, lambda block, rows, _: conv(block, rows), x, keep)

    def _graph_convolution(self, target: Graph | Communicator, conv: GCNConv, x: Tensor, keep: str | None) -> Tensor:
        """Run graph convolution with the degrees of the full graph; rows travel at the narrower width."""
        degrees = self._degrees_of(target)
        if isinstance(target, Graph):
            return conv(target, x, degrees=degrees)
        narrow_first = conv.out_channels < conv.in_channels and (keep is None or x.requires_grad)
        if not narrow_first:
            return exchanged(target, lambda block, rows, at: conv(block, rows, degrees=degrees[at]), x, keep)
        out = exchanged(target, lambda block, rows, at: conv.propagate(block, rows, None, degrees[at]), conv.lin(x))
        return out if conv.bias is None else out + conv.bias

    def _degrees_of(self, target: Graph | Communicator) -> Tensor:
        if self._degrees is None or self._degrees[0] is not target:
            if isinstance(target, Graph):
                degrees = weighted_degrees(target)
            else:
                whole = target.plan._attached("degrees").graph
                degrees = weighted_degrees(whole)[torch.from_numpy(target.layout.global_rows)].to(target.group.device)
            self._degrees = (target, degrees)
        return self._degrees[1]


def build_model(name: str, in_channels: int, hidden: int, out_channels: int, num_layers: int = 2) -> FullGraphModel:
    """Build one of the models by name.

    Args:
        name: One of :data:`MODELS`.
        in_channels: Width of the features.
        hidden: Width between layers; a multiple of 4 for ``"gat"`` (its heads).
        out_channels: Number of classes.
        num_layers: Number of layers, at least 1.

    Raises:
        GnnCommArgumentError: The name is not known, or a width does not fit.
    """
    if name not in MODELS or num_layers < 1:
        raise GnnCommArgumentError(
            f"model={name!r}, num_layers={num_layers}: expected one of {MODELS} and at least 1 layer; choose one"
        )
    if name == "gat" and hidden % _HEADS:
        raise GnnCommArgumentError(
            f"hidden={hidden} is no multiple of {_HEADS} heads; pass {hidden + -hidden % _HEADS}"
        )
    widths = [in_channels, *[hidden] * (num_layers - 1), out_channels]
    convs: list[nn.Module] = []
    for number, (before, after) in enumerate(pairwise(widths)):
        is_last = number == num_layers - 1
        if name == "gcn":
            convs.append(GCNConv(before, after))
        elif name == "commnet":
            convs.append(CommNetConv(before, after))
        elif name == "gin":
            convs.append(GINConv(nn.Sequential(nn.Linear(before, hidden), nn.ReLU(), nn.Linear(hidden, after))))
        elif name == "sage":
            convs.append(SAGEConv(before, after))
        else:
            heads = 1 if is_last else _HEADS
            convs.append(GATConv(before, after // heads, heads=heads))
    return FullGraphModel(convs, torch.tanh if name == "commnet" else torch.relu)
