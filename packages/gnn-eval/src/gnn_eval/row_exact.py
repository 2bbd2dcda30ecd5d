"""Matrix products whose rows do not depend on how many rows are computed at once.

BLAS computes a row of a product the same way in any large matrix, with four exceptions, found by measurement with MKL
2024 and handled here:

- very few rows take another kernel, so blocks are padded to at least 16 rows;
- rows whose width is not a multiple of 16 bytes are added up according to their address modulo 16, so each row is put
  at a position congruent modulo 4 to its position in the full matrix;
- matrices of a batch lie one behind the other, so their address depends on the number of rows before them: with such
  rows, blocks of batched products are filled to the remainder modulo 4 of the full matrix;
- products with one output column take rows in groups of four and the last one to three rows of the matrix one by one,
  so blocks are filled to whole groups, and rows at the end of the full matrix are computed as the end of a matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gnn_eval.program import Program, Value

__all__ = [
    "FEW_ROWS",
    "PRODUCTS",
    "RowExactProduct",
    "congruent_places",
    "depends_on_position",
    "pick_result",
    "positions_of_one_column",
]

PRODUCTS = {"linear", "addmm", "mm", "matmul", "mv", "bmm", "baddbmm", "einsum"}
PRODUCTS |= {"lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell"}
FEW_ROWS = 16
"""Products of fewer rows take another path."""
_GROUP = 4
_ALIGNED_BYTES = 16

Call = Callable[[dict[str, Tensor], int], Any]


def positions_of_one_column(program: Program, value: Value) -> int:
    """Return the matrix rows one row of the result makes up if the product has one output column, else 0."""
    if not value.is_tensor or value.short_op not in ("linear", "addmm", "mm", "matmul", "mv"):
        return 0
    last = value.dims[-1]
    if value.short_op != "mv" and (len(value.dims) < 2 or last.constant != 1 or last.terms):
        return 0
    others = [size.constant for dim, size in enumerate(value.dims) if dim != value.type.row_dim]
    return math.prod(others) * value.type.factor


def depends_on_position(program: Program, value: Value) -> bool:
    """Whether some operand has rows that are not a multiple of 16 bytes wide."""
    for name in value.refs():
        operand = program[name]
        is_matrix = bool(operand.shape) and operand.dtype is not None and not operand.shape[-1].terms
        if is_matrix and operand.shape[-1].constant * operand.dtype.itemsize % _ALIGNED_BYTES:
            return True
    return False


def congruent_places(ids: Tensor) -> Tensor:
    """Return distinct places, as near to the front as can be, each congruent modulo 4 to its id.

    >>> congruent_places(torch.tensor([9, 2, 5, 6])).tolist()
    [1, 2, 5, 6]
    """
    residues, places = ids % _GROUP, torch.empty_like(ids)
    for residue in range(_GROUP):
        members = (residues == residue).nonzero().flatten()
        places[members] = torch.arange(members.numel()) * _GROUP + residue
    return places


class RowExactProduct:
    """Calls a product so that each row comes out as in the full matrix.

    Args:
        call: Runs the operator on row tensors by slot, for a number of rows.
        row_dims: Row dimension and positions per row of each row tensor, by slot.
        result: Row dimension and positions per row of the result; ``None`` for operators with several results.
        num_rows: Rows of the full matrix.
        by_position: Whether rows must keep their position modulo 4.
        one_column: Matrix rows per row if the product has one output column, else 0.
    """

    def __init__(
        self,
        call: Call,
        row_dims: dict[str, tuple[int, int]],
        result: tuple[int, int] | None,
        num_rows: int,
        by_position: bool,
        one_column: int,
    ):
        self._call, self._row_dims, self._result, self._num_rows = call, row_dims, result, num_rows
        self._by_position, self._one_column = by_position or bool(one_column), one_column
        dims = [dim for dim, _ in [*row_dims.values(), *([result] if result else [])]]
        self._is_batched = self._by_position and any(dims)
        tail = (num_rows * one_column) % _GROUP
        self._tail_rows = -(-tail // one_column) if tail else 0

    def __call__(self, tensors: dict[str, Tensor], rows: int, first: int, ids: Tensor | None) -> Any:
        """Run on the rows ``first``, ``first + 1``, ... or ``ids`` of the full matrix."""
        if rows == 0 or (rows == self._num_rows and ids is None):
            return self._call(tensors, rows)
        if ids is not None and rows == self._num_rows:
            return self._pick(self._call(self._placed(tensors, ids, rows), rows), ids)
        if ids is not None and self._by_position:
            return self._run_scattered(tensors, rows, ids)
        before = first % _GROUP if self._by_position else 0
        if rows < FEW_ROWS:
            before += FEW_ROWS
        after = self._num_rows_after(before + rows, ends=ids is None and first + rows == self._num_rows)
        if not before and not after and (not self._by_position or ids is None):
            return self._call(self._aligned(tensors), rows)
        target = before + rows + after
        places = slice(before, before + rows)
        return self._pick(self._call(self._placed(tensors, places, target), target), places)

    def _num_rows_after(self, rows: int, ends: bool) -> int:
        """Return how many rows to add behind so many."""
        if self._is_batched:
            return (self._num_rows - rows) % _GROUP
        return -rows % _GROUP if self._one_column and not ends else 0

    def _run_scattered(self, tensors: dict[str, Tensor], rows: int, ids: Tensor) -> Any:
        """Give every row a position congruent to its id."""
        places = congruent_places(ids)
        target = max(int(places.max()) // _GROUP + 1, FEW_ROWS // _GROUP) * _GROUP
        if self._is_batched:
            target += self._num_rows % _GROUP
        result = self._pick(self._call(self._placed(tensors, places, target), target), places)
        if self._tail_rows and self._result is not None:
            self._redo_tail(tensors, ids, result, *self._result)
        return result

    def _aligned(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        if not self._by_position:
            return tensors
        return {
            slot: t.clone() if slot in self._row_dims and t.data_ptr() % _ALIGNED_BYTES else t
            for slot, t in tensors.items()
        }

    def _placed(self, tensors: dict[str, Tensor], places: slice | Tensor, target: int) -> dict[str, Tensor]:
        """Return the row tensors with rows moved to ``places`` among ``target``, zeros elsewhere."""
        placed = dict(tensors)
        for slot, (dim, factor) in self._row_dims.items():
            tensor = tensors[slot]
            shape = list(tensor.shape)
            shape[dim] = target * factor
            fresh = tensor.new_zeros(shape)
            if isinstance(places, slice):
                fresh.narrow(dim, places.start * factor, (places.stop - places.start) * factor).copy_(tensor)
            else:
                fresh.index_copy_(dim, _spread(places, factor), tensor)
            placed[slot] = fresh
        return placed

    def _pick(self, result: Any, places: slice | Tensor) -> Any:
        if self._result is None:
            return _PickedLater(result, places)
        return _rows_at(result, *self._result, places)

    def _redo_tail(self, tensors: dict[str, Tensor], ids: Tensor, result: Tensor, dim: int, factor: int) -> None:
        """Compute rows at the end of the full matrix as the end of a short matrix with the same remainder."""
        here = (ids >= self._num_rows - self._tail_rows).nonzero().flatten()
        if here.numel() == 0:
            return
        short = min(self._num_rows, FEW_ROWS + self._num_rows % _GROUP)
        places = ids[here] - self._num_rows + short
        chosen = {
            slot: tensors[slot].index_select(row_dim, _spread(here, per_row))
            for slot, (row_dim, per_row) in self._row_dims.items()
        }
        redone = self._call(self._placed({**tensors, **chosen}, places, short), short)
        result.index_copy_(dim, _spread(here, factor), redone.index_select(dim, _spread(places, factor)))


class _PickedLater:
    """Several results of one operator, whose rows are taken out where each is used."""

    def __init__(self, results: Any, places: slice | Tensor):
        self._results, self._places = results, places

    def pick(self, number: int, dim: int, factor: int) -> Tensor:
        """Return the wanted rows of one result."""
        return _rows_at(self._results[number], dim, factor, self._places)


def pick_result(results: Any, number: int, dim: int, factor: int) -> Tensor:
    """Return result ``number`` of an operator with several, with the rows that were asked for."""
    return results.pick(number, dim, factor) if isinstance(results, _PickedLater) else results[number]


def _rows_at(result: Tensor, dim: int, factor: int, places: slice | Tensor) -> Tensor:
    if isinstance(places, slice):
        return result.narrow(dim, places.start * factor, (places.stop - places.start) * factor)
    return result.index_select(dim, _spread(places, factor))


def _spread(places: Tensor, factor: int) -> Tensor:
    return places if factor == 1 else (places.unsqueeze(1) * factor + torch.arange(factor)).flatten()
