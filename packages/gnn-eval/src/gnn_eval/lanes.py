"""Pointwise functions whose last bit depends on where in the tensor an item lies.

torch computes most items of a tensor with vector instructions and the few left over at the end of each thread's share
one by one. For sigmoid and its relatives the two ways round differently, so an item at the end of a block would not
come out as in the full tensor. Here items at the ends are computed again in the way the full tensor computes them: by
vector instructions, unless they are left over in the full tensor too.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from gnn_eval.program import Program, Value

__all__ = ["LANE_DEPENDENT", "RowExactPointwise", "left_over", "takes_one_tensor"]

LANE_DEPENDENT = {"sigmoid", "gelu", "elu", "selu", "celu", "silu", "softplus", "mish", "log_sigmoid"}
_GRAIN = 32768  # items torch gives a thread at least
_VECTOR_BYTES = {"AVX512": 64}
_OTHER_VECTOR_BYTES = 32


def takes_one_tensor(program: Program, value: Value) -> bool:
    """Whether a value is a lane-dependent function of one tensor whose rows come first."""
    inputs = [program[name] for name in value.refs()]
    if value.short_op == "gelu" and value.dtype == torch.float32 and value.kwargs.get("approximate", "none") == "none":
        return False  # a kernel of its own, which treats all items alike
    return value.short_op in LANE_DEPENDENT and len(inputs) == 1 and value.type.row_dim == 0


def left_over(num_items: int, item_bytes: int, threads: int | None = None) -> Tensor:
    """Return the positions, int64, that torch computes one by one in a contiguous tensor.

    Args:
        num_items: Items of the tensor.
        item_bytes: Bytes of an item.
        threads: Number of threads; those of torch when left out.

    >>> left_over(1024, 4, 1).numel(), left_over(1027, 4, 1).tolist()
    (0, [1024, 1025, 1026])
    """
    vector_bytes = _VECTOR_BYTES.get(torch.backends.cpu.get_cpu_capability(), _OTHER_VECTOR_BYTES)
    step = max(2 * vector_bytes // item_bytes, 1)
    shares = min(threads or torch.get_num_threads(), -(-num_items // _GRAIN)) or 1
    share = -(-num_items // shares) or 1
    ends = [min(start + share, num_items) for start in range(0, num_items, share)]
    parts = [torch.arange(end - (end - start) % step, end) for start, end in zip([0, *ends], ends, strict=False)]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)


class RowExactPointwise:
    """Calls a lane-dependent function on some rows so that each item comes out as in the full tensor.

    Args:
        call: The function of one tensor.
        row_items: Items per row.
        num_rows: Rows of the full tensor.
        item_bytes: Bytes of an item.
    """

    def __init__(self, call: Callable[[Tensor], Tensor], row_items: int, num_rows: int, item_bytes: int):
        self._call, self._row_items, self._num_rows, self._item_bytes = call, row_items, num_rows, item_bytes
        self._alone = left_over(num_rows * row_items, item_bytes)

    def __call__(self, rows: Tensor, first: int, ids: Tensor | None) -> Tensor:
        """Run on the rows ``first``, ``first + 1``, ... or ``ids`` of the full tensor."""
        result = self._call(rows)
        if rows.size(0) == self._num_rows and ids is None:
            return result
        source, flat = rows.reshape(-1), result.view(-1) if result.is_contiguous() else None
        if flat is None or not rows.is_contiguous():
            return result
        ends = left_over(flat.numel(), self._item_bytes)
        if ends.numel():
            flat[ends] = self._by_vector(source[ends])
        alone = self._places_alone(first, rows.size(0), ids)
        for place in alone.tolist():
            flat[place : place + 1] = self._call(source[place : place + 1])
        return result

    def _by_vector(self, items: Tensor) -> Tensor:
        """Return the function of some items, computed with vector instructions only."""
        padded = items.new_zeros(math.ceil(items.numel() / 256) * 256)
        padded[: items.numel()] = items
        return self._call(padded)[: items.numel()]

    def _places_alone(self, first: int, count: int, ids: Tensor | None) -> Tensor:
        """Return where in the block the items lie that the full tensor computes one by one."""
        rows, offsets = self._alone // self._row_items, self._alone % self._row_items
        if ids is None:
            inside = (rows >= first) & (rows < first + count)
            return (rows[inside] - first) * self._row_items + offsets[inside]
        here = torch.isin(ids, rows).nonzero().flatten()
        matches = (ids[here].unsqueeze(1) == rows).nonzero()
        return here[matches[:, 0]] * self._row_items + offsets[matches[:, 1]]
