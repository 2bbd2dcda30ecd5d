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

:class:`~gnn_parallel.linear_split.LinearSplit` aggregates raw feature rows and projects the result. A
:class:`ProjectedSplit` projects first: attention (:mod:`gnn_parallel.softmax_split`) and vertex programs
(:mod:`gnn_parallel.vertex_split`).

Source: the strategies and their layer cuts follow APT (PPoPP 2025); NFP is the scheme of P3 (OSDI 2021). Where we
differ: a mean travels as sum and count, and attention is merged by log-sum-exp instead of moving projected sources.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from core_kernels import Graph, ops

__all__ = ["Columns", "ProjectedSplit", "SplitLayer", "View", "VirtualRows", "WholeLayer"]

Columns = slice | None
"""Some columns of a feature row; ``None`` for all."""


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
        root_rows: Feature rows of the destinations, ``None`` where the layer reads none.
    """

    table: Tensor
    indptr: Tensor
    sources: Tensor
    weight: Tensor | None = None
    roots: Tensor | None = None
    scale: Tensor | None = None
    is_partial: bool = False
    rows: Tensor = field(init=False)
    local: Graph = field(init=False)
    root_rows: Tensor | None = None

    @property
    def own_rows(self) -> Tensor:
        """The feature rows of the destinations, where the layer reads them."""
        assert self.root_rows is not None
        return self.root_rows

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
        algebra: How partial states merge: sum, mean, max, softmax, or several of them; ``"none"`` when they do not.
        input_width: Columns of a feature row.
        output_width: Columns of a result row.
        self_loops: Whether every destination is also its own source, exactly once.
        source_scale: ``[num_nodes]`` factor of each source, by node id, or ``None``.
        destination_scale: ``[num_nodes]`` factor of each destination's aggregate, by node id, or ``None``.
    """

    algebra: str
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


class ProjectedSplit(SplitLayer):
    """A layer that projects its sources first and aggregates what it computes of them per edge.

    Strategies call the steps in this order. Whole: ``project`` and ``project_root`` (additive over column slices),
    ``complete_sources`` and ``complete_query``, ``attend``. In parts: ``partial`` where the sources are, ``merge`` and
    ``conclude`` where the destination is.

    Attributes:
        projected_width: Columns of a projected source row.
        state_width: Columns of a partial row as it travels.
    """

    projected_width: int
    state_width: int

    @property
    def reads_roots(self) -> bool:
        """Whether a destination's own feature row enters beside its edges: as the query."""
        return self.query_width > 0

    @abstractmethod
    def project(self, x: Tensor, columns: Columns = None) -> Tensor:
        """Map source rows, or a slice of their columns, without bias."""

    @abstractmethod
    def project_root(self, x: Tensor, columns: Columns = None) -> Tensor:
        """Map destination rows, or a slice of their columns, to queries, without bias."""

    @abstractmethod
    def complete_sources(self, projected: Tensor) -> Tensor:
        """Add the bias of sources, once all columns are summed."""

    @abstractmethod
    def complete_query(self, query: Tensor) -> Tensor:
        """Add the bias of queries, once all columns are summed."""

    @abstractmethod
    def attend(self, graph: Graph, projected: Tensor, query: Tensor | None) -> Tensor:
        """Compute result rows from completed sources and queries of all in-edges."""

    @abstractmethod
    def partial(self, view: View, query: Tensor | None) -> Tensor:
        """Return the states of a loaded view's rows, ``[rows, state_width]``."""

    @abstractmethod
    def merge(self, states: Tensor, virtual: VirtualRows, scale: Tensor | None = None) -> Tensor:
        """Combine the states of each destination."""

    @abstractmethod
    def conclude(self, merged: Tensor, query: Tensor | None) -> Tensor:
        """Compute result rows from merged states and queries."""

    def whole(self, view: View) -> Tensor:
        """Compute complete result rows from all in-edges of a loaded view's destinations."""
        query = None if view.root_rows is None else self.complete_query(self.project_root(view.root_rows))
        return self.attend(view.local, self.complete_sources(self.project(view.rows)), query)


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
        assert view.roots is not None  # reads_roots
        unique, local = ops.unique_relabel(view.roots, view.sources.to(view.roots.dtype))
        view.local = Graph(view.indptr, local, len(unique), validate=False)
        view.rows = ops.gather(view.table, unique)

    def whole(self, view: View) -> Tensor:
        """Call the layer on all in-edges of a loaded view's destinations."""
        return self.call(view.local, view.rows, view.local.num_dst)
