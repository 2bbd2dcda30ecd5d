"""Rows as bytes, checks of row counts, and combination in rank order: the arithmetic below the collectives."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from core_kernels.errors import ArgumentTypeError, argument_error

__all__ = ["as_bytes", "check_counts", "combine_in_order", "num_rows_of", "row_bytes"]

_ACCUMULATE_IN = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def num_rows_of(name: str, x: Tensor) -> int:
    """Return the number of rows of ``x``; a scalar has none and is refused."""
    if not isinstance(x, Tensor):
        raise ArgumentTypeError(f"{name} is a {type(x).__name__}; expected a torch.Tensor; convert it first")
    if x.dim() == 0:
        raise argument_error(name, x, "a tensor of at least one dimension", "pass x.view(1)")
    return x.shape[0]


def row_bytes(x: Tensor) -> int:
    """Return the bytes of one row of ``x``."""
    return x.shape[1:].numel() * x.element_size()


def as_bytes(x: Tensor) -> Tensor:
    """View a contiguous tensor as ``[num_rows, bytes_per_row]``, sharing memory."""
    # One row or one column may be contiguous with any stride, which a view to bytes does not accept.
    flat = x.as_strided((x.numel(),), (1,))
    return flat.view(torch.uint8).view(x.shape[0], row_bytes(x))


def check_counts(name: str, counts: Sequence[int] | Tensor, num_ranks: int, num_rows: int | None = None) -> list[int]:
    """Return ``counts`` as a list after checking length, sign and (where given) sum."""
    listed = [int(count) for count in (counts.tolist() if isinstance(counts, Tensor) else counts)]
    if len(listed) != num_ranks or any(count < 0 for count in listed):
        raise argument_error(name, listed, f"{num_ranks} numbers of at least 0", "pass one count per rank")
    if num_rows is not None and sum(listed) != num_rows:
        raise argument_error(name, listed, f"a sum of {num_rows} rows, not {sum(listed)}", "count every row of x once")
    return listed


def combine_in_order(contributions: Tensor, op: str) -> Tensor:
    """Combine ``[num_ranks, rows, ...]`` over the first dimension, from rank 0 upwards.

    >>> combine_in_order(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "mean")
    tensor([2., 3.])
    """
    dtype = contributions.dtype
    total = contributions[0].to(_ACCUMULATE_IN.get(dtype, dtype), copy=True)
    for contribution in contributions[1:]:
        if op == "max":
            torch.maximum(total, contribution.to(total.dtype), out=total)
        elif op == "min":
            torch.minimum(total, contribution.to(total.dtype), out=total)
        else:
            total += contribution
    if op == "mean":
        total /= len(contributions)
    return total.to(dtype)
