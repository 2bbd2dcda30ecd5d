"""Count sketch in plain torch."""

from __future__ import annotations

import torch

from core_kernels.random import bounded, random_bits

__all__ = ["sketch_estimate", "sketch_insert_"]


def _places(table, keys, seed):
    """Return column and sign of every key in every table row, [R, n]."""
    bits = torch.stack([random_bits(seed, 0, row, keys, 0) for row in range(table.shape[0])])
    return bounded(bits, table.shape[1]), ((bits & 1) * 2 - 1).to(table.dtype)


def sketch_insert_(table, keys, values, seed):
    """Add to ``table``: see the operator's meaning."""
    columns, signs = _places(table, keys, seed)
    for row in range(table.shape[0]):
        table[row].index_add_(0, columns[row], signs[row] * values)


def sketch_estimate(table, keys, seed, out):
    """Fill ``out``: see the operator's meaning."""
    columns, signs = _places(table, keys, seed)
    estimates = (signs * table.gather(1, columns)).sort(0).values
    middle = table.shape[0] // 2
    if table.shape[0] % 2:
        out.copy_(estimates[middle])
    else:
        out.copy_((estimates[middle - 1] + estimates[middle]) * 0.5)
