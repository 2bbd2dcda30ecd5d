"""Count sketch: a small table of signed sums from which the value of any key can be estimated.

Every table row hashes a key to a column and a sign and adds the signed value there. Other keys disturb one estimate by
their signed sum in the column; the median over rows is right within ``3 * norm / sqrt(columns)`` but for a fraction
that falls exponentially with the rows. Sketches with equal seeds and sizes add up: the sum of two tables is the table
of both streams, which is what lets ranks reduce them.

Source: M. Charikar, K. Chen, M. Farach-Colton, "Finding Frequent Items in Data Streams", ICALP 2002. We take signs
and columns from one 64-bit hash per row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from core_kernels.errors import argument_error
from core_kernels.ops import _library
from core_kernels.ops._checks import check_floating, check_ids_tensor

__all__ = ["CountSketch"]


class CountSketch:
    """A count sketch.

    Args:
        num_rows: Independent hash rows, at least 1; odd numbers give a true median.
        num_columns: Counters per row, at least 1 and at most 2**31.
        seed: Key of the hash; sketches that are added must share it.
        device: Where the table lives.

    Raises:
        ArgumentError: A size out of range.

    Attributes:
        table: fp32 [num_rows, num_columns]; may be reduced over ranks by sum.

    Determinism: values are added in order; bitwise repeatable on any number of threads.

    >>> sketch = CountSketch(num_rows=5, num_columns=1024, seed=1)
    >>> sketch.insert(torch.tensor([7, 9, 7]), torch.tensor([1.0, 5.0, 2.0]))
    >>> sketch.estimate(torch.tensor([7, 9])).tolist()
    [3.0, 5.0]
    """

    def __init__(self, num_rows: int, num_columns: int, seed: int = 0, device: torch.device | str = "cpu"):
        if num_rows < 1:
            raise argument_error("num_rows", num_rows, "at least 1", "5 is a good start")
        if not 1 <= num_columns <= 1 << 31:
            raise argument_error(
                "num_columns", num_columns, f"in [1, {1 << 31}]", "take several per expected heavy key"
            )
        if not -(1 << 63) <= seed < 1 << 63:
            raise argument_error("seed", seed, "an int64", "reduce it modulo 2**63")
        self.seed = seed
        self.table = torch.zeros(num_rows, num_columns, device=device)

    def insert(self, keys: Tensor, values: Tensor) -> None:
        """Add ``values`` [n] to the keys [n], which may repeat."""
        keys = check_ids_tensor("keys", keys)
        check_floating("values", values)
        if values.shape != keys.shape:
            raise argument_error(
                "values.shape", tuple(values.shape), f"{tuple(keys.shape)} like keys", "pass one per key"
            )
        _insert(self.table, keys.long(), values.detach().to(torch.float32), self.seed)

    def estimate(self, keys: Tensor) -> Tensor:
        """Return the estimated total of each key, fp32 [n]."""
        return _estimate(self.table, check_ids_tensor("keys", keys).long(), self.seed)

    def merge(self, other: CountSketch) -> None:
        """Add another sketch: this one then stands for both streams.

        Raises:
            ArgumentError: Seed or size differ.
        """
        if other.seed != self.seed or other.table.shape != self.table.shape:
            found = f"seed {other.seed}, table {tuple(other.table.shape)}"
            expected = f"seed {self.seed}, table {tuple(self.table.shape)}"
            raise argument_error("other", found, expected, "make both with the same arguments")
        self.table += other.table


def _dispatch_insert(table, keys, values, seed):
    if keys.shape[0]:
        target = table.contiguous()
        _library.run("sketch_insert_", table, target, keys.contiguous(), values.contiguous(), seed)
        if target is not table:
            table.copy_(target)


def _dispatch_estimate(table, keys, seed):
    out = table.new_empty(keys.shape)
    if keys.shape[0]:
        _library.run("sketch_estimate", table, table.contiguous(), keys.contiguous(), seed, out)
    return out


def _fake_estimate(table, keys, seed):
    return table.new_empty(keys.shape)


_insert = _library.register("sketch_insert_", _dispatch_insert, lambda *args: None)
_estimate = _library.register("sketch_estimate", _dispatch_estimate, _fake_estimate)
