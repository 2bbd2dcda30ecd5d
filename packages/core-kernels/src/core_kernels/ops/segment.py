"""Reductions and softmax over segments: runs of consecutive rows, or the in-edges of each destination."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from core_kernels.errors import argument_error
from core_kernels.ops import _library
from core_kernels.ops._checks import check_floating, check_indptr, check_rows, feature_matrix
from core_kernels.ops._memory import empty_rows

if TYPE_CHECKING:
    from core_kernels.graph import Graph

__all__ = ["segment_reduce", "segment_softmax"]

_REDUCTIONS = ("sum", "mean", "max", "min")


def segment_reduce(x: Tensor, indptr: Tensor, reduce: str = "sum") -> Tensor:
    """Reduce each segment of consecutive rows.

    Args:
        x: Rows, floating point.
        indptr: int64 row pointers from 0 to the number of rows.
        reduce: ``"sum"``, ``"mean"``, ``"max"`` or ``"min"``.

    Returns:
        One row per segment; empty segments give 0. The gradient of ``max`` and ``min`` goes to the first of equals.

    Raises:
        ArgumentError: ``indptr`` does not describe the rows, or ``reduce`` is unknown.
        ArgumentTypeError: Wrong dtypes.

    Shapes:
        ``x`` [rows, ...], ``indptr`` [segments + 1] -> [segments, ...].

    Determinism: bitwise repeatable, forward and backward.

    >>> segment_reduce(torch.tensor([1.0, 2.0, 5.0]), torch.tensor([0, 2, 2, 3]), "mean").tolist()
    [1.5, 0.0, 5.0]
    """
    if reduce not in _REDUCTIONS:
        raise argument_error("reduce", reduce, f"one of {', '.join(_REDUCTIONS)}", 'use "sum" and scale yourself')
    check_floating("x", x)
    if x.dim() == 0:
        raise argument_error("x.shape", (), "(rows, ...)", "add a dimension for rows")
    check_indptr("indptr", indptr, x.shape[0])
    rows, shape = feature_matrix(x), (indptr.shape[0] - 1, *x.shape[1:])
    if reduce in ("max", "min"):
        return _extremum(rows, indptr, None, reduce == "max")[0].view(shape)
    scale = indptr.diff().clamp(min=1).to(x.dtype).reciprocal() if reduce == "mean" else None
    return _sum(rows, indptr, None, scale).view(shape)


def segment_softmax(graph_or_indptr: Graph | Tensor, logits: Tensor) -> Tensor:
    """Normalise logits over the in-edges of each destination, or over each segment of consecutive rows.

    Args:
        graph_or_indptr: A graph (logits in the order of edge ids), or int64 row pointers (logits by position).
        logits: Floating-point values, one row per edge; columns (heads) are independent.

    Returns:
        Weights of the same shape that sum to 1 per segment and column. The maximum is subtracted first, so large logits
        do not overflow; a segment of ``-inf`` alone gives zeros.

    Raises:
        ArgumentError: The number of rows does not fit.
        ArgumentTypeError: Wrong dtypes.

    Determinism: bitwise repeatable, forward and backward.

    >>> segment_softmax(torch.tensor([0, 2, 3]), torch.tensor([0.0, 0.0, 7.0])).tolist()
    [0.5, 0.5, 1.0]
    """
    check_floating("logits", logits)
    if isinstance(graph_or_indptr, Tensor):
        if logits.dim() == 0:
            raise argument_error("logits.shape", (), "(rows, ...)", "add a dimension for rows")
        check_indptr("indptr", graph_or_indptr, logits.shape[0])
        indptr, edge_ids = graph_or_indptr, None
    else:
        check_rows("logits", logits, graph_or_indptr.num_edges, "num_edges")
        indptr, edge_ids = graph_or_indptr.indptr, graph_or_indptr.edge_ids
    return _softmax(feature_matrix(logits), indptr, edge_ids).view(logits.shape)


def _dispatch_sum(x, indptr, edge_ids, dst_scale):
    out = empty_rows(x, indptr.shape[0] - 1, x.shape[1])
    x = _library.contiguous_rows("segment_sum", "x", x)
    if out.numel():
        _library.run("segment_sum", x, x, indptr, edge_ids, dst_scale, out)
    return out


def _fake_sum(x, indptr, edge_ids, dst_scale):
    return x.new_empty(indptr.shape[0] - 1, x.shape[1])


def _save_sum(ctx, inputs, output):
    x, *rest = inputs
    ctx.num_edges = x.shape[0]
    ctx.save_for_backward(*rest)


def _sum_backward(ctx, grad):
    return _expand(grad, *ctx.saved_tensors, ctx.num_edges), None, None, None


def _dispatch_expand(x, indptr, edge_ids, dst_scale, num_edges):
    out = empty_rows(x, num_edges, x.shape[1])
    x = _library.contiguous_rows("segment_expand", "x", x)
    if out.numel():
        _library.run("segment_expand", x, x, indptr, edge_ids, dst_scale, num_edges, out)
    return out


def _fake_expand(x, indptr, edge_ids, dst_scale, num_edges):
    return x.new_empty(num_edges, x.shape[1])


def _save_expand(ctx, inputs, output):
    ctx.save_for_backward(*inputs[1:4])


def _expand_backward(ctx, grad):
    return _sum(grad, *ctx.saved_tensors), None, None, None, None


def _dispatch_extremum(x, indptr, edge_ids, largest):
    x = _library.contiguous_rows("segment_extremum", "x", x)
    out, arg = _fake_extremum(x, indptr, edge_ids, largest)
    if out.numel():
        _library.run("segment_extremum", x, x, indptr, edge_ids, largest, out, arg)
    return out, arg


def _fake_extremum(x, indptr, edge_ids, largest):
    shape = (indptr.shape[0] - 1, x.shape[1])
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int32)


def _save_extremum(ctx, inputs, output):
    x, indptr, edge_ids, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.num_edges = x.shape[0]
    ctx.save_for_backward(output[1], indptr, edge_ids)


def _extremum_gradient(ctx, grad, _):
    return _extremum_backward(grad, *ctx.saved_tensors, ctx.num_edges), None, None, None


def _dispatch_extremum_backward(grad, arg, indptr, edge_ids, num_edges):
    grad, arg = grad.contiguous(), arg.contiguous()
    out = empty_rows(grad, num_edges, grad.shape[1])
    if out.numel():
        _library.run("segment_extremum_backward", grad, grad, arg, indptr, edge_ids, num_edges, out)
    return out


def _fake_extremum_backward(grad, arg, indptr, edge_ids, num_edges):
    return grad.new_empty(num_edges, grad.shape[1])


def _dispatch_softmax(logits, indptr, edge_ids):
    logits = _library.contiguous_rows("segment_softmax", "logits", logits)
    out = empty_rows(logits, logits.shape[0], logits.shape[1])
    if logits.numel():
        _library.run("segment_softmax", logits, logits, indptr, edge_ids, out)
    return out


def _fake_softmax(logits, indptr, edge_ids):
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _save_softmax(ctx, inputs, output):
    ctx.save_for_backward(output, *inputs[1:])


def _softmax_gradient(ctx, grad):
    return _softmax_backward(grad, *ctx.saved_tensors), None, None


def _dispatch_softmax_backward(grad, out, indptr, edge_ids):
    grad, out = grad.contiguous(), out.contiguous()
    grad_logits = empty_rows(grad, *grad.shape)
    if grad.numel():
        _library.run("segment_softmax_backward", grad, grad, out, indptr, edge_ids, grad_logits)
    return grad_logits


def _fake_softmax_backward(grad, out, indptr, edge_ids):
    return torch.empty_like(grad, memory_format=torch.contiguous_format)


def _save_softmax_backward(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _softmax_second_gradient(ctx, grad):
    upstream, soft, indptr, edge_ids = ctx.saved_tensors

    # With D = soft * (g - m), m = sum(soft * g) per segment: dD/dg and dD/dsoft applied to `grad`.
    def over_segments(values):
        return _expand(_sum(values, indptr, edge_ids, None), indptr, edge_ids, None, values.shape[0])

    mean, cross = over_segments(soft * upstream), over_segments(soft * grad)
    return soft * (grad - cross), grad * (upstream - mean) - upstream * cross, None, None


_sum = _library.register("segment_sum", _dispatch_sum, _fake_sum, _sum_backward, _save_sum)
_expand = _library.register("segment_expand", _dispatch_expand, _fake_expand, _expand_backward, _save_expand)
_extremum = _library.register(
    "segment_extremum", _dispatch_extremum, _fake_extremum, _extremum_gradient, _save_extremum
)
_extremum_backward = _library.register(
    "segment_extremum_backward", _dispatch_extremum_backward, _fake_extremum_backward
)
_softmax = _library.register("segment_softmax", _dispatch_softmax, _fake_softmax, _softmax_gradient, _save_softmax)
_softmax_backward = _library.register(
    "segment_softmax_backward",
    _dispatch_softmax_backward,
    _fake_softmax_backward,
    _softmax_second_gradient,
    _save_softmax_backward,
)
