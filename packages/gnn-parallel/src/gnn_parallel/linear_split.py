"""Layers that aggregate raw feature rows and project the result: GraphSAGE, GCN, GIN.

Projection and aggregation commute for sums and means, so a partial state may travel raw or projected, whichever is
narrower; a maximum is taken over raw rows and travels raw. Since features take no gradient, none ever passes an edge.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from core_kernels import ops
from gnn_parallel.layers import Columns, SplitLayer, View, VirtualRows

__all__ = ["LinearSplit"]


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
        return rows + self.project_root(view.own_rows, columns) if self.reads_roots else rows

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

    def conclude(self, merged: Tensor, roots: Tensor | None) -> Tensor:
        """Add the projected own rows to merged states and finalize."""
        return self.finalize(merged if roots is None else merged + roots)
