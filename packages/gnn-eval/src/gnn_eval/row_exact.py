"""Matrix products whose rows do not depend on how many rows are computed at once.

BLAS computes a row of a product the same way in any large matrix, with two exceptions, both found by measurement with
MKL 2024 and both handled here. Very few rows take another kernel, so blocks are padded to 16 rows. Products with one
output column take rows in groups of four from an aligned address and the last one to three rows of the matrix one by
one; so such blocks are copied to whole groups, and rows that are the last of the full matrix are computed as such.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from gnn_eval.program import Program, Value

__all__ = ["PRODUCTS", "RowExactProduct", "is_one_column"]

PRODUCTS = {"linear", "addmm", "mm", "matmul", "mv", "lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell"}
_FEW_ROWS = 16
_GROUP = 4

Call = Callable[[dict[str, Tensor], int], Any]


def is_one_column(program: Program, value: Value) -> bool:
    """Whether a row-wise product has one output column per position."""
    if not value.is_tensor or value.short_op not in ("linear", "addmm", "mm", "matmul", "mv"):
        return False
    return value.short_op == "mv" or (
        len(value.shape) > 1 and value.shape[-1].constant == 1 and not value.shape[-1].terms
    )


class RowExactProduct:
    """Calls a product so that each row comes out as in the full matrix.

    Args:
        call: Runs the operator on row tensors by slot, for a number of rows.
        row_dims: Row dimension and positions per row of each row tensor, by slot.
        result: Row dimension and positions per row of the result; ``None`` for operators with several results.
        num_rows: Rows of the full matrix.
        positions_per_row: Rows of the flattened matrix that one row makes up; 0 unless the product has one column.
    """

    def __init__(
        self,
        call: Call,
        row_dims: dict[str, tuple[int, int]],
        result: tuple[int, int] | None,
        num_rows: int,
        positions_per_row: int,
    ):
        self._call, self._row_dims, self._result, self._num_rows = call, row_dims, result, num_rows
        self._positions = positions_per_row
        tail = (num_rows * positions_per_row) % _GROUP
        self._tail_rows = -(-tail // positions_per_row) if tail else 0

    def __call__(self, tensors: dict[str, Tensor], rows: int, first: int | None, ids: Tensor | None) -> Any:
        """Run on the rows ``first``, ``first + 1``, ... or ``ids`` of the full matrix."""
        if rows == 0 or rows == self._num_rows:
            return self._call(tensors, rows)
        target = max(rows, _FEW_ROWS)
        if self._positions:
            target += -target % _GROUP
        padded = tensors if target == rows and not self._positions else self._pad(tensors, rows, target)
        result = self._call(padded, target)
        if self._result is None:
            return result
        dim, factor = self._result
        result = result.narrow(dim, 0, rows * factor)
        if self._tail_rows:
            self._redo_tail(tensors, rows, first, ids, result)
        return result

    def _pad(self, tensors: dict[str, Tensor], rows: int, target: int) -> dict[str, Tensor]:
        padded = dict(tensors)
        for slot, (dim, factor) in self._row_dims.items():
            tensor = tensors[slot]
            shape = list(tensor.shape)
            shape[dim] = target * factor
            fresh = tensor.new_zeros(shape)
            fresh.narrow(dim, 0, rows * factor).copy_(tensor)
            padded[slot] = fresh
        return padded

    def _redo_tail(
        self, tensors: dict[str, Tensor], rows: int, first: int | None, ids: Tensor | None, result: Tensor
    ) -> None:
        """Compute rows at the end of the full matrix as the end of a short matrix with the same remainder."""
        bound = self._num_rows - self._tail_rows
        if ids is not None:
            places = (ids >= bound).nonzero().flatten().tolist()
            numbers = [int(ids[place]) for place in places]
        else:
            start = first or 0
            numbers = list(range(max(bound, start), start + rows))
            places = [number - start for number in numbers]
        if not places:
            return
        short = min(self._num_rows, _FEW_ROWS + self._num_rows % _GROUP)
        dim, factor = self._result
        filled = dict(tensors)
        for slot, (row_dim, per_row) in self._row_dims.items():
            shape = list(tensors[slot].shape)
            shape[row_dim] = short * per_row
            filled[slot] = tensors[slot].new_zeros(shape)
            for place, number in zip(places, numbers, strict=True):
                target = filled[slot].narrow(row_dim, (short - self._num_rows + number) * per_row, per_row)
                target.copy_(tensors[slot].narrow(row_dim, place * per_row, per_row))
        redone = self._call(filled, short)
        for place, number in zip(places, numbers, strict=True):
            own = redone.narrow(dim, (short - self._num_rows + number) * factor, factor)
            result.narrow(dim, place * factor, factor).copy_(own)
