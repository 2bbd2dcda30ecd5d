"""Gather and scatter-add in plain torch."""

from __future__ import annotations

__all__ = ["gather", "scatter_add"]


def gather(x, index, out):
    """Fill ``out``: see the operator's meaning."""
    out.copy_(x[index.long()])


def scatter_add(x, index, num_rows, out):
    """Fill ``out``: see the operator's meaning."""
    out.zero_().index_add_(0, index, x)
