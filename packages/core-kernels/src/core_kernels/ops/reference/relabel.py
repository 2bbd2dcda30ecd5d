"""First-seen relabelling in plain torch."""

from __future__ import annotations

import torch

__all__ = ["unique_relabel"]


def unique_relabel(ids):
    """Return (unique, local): see the operator's meaning."""
    values, inverse = torch.unique(ids, return_inverse=True)
    places = torch.arange(ids.shape[0], device=ids.device)
    first = torch.full(values.shape, ids.shape[0], device=ids.device).scatter_reduce(0, inverse, places, "amin")
    order = first.argsort()
    rank = torch.empty_like(order)
    rank[order] = torch.arange(order.shape[0], device=ids.device)
    return values[order], rank[inverse]
