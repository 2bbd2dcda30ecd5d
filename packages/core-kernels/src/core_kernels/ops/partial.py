"""Aggregations cut in parts: states that ranks compute on their edges, exchange and merge.

A mean of means is wrong, and so is a sum of softmaxes. What can be merged exactly is a state:

=========  ==========================================  ==========================================
reduce     state                                       result
=========  ==========================================  ==========================================
sum        total                                       total
mean       total, count                                total / count
max, min   best (-inf or +inf without edges)           best, 0 without edges
softmax    peak of logits, sum of exp, weighted total  total / sum
=========  ==========================================  ==========================================

Merging is associative; for max and min the first of equal values takes the gradient. States are tensors with one row
per destination, so any exchange of rows carries them. All is differentiable.

Source: the rescaled merge of softmax states is from M. Milakov, N. Gimelshein, "Online normalizer calculation for
softmax", 2018.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from core_kernels.errors import argument_error
from core_kernels.ops.aggregation import spmm
from core_kernels.ops.segment import segment_reduce

if TYPE_CHECKING:
    from core_kernels.graph import Graph

__all__ = ["PartialState", "partial_aggregate"]

_NUM_TENSORS = {"sum": 1, "mean": 2, "max": 1, "min": 1, "softmax": 3}


@dataclass(frozen=True)
class PartialState:
    """The state of an aggregation over some of the edges.

    Attributes:
        reduce: ``"sum"``, ``"mean"``, ``"max"``, ``"min"`` or ``"softmax"``.
        tensors: One row per destination each, in the order of the table above.

    Raises:
        ArgumentError: Another ``reduce``, or another number of tensors than it has.

    >>> left = PartialState("mean", (torch.tensor([[6.0]]), torch.tensor([[3.0]])))
    >>> right = PartialState("mean", (torch.tensor([[2.0]]), torch.tensor([[1.0]])))
    >>> left.merge(right).result().tolist()
    [[2.0]]
    """

    reduce: str
    tensors: tuple[Tensor, ...]

    def __post_init__(self):
        expected = _NUM_TENSORS.get(self.reduce)
        if expected is None:
            raise argument_error("reduce", self.reduce, f"one of {', '.join(_NUM_TENSORS)}", "aggregate in one part")
        if len(self.tensors) != expected:
            raise argument_error("tensors", len(self.tensors), f"{expected} tensors for {self.reduce}", "pass them all")

    def merge(self, other: PartialState) -> PartialState:
        """Return the state over the edges of both, which must be disjoint.

        Raises:
            ArgumentError: The other state is of another reduction.
        """
        if other.reduce != self.reduce:
            raise argument_error("other.reduce", other.reduce, f"{self.reduce!r}", "merge states of one reduction")
        if self.reduce in ("sum", "mean"):
            merged = tuple(left + right for left, right in zip(self.tensors, other.tensors, strict=True))
        elif self.reduce == "softmax":
            merged = _merge_softmax(self.tensors, other.tensors)
        else:
            (left,), (right,) = self.tensors, other.tensors
            second_wins = right > left if self.reduce == "max" else right < left
            merged = (torch.where(second_wins | right.isnan(), right, left),)
        return PartialState(self.reduce, merged)

    def result(self) -> Tensor:
        """Return the aggregate; destinations without edges get 0."""
        if self.reduce == "sum":
            return self.tensors[0]
        if self.reduce == "mean":
            total, count = self.tensors
            return total / count.clamp(min=1)
        if self.reduce == "softmax":
            _, denominator, total = self.tensors
            return total / torch.where(denominator == 0, torch.ones_like(denominator), denominator)
        (best,) = self.tensors
        return torch.where(best == _identity(self.reduce), torch.zeros_like(best), best)


def partial_aggregate(
    graph: Graph, x: Tensor, reduce: str = "sum", weight: Tensor | None = None, logits: Tensor | None = None
) -> PartialState:
    """Aggregate the edges of ``graph``, a part of all, into a state that can be merged.

    Args:
        graph: Some of the edges; its destinations are those of the result.
        x: Source rows [num_src, width], or [num_src, heads, width] with logits per head.
        reduce: ``"sum"``, ``"mean"``, ``"max"``, ``"min"``, or ``"softmax"``: the sum of rows weighted by the softmax
            of ``logits`` over all in-edges.
        weight: A factor per edge, not with softmax.
        logits: Per edge [num_edges] or per edge and head [num_edges, heads], only with softmax.

    Returns:
        The state.

    Raises:
        ArgumentError: ``logits`` are missing or not wanted, or a shape does not fit.

    >>> from core_kernels import Graph
    >>> x = torch.tensor([[1.0], [2.0], [6.0]])
    >>> parts = [Graph.from_edge_index(torch.tensor(edges), (3, 1)) for edges in ([[0, 1], [0, 0]], [[2], [0]])]
    >>> states = [partial_aggregate(part, x, "mean") for part in parts]
    >>> states[0].merge(states[1]).result().tolist()
    [[3.0]]
    """
    if (reduce == "softmax") != (logits is not None) or (reduce == "softmax" and weight is not None):
        raise argument_error("reduce", reduce, 'logits exactly with "softmax", and then no weight', "fix the arguments")
    if logits is not None:  # exactly with softmax
        return PartialState("softmax", _softmax_state(graph, x, logits))
    if reduce not in _NUM_TENSORS:
        raise argument_error("reduce", reduce, f"one of {', '.join(_NUM_TENSORS)}", "aggregate in one part")
    values = spmm(graph, x, weight, "sum" if reduce == "mean" else reduce)
    if reduce == "sum":
        return PartialState(reduce, (values,))
    counts = _like_rows(graph.in_degrees(), values).to(values.dtype)
    if reduce == "mean":
        return PartialState(reduce, (values, counts))
    return PartialState(reduce, (values.masked_fill(counts == 0, _identity(reduce)),))


def _identity(reduce: str) -> float:
    return float("-inf") if reduce == "max" else float("inf")


def _like_rows(column: Tensor, rows: Tensor) -> Tensor:
    """Return one value per row (and head) with trailing dimensions of size 1, to broadcast against ``rows``."""
    return column.reshape(*column.shape, *[1] * (rows.dim() - column.dim()))


def _softmax_state(graph: Graph, x: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    by_position = graph.to_positions(logits)
    # The result does not depend on the peak: it is a constant to the gradient.
    peak = segment_reduce(by_position.detach(), graph.indptr, "max")
    exponentials = (by_position - peak[graph.coo()[1]]).exp()
    denominator = segment_reduce(exponentials, graph.indptr)
    total = spmm(graph, x, graph.from_positions(exponentials))
    empty = _like_rows(graph.in_degrees() == 0, peak)
    peak = peak.masked_fill(empty, float("-inf"))
    return _like_rows(peak, total), _like_rows(denominator, total), total


def _merge_softmax(left: Sequence[Tensor], right: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    peak = torch.maximum(left[0], right[0])
    # Both peaks are -inf where neither part has edges: nothing to rescale.
    shift = torch.where(peak == float("-inf"), torch.zeros_like(peak), peak)
    factors = [(state[0] - shift).exp() for state in (left, right)]
    denominator, total = (left[number] * factors[0] + right[number] * factors[1] for number in (1, 2))
    return peak, denominator, total
