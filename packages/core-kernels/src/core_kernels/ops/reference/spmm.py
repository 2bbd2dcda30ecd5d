"""Sparse times dense in plain torch: messages per edge, then an index-wise reduction."""

from __future__ import annotations

import torch

__all__ = [
    "destinations",
    "edge_rows",
    "spmm_extremum",
    "spmm_extremum_backward",
    "spmm_extremum_weight_backward",
    "spmm_sum",
]


def destinations(indptr):
    """Return the destination of each position."""
    return torch.repeat_interleave(torch.arange(len(indptr) - 1, device=indptr.device), indptr.diff())


def edge_rows(edge_ids, indptr):
    """Return the row of edge-wise tensors for each position."""
    return torch.arange(int(indptr[-1]), device=indptr.device) if edge_ids is None else edge_ids


def _messages(indptr, indices, x, weight, edge_ids):
    rows = x[indices.long()]
    if weight is None:
        return rows
    heads = weight.shape[1]
    return (rows.unflatten(1, (heads, -1)) * weight[edge_rows(edge_ids, indptr)].unsqueeze(2)).flatten(1)


def spmm_sum(indptr, indices, x, weight, edge_ids, src_scale, dst_scale, out):
    """Fill ``out``: see the operator's meaning."""
    scaled = x if src_scale is None else x * src_scale.unsqueeze(1)
    out.zero_().index_add_(0, destinations(indptr), _messages(indptr, indices, scaled, weight, edge_ids))
    if dst_scale is not None:
        out.mul_(dst_scale.unsqueeze(1))


def spmm_extremum(indptr, indices, x, weight, edge_ids, largest, out, arg):
    """Fill ``out`` and ``arg``: see the operator's meaning."""
    extremum_of_messages(indptr, _messages(indptr, indices, x, weight, edge_ids), largest, out, arg)


def extremum_of_messages(indptr, messages, largest, out, arg):
    """Fill the extremum per segment of ``messages`` and the slot of its first occurrence."""
    out.zero_()
    arg.fill_(-1)
    for row, (begin, end) in enumerate(zip(indptr[:-1].tolist(), indptr[1:].tolist(), strict=True)):
        if begin < end:
            segment = messages[begin:end]
            best = segment.amax(0) if largest else segment.amin(0)
            is_best = (segment == best) | (segment.isnan() & best.isnan())
            out[row] = best
            arg[row] = is_best.to(torch.uint8).argmax(0).to(torch.int32)


def winners(indptr, arg):
    """Return (row, column, position) of all cells that have a winner."""
    row, column = (arg >= 0).nonzero(as_tuple=True)
    return row, column, indptr[row] + arg[row, column]


def spmm_extremum_backward(indptr, indices, grad, arg, weight, edge_ids, t_indptr, t_indices, t_positions, out):
    """Fill ``out``: see the operator's meaning."""
    row, column, position = winners(indptr, arg)
    value = grad[row, column]
    if weight is not None:
        head = column // (grad.shape[1] // weight.shape[1])
        value = value * weight[edge_rows(edge_ids, indptr)[position], head]
    out.zero_().index_put_((indices[position].long(), column), value, accumulate=True)


def spmm_extremum_weight_backward(indptr, indices, x, grad, arg, edge_ids, heads, out):
    """Fill ``out``: see the operator's meaning."""
    row, column, position = winners(indptr, arg)
    value = grad[row, column] * x[indices[position].long(), column]
    head = column // (grad.shape[1] // heads)
    out.zero_().index_put_((edge_rows(edge_ids, indptr)[position], head), value, accumulate=True)
