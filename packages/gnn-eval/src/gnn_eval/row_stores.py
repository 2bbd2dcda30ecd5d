"""Rows kept in memory: inputs, structural values and what stages hand to each other.

A store keeps one value with all its rows. Reading a contiguous range gives a view; reading scattered rows copies them.
Stores on disk, with the same methods, are in :mod:`gnn_eval.disk_rows`.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

__all__ = ["RamRows", "RowStore"]


class RowStore(Protocol):
    """Rows of one value."""

    num_rows: int
    row_dim: int

    def read_range(self, start: int, stop: int) -> Tensor:
        """Return rows ``start`` to ``stop``."""
        ...

    def read_rows(self, ids: Tensor) -> Tensor:
        """Return the rows ``ids``."""
        ...

    def write_range(self, start: int, rows: Tensor) -> None:
        """Store rows from ``start`` on."""
        ...

    def write_rows(self, ids: Tensor, rows: Tensor) -> None:
        """Store rows at ``ids``."""
        ...

    def whole(self) -> Tensor | None:
        """Return all rows as one tensor if they are in memory, else ``None``."""
        ...


class RamRows:
    """Rows in one tensor.

    Args:
        tensor: All rows.
        row_dim: Dimension of the rows.

    >>> import torch
    >>> store = RamRows(torch.arange(6.).reshape(3, 2))
    >>> store.read_range(1, 3).tolist(), store.read_rows(torch.tensor([2, 0])).tolist()
    ([[2.0, 3.0], [4.0, 5.0]], [[4.0, 5.0], [0.0, 1.0]])
    """

    def __init__(self, tensor: Tensor, row_dim: int = 0):
        self.tensor, self.row_dim = tensor, row_dim
        self.num_rows = tensor.size(row_dim)

    def read_range(self, start: int, stop: int) -> Tensor:
        """Return a view of rows ``start`` to ``stop``."""
        if start == 0 and stop == self.num_rows:
            return self.tensor
        return self.tensor.narrow(self.row_dim, start, stop - start)

    def read_rows(self, ids: Tensor) -> Tensor:
        """Return a copy of the rows ``ids``."""
        return self.tensor.index_select(self.row_dim, ids)

    def write_range(self, start: int, rows: Tensor) -> None:
        """Copy ``rows`` to their place from ``start`` on."""
        self.tensor.narrow(self.row_dim, start, rows.size(self.row_dim)).copy_(rows)

    def write_rows(self, ids: Tensor, rows: Tensor) -> None:
        """Copy ``rows`` to the places ``ids``."""
        self.tensor.index_copy_(self.row_dim, ids, rows.to(self.tensor.dtype))

    def whole(self) -> Tensor | None:
        """Return the tensor itself."""
        return self.tensor
