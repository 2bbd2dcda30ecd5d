"""How a GNN layer is cut so that several ranks can compute it together and get the same numbers.

A layer is described by four steps and one algebra, never by its class:

- ``project``: a linear map of feature rows; it can be cut by columns, ``x W = sum_q x[:, q] W[q]``;
- ``partial``: the aggregation over *some* in-edges of a destination, a mergeable state;
- ``merge``: combines the states of one destination, which different ranks computed;
- ``finalize``: bias, normalisation and whatever else follows.

======== ============================= ==========================================================
algebra  state of a destination        merge
======== ============================= ==========================================================
sum      sum                           add
mean     (sum, count)                  add both, divide at the end; a mean of means would be wrong
max      maximum                       maximum
softmax  (m, z, v)                     rescale to the larger ``m``, add ``z`` and ``v``
======== ============================= ==========================================================

:class:`LinearSplit` aggregates raw feature rows and projects the result (the two commute for sum and mean), so no
gradient ever passes an edge. :class:`SoftmaxSplit` projects first and weighs edges by attention.

Source: the strategies and their layer cuts follow APT (PPoPP 2025); NFP is the scheme of P3 (OSDI 2021). Where we
differ: a mean travels as sum and count, and attention is merged by log-sum-exp instead of moving projected sources.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core_kernels import Graph, ops

__all__ = ["LinearSplit", "SoftmaxSplit", "SplitLayer", "View", "VirtualRows", "WholeLayer"]

Columns = slice | None


@dataclass
class View:
    """What one executor reads to compute some rows: a table of features and in-edges into it.

    Attributes:
        table: ``[num_table_rows, width]`` feature rows, all columns or a slice of them.
        indptr: int64 ``[rows + 1]``.
        sources: ``[edges]``, table row of each edge's source.
        weight: ``[edges]`` factor of each edge, ``None`` for 1.
        roots: int64 ``[rows]``, table row of each destination; ``None`` where destinations are elsewhere.
        scale: ``[rows]`` factor of each destination's aggregate, ``None`` for 1.
        is_partial: Whether these are only some of the in-edges of their destinations.
        rows: What :meth:`SplitLayer.load` read: aggregated rows, or rows of distinct sources.
        local: Edges over the distinct sources, where ``rows`` are those.
        root_rows: Feature rows of the destinations.
    """

    table: Tensor
    indptr: Tensor
    sources: Tensor
    weight: Tensor | None = None
    roots: Tensor | None = None
    scale: Tensor | None = None
    is_partial: bool = False
    rows: Tensor | None = None
    local: Graph | None = None
    root_rows: Tensor | None = None

    def graph(self) -> Graph:
        """Return the edges as a graph from table rows to rows."""
        return Graph(self.indptr, self.sources, self.table.shape[0], validate=False)


@dataclass(frozen=True)
class VirtualRows:
    """Which destination each partial row belongs to: a destination has one row per rank that owns sources of it.

    Attributes:
        destination: int64 ``[num_virtual]``.
        counts: int64 ``[num_virtual]``, edges behind each row.
        num_destinations: Number of destinations.
    """

    destination: Tensor
    counts: Tensor
    num_destinations: int

    def sum(self, rows: Tensor) -> Tensor:
        """Add the rows of each destination, in ascending order of owner."""
        return ops.scatter_add(rows, self.destination, self.num_destinations)

    def total_counts(self) -> Tensor:
        """Return the edges of each destination, int64."""
        total = torch.zeros(self.num_destinations, dtype=torch.int64)
        return total.index_add_(0, self.destination, self.counts)

    def max(self, rows: Tensor) -> Tensor:
        """Take the maximum over the rows of each destination; 0 where there are none."""
        order = torch.argsort(self.destination, stable=True)
        lengths = torch.bincount(self.destination, minlength=self.num_destinations)
        indptr = torch.zeros(self.num_destinations + 1, dtype=torch.int64)
        torch.cumsum(lengths, 0, out=indptr[1:])
        return ops.segment_reduce(rows.index_select(0, order), indptr, "max")


class SplitLayer(ABC):
    """The input layer of a model as strategies see it.

    Attributes:
        algebra: How partial states merge; ``"none"`` when they do not.
        input_width: Columns of a feature row.
        output_width: Columns of a result row.
        self_loops: Whether every destination is also its own source, exactly once.
        source_scale: ``[num_nodes]`` factor of each source, by node id, or ``None``.
        destination_scale: ``[num_nodes]`` factor of each destination's aggregate, by node id, or ``None``.
    """

    algebra: Literal["sum", "mean", "max", "softmax", "none"]
    input_width: int
    output_width: int
    self_loops: bool = False
    source_scale: Tensor | None = None
    destination_scale: Tensor | None = None

    @property
    def reads_roots(self) -> bool:
        """Whether a destination's own feature row enters beside its edges."""
        return False

    @property
    def query_width(self) -> int:
        """Columns that executors of partial rows need from each destination."""
        return 0

    def obstacles(self) -> dict[str, str]:
        """Return why this layer cannot run under a strategy, by its name; empty when it can run under all."""
        return {}

    def column_parameters(self) -> list[nn.Parameter]:
        """Return the weights ``[output, input_width]`` whose columns NFP spreads over ranks."""
        return []

    def load(self, view: View) -> None:
        """Read the features a view needs, all that can be done before gradients: sets ``rows``, ``root_rows``."""
        unique, local = ops.unique_relabel(view.sources[:0], view.sources)
        view.local = Graph(view.indptr, local, len(unique), validate=False)
        view.rows = ops.gather(view.table, unique)
        if view.roots is not None:
            view.root_rows = ops.gather(view.table, view.roots)

    @abstractmethod
    def whole(self, view: View) -> Tensor:
        """Compute complete result rows from all in-edges of a loaded view's destinations."""


class LinearSplit(SplitLayer):
    """A layer ``finish(scale * aggregate(x) W + factor * x_root W_root)``.

    Args:
        algebra: ``"sum"``, ``"mean"`` or ``"max"``, taken over raw feature rows.
        weight: ``[output, input]`` map of the aggregate.
        root_weight: ``[output, input]`` map of the destination's own row, or ``None``.
        finish: What follows the sum of the two, from width ``output`` to ``output_width``.
        root_factor: Returns the factor of the own row, a number or a scalar tensor.
        output_width: Columns after ``finish``; ``output`` when left out.
    """

    def __init__(
        self,
        algebra: Literal["sum", "mean", "max"],
        weight: nn.Parameter,
        root_weight: nn.Parameter | None,
        finish: Callable[[Tensor], Tensor],
        root_factor: Callable[[], Tensor | float] | None = None,
        output_width: int | None = None,
    ):
        self.algebra, self.weight, self.root_weight = algebra, weight, root_weight
        self.finish, self.root_factor = finish, root_factor
        self.projected_width, self.input_width = weight.shape
        self.output_width = output_width or self.projected_width

    @property
    def reads_roots(self) -> bool:
        """Whether a destination's own feature row enters beside its edges."""
        return self.root_weight is not None

    @property
    def state_is_raw(self) -> bool:
        """Whether partial rows travel before the projection.

        A maximum must. A sum may, and is cheaper so when a raw row (forward only, features need no gradient) is
        narrower than a projected row there and its gradient back.
        """
        return self.algebra == "max" or self.input_width < 2 * self.projected_width

    @property
    def state_width(self) -> int:
        """Columns of a partial row as it travels."""
        return self.input_width if self.state_is_raw else self.projected_width

    def column_parameters(self) -> list[nn.Parameter]:
        """Return the weights whose columns NFP spreads over ranks."""
        if self.root_weight is None or self.root_weight is self.weight:
            return [self.weight]
        return [self.weight, self.root_weight]

    def project(self, x: Tensor, columns: Columns = None) -> Tensor:
        """Map aggregated rows, or a slice of their columns, to width ``output``."""
        return F.linear(x, self.weight if columns is None else self.weight[:, columns])

    def project_root(self, x: Tensor, columns: Columns = None) -> Tensor:
        """Map the destinations' own rows, or a slice of their columns, to width ``output``."""
        assert self.root_weight is not None
        rows = F.linear(x, self.root_weight if columns is None else self.root_weight[:, columns])
        return rows if self.root_factor is None else rows * self.root_factor()

    def load(self, view: View) -> None:
        """Aggregate raw feature rows over the view's edges, and read the destinations' own."""
        reduce = "sum" if view.is_partial and self.algebra == "mean" else self.algebra
        if view.table.shape[1]:
            view.rows = ops.spmm(view.graph(), view.table, weight=view.weight, reduce=reduce)
        else:  # a rank without columns, under NFP with more ranks than columns
            view.rows = view.table.new_zeros(len(view.indptr) - 1, 0)
        if view.scale is not None:
            view.rows *= view.scale[:, None]
        if view.roots is not None:
            view.root_rows = ops.gather(view.table, view.roots)

    def combine(self, view: View, columns: Columns = None) -> Tensor:
        """Project a loaded view and add the own rows: all but ``finalize``, additive over column slices."""
        rows = self.project(view.rows, columns)
        return rows + self.project_root(view.root_rows, columns) if self.reads_roots else rows

    def whole(self, view: View) -> Tensor:
        """Compute complete result rows from all in-edges of a loaded view's destinations."""
        return self.finalize(self.combine(view))

    def partial(self, view: View) -> Tensor:
        """Return the states of a loaded view's rows, for :meth:`merge`."""
        return view.rows if self.state_is_raw else self.project(view.rows)

    def merge(self, states: Tensor, virtual: VirtualRows, scale: Tensor | None) -> Tensor:
        """Combine the states of each destination and project them where that is still to be done."""
        merged = virtual.max(states) if self.algebra == "max" else virtual.sum(states)
        if self.algebra == "mean":
            merged = merged / virtual.total_counts().clamp_(min=1).to(merged.dtype)[:, None]
        if scale is not None:
            merged = merged * scale[:, None]
        return self.project(merged) if self.state_is_raw else merged

    def finalize(self, rows: Tensor) -> Tensor:
        """Apply what follows the projections."""
        return self.finish(rows)


class SoftmaxSplit(SplitLayer):
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

    @property
    def reads_roots(self) -> bool:
        """Whether a destination's own feature row enters beside its edges: always, as the query."""
        return True

    @property
    def query_width(self) -> int:
        """Columns that executors of partial rows need from each destination."""
        return self._query_width

    @property
    def state_width(self) -> int:
        """Columns of a partial row as it travels: log-sum-exp per head, and values."""
        return self.heads + self.projected_width

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

    def complete(self, projected: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
        """Add the biases, once all columns are summed."""
        query_bias = self._query_bias()
        projected = projected if self.bias is None else projected + self.bias
        return projected, query if query_bias is None else query + query_bias

    def attend(self, graph: Graph, projected: Tensor, query: Tensor) -> Tensor:
        """Compute result rows from projected sources and queries of all in-edges."""
        alpha = ops.segment_softmax(graph, self.score(graph, projected, query))
        values = ops.spmm(graph, projected.view(-1, self.heads, self.channels), weight=alpha)
        return self.finish(values)

    def whole(self, view: View) -> Tensor:
        """Compute complete result rows from all in-edges of a loaded view's destinations."""
        projected, query = self.complete(self.project(view.rows), self.project_root(view.root_rows))
        return self.attend(view.local, projected, query)

    def partial(self, view: View, query: Tensor) -> Tensor:
        """Return (log-sum-exp per head, values) of a loaded view's edges, ``[rows, state_width]``."""
        graph = view.local
        projected = self.project(view.rows) if self.bias is None else self.project(view.rows) + self.bias
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

    def finalize(self, values: Tensor) -> Tensor:
        """Apply what follows the weighted sum."""
        return self.finish(values)


class WholeLayer(SplitLayer):
    """A layer of which only the call is known: it runs where all in-edges are, under GDP and DNP.

    Args:
        call: From ``(graph, source rows, number of destinations)`` to result rows; destinations are the first sources.
        input_width: Columns of a feature row.
        output_width: Columns of a result row.
        reason: Why it has no mergeable state, for :meth:`SplitLayer.obstacles`.
    """

    algebra = "none"

    def __init__(self, call: Callable[[Graph, Tensor, int], Tensor], input_width: int, output_width: int, reason: str):
        self.call, self.input_width, self.output_width, self.reason = call, input_width, output_width, reason

    @property
    def reads_roots(self) -> bool:
        """Whether a destination's own feature row enters beside its edges: it may."""
        return True

    def obstacles(self) -> dict[str, str]:
        """Return why this layer cannot run under NFP and SNP."""
        return {"nfp": self.reason, "snp": self.reason}

    def load(self, view: View) -> None:
        """Read the distinct sources, the destinations first."""
        unique, local = ops.unique_relabel(view.roots, view.sources.to(view.roots.dtype))
        view.local = Graph(view.indptr, local, len(unique), validate=False)
        view.rows = ops.gather(view.table, unique)

    def whole(self, view: View) -> Tensor:
        """Call the layer on all in-edges of a loaded view's destinations."""
        return self.call(view.local, view.rows, view.local.num_dst)
