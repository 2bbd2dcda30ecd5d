"""The graph whose self-loops are replaced by exactly one per destination, computed once a graph.

GCN and attention layers see every vertex as its own neighbour. Replacing is the same for both: every edge from a vertex
to itself goes, one comes, behind the other edges of its row. What differs is the value the new edge carries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from core_kernels.errors import argument_error
from core_kernels.graph import Graph
from core_kernels.graph.tracing import before_tracing, kept

__all__ = ["LoopedGraph", "replace_self_loops"]


@dataclass(frozen=True)
class LoopedGraph:
    """A graph with one self-loop per destination.

    Attributes:
        graph: The new graph; its edge ids are positions.
        origin: int64 [new edges], for each edge its id in the old graph, or, for the loop of destination ``i``, the
            number of old edges plus ``i``.
        old_loops: int64, edge ids of the self-loops that were replaced, ascending.
    """

    graph: Graph
    origin: Tensor
    old_loops: Tensor

    def edge_values(self, values: Tensor, loop_values: Tensor) -> Tensor:
        """Return edge values of the new graph from those of the old one and one value per destination.

        Raises:
            ArgumentError: There is not one value for each edge of the old graph.
        """
        num_edges = self.origin.shape[0] - self.graph.num_dst + self.old_loops.shape[0]
        if values.shape[0] != num_edges:
            raise argument_error(
                "edge values", tuple(values.shape), f"({num_edges}, ...), one row per edge", "check the graph"
            )
        return torch.cat([values, loop_values]).index_select(0, self.origin)


def replace_self_loops(graph: Graph) -> LoopedGraph:
    """Return the graph with exactly one self-loop per destination, kept on ``graph`` for the next call.

    Args:
        graph: A square graph, or a block (destination ``i`` is source ``i``).

    Raises:
        ArgumentError: There are fewer sources than destinations, so some vertex is not its own source.
    """
    return kept(_replace_once, graph)


def _replace_once(graph: Graph) -> LoopedGraph:
    return graph._once("replaced_self_loops", lambda: _replace(graph))


@before_tracing
def _prepare_self_loops(graph: Graph) -> None:
    if graph.num_src >= graph.num_dst:
        _replace_once(graph)


def _replace(graph: Graph) -> LoopedGraph:
    num_dst, num_edges = graph.num_dst, graph.num_edges
    if graph.num_src < num_dst:
        raise argument_error(
            "graph", graph, f"num_src of at least num_dst={num_dst} for self-loops", "pass add_self_loops=False"
        )
    device = graph.device
    sources, rows = graph.coo()
    rows = rows.long()
    ids = torch.arange(num_edges, device=device) if graph.edge_ids is None else graph.edge_ids
    is_loop = sources == rows
    old_loops = ids[is_loop].sort().values
    if old_loops.numel():
        kept = (~is_loop).nonzero().squeeze(1)
        sources, rows, ids = sources[kept], rows[kept], ids[kept]
    # Every row before this one has gained one edge, so an edge moves back by the number of its row.
    positions = torch.arange(sources.shape[0], device=device) + rows
    counts = torch.bincount(rows, minlength=num_dst) + 1
    indptr = torch.zeros(num_dst + 1, dtype=torch.int64, device=device)
    torch.cumsum(counts, 0, out=indptr[1:])
    vertices = torch.arange(num_dst, device=device)
    indices = torch.empty(sources.shape[0] + num_dst, dtype=sources.dtype, device=device)
    origin = torch.empty(indices.shape[0], dtype=torch.int64, device=device)
    indices[positions], origin[positions] = sources, ids
    loops = indptr[1:] - 1
    indices[loops], origin[loops] = vertices.to(indices.dtype), vertices + num_edges
    return LoopedGraph(Graph(indptr, indices, graph.num_src, None, validate=False), origin, old_loops)
