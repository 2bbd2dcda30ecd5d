"""Segment reductions and softmax in plain torch."""

from __future__ import annotations

import torch

from core_kernels.ops.reference.spmm import destinations, edge_rows, extremum_of_messages, winners

__all__ = [
    "segment_expand",
    "segment_extremum",
    "segment_extremum_backward",
    "segment_softmax",
    "segment_softmax_backward",
    "segment_sum",
]


def segment_sum(x, indptr, edge_ids, dst_scale, out):
    """Fill ``out``: see the operator's meaning."""
    out.zero_().index_add_(0, destinations(indptr), x[edge_rows(edge_ids, indptr)])
    if dst_scale is not None:
        out.mul_(dst_scale.unsqueeze(1))


def segment_expand(x, indptr, edge_ids, dst_scale, num_edges, out):
    """Fill ``out``: see the operator's meaning."""
    scaled = x if dst_scale is None else x * dst_scale.unsqueeze(1)
    out[edge_rows(edge_ids, indptr)] = scaled[destinations(indptr)]


def segment_extremum(x, indptr, edge_ids, largest, out, arg):
    """Fill ``out`` and ``arg``: see the operator's meaning."""
    extremum_of_messages(indptr, x[edge_rows(edge_ids, indptr)], largest, out, arg)


def segment_extremum_backward(grad, arg, indptr, edge_ids, num_edges, out):
    """Fill ``out``: see the operator's meaning."""
    row, column, position = winners(indptr, arg)
    out.zero_()
    out[edge_rows(edge_ids, indptr)[position], column] = grad[row, column]


def _per_segment(values, indptr, reduce, initial):
    rows = destinations(indptr).unsqueeze(1).expand_as(values)
    start = values.new_full((len(indptr) - 1, values.shape[1]), initial)
    return start.scatter_reduce(0, rows, values, reduce)


def segment_softmax(logits, indptr, edge_ids, out):
    """Fill ``out``: see the operator's meaning."""
    rows, edges = destinations(indptr), edge_rows(edge_ids, indptr)
    values = logits[edges]
    peak = _per_segment(values, indptr, "amax", float("-inf"))
    peak = torch.where(peak == float("-inf"), torch.zeros_like(peak), peak)
    values = (values - peak[rows]).exp()
    total = _per_segment(values, indptr, "sum", 0.0)
    total = torch.where(total == 0, torch.ones_like(total), total)
    out[edges] = values / total[rows]


def segment_softmax_backward(grad, out, indptr, edge_ids, grad_logits):
    """Fill ``grad_logits``: see the operator's meaning."""
    rows, edges = destinations(indptr), edge_rows(edge_ids, indptr)
    mean = _per_segment((grad * out)[edges], indptr, "sum", 0.0)
    grad_logits[edges] = out[edges] * (grad[edges] - mean[rows])
