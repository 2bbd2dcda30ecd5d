"""GraphSAGE: the mean (or maximum, or sum) of in-neighbours and the vertex itself, each through a linear map.

Source: Hamilton et al., Inductive Representation Learning on Large Graphs, NeurIPS 2017
(https://arxiv.org/abs/1706.02216).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from core_kernels import vertex
from core_kernels.errors import argument_error
from core_kernels.graph import Graph
from core_kernels.nn.init import linear

__all__ = ["SAGEConv"]


@vertex.program
def sage_mean(v):
    """Mean of in-neighbours."""
    return vertex.mean(e.src.h for e in v.in_edges)


@vertex.program
def sage_max(v):
    """Maximum of in-neighbours."""
    return vertex.max(e.src.h for e in v.in_edges)


@vertex.program
def sage_min(v):
    """Minimum of in-neighbours."""
    return vertex.min(e.src.h for e in v.in_edges)


@vertex.program
def sage_sum(v):
    """Sum of in-neighbours."""
    return vertex.sum(e.src.h for e in v.in_edges)


_PROGRAMS = {"mean": sage_mean, "max": sage_max, "min": sage_min, "sum": sage_sum, "add": sage_sum}


class SAGEConv(nn.Module):
    """GraphSAGE layer; parameters and state-dict keys are those of ``torch_geometric.nn.SAGEConv``.

    Args:
        in_channels: Width of the input; a pair for sources and destinations of unequal widths.
        out_channels: Width of the output.
        aggr: ``mean``, ``max``, ``min``, ``sum`` (or ``add``).
        normalize: Scale rows of the output to length one.
        root_weight: Add the vertex itself, through its own linear map.
        project: Send sources through a linear map and ReLU first.
        bias: Add a bias.

    >>> import torch
    >>> graph = Graph.from_edge_index(torch.tensor([[0, 1, 2], [1, 2, 0]]))
    >>> SAGEConv(4, 8)(graph, torch.ones(3, 4)).shape
    torch.Size([3, 8])
    """

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        aggr: str = "mean",
        normalize: bool = False,
        root_weight: bool = True,
        project: bool = False,
        bias: bool = True,
    ):
        super().__init__()
        if aggr not in _PROGRAMS:
            raise argument_error("aggr", aggr, f"one of {', '.join(_PROGRAMS)}", "write a vertex.program for others")
        source_width, own_width = (in_channels, in_channels) if isinstance(in_channels, int) else in_channels
        self.in_channels, self.out_channels = in_channels, out_channels
        self.aggr, self.normalize, self.root_weight, self.project = aggr, normalize, root_weight, project
        self.program = _PROGRAMS[aggr]
        if project:
            self.lin = linear(source_width, source_width, bias=True)
        self.lin_l = linear(source_width, out_channels, bias=bias)
        if root_weight:
            self.lin_r = linear(own_width, out_channels)

    def forward(self, graph: Graph, x: Tensor | tuple[Tensor, Tensor], edge_weight: None = None) -> Tensor:
        """Return the new features.

        Args:
            graph: A graph or block.
            x: [num_src, in_channels]; or a pair for sources and destinations.
            edge_weight: Must be None: GraphSAGE has no edge weights.

        Returns:
            [num_dst, out_channels].
        """
        if edge_weight is not None:
            raise argument_error("edge_weight", type(edge_weight), "None", "use GCNConv or a vertex.program")
        source, own = x if isinstance(x, tuple) else (x, x[: graph.num_dst])
        if self.project:
            source = self.lin(source).relu()
        if self.aggr in ("mean", "sum", "add") and self.lin_l.in_features > self.out_channels:
            # The map is linear, so it may come first; then fewer columns are gathered.
            out = self.program(graph, src={"h": F.linear(source, self.lin_l.weight)})
            out = out if self.lin_l.bias is None else out + self.lin_l.bias
        else:
            out = self.lin_l(self.program(graph, src={"h": source}))
        if self.root_weight:
            own_map = self.lin_r.weight.t()
            # In place, the sum costs no pass over the result; under autocast the dtypes may differ.
            in_place = out.dtype == own.dtype == own_map.dtype
            out = out.addmm_(own, own_map) if in_place else out + self.lin_r(own)
        return F.normalize(out, p=2.0, dim=-1) if self.normalize else out

    def extra_repr(self) -> str:
        """Return widths and aggregation."""
        return f"{self.in_channels}, {self.out_channels}, aggr={self.aggr}"
