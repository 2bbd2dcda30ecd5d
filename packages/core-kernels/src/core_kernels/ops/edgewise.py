"""Edge-wise values from the rows at both ends: the logits of attention, the gradient of edge weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from core_kernels.errors import ArgumentTypeError, argument_error
from core_kernels.ops import _library
from core_kernels.ops._checks import check_floating, check_rows, feature_matrix, transpose_tensors
from core_kernels.ops._memory import empty_rows

if TYPE_CHECKING:
    from core_kernels.graph import Graph

__all__ = ["sddmm"]

_OPS = ("dot", "add", "mul")


def sddmm(graph: Graph, a_src: Tensor, b_dst: Tensor, op: str = "dot") -> Tensor:
    """Combine, for every edge, the source's row of ``a_src`` with the destination's row of ``b_dst``.

    Args:
        graph: The edges.
        a_src: Source rows, floating point.
        b_dst: Destination rows of the same trailing shape and dtype.
        op: ``"dot"`` sums the products over the last dimension; ``"add"`` and ``"mul"`` are elementwise.

    Returns:
        Edge-wise values in the order of edge ids.

    Raises:
        ArgumentError: Shapes do not fit the graph or each other, or ``op`` is unknown.
        ArgumentTypeError: A dtype is not floating point, or they differ.

    Shapes:
        ``a_src`` [num_src, heads..., width], ``b_dst`` [num_dst, heads..., width] -> [num_edges, heads...] for dot,
        [num_edges, heads..., width] else.

    Determinism: bitwise repeatable, forward and backward.

    >>> from core_kernels import Graph
    >>> graph = Graph.from_edge_index(torch.tensor([[0, 1], [1, 1]]), 2)
    >>> rows = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> sddmm(graph, rows, rows).tolist()
    [11.0, 25.0]
    """
    if op not in _OPS:
        raise argument_error("op", op, f"one of {', '.join(_OPS)}", 'use "dot" for attention logits')
    for name, rows, count, count_name in (
        ("a_src", a_src, graph.num_src, "num_src"),
        ("b_dst", b_dst, graph.num_dst, "num_dst"),
    ):
        check_floating(name, rows)
        check_rows(name, rows, count, count_name)
    if a_src.dtype != b_dst.dtype:
        raise ArgumentTypeError(f"b_dst is {b_dst.dtype}; expected {a_src.dtype} like a_src; convert one of them")
    if a_src.shape[1:] != b_dst.shape[1:]:
        raise argument_error(
            "b_dst.shape",
            tuple(b_dst.shape),
            f"rows of shape {tuple(a_src.shape[1:])} like a_src",
            "project them alike",
        )
    left, right = feature_matrix(a_src), feature_matrix(b_dst)
    trailing = tuple(a_src.shape[1:]) if op != "dot" else tuple(a_src.shape[1:-1])
    heads = 1
    for size in trailing:
        heads *= size
    needs_grad = torch.is_grad_enabled() and (a_src.requires_grad or b_dst.requires_grad)
    result = _sddmm(
        graph.indptr, graph.indices, left, right, graph.edge_ids, op, heads, *transpose_tensors(graph, needs_grad)
    )
    return result.view(graph.num_edges, *trailing)


def _dispatch(indptr, indices, a, b, edge_ids, op, heads, t_indptr, t_indices, t_edge_ids):
    a, b = _library.contiguous_rows("sddmm", "a", a), _library.contiguous_rows("sddmm", "b", b)
    out = empty_rows(a, indices.shape[0], heads)
    if heads and a.shape[1]:
        _library.run("sddmm", a, indptr, indices, a, b, edge_ids, op, heads, out)
    return out if a.shape[1] else out.zero_()


def _fake(indptr, indices, a, b, edge_ids, op, heads, t_indptr, t_indices, t_edge_ids):
    return a.new_empty(indices.shape[0], heads)


def _save(ctx, inputs, output):
    indptr, indices, a, b, edge_ids, ctx.op, _, *transposed = inputs
    ctx.save_for_backward(indptr, indices, a, b, edge_ids, *transposed)


def _backward(ctx, grad):
    indptr, indices, a, b, edge_ids, t_indptr, t_indices, t_edge_ids = ctx.saved_tensors
    here, there = (indptr, indices, edge_ids), (t_indptr, t_indices, t_edge_ids)
    grad_a = _gradient(ctx.op, there, here, b, grad, "a") if ctx.needs_input_grad[2] else None
    grad_b = _gradient(ctx.op, here, there, a, grad, "b") if ctx.needs_input_grad[3] else None
    return None, None, grad_a, grad_b, None, None, None, None, None, None


def _gradient(op, edges, reverse, other, grad, name):
    """Return the gradient of the rows that own ``edges`` as their in-edges; ``other`` are the rows at the other end."""
    indptr, indices, edge_ids = edges
    if indptr is None:
        raise argument_error("t_indptr_grad", None, f"the transposed graph for the gradient of {name}", "use ops.sddmm")
    if op == "add":
        return torch.ops.core_kernels.segment_sum(grad, indptr, edge_ids, None)
    return torch.ops.core_kernels.spmm_sum(indptr, indices, other, grad, edge_ids, None, None, *reverse)


_sddmm = _library.register("sddmm", _dispatch, _fake, _backward, _save)
