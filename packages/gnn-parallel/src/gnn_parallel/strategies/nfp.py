"""NFP, node-feature parallel: every rank holds some columns of all features and computes its share of every projection.

A projection is a sum over columns, ``x W = sum_q x[:, q] W[q]``. Each rank aggregates its columns for the destinations
of all ranks, multiplies by its rows of the weights, and a reduce-scatter adds the shares at whoever asked. The weights
are spread with the columns, so their gradient is complete where it is computed and needs no all-reduce.

Attention is not additive over columns; there the projected *sources* are reduced and the rest runs at home.

Source: P3 (OSDI 2021) for the scheme, APT (PPoPP 2025) for its place among the four.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from core_kernels import Graph, ops
from core_kernels.comm import Group
from gnn_parallel.clock import TermClock
from gnn_parallel.layers import ProjectedSplit, SplitLayer, View
from gnn_parallel.linear_split import LinearSplit
from gnn_parallel.strategies.base import Context, Strategy, join_runs, split_runs

__all__ = ["NodeFeatureParallel", "sends_destinations"]


def sends_destinations(layer: SplitLayer) -> bool:
    """Return whether executors need to know which nodes the destinations are."""
    return layer.reads_roots or layer.destination_scale is not None


@dataclass
class Parcel:
    """What every rank shall know of this rank's batch.

    Attributes:
        parts: Arrays to send: linear layers (edges per destination, sources, destinations), attention layers (distinct
            sources, destinations).
        graph: The batch's edges over its distinct sources, for attention layers.
    """

    parts: list[Tensor]
    graph: Graph | None


@dataclass
class Work:
    """The batches of all ranks, over this rank's columns.

    Attributes:
        view: Edges of all batches (linear), or rows to project without edges (attention).
        row_counts: Rows that go home to each rank, per kind of row.
        graph: As in :class:`Parcel`.
    """

    view: View
    row_counts: list[list[int]]
    graph: Graph | None


class NodeFeatureParallel(Strategy):
    """Each rank computes with its feature columns, for all ranks.

    Args:
        context: Its ``features`` are replicated rows of this rank's columns only.
        columns: Which columns these are.
    """

    name = "nfp"
    summary = "node-feature parallel: each rank holds some feature columns and the matching weights"

    def __init__(self, context: Context, columns: slice):
        super().__init__(context)
        self.columns = columns

    def permute(self, destinations: Tensor, step: int) -> Parcel:
        """Sample; every rank gets the whole batch."""
        layer = self.context.layer
        indptr, sources = self.context.sample(destinations, step)
        if isinstance(layer, ProjectedSplit):
            with self.context.early_clock("sample"):
                unique, local = ops.unique_relabel(sources[:0], sources)
            return Parcel([unique, destinations], Graph(indptr, local, len(unique), validate=False))
        return Parcel([indptr.diff(), sources] + ([destinations] if sends_destinations(layer) else []), None)

    def shuffle(self, parcel: Parcel) -> Work:
        """Send the batch to all ranks and find this rank's columns of it."""
        context, group = self.context, self.context.early_group
        clock = context.early_clock
        lengths = torch.tensor([[len(part) for part in parcel.parts]])
        with clock("shuffle"):
            message, _ = join_runs([(part, [len(part)]) for part in parcel.parts], context.id_dtype)
            sizes = group.all_gather_v(lengths, counts=[1] * group.size, tag="sizes")[0]
            received = group.all_gather_v(message, counts=sizes.sum(1).tolist(), tag="ids")[0]
            counts = sizes.T.tolist()
            parts = split_runs(received, counts)
        if parcel.graph is not None:
            with clock("load"):
                sources, roots = (ops.gather(*context.features.lookup(part)) for part in parts)
            empty = torch.zeros(1, dtype=torch.int64)
            view = View(sources, empty, empty[:0], root_rows=roots)
            view.rows = sources
            return Work(view, counts, parcel.graph)
        indptr = torch.zeros(len(parts[0]) + 1, dtype=torch.int64)
        torch.cumsum(parts[0], 0, out=indptr[1:])
        destinations = parts[2].long() if len(parts) == 3 else None
        return Work(context.view(indptr, parts[1], destinations), counts[:1], None)

    def execute(self, work: Work) -> list[Tensor]:
        """Aggregate and project this rank's columns for all ranks."""
        layer, view = self.context.layer, work.view
        if isinstance(layer, LinearSplit):
            return [layer.combine(view, self.columns)]
        assert isinstance(layer, ProjectedSplit)
        return [layer.project(view.rows, self.columns), layer.project_root(view.own_rows, self.columns)]

    def reshuffle(self, work: Work, rows: list[Tensor]) -> Tensor:
        """Add the shares at home and complete the rows."""
        context, layer = self.context, self.context.layer
        home = [_reduce_rows(context, share, counts) for share, counts in zip(rows, work.row_counts, strict=True)]
        if isinstance(layer, LinearSplit):
            return layer.finalize(home[0])
        assert isinstance(layer, ProjectedSplit)
        assert work.graph is not None
        return layer.attend(work.graph, layer.complete_sources(home[0]), layer.complete_query(home[1]))


def _reduce_rows(context: Context, rows: Tensor, counts: list[int]) -> Tensor:
    if context.group.size == 1:
        return rows
    carried = rows if context.travel is None else rows.to(context.travel)
    reduced: Tensor = _ReduceRows.apply(carried, context.group, counts, context.clock)  # type: ignore
    return reduced.to(rows.dtype)


class _ReduceRows(torch.autograd.Function):
    """A reduce-scatter of rows and its transpose, an all-gather."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Group, counts: list[int], clock: TermClock) -> Tensor:
        ctx.group, ctx.counts, ctx.clock = group, counts, clock
        with clock("shuffle"):
            return group.reduce_scatter_v(rows, counts, tag="activations")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with ctx.clock("shuffle"):
            rows = ctx.group.all_gather_v(grad, counts=ctx.counts, tag="activation_gradients")[0]
        return rows, None, None, None
