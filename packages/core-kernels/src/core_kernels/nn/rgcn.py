"""Relational graph convolution: one mean (or sum, or maximum) per edge type, each through its own linear map.

The edges of each type are a graph of their own, cut out once and kept on the graph while the same types are passed.

Source: Schlichtkrull et al., Modeling Relational Data with Graph Convolutional Networks, ESWC 2018
(https://arxiv.org/abs/1703.06103).
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from core_kernels import vertex
from core_kernels.errors import ArgumentError, argument_error
from core_kernels.graph import Graph
from core_kernels.graph.tracing import prepare_for_tracing
from core_kernels.nn.init import glorot_
from core_kernels.nn.sage import sage_max, sage_mean, sage_min, sage_sum

__all__ = ["RGCNConv", "split_by_type"]

_PROGRAMS: dict[str, vertex.VertexProgram] = {
    "mean": sage_mean,
    "sum": sage_sum,
    "add": sage_sum,
    "max": sage_max,
    "min": sage_min,
}


def split_by_type(graph: Graph, edge_type: Tensor, num_relations: int) -> list[Graph]:
    """Return one graph per edge type, with all vertices; kept on ``graph`` while ``edge_type`` is the same tensor.

    A traced model (``torch.compile``, ``torch.export``) keeps the split of the types it was traced with, and fails when
    it is run with others.

    Args:
        graph: A graph or block.
        edge_type: int64 [num_edges] in the order of edge ids, in [0, num_relations).
        num_relations: Number of edge types.

    Raises:
        ArgumentError: A type is out of range, or a trace knows the types by shape only.
    """
    if torch.compiler.is_compiling():
        traced_types, graphs = getattr(graph, _split_for_trace(graph, edge_type, num_relations))
        torch._assert_async((edge_type == traced_types).all(), "edge_type differs from what the model was traced with")
        return graphs
    cached = graph._cache.get("edge_types")
    version = None if edge_type.is_inference() else edge_type._version
    if cached is not None and cached[0] is edge_type and cached[1:3] == (version, num_relations):
        return cached[3]
    with torch.inference_mode(False):  # later calls may want gradients
        graphs = _split(graph, edge_type, num_relations)
    graph._cache["edge_types"] = (edge_type, version, num_relations, graphs)
    return graphs


@torch._dynamo.assume_constant_result
def _split_for_trace(graph: Graph, edge_type: Tensor, num_relations: int) -> str:
    """Split the real arrays; return the name of a new attribute of ``graph`` that holds the types and their graphs.

    A new attribute, because a trace does not see what is added to something it has looked at before.
    """
    if isinstance(edge_type, FakeTensor):
        raise ArgumentError(
            "edge_type is an input of the exported model, of which only the shape is known; expected a tensor with "
            "values, which decide what is computed; make it an attribute of the model"
        )
    with _disable_current_modes():
        content = hashlib.blake2b(edge_type.cpu().numpy().tobytes(), digest_size=8).hexdigest()
        name = f"_edges_of_{num_relations}_types_{content}"
        if not hasattr(graph, name):
            graphs = _split(graph, edge_type, num_relations)
            for one in graphs:
                prepare_for_tracing(one)
            setattr(graph, name, (edge_type.clone(), graphs))
        return name


def _split(graph: Graph, edge_type: Tensor, num_relations: int) -> list[Graph]:
    if edge_type.numel() and not 0 <= int(edge_type.min()) <= int(edge_type.max()) < num_relations:
        lowest, highest = int(edge_type.min()), int(edge_type.max())
        raise argument_error("edge_type", (lowest, highest), f"values in [0, {num_relations})", "raise num_relations")
    types = graph.to_positions(edge_type)
    sources, rows = graph.coo()
    graphs = []
    for relation in range(num_relations):
        chosen = (types == relation).nonzero().squeeze(1)
        indptr = torch.zeros(graph.num_dst + 1, dtype=torch.int64, device=graph.device)
        torch.cumsum(torch.bincount(rows[chosen], minlength=graph.num_dst), 0, out=indptr[1:])
        graphs.append(Graph(indptr, sources[chosen], graph.num_src, None, validate=False))
    return graphs


class RGCNConv(nn.Module):
    """Relational graph convolution; parameters and keys are those of ``torch_geometric.nn.RGCNConv``.

    Args:
        in_channels: Width of the input.
        out_channels: Width of the output.
        num_relations: Number of edge types.
        num_bases: Share this many weight matrices among types; None for one of each.
        num_blocks: Make weight matrices block-diagonal with this many blocks.
        aggr: ``mean``, ``sum`` (or ``add``), ``max``, ``min``.
        root_weight: Add the vertex itself.
        is_sorted: Accepted for compatibility.
        bias: Add a bias.

    >>> graph = Graph.from_edge_index(torch.tensor([[0, 1, 2], [1, 2, 0]]))
    >>> RGCNConv(4, 8, num_relations=2)(graph, torch.ones(3, 4), torch.tensor([0, 1, 0])).shape
    torch.Size([3, 8])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        num_relations: int,
        num_bases: int | None = None,
        num_blocks: int | None = None,
        aggr: str = "mean",
        root_weight: bool = True,
        is_sorted: bool = False,
        bias: bool = True,
    ):
        super().__init__()
        if aggr not in _PROGRAMS:
            raise argument_error("aggr", aggr, f"one of {', '.join(_PROGRAMS)}", "choose one of them")
        if num_bases is not None and num_blocks is not None:
            raise argument_error("num_blocks", num_blocks, "None beside num_bases", "use one decomposition")
        if num_blocks is not None and (in_channels % num_blocks or out_channels % num_blocks):
            raise argument_error(
                "num_blocks", num_blocks, f"a divisor of {in_channels} and {out_channels}", "change it"
            )
        self.in_channels, self.out_channels, self.num_relations = in_channels, out_channels, num_relations
        self.num_bases, self.num_blocks, self.aggr, self.is_sorted = num_bases, num_blocks, aggr, is_sorted
        self.program = _PROGRAMS[aggr]
        if num_blocks is not None:
            shape = (num_relations, num_blocks, in_channels // num_blocks, out_channels // num_blocks)
        else:
            shape = (num_relations if num_bases is None else num_bases, in_channels, out_channels)
        self.weight = nn.Parameter(torch.empty(shape))
        self.comp = None if num_bases is None else nn.Parameter(torch.empty(num_relations, num_bases))
        self.root = nn.Parameter(torch.empty(in_channels, out_channels)) if root_weight else None
        self.bias = nn.Parameter(torch.zeros(out_channels)) if bias else None
        for parameter in (self.weight, self.comp, self.root):
            glorot_(parameter)

    def forward(self, graph: Graph, x: Tensor, edge_type: Tensor) -> Tensor:
        """Return the new features.

        Args:
            graph: A graph or block.
            x: [num_src, in_channels].
            edge_type: int64 [num_edges] in the order of edge ids.

        Returns:
            [num_dst, out_channels].
        """
        weight = self.weight
        if self.comp is not None:
            weight = torch.einsum("rb,bio->rio", self.comp, weight)
        out = None
        for relation, edges in enumerate(split_by_type(graph, edge_type, self.num_relations)):
            if edges.num_edges == 0:
                continue
            part = self._transform(self.program(edges, src={"h": x}), weight[relation])
            out = part if out is None else out + part
        if self.root is not None:
            own = x[: graph.num_dst] @ self.root
            out = own if out is None else out + own
        if out is None:
            out = x.new_zeros(graph.num_dst, self.out_channels)
        return out if self.bias is None else out + self.bias

    def _transform(self, h: Tensor, weight: Tensor) -> Tensor:
        if self.num_blocks is None:
            return h @ weight
        blocks = h.view(-1, weight.shape[0], weight.shape[1])
        return torch.einsum("nbi,bio->nbo", blocks, weight).reshape(-1, self.out_channels)

    def extra_repr(self) -> str:
        """Return widths and number of edge types."""
        return f"{self.in_channels}, {self.out_channels}, num_relations={self.num_relations}"
