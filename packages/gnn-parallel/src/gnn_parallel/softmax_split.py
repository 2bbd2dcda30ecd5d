"""Attention layers: GAT and GATv2.

Sources are projected first and weighed by a softmax over in-edges. Executors of partial rows return the log-sum-exp of
their edges per head and the values normalised by it; the destination merges them by log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core_kernels import Graph, ops
from gnn_parallel.layers import Columns, ProjectedSplit, View, VirtualRows

__all__ = ["SoftmaxSplit"]


class SoftmaxSplit(ProjectedSplit):
    """An attention layer ``finish(sum_j softmax_j(score(h_j, query_i)) h_j)`` with ``h = x W + b`` and several heads.

    Args:
        weight: ``[heads * channels, input]`` map of sources.
        bias: Bias of ``h``, or ``None``.
        query_weight: Returns ``[query_width, input]``, the map of destinations (it may depend on parameters).
        query_bias: Returns the bias of queries, or ``None``.
        score: From ``(graph, h, query)`` to logits ``[edges, heads]``.
        finish: From ``(values [rows, heads, channels])`` to result rows.
        heads: Number of heads.
        output_width: Columns after ``finish``.
        query_parameters: Weights ``[*, input]`` that only ``query_weight`` reads.
    """

    algebra = "softmax"

    def __init__(
        self,
        *,
        weight: nn.Parameter,
        bias: Tensor | None,
        query_weight: Callable[[], Tensor],
        query_bias: Callable[[], Tensor | None],
        score: Callable[[Graph, Tensor, Tensor], Tensor],
        finish: Callable[[Tensor], Tensor],
        heads: int,
        query_width: int,
        output_width: int,
        query_parameters: list[nn.Parameter],
    ):
        self.weight, self.bias, self.score, self.finish = weight, bias, score, finish
        self._query_weight, self._query_bias, self._query_width = query_weight, query_bias, query_width
        self._query_parameters = query_parameters
        self.projected_width, self.input_width = weight.shape
        self.heads, self.channels, self.output_width = heads, self.projected_width // heads, output_width
        self.state_width = heads + self.projected_width  # log-sum-exp per head, and values

    @property
    def query_width(self) -> int:
        """Columns that executors of partial rows need from each destination."""
        return self._query_width

    def column_parameters(self) -> list[nn.Parameter]:
        """Return the weights whose columns NFP spreads over ranks."""
        return [self.weight, *self._query_parameters]

    def project(self, x: Tensor, columns: Columns = None) -> Tensor:
        """Map source rows, or a slice of their columns, to heads * channels, without bias."""
        return F.linear(x, self.weight if columns is None else self.weight[:, columns])

    def project_root(self, x: Tensor, columns: Columns = None) -> Tensor:
        """Map destination rows, or a slice of their columns, to queries, without bias."""
        weight = self._query_weight()
        return F.linear(x, weight if columns is None else weight[:, columns])

    def complete_sources(self, projected: Tensor) -> Tensor:
        """Add the bias of sources, once all columns are summed."""
        return projected if self.bias is None else projected + self.bias

    def complete_query(self, query: Tensor) -> Tensor:
        """Add the bias of queries, once all columns are summed."""
        bias = self._query_bias()
        return query if bias is None else query + bias

    def attend(self, graph: Graph, projected: Tensor, query: Tensor | None) -> Tensor:
        """Compute result rows from projected sources and queries of all in-edges."""
        assert query is not None  # attention always has a query
        alpha = ops.segment_softmax(graph, self.score(graph, projected, query))
        values = ops.spmm(graph, projected.view(-1, self.heads, self.channels), weight=alpha)
        return self.finish(values)

    def partial(self, view: View, query: Tensor | None) -> Tensor:
        """Return (log-sum-exp per head, values) of a loaded view's edges, ``[rows, state_width]``."""
        assert query is not None
        graph = view.local
        projected = self.complete_sources(self.project(view.rows))
        logits = self.score(graph, projected, query)
        # The shift m cancels in the result, so it needs no gradient.
        m = ops.segment_reduce(logits.detach(), graph.indptr, "max")
        weight = torch.exp(logits - torch.repeat_interleave(m, graph.in_degrees(), dim=0))
        z = ops.segment_reduce(weight, graph.indptr, "sum")
        values = ops.spmm(graph, projected.view(-1, self.heads, self.channels), weight=weight) / z[:, :, None]
        return torch.cat([m + torch.log(z), values.flatten(1)], dim=1)

    def merge(self, states: Tensor, virtual: VirtualRows, scale: Tensor | None = None) -> Tensor:
        """Combine the states of each destination by log-sum-exp; values ``[destinations, heads, channels]``."""
        log_sum, values = states[:, : self.heads], states[:, self.heads :]
        m = virtual.max(log_sum.detach())
        weight = torch.exp(log_sum - m.index_select(0, virtual.destination))
        z = virtual.sum(weight)
        weighted = (values.view(-1, self.heads, self.channels) * weight[:, :, None]).flatten(1)
        merged = virtual.sum(weighted).view(-1, self.heads, self.channels)
        return merged / torch.where(z == 0, 1.0, z)[:, :, None]

    def conclude(self, merged: Tensor, query: Tensor | None) -> Tensor:
        """Apply what follows the weighted sum."""
        return self.finish(merged)
