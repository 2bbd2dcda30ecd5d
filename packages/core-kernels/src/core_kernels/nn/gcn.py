"""Graph convolution with symmetric normalisation, and the personalised propagation built on it.

``out_i = d_i^-1/2 * sum_j w_ji * d_j^-1/2 * h_j`` over in-neighbours and the vertex itself, ``d`` being the weighted
in-degree with the self-loop counted. The normalisation is two vectors, never one number per edge.

On a block, degrees are those of the full graph, so results equal the full graph's: the block's
``global_source_in_degrees``, or, where it does not know them, ``global_out_degrees``, which is the same for graphs with
every edge in both directions. A block cannot tell the degrees of vertices that had self-loops of their own, nor
weighted ones; then pass ``degrees``: :func:`weighted_degrees` of the full graph at ``src_ids``.

Sources: Kipf and Welling, Semi-Supervised Classification with Graph Convolutional Networks, ICLR 2017
(https://arxiv.org/abs/1609.02907); Gasteiger et al., Predict then Propagate, ICLR 2019
(https://arxiv.org/abs/1810.05997).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core_kernels import vertex
from core_kernels.errors import ArgumentError, ArgumentTypeError, argument_error
from core_kernels.graph import Block, Graph
from core_kernels.graph.tracing import kept
from core_kernels.nn.init import linear
from core_kernels.nn.self_loops import replace_self_loops

__all__ = ["APPNP", "GCNConv", "weighted_degrees"]


@vertex.program
def gcn(v):
    """Sum of in-neighbours, normalised at both ends."""
    return v.norm * vertex.sum(e.src.norm * e.src.h for e in v.in_edges)


@vertex.program
def weighted_gcn(v):
    """The same with edge weights."""
    return v.norm * vertex.sum(e.weight * e.src.norm * e.src.h for e in v.in_edges)


@vertex.program
def weighted_sum(v):
    """Weighted sum of in-neighbours."""
    return vertex.sum(e.weight * e.src.h for e in v.in_edges)


@vertex.program
def plain_sum(v):
    """Sum of in-neighbours."""
    return vertex.sum(e.src.h for e in v.in_edges)


def weighted_degrees(
    graph: Graph, edge_weight: Tensor | None = None, add_self_loops: bool = True, fill_value: float = 1.0
) -> Tensor:
    """Return the in-degree of every destination as graph convolution counts it.

    Args:
        graph: The full graph.
        edge_weight: [num_edges] in the order of edge ids; None: all ones.
        add_self_loops: Count one self-loop per vertex instead of those the graph has; a vertex that had some keeps the
            weight of its last one.
        fill_value: Weight of new self-loops, used when there are edge weights.

    Returns:
        [num_dst], dtype of the weights, float32 without.

    >>> weighted_degrees(Graph.from_edge_index(torch.tensor([[0, 1], [1, 1]]), 2))
    tensor([1., 2.])
    """
    if edge_weight is None:
        if not add_self_loops:
            return graph.in_degrees().float()
        return replace_self_loops(graph).graph.in_degrees().float()
    _check_weight(graph, edge_weight)
    if not add_self_loops:
        _, rows = graph.coo()
        values = graph.to_positions(edge_weight)
        return values.new_zeros(graph.num_dst).index_add(0, rows.long(), values)
    looped = replace_self_loops(graph)
    values = looped.edge_values(edge_weight, _loop_weights(graph, edge_weight, fill_value))
    _, rows = looped.graph.coo()
    return values.new_zeros(graph.num_dst).index_add(0, rows.long(), values)


def _check_weight(graph: Graph, edge_weight: Tensor) -> None:
    if not isinstance(edge_weight, Tensor) or not edge_weight.dtype.is_floating_point:
        found = edge_weight.dtype if isinstance(edge_weight, Tensor) else type(edge_weight).__name__
        raise ArgumentTypeError(
            f"edge_weight is {found}; expected a floating-point tensor; convert it with edge_weight.to(x.dtype)"
        )
    if tuple(edge_weight.shape) != (graph.num_edges,):
        shape, expected = tuple(edge_weight.shape), f"({graph.num_edges},) because num_edges={graph.num_edges}"
        raise argument_error("edge_weight.shape", shape, expected, "pass one number for each edge of this graph")


def _loop_weights(graph: Graph, edge_weight: Tensor, fill_value: float) -> Tensor:
    """Return the weight of each vertex's self-loop: that of the last one it had, else ``fill_value``."""
    old = replace_self_loops(graph).old_loops
    weights = edge_weight.new_full((graph.num_dst,), fill_value)
    if old.numel() == 0:
        return weights
    ends = graph.edge_index()[0][old]
    last = torch.full((graph.num_dst,), -1, dtype=torch.int64, device=old.device)
    last = last.scatter_reduce(0, ends, old, "amax")
    has = (last >= 0).nonzero().squeeze(1)
    return weights.index_put((has,), edge_weight[last[has]])


def _inverse_sqrt(degrees: Tensor) -> Tensor:
    inverse = degrees.pow(-0.5)
    return inverse.masked_fill(inverse == float("inf"), 0.0)


def _block_degrees(block: Block, add_self_loops: bool) -> Tensor:
    degrees = block.global_source_in_degrees
    if degrees is None and block.global_out_degrees is not None:
        degrees = block.global_out_degrees
        if block.global_in_degrees is not None:
            degrees = torch.cat([block.global_in_degrees, degrees[block.num_dst :]])
    if degrees is None:
        raise ArgumentError(
            "the block knows no degrees of its sources; expected those of the full graph for its normalisation; "
            "pass degrees=weighted_degrees(graph)[block.src_ids]"
        )
    if add_self_loops and replace_self_loops(block).old_loops.numel():
        raise ArgumentError(
            f"the block has {replace_self_loops(block).old_loops.numel()} self-loops, so the degrees it carries count "
            "loops that this layer replaces; expected a graph without them; pass "
            "degrees=weighted_degrees(graph)[block.src_ids]"
        )
    return degrees.float() + 1.0 if add_self_loops else degrees.float()


class _Normalised(nn.Module):
    """Propagation with or without normalisation, shared by the two layers."""

    normalize: bool
    add_self_loops: bool
    fill_value: float = 1.0

    def propagate(self, graph: Graph, h: Tensor, edge_weight: Tensor | None, degrees: Tensor | None) -> Tensor:
        """Return the (normalised) sum over in-neighbours."""
        if edge_weight is not None:
            _check_weight(graph, edge_weight)
        if not self.normalize:
            if edge_weight is None:
                return plain_sum(graph, src={"h": h})
            return weighted_sum(graph, src={"h": h}, edge={"weight": edge_weight.unsqueeze(-1)})
        norm = self._norms(graph, edge_weight, degrees, h.dtype)
        target = graph
        if self.add_self_loops:
            looped = replace_self_loops(graph)
            target = looped.graph
            if edge_weight is not None:
                edge_weight = looped.edge_values(edge_weight, _loop_weights(graph, edge_weight, self.fill_value))
        src, dst = {"norm": norm, "h": h}, {"norm": norm[: graph.num_dst]}
        if edge_weight is None:
            return gcn(target, src=src, dst=dst)
        return weighted_gcn(target, src=src, dst=dst, edge={"weight": edge_weight.unsqueeze(-1)})

    def _norms(self, graph: Graph, edge_weight: Tensor | None, degrees: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return ``d^-1/2`` of every source, [num_src, 1]; kept on the graph when there are no weights."""
        if degrees is not None:
            return _inverse_sqrt(degrees.to(dtype)).unsqueeze(-1)
        if edge_weight is not None:
            if isinstance(graph, Block):
                raise ArgumentError(
                    "weighted degrees of a block are unknown; expected those of the full graph; pass "
                    "degrees=weighted_degrees(graph, edge_weight)[block.src_ids]"
                )
            found = weighted_degrees(graph, edge_weight, self.add_self_loops, self.fill_value)
            return _inverse_sqrt(found).unsqueeze(-1)

        return kept(_unweighted_norms, graph, self.add_self_loops, dtype)


def _unweighted_norms(graph: Graph, add_self_loops: bool, dtype: torch.dtype) -> Tensor:
    def compute() -> Tensor:
        if isinstance(graph, Block):
            found = _block_degrees(graph, add_self_loops)
        else:
            found = weighted_degrees(graph, None, add_self_loops)
        return _inverse_sqrt(found.to(dtype)).unsqueeze(-1)

    return graph._once(f"gcn_norm {add_self_loops} {dtype}", compute)


class GCNConv(_Normalised):
    """Graph convolution; parameters and state-dict keys are those of ``torch_geometric.nn.GCNConv``.

    Args:
        in_channels: Width of the input.
        out_channels: Width of the output.
        improved: New self-loops weigh 2 instead of 1; as in PyTorch Geometric, only where edge weights are given.
        cached: Accepted for compatibility; normalisation without weights is always kept on the graph.
        add_self_loops: Give each vertex one self-loop; None: as ``normalize``.
        normalize: Apply the symmetric normalisation.
        bias: Add a bias.

    >>> graph = Graph.from_edge_index(torch.tensor([[0, 1, 2], [1, 2, 0]]))
    >>> GCNConv(4, 8)(graph, torch.ones(3, 4)).shape
    torch.Size([3, 8])
    """

    program = gcn

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        improved: bool = False,
        cached: bool = False,
        add_self_loops: bool | None = None,
        normalize: bool = True,
        bias: bool = True,
    ):
        super().__init__()
        self.in_channels, self.out_channels = in_channels, out_channels
        self.improved, self.cached, self.normalize = improved, cached, normalize
        self.add_self_loops = normalize if add_self_loops is None else add_self_loops
        if self.add_self_loops and not normalize:
            raise ArgumentError("add_self_loops=True needs normalize=True; expected both or none; change one of them")
        self.fill_value = 2.0 if improved else 1.0
        self.lin = linear(in_channels, out_channels, glorot=True)
        self.bias = nn.Parameter(torch.zeros(out_channels)) if bias else None

    def forward(
        self, graph: Graph, x: Tensor, edge_weight: Tensor | None = None, degrees: Tensor | None = None
    ) -> Tensor:
        """Return the new features.

        Args:
            graph: A graph or block.
            x: [num_src, in_channels].
            edge_weight: [num_edges] in the order of edge ids.
            degrees: [num_src] weighted in-degrees in the full graph (:func:`weighted_degrees`), for blocks.

        Returns:
            [num_dst, out_channels].
        """
        # Propagation is linear: it runs at the smaller of the two widths, and first where they are equal, which spares
        # its gradient when x wants none.
        if self.in_channels <= self.out_channels:
            return F.linear(self.propagate(graph, x, edge_weight, degrees), self.lin.weight, self.bias)
        out = self.propagate(graph, self.lin(x), edge_weight, degrees)
        return out if self.bias is None else out + self.bias

    def extra_repr(self) -> str:
        """Return the widths."""
        return f"{self.in_channels}, {self.out_channels}"


class APPNP(_Normalised):
    """Personalised propagation: ``x <- (1 - alpha) * propagate(x) + alpha * x0``, ``K`` times; it has no parameters.

    Args:
        K: Number of steps.
        alpha: Probability of returning to the start.
        dropout: Share of edges dropped at each step in training.
        cached: Accepted for compatibility.
        add_self_loops: Give each vertex one self-loop.
        normalize: Apply the symmetric normalisation of :class:`GCNConv`.
    """

    program = gcn

    def __init__(
        self,
        K: int,
        alpha: float,
        dropout: float = 0.0,
        cached: bool = False,
        add_self_loops: bool = True,
        normalize: bool = True,
    ):
        super().__init__()
        self.K, self.alpha, self.dropout, self.cached = K, alpha, dropout, cached
        self.normalize, self.add_self_loops = normalize, add_self_loops and normalize

    def forward(
        self, graph: Graph, x: Tensor, edge_weight: Tensor | None = None, degrees: Tensor | None = None
    ) -> Tensor:
        """Return the propagated features [num_nodes, features] of a square graph; arguments as :class:`GCNConv`."""
        start = x
        for _ in range(self.K):
            weight = edge_weight
            if self.dropout > 0 and self.training:
                # Dropped edges keep their part in the degrees: normalisation precedes dropout.
                degrees = weighted_degrees(graph, edge_weight, self.add_self_loops) if degrees is None else degrees
                x = self._propagate_dropped(graph, x, weight, degrees)
            else:
                x = self.propagate(graph, x, weight, degrees)
            x = x * (1 - self.alpha) + self.alpha * start
        return x

    def _propagate_dropped(self, graph: Graph, x: Tensor, edge_weight: Tensor | None, degrees: Tensor) -> Tensor:
        target, weight = graph, x.new_ones(graph.num_edges) if edge_weight is None else edge_weight
        if self.add_self_loops:
            looped = replace_self_loops(graph)
            target, weight = looped.graph, looped.edge_values(weight, _loop_weights(graph, weight, 1.0))
        weight = F.dropout(weight, self.dropout).unsqueeze(-1)
        if not self.normalize:
            return weighted_sum(target, src={"h": x}, edge={"weight": weight})
        norm = _inverse_sqrt(degrees.to(x.dtype)).unsqueeze(-1)
        src, dst = {"norm": norm, "h": x}, {"norm": norm[: graph.num_dst]}
        return weighted_gcn(target, src=src, dst=dst, edge={"weight": weight})

    def extra_repr(self) -> str:
        """Return steps and return probability."""
        return f"K={self.K}, alpha={self.alpha}"
