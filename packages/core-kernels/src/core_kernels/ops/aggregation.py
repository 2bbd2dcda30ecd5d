"""Sparse times dense: each destination aggregates the rows of its in-neighbours.

``spmm(graph, x, weight)`` is the message passing of a layer whose message is a (weighted) source row, without any
tensor of one row per edge. The mean is the sum scaled by ``1 / in-degree``. Gradients run over the transposed graph
and never use atomics: results are bitwise repeatable and independent of the number of threads.

Sums of fp32 rows are taken in chunks of 4,096 edges, which bounds the error of hubs. The gradient of ``max`` and
``min`` goes to the first of equal values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from core_kernels._gradients import first_derivative
from core_kernels.errors import argument_error
from core_kernels.ops import _library
from core_kernels.ops._checks import (
    check_apart,
    check_floating,
    check_rows,
    edge_weight_matrix,
    feature_matrix,
    transpose_tensors,
)
from core_kernels.ops._memory import empty_rows

if TYPE_CHECKING:
    from core_kernels.graph import Graph

__all__ = ["mean_scale", "spmm"]

_REDUCTIONS = ("sum", "mean", "max", "min")


def spmm(
    graph: Graph, x: Tensor, weight: Tensor | None = None, reduce: str = "sum", out: Tensor | None = None
) -> Tensor:
    """Aggregate source rows into destinations.

    Args:
        graph: The edges.
        x: Source rows, floating point.
        weight: One factor per edge, or one per edge and head, in the order of edge ids.
        reduce: ``"sum"``, ``"mean"`` (divides by the number of edges, weighted or not), ``"max"`` or ``"min"``.
        out: Where to write; only without gradients and for ``sum`` and ``mean``.

    Returns:
        Destination rows; destinations without edges get 0.

    Raises:
        ArgumentError: A shape does not fit the graph, ``reduce`` is unknown, or ``out`` cannot be used.
        ArgumentTypeError: A dtype is not floating point, or weight and rows differ in it.

    Shapes:
        ``x`` [num_src, ...], ``weight`` [num_edges] or [num_edges, heads] with x [num_src, heads, ...];
        returns [num_dst, ...] (with heads where x has them).

    Cost: reads ``num_edges`` rows; writes ``num_dst`` rows.

    Determinism: bitwise repeatable, forward and backward.

    >>> from core_kernels import Graph
    >>> graph = Graph.from_edge_index(torch.tensor([[0, 1, 2], [2, 2, 0]]), 3)
    >>> spmm(graph, torch.tensor([[1.0], [2.0], [4.0]])).tolist()
    [[4.0], [0.0], [3.0]]
    """
    if reduce not in _REDUCTIONS:
        raise argument_error("reduce", reduce, f"one of {', '.join(_REDUCTIONS)}", 'use "sum" and scale yourself')
    check_floating("x", x)
    check_rows("x", x, graph.num_src, "num_src")
    rows = feature_matrix(x)
    factors = None if weight is None else edge_weight_matrix(graph, x, weight)
    shape = (graph.num_dst, *x.shape[1:])
    dst_scale = mean_scale(graph, x.dtype) if reduce == "mean" else None
    needs_grad = torch.is_grad_enabled() and (x.requires_grad or (weight is not None and weight.requires_grad))
    if out is not None:
        if needs_grad or reduce in ("max", "min"):
            problem = "gradients" if needs_grad else f"reduce={reduce!r}"
            raise argument_error("out", problem, "sum or mean without gradients", "leave out= away")
        _check_out(out, shape, x)
        check_apart(out, x)
        arrays = (graph.indptr, graph.indices, rows, factors, graph.edge_ids, None, dst_scale)
        _spmm_sum_out(
            *arrays, out.view(graph.num_dst, -1) if out.numel() else out.reshape(graph.num_dst, rows.shape[1])
        )
        return out
    t_indptr, t_indices, t_edge_ids = transpose_tensors(graph, needs_grad)
    if reduce in ("max", "min"):
        t_positions = graph.transpose_positions() if needs_grad else None
        largest = reduce == "max"
        result, _ = _spmm_extremum(
            graph.indptr, graph.indices, rows, factors, graph.edge_ids, largest, t_indptr, t_indices, t_positions
        )
        return result.view(shape)
    result = _spmm_sum(
        graph.indptr, graph.indices, rows, factors, graph.edge_ids, None, dst_scale, t_indptr, t_indices, t_edge_ids
    )
    return result.view(shape)


def mean_scale(graph: Graph, dtype: torch.dtype) -> Tensor:
    """Return ``1 / max(in-degree, 1)`` per destination."""
    from core_kernels.graph import Graph
    from core_kernels.graph.tracing import kept

    return kept(Graph.in_degrees, graph).clamp(min=1).to(dtype).reciprocal()


def _check_out(out: Tensor, shape: tuple[int, ...], x: Tensor) -> None:
    if tuple(out.shape) != shape or out.dtype != x.dtype or not out.is_contiguous():
        found = f"{out.dtype} {tuple(out.shape)}"
        raise argument_error("out", found, f"a contiguous {x.dtype} tensor {shape}", "allocate it with torch.empty")


def _dispatch_sum(indptr, indices, x, weight, edge_ids, src_scale, dst_scale, t_indptr, t_indices, t_edge_ids):
    out = empty_rows(x, indptr.shape[0] - 1, x.shape[1])
    _fill_sum(indptr, indices, x, weight, edge_ids, src_scale, dst_scale, out)
    return out


def _fill_sum(indptr, indices, x, weight, edge_ids, src_scale, dst_scale, out):
    x = _library.contiguous_rows("spmm_sum", "x", x)
    weight = None if weight is None else weight.contiguous()
    if out.numel():
        _library.run("spmm_sum", x, indptr, indices, x, weight, edge_ids, src_scale, dst_scale, out)


def _fake_sum(indptr, indices, x, weight, edge_ids, src_scale, dst_scale, t_indptr, t_indices, t_edge_ids):
    return x.new_empty(indptr.shape[0] - 1, x.shape[1])


def _save_sum(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _sum_backward(ctx, grad):
    indptr, indices, x, weight, edge_ids, src_scale, dst_scale, t_indptr, t_indices, t_edge_ids = ctx.saved_tensors
    grad_x = grad_weight = None
    if ctx.needs_input_grad[2]:
        _require_transpose("spmm_sum", t_indptr)
        grad_x = _spmm_sum(
            t_indptr, t_indices, grad, weight, t_edge_ids, dst_scale, src_scale, indptr, indices, edge_ids
        )
    if weight is not None and ctx.needs_input_grad[3]:
        left = x if src_scale is None else x * src_scale.unsqueeze(1)
        right = grad if dst_scale is None else grad * dst_scale.unsqueeze(1)
        sddmm = torch.ops.core_kernels.sddmm
        heads = weight.shape[1]
        grad_weight = sddmm(indptr, indices, left, right, edge_ids, "dot", heads, t_indptr, t_indices, t_edge_ids)
    return None, None, grad_x, grad_weight, None, None, None, None, None, None


def _require_transpose(op: str, t_indptr: Tensor | None) -> None:
    if t_indptr is None:
        raise argument_error(
            "t_indptr_grad", None, f"the transposed graph for the gradient of {op}", "call the function in ops"
        )


def _dispatch_extremum(indptr, indices, x, weight, edge_ids, largest, t_indptr, t_indices, t_positions):
    x = _library.contiguous_rows("spmm_extremum", "x", x)
    weight = None if weight is None else weight.contiguous()
    out = empty_rows(x, indptr.shape[0] - 1, x.shape[1])
    arg = empty_rows(x, *out.shape, dtype=torch.int32)
    if out.numel():
        _library.run("spmm_extremum", x, indptr, indices, x, weight, edge_ids, largest, out, arg)
    return out, arg


def _fake_extremum(indptr, indices, x, weight, edge_ids, largest, t_indptr, t_indices, t_positions):
    shape = (indptr.shape[0] - 1, x.shape[1])
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int32)


def _save_extremum(ctx, inputs, output):
    indptr, indices, x, weight, edge_ids, _, *transposed = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(indptr, indices, x, weight, edge_ids, *transposed, output[1])


def _extremum_gradient(ctx, grad, _):
    indptr, indices, x, weight, edge_ids, t_indptr, t_indices, t_positions, arg = ctx.saved_tensors
    grad_x = grad_weight = None
    if ctx.needs_input_grad[2]:
        _require_transpose("spmm_extremum", t_indptr)
        with torch.no_grad():
            grad_x = _spmm_extremum_backward(
                indptr, indices, grad, arg, weight, edge_ids, t_indptr, t_indices, t_positions
            )
        grad_x = first_derivative("spmm of max or min", grad_x, grad, weight)
    if weight is not None and ctx.needs_input_grad[3]:
        with torch.no_grad():
            grad_weight = _spmm_extremum_weight_backward(indptr, indices, x, grad, arg, edge_ids, weight.shape[1])
        grad_weight = first_derivative("spmm of max or min", grad_weight, grad, x)
    return None, None, grad_x, grad_weight, None, None, None, None, None


def _dispatch_extremum_backward(indptr, indices, grad, arg, weight, edge_ids, t_indptr, t_indices, t_positions):
    grad, arg = grad.contiguous(), arg.contiguous()
    out = empty_rows(grad, t_indptr.shape[0] - 1, grad.shape[1])
    arrays = (indptr, indices, grad, arg, weight, edge_ids, t_indptr, t_indices, t_positions)
    if out.numel():
        _library.run("spmm_extremum_backward", grad, *arrays, out)
    return out


def _fake_extremum_backward(indptr, indices, grad, arg, weight, edge_ids, t_indptr, t_indices, t_positions):
    return grad.new_empty(t_indptr.shape[0] - 1, grad.shape[1])


def _dispatch_weight_backward(indptr, indices, x, grad, arg, edge_ids, heads):
    x, grad, arg = x.contiguous(), grad.contiguous(), arg.contiguous()
    out = empty_rows(x, indices.shape[0], heads)
    if out.numel():
        _library.run("spmm_extremum_weight_backward", x, indptr, indices, x, grad, arg, edge_ids, heads, out)
    return out


def _fake_weight_backward(indptr, indices, x, grad, arg, edge_ids, heads):
    return x.new_empty(indices.shape[0], heads)


_spmm_sum = _library.register("spmm_sum", _dispatch_sum, _fake_sum, _sum_backward, _save_sum)
_spmm_sum_out = _library.register("spmm_sum_out", _fill_sum, lambda *args: None)
_spmm_extremum = _library.register(
    "spmm_extremum", _dispatch_extremum, _fake_extremum, _extremum_gradient, _save_extremum
)
_spmm_extremum_backward = _library.register(
    "spmm_extremum_backward", _dispatch_extremum_backward, _fake_extremum_backward
)
_spmm_extremum_weight_backward = _library.register(
    "spmm_extremum_weight_backward", _dispatch_weight_backward, _fake_weight_backward
)
