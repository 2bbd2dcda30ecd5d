"""Edge-wise products in plain torch: gather both rows, combine."""

from __future__ import annotations

from core_kernels.ops.reference.spmm import destinations, edge_rows

__all__ = ["sddmm"]


def sddmm(indptr, indices, a, b, edge_ids, op, heads, out):
    """Fill ``out``: see the operator's meaning."""
    left, right = a[indices.long()], b[destinations(indptr)]
    if op == "dot":
        values = (left * right).unflatten(1, (heads, -1)).sum(2)
    else:
        values = left + right if op == "add" else left * right
    out[edge_rows(edge_ids, indptr)] = values
