"""Fresh memory for results, on huge pages where they are large."""

from __future__ import annotations

import torch
from torch import Tensor

from core_kernels._huge_pages import advise

__all__ = ["empty_rows"]


def empty_rows(like: Tensor, num_rows: int, width: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return an uninitialised matrix on the device of ``like``, in its dtype unless another is given."""
    out = like.new_empty((num_rows, width), dtype=dtype)
    advise(out)
    return out
