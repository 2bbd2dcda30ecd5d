"""Graph attention, first and second version.

The two programs below are the layers; the classes add linear maps, self-loops, edge features and dropout. Edge
features enter as one number per edge and head (first version) or one row per edge (second version, whose score is not
linear in them).

Sources: Velickovic et al., Graph Attention Networks, ICLR 2018 (https://arxiv.org/abs/1710.10903); Brody et al., How
Attentive are Graph Attention Networks?, ICLR 2022 (https://arxiv.org/abs/2105.14491).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core_kernels import vertex
from core_kernels.errors import argument_error
from core_kernels.graph import Graph
from core_kernels.nn.init import glorot_, linear
from core_kernels.nn.self_loops import LoopedGraph, replace_self_loops

__all__ = ["GATConv", "GATv2Conv"]


@vertex.program
def gat(v, *, slope=0.2):
    """Sum of in-neighbours, weighted by attention."""
    alpha = vertex.softmax(vertex.leaky_relu(e.src.score + v.score, slope) for e in v.in_edges)
    return vertex.sum(a * e.src.h for a, e in zip(alpha, v.in_edges, strict=True))


@vertex.program
def gat_with_edges(v, *, slope=0.2):
    """The same, with a score of the edge and a factor on its attention (dropout)."""
    alpha = vertex.softmax(vertex.leaky_relu(e.src.score + v.score + e.score, slope) for e in v.in_edges)
    return vertex.sum(a * e.keep * e.src.h for a, e in zip(alpha, v.in_edges, strict=True))


@vertex.program
def gatv2(v, att, *, slope=0.2):
    """Sum of in-neighbours, weighted by attention that is not linear in either end."""
    alpha = vertex.softmax(vertex.dot(att, vertex.leaky_relu(e.src.h + v.query, slope)) for e in v.in_edges)
    return vertex.sum(a * e.src.h for a, e in zip(alpha, v.in_edges, strict=True))


@vertex.program
def gatv2_with_edges(v, att, *, slope=0.2):
    """The same, with a row per edge and a factor on its attention (dropout)."""
    alpha = vertex.softmax(vertex.dot(att, vertex.leaky_relu(e.src.h + v.query + e.h, slope)) for e in v.in_edges)
    return vertex.sum(a * e.keep * e.src.h for a, e in zip(alpha, v.in_edges, strict=True))


class _Attention(nn.Module):
    """What both versions share: sizes, self-loops, edge features, output."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        heads: int,
        concat: bool,
        negative_slope: float,
        dropout: float,
        add_self_loops: bool,
        edge_dim: int | None,
        fill_value: float | Tensor | str,
        bias: bool,
        residual: bool,
    ):
        super().__init__()
        self.in_channels, self.out_channels, self.heads, self.concat = in_channels, out_channels, heads, concat
        self.negative_slope, self.dropout, self.add_self_loops = negative_slope, dropout, add_self_loops
        self.edge_dim, self.fill_value = edge_dim, fill_value
        self.lin_edge = None if edge_dim is None else linear(edge_dim, heads * out_channels, glorot=True)
        width = heads * out_channels if concat else out_channels
        self.res = linear(in_channels, width, glorot=True) if residual else None
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def _looped(self, graph: Graph, edge_attr: Tensor | None) -> tuple[Graph, Tensor | None]:
        """Return graph and edge features after self-loops were replaced."""
        if edge_attr is not None and edge_attr.dim() == 1:
            edge_attr = edge_attr.unsqueeze(-1)
        if not self.add_self_loops:
            return graph, edge_attr
        looped = replace_self_loops(graph)
        if edge_attr is None:
            return looped.graph, None
        return looped.graph, looped.edge_values(edge_attr, _fill(looped, edge_attr, self.fill_value))

    def _keep(self, graph: Graph, like: Tensor) -> Tensor | None:
        """Return the factors of attention dropout, [num_edges, heads, 1], or None when there is none."""
        if not (self.training and self.dropout > 0):
            return None
        return F.dropout(like.new_ones(graph.num_edges, self.heads, 1), self.dropout)

    def _finish(self, out: Tensor, x: Tensor) -> Tensor:
        """Join or average heads; add residual and bias."""
        out = out.flatten(1) if self.concat else out.mean(1)
        if self.res is not None:
            out = out + self.res(x[: out.shape[0]])
        return out if self.bias is None else out + self.bias

    def _check(self, edge_attr: Tensor | None) -> None:
        if edge_attr is not None and self.lin_edge is None:
            raise argument_error(
                "edge_attr", tuple(edge_attr.shape), "None for a layer with edge_dim=None", "set edge_dim"
            )

    def extra_repr(self) -> str:
        """Return widths and heads."""
        return f"{self.in_channels}, {self.out_channels}, heads={self.heads}"


def _with_slope(program: vertex.VertexProgram, slope: float) -> vertex.VertexProgram:
    """Return the program for a slope of its leaky ReLU; the usual one is shared by all layers."""
    return program if slope == 0.2 else program.bind(slope=slope)


def _fill(looped: LoopedGraph, edge_attr: Tensor, fill_value: float | Tensor | str) -> Tensor:
    """Return the features of the new self-loops, [num_dst, edge_dim]."""
    num_dst = looped.graph.num_dst
    if not isinstance(fill_value, str):
        fill = torch.as_tensor(fill_value, dtype=edge_attr.dtype, device=edge_attr.device)
        return fill.expand(num_dst, edge_attr.shape[1])
    is_old = looped.origin < edge_attr.shape[0]
    _, rows = looped.graph.coo()
    rows, values = rows[is_old].long(), edge_attr[looped.origin[is_old]]
    if fill_value in ("mean", "add", "sum"):
        total = values.new_zeros(num_dst, values.shape[1]).index_add(0, rows, values)
        counts = (looped.graph.in_degrees() - 1).clamp(min=1).to(values.dtype)
        return total / counts.unsqueeze(-1) if fill_value == "mean" else total
    names = {"max": "amax", "min": "amin", "mul": "prod"}
    if fill_value not in names:
        raise argument_error("fill_value", fill_value, "a number, tensor, mean, add, max, min or mul", "choose one")
    start = (
        values.new_ones(num_dst, values.shape[1]) if fill_value == "mul" else values.new_zeros(num_dst, values.shape[1])
    )
    index = rows.unsqueeze(-1).expand_as(values)
    return start.scatter_reduce(0, index, values, names[fill_value], include_self=fill_value == "mul")


class GATConv(_Attention):
    """Graph attention; parameters and state-dict keys are those of ``torch_geometric.nn.GATConv``.

    Args:
        in_channels: Width of the input.
        out_channels: Width of the output per head.
        heads: Number of heads.
        concat: Join heads; else average them.
        negative_slope: Slope of the leaky ReLU.
        dropout: Share of attention dropped in training.
        add_self_loops: Replace self-loops by one per vertex.
        edge_dim: Width of edge features, None for none.
        fill_value: Edge features of self-loops: a number or tensor, or ``mean``, ``add``, ``max``, ``min``, ``mul`` of
            the vertex's in-edges.
        bias: Add a bias.
        residual: Add a linear map of the vertex itself.

    >>> graph = Graph.from_edge_index(torch.tensor([[0, 1, 2], [1, 2, 0]]))
    >>> GATConv(4, 8, heads=2)(graph, torch.ones(3, 4)).shape
    torch.Size([3, 16])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        heads: int = 1,
        concat: bool = True,
        negative_slope: float = 0.2,
        dropout: float = 0.0,
        add_self_loops: bool = True,
        edge_dim: int | None = None,
        fill_value: float | Tensor | str = "mean",
        bias: bool = True,
        residual: bool = False,
    ):
        super().__init__(
            in_channels, out_channels, heads, concat, negative_slope, dropout, add_self_loops, edge_dim, fill_value,
            bias, residual,
        )  # fmt: skip
        self.lin = linear(in_channels, heads * out_channels, glorot=True)
        self.att_src = nn.Parameter(torch.empty(1, heads, out_channels))
        glorot_(self.att_src)
        self.att_dst = nn.Parameter(torch.empty(1, heads, out_channels))
        glorot_(self.att_dst)
        if edge_dim is not None:
            self.att_edge = nn.Parameter(torch.empty(1, heads, out_channels))
            glorot_(self.att_edge)
        self.program = _with_slope(gat, negative_slope)
        self._program_with_edges = _with_slope(gat_with_edges, negative_slope)

    def _scores(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores of each vertex as source and as destination, [num_src, heads, 1].

        A score is linear in ``h``, which is linear in ``x``; multiplying the two maps first leaves one narrow product.
        """
        weight = self.lin.weight.view(self.heads, self.out_channels, -1)
        maps = [torch.einsum("hci,hc->hi", weight, att[0]) for att in (self.att_src, self.att_dst)]
        source, own = F.linear(x, torch.cat(maps)).unsqueeze(-1).split(self.heads, dim=1)
        return source, own

    def forward(self, graph: Graph, x: Tensor, edge_attr: Tensor | None = None) -> Tensor:
        """Return the new features.

        Args:
            graph: A graph or block.
            x: [num_src, in_channels].
            edge_attr: [num_edges, edge_dim] in the order of edge ids.

        Returns:
            [num_dst, heads * out_channels], or [num_dst, out_channels] when heads are averaged.
        """
        self._check(edge_attr)
        graph, edge_attr = self._looped(graph, edge_attr)
        h = self.lin(x).view(-1, self.heads, self.out_channels)
        score, own_score = self._scores(x)
        keep = self._keep(graph, h)
        src, dst = {"score": score, "h": h}, {"score": own_score[: graph.num_dst]}
        if edge_attr is None and keep is None:
            return self._finish(self.program(graph, src=src, dst=dst), x)
        edge_score = h.new_zeros(graph.num_edges, self.heads, 1)
        if edge_attr is not None:
            # The score is linear in the edge, so the wide edge row never has to exist.
            weight = self.lin_edge.weight.view(self.heads, self.out_channels, -1)
            edge_score = (edge_attr @ torch.einsum("hce,hc->eh", weight, self.att_edge[0])).unsqueeze(-1)
        keep = h.new_ones(graph.num_edges, 1, 1) if keep is None else keep
        edge = {"score": edge_score, "keep": keep}
        return self._finish(self._program_with_edges(graph, src=src, dst=dst, edge=edge), x)


class GATv2Conv(_Attention):
    """Graph attention, second version; parameters and keys are those of ``torch_geometric.nn.GATv2Conv``.

    Args:
        in_channels: Width of the input.
        out_channels: Width of the output per head.
        heads: Number of heads.
        concat: Join heads; else average them.
        negative_slope: Slope of the leaky ReLU.
        dropout: Share of attention dropped in training.
        add_self_loops: Replace self-loops by one per vertex.
        edge_dim: Width of edge features, None for none.
        fill_value: Edge features of self-loops, see :class:`GATConv`.
        bias: Add biases.
        share_weights: Use one linear map for both ends.
        residual: Add a linear map of the vertex itself.

    >>> graph = Graph.from_edge_index(torch.tensor([[0, 1, 2], [1, 2, 0]]))
    >>> GATv2Conv(4, 8, heads=2, concat=False)(graph, torch.ones(3, 4)).shape
    torch.Size([3, 8])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        heads: int = 1,
        concat: bool = True,
        negative_slope: float = 0.2,
        dropout: float = 0.0,
        add_self_loops: bool = True,
        edge_dim: int | None = None,
        fill_value: float | Tensor | str = "mean",
        bias: bool = True,
        share_weights: bool = False,
        residual: bool = False,
    ):
        super().__init__(
            in_channels, out_channels, heads, concat, negative_slope, dropout, add_self_loops, edge_dim, fill_value,
            bias, residual,
        )  # fmt: skip
        self.share_weights = share_weights
        self.lin_l = linear(in_channels, heads * out_channels, bias=bias, glorot=True)
        self.lin_r = self.lin_l if share_weights else linear(in_channels, heads * out_channels, bias=bias, glorot=True)
        self.att = nn.Parameter(torch.empty(1, heads, out_channels))
        glorot_(self.att)
        self.program = _with_slope(gatv2, negative_slope)
        self._program_with_edges = _with_slope(gatv2_with_edges, negative_slope)

    def forward(self, graph: Graph, x: Tensor, edge_attr: Tensor | None = None) -> Tensor:
        """Return the new features; arguments and result as :class:`GATConv`."""
        self._check(edge_attr)
        graph, edge_attr = self._looped(graph, edge_attr)
        sizes = (-1, self.heads, self.out_channels)
        h = self.lin_l(x).view(sizes)
        query = h[: graph.num_dst] if self.share_weights else self.lin_r(x[: graph.num_dst]).view(sizes)
        keep = self._keep(graph, h)
        src, dst, params = {"h": h}, {"query": query}, {"att": self.att}
        if edge_attr is None and keep is None:
            return self._finish(self.program(graph, src=src, dst=dst, params=params), x)
        edge_rows = h.new_zeros(graph.num_edges, 1, 1)
        if edge_attr is not None:
            assert self.lin_edge is not None  # else the check above has refused
            edge_rows = self.lin_edge(edge_attr).view(sizes)
        keep = h.new_ones(graph.num_edges, 1, 1) if keep is None else keep
        edge = {"h": edge_rows, "keep": keep}
        return self._finish(self._program_with_edges(graph, src=src, dst=dst, edge=edge, params=params), x)
