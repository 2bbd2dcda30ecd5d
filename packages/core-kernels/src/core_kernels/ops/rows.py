"""Moving rows: gather, scatter-add, and the packing that precedes and follows an exchange between ranks.

An exchange sorts ids by owner (:func:`bucket_by_owner`), gathers the rows to send (:func:`pack_rows`) and puts the rows
received in their places (:func:`unpack_rows`). They take ``out`` tensors: on a CPU, fresh memory costs more than the
copy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from core_kernels._backend import resolve_backend
from core_kernels.errors import ArgumentTypeError, argument_error
from core_kernels.ops import _library
from core_kernels.ops._checks import (
    check_apart,
    check_bounds_mode,
    check_floating,
    check_ids_tensor,
    check_rows,
    feature_matrix,
)
from core_kernels.ops._memory import empty_rows

__all__ = ["bucket_by_owner", "gather", "pack_rows", "scatter_add", "unpack_rows"]


def gather(x: Tensor, index: Tensor, out: Tensor | None = None, bounds: str = "error") -> Tensor:
    """Return the rows of ``x`` that ``index`` names.

    Args:
        x: Rows of any dtype; they may be strided.
        index: int32 or int64 row numbers.
        out: Where to write, contiguous; only without gradients.
        bounds: ``"error"`` checks the index, ``"unchecked"`` trusts it.

    Returns:
        ``x[index]``, or ``out``.

    Raises:
        ArgumentError: An index outside the rows, a wrong ``out``.
        ArgumentTypeError: ``index`` is not of integers.

    Shapes: ``x`` [rows, ...], ``index`` [n] -> [n, ...].

    Cost: reads and writes n rows.

    Determinism: the gradient, a scatter-add, is summed in order of the index.

    >>> gather(torch.tensor([[1.0], [2.0]]), torch.tensor([1, 1, 0])).flatten().tolist()
    [2.0, 2.0, 1.0]
    """
    checked, index = check_bounds_mode(bounds), check_ids_tensor("index", index)
    if x.dim() == 0:
        raise argument_error("x.shape", (), "(rows, ...)", "add a dimension for rows")
    rows, shape = feature_matrix(x), (index.shape[0], *x.shape[1:])
    if out is None:
        return _gather(rows, index, checked).view(shape)
    if torch.is_grad_enabled() and x.requires_grad:
        raise argument_error("out", "given", "no gradient through x", "detach x or leave out= away")
    if tuple(out.shape) != shape or out.dtype != x.dtype or not out.is_contiguous():
        found = f"{out.dtype} {tuple(out.shape)}"
        raise argument_error("out", found, f"a contiguous {x.dtype} tensor {shape}", "allocate it with torch.empty")
    check_apart(out, x)
    _gather_out(rows, index, checked, out.view(index.shape[0], rows.shape[1]))
    return out


def pack_rows(x: Tensor, index: Tensor, out: Tensor | None = None, bounds: str = "error") -> Tensor:
    """Gather rows into the buffer that is sent: :func:`gather` by the name that pairs with :func:`unpack_rows`.

    >>> pack_rows(torch.tensor([[1.0], [2.0]]), torch.tensor([1, 0])).flatten().tolist()
    [2.0, 1.0]
    """
    return gather(x, index, out, bounds)


def scatter_add(x: Tensor, index: Tensor, num_rows: int, bounds: str = "error") -> Tensor:
    """Add each row of ``x`` to the output row that ``index`` names.

    Args:
        x: Rows, floating point.
        index: int32 or int64, one output row per row of ``x``.
        num_rows: Number of output rows.
        bounds: ``"error"`` checks the index, ``"unchecked"`` trusts it.

    Returns:
        The sums; rows that nobody names are 0.

    Raises:
        ArgumentError: An index outside ``[0, num_rows)``, or another number of indices than rows.
        ArgumentTypeError: Wrong dtypes.

    Shapes: ``x`` [n, ...], ``index`` [n] -> [num_rows, ...].

    Determinism: summed in ascending order of position, on any number of threads.

    >>> scatter_add(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1, 1, 0]), 3).tolist()
    [4.0, 3.0, 0.0]
    """
    checked, index = check_bounds_mode(bounds), check_ids_tensor("index", index)
    check_floating("x", x)
    check_rows("x", x, index.shape[0], "len(index)")
    if num_rows < 0:
        raise argument_error("num_rows", num_rows, "at least 0", "pass the number of output rows")
    return _scatter_add(feature_matrix(x), index, num_rows, checked).view(num_rows, *x.shape[1:])


def bucket_by_owner(ids: Tensor, offsets: Tensor, bounds: str = "error") -> tuple[Tensor, Tensor]:
    """Sort the positions of ids by the part that owns them.

    Args:
        ids: int32 or int64 [n].
        offsets: int64 [parts + 1], ascending from 0; part p owns the ids in ``[offsets[p], offsets[p + 1])``.
        bounds: ``"error"`` checks the ids, ``"unchecked"`` trusts them.

    Returns:
        ``(order, counts)``: ``ids[order]`` is grouped by owner, stable; ``counts[p]`` ids belong to part p. int64.

    Raises:
        ArgumentError: An id outside all parts, or offsets that do not ascend from 0.
        ArgumentTypeError: Wrong dtypes.

    >>> bucket_by_owner(torch.tensor([5, 0, 6, 1]), torch.tensor([0, 4, 8]))
    (tensor([1, 3, 0, 2]), tensor([2, 2]))
    """
    checked, ids = check_bounds_mode(bounds), check_ids_tensor("ids", ids)
    if not isinstance(offsets, Tensor) or offsets.dtype != torch.int64 or offsets.dim() != 1 or offsets.shape[0] < 2:
        raise ArgumentTypeError("offsets must be an int64 tensor [parts + 1] with at least one part; use book.offsets")
    if checked and (int(offsets[0]) != 0 or bool((offsets.diff() < 0).any())):
        raise argument_error("offsets", offsets.tolist(), "an ascending list from 0", "use book.offsets")
    return _bucket_by_owner(ids, offsets, checked)


def unpack_rows(out: Tensor, index: Tensor, rows: Tensor, accumulate: bool = False, bounds: str = "error") -> Tensor:
    """Put rows in the places that ``index`` names, inside ``out``. Not differentiable: see :func:`scatter_add`.

    Args:
        out: Tensor changed in place; its rows may be strided.
        index: int32 or int64, one place per row.
        rows: Rows of the dtype and trailing shape of ``out``.
        accumulate: Add instead of replacing.
        bounds: ``"error"`` checks the index, ``"unchecked"`` trusts it.

    Returns:
        ``out``.

    Raises:
        ArgumentError: An index outside ``out``, shapes that do not fit, or a tensor that requires a gradient.
        ArgumentTypeError: Wrong dtypes.

    Determinism: rows are taken in order; of several for one place the last stays, or all are added one by one.

    >>> unpack_rows(torch.zeros(3), torch.tensor([2, 0]), torch.tensor([5.0, 6.0])).tolist()
    [6.0, 0.0, 5.0]
    """
    checked, index = check_bounds_mode(bounds), check_ids_tensor("index", index)
    check_rows("rows", rows, index.shape[0], "len(index)")
    if out.dim() == 0 or rows.shape[1:] != out.shape[1:]:
        raise argument_error("rows.shape", tuple(rows.shape), f"rows like out {tuple(out.shape)}", "reshape them")
    if rows.dtype != out.dtype:
        raise ArgumentTypeError(f"rows are {rows.dtype}; expected {out.dtype} like out; convert them")
    if torch.is_grad_enabled() and (rows.requires_grad or out.requires_grad):
        raise argument_error("rows", "requires_grad", "tensors without gradient", "use scatter_add, or detach them")
    matrix = out.unsqueeze(1) if out.dim() == 1 else out.flatten(1)
    if out.numel() and matrix.data_ptr() != out.data_ptr():
        raise argument_error("out.stride()", out.stride(), "contiguous trailing dimensions", "pass a contiguous tensor")
    _unpack_rows(matrix, index, feature_matrix(rows), accumulate, checked)
    return out


def _strided_rows(op: str, x: Tensor) -> Tensor:
    """Return ``x`` itself where the CPU kernel can walk its rows, else contiguous."""
    if resolve_backend(x) == "numba" and x.dim() == 2 and x.stride(1) == 1:
        return x
    return _library.contiguous_rows(op, "x", x)


def _dispatch_gather(x, index, checked):
    out = empty_rows(x, index.shape[0], x.shape[1])
    _fill_gather(x, index, checked, out)
    return out


def _fill_gather(x, index, checked, out):
    if checked:
        _library.check_ids("gather", "index", index, x.shape[0])
    if out.numel():
        _library.run("gather", x, _strided_rows("gather", x), index.contiguous(), out)


def _fake_gather(x, index, checked):
    return x.new_empty(index.shape[0], x.shape[1])


def _save_gather(ctx, inputs, output):
    x, index, ctx.checked = inputs
    ctx.num_rows = x.shape[0]
    ctx.save_for_backward(index)


def _gather_backward(ctx, grad):
    return _scatter_add(grad, ctx.saved_tensors[0], ctx.num_rows, ctx.checked), None, None


def _dispatch_scatter_add(x, index, num_rows, checked):
    if checked:
        _library.check_ids("scatter_add", "index", index, num_rows)
    out = empty_rows(x, num_rows, x.shape[1])
    if out.numel():
        x = _library.contiguous_rows("scatter_add", "x", x)
        _library.run("scatter_add", x, x, index.contiguous(), num_rows, out)
    return out


def _fake_scatter_add(x, index, num_rows, checked):
    return x.new_empty(num_rows, x.shape[1])


def _save_scatter_add(ctx, inputs, output):
    _, index, _, ctx.checked = inputs
    ctx.save_for_backward(index)


def _scatter_add_backward(ctx, grad):
    return _gather(grad, ctx.saved_tensors[0], ctx.checked), None, None, None


def _dispatch_bucket(ids, offsets, checked):
    if checked:
        _library.check_ids("bucket_by_owner", "ids", ids, int(offsets[-1]))
    order, counts = _fake_bucket(ids, offsets, checked)
    _library.run("bucket_by_owner", ids, ids.contiguous(), offsets.contiguous(), order, counts)
    return order, counts


def _fake_bucket(ids, offsets, checked):
    return ids.new_empty(ids.shape[0], dtype=torch.int64), offsets.new_empty(offsets.shape[0] - 1)


def _dispatch_unpack(out, index, rows, accumulate, checked):
    if checked:
        _library.check_ids("unpack_rows", "index", index, out.shape[0])
    if rows.numel() == 0:
        return
    rows, index = rows.contiguous(), index.contiguous()
    if resolve_backend(out) in ("numba", "torch") and out.stride(1) == 1:
        _library.run("unpack_rows_", out, out, index, rows, accumulate)
    else:
        target = out.contiguous()
        _library.run("unpack_rows_", target, target, index, rows, accumulate)
        if target is not out:
            out.copy_(target)


_gather = _library.register("gather", _dispatch_gather, _fake_gather, _gather_backward, _save_gather)
_gather_out = _library.register("gather_out", _fill_gather, lambda *args: None)
_scatter_add = _library.register(
    "scatter_add", _dispatch_scatter_add, _fake_scatter_add, _scatter_add_backward, _save_scatter_add
)
_bucket_by_owner = _library.register("bucket_by_owner", _dispatch_bucket, _fake_bucket)
_unpack_rows = _library.register("unpack_rows_", _dispatch_unpack, lambda *args: None)
