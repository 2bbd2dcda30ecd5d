"""Buckets and unpacking in plain torch."""

from __future__ import annotations

import torch

__all__ = ["bucket_by_owner", "unpack_rows_"]


def bucket_by_owner(ids, offsets, order, counts):
    """Fill ``order`` and ``counts``: see the operator's meaning."""
    owners = torch.searchsorted(offsets[1:], ids.long(), right=True)
    order.copy_(owners.argsort(stable=True))
    counts.copy_(torch.bincount(owners, minlength=counts.shape[0]))


def unpack_rows_(out, index, rows, accumulate):
    """Write or add row by row: see the operator's meaning."""
    for place, target in enumerate(index.tolist()):
        if accumulate:
            out[target] += rows[place]
        else:
            out[target] = rows[place]
