"""Embedding bags on the CPU, and their backward fused with an optimiser step.

The forward pass is spmm with bags as rows. The fused update groups the occurrences of every row, sums its gradient from
the bags' gradients (in order, hubs in chunks) for a few hundred rows at a time, and updates them while the sums are in
the cache: the coalesced gradient never reaches memory.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from core_kernels._huge_pages import collapse
from core_kernels.kernels.numba._arrays import array, fill_through_float32, is_half
from core_kernels.kernels.numba._copy_loop import prefetch_row
from core_kernels.kernels.numba._elements import get_written, put
from core_kernels.kernels.numba._groups import group_positions
from core_kernels.kernels.numba._rows import dot_rows, sum_rows
from core_kernels.kernels.numba._threads import run_ranges
from core_kernels.kernels.numba.relabel import unique_relabel

__all__ = ["embedding_bag", "embedding_bag_backward", "embedding_bag_sample_weight_backward", "embedding_update_"]

#: Rows whose gradients are summed before they are applied.
_BLOCK_ROWS = 256


def embedding_bag(weight, ids, offsets, sample_weight, mean, out):
    """Fill ``out`` with the sum or mean of each bag."""
    if is_half(weight):
        fill_through_float32(embedding_bag, weight, ids, offsets, sample_weight, mean, out)
        return
    collapse(weight, ids.shape[0])
    pointers = array(offsets)
    run_ranges(
        sum_rows, out.shape[0], pointers, pointers, array(ids), array(weight), _column(sample_weight), 1, None, None,
        array(_bag_scale(offsets, mean, weight.dtype)), array(out), unit=weight.shape[1],
    )  # fmt: skip


def embedding_bag_backward(grad, ids, offsets, sample_weight, mean, num_rows, out):
    """Fill ``out`` with the dense gradient of the table."""
    if is_half(grad):
        fill_through_float32(embedding_bag_backward, grad, ids, offsets, sample_weight, mean, num_rows, out)
        return
    pointers, positions = group_positions(array(ids), num_rows)
    bags = _bags(array(offsets), ids.shape[0])[positions]
    run_ranges(
        sum_rows, num_rows, pointers, pointers, bags, array(grad), _column(sample_weight), 1, positions,
        array(_bag_scale(offsets, mean, grad.dtype)), None, array(out), unit=grad.shape[1],
    )  # fmt: skip


def embedding_bag_sample_weight_backward(grad, weight, ids, offsets, mean, out):
    """Fill ``out`` with the gradient of the sample weights."""
    if is_half(grad):
        fill_through_float32(embedding_bag_sample_weight_backward, grad, weight, ids, offsets, mean, out)
        return
    pointers = array(offsets)
    run_ranges(
        dot_rows, grad.shape[0], pointers, pointers, array(ids), array(weight), array(grad), 1, None,
        array(out).reshape(-1, 1), unit=grad.shape[1],
    )  # fmt: skip
    if mean:
        out.mul_(_bag_scale(offsets, mean, grad.dtype)[torch.from_numpy(_bags(pointers, ids.shape[0]))])


def embedding_update_(
    weight, first, second, ids, offsets, grad, sample_weight, optimizer, mean, lr, eps, beta1, beta2, weight_decay, step
):
    """Apply one exact optimiser step to the rows that ``ids`` names."""
    unique, local = unique_relabel(ids)
    if is_half(weight):
        # The rows named, widened, form a small table of their own.
        tables = [table for table in (weight, first, second) if table is not None]
        wide = [table[unique].float() for table in tables]
        padded = (*wide, *[None] * (3 - len(wide)))
        rest = (optimizer, mean, lr, eps, beta1, beta2, weight_decay, step)
        embedding_update_(*padded, local, offsets, grad.float(), _float(sample_weight), *rest)
        for table, rows in zip(tables, wide, strict=True):
            table[unique] = rows.to(table.dtype)
        return
    pointers, positions = group_positions(array(local), unique.shape[0])
    bags = _bags(array(offsets), ids.shape[0])[positions]
    source = (array(grad), _column(sample_weight), positions, array(_bag_scale(offsets, mean, grad.dtype)))
    if optimizer == "adam":
        beta1_rest, beta2_rest = 1 - beta1**step, 1 - beta2**step
    else:
        beta1_rest = beta2_rest = 1.0
    # Every constant enters in the table's precision, so that fp32 loops stay fp32.
    constants = tuple(
        array(weight).dtype.type(value) for value in (lr, eps, beta1, beta2, beta1_rest, beta2_rest, weight_decay)
    )
    run_ranges(
        _KERNELS[optimizer], unique.shape[0], pointers, pointers, bags, *source, array(unique), _flat(weight),
        _flat(first), _flat(second), constants, unit=weight.shape[1],
    )  # fmt: skip


def _float(tensor):
    return None if tensor is None else tensor.float()


def _flat(table):
    return None if table is None else array(table).reshape(-1)


def _column(sample_weight):
    return None if sample_weight is None else array(sample_weight).reshape(-1, 1)


def _bag_scale(offsets, mean, dtype):
    return offsets.diff().clamp(min=1).to(dtype).reciprocal() if mean else None


@njit(cache=True, nogil=True)
def _bags(offsets, num_ids):
    """Return the bag of every position."""
    bags = np.empty(num_ids, np.int64)
    for bag in range(len(offsets) - 1):
        bags[offsets[bag] : offsets[bag + 1]] = bag
    return bags


# The updates of one row. Its gradient starts at ``at`` in ``sums``, its weights at ``base`` in ``weight`` and in states
# of the same shape; all arrays are flat.


@njit(cache=True, nogil=True)
def _decayed(sums, at, weight, base, column, decay):
    return get_written(sums, at + column) + decay * get_written(weight, base + column)


@njit(cache=True, nogil=True)
def _sgd_row(sums, at, weight, base, first, second, row, width, constants):
    lr, decay = constants[0], constants[6]
    for column in range(width):
        g = _decayed(sums, at, weight, base, column, decay)
        put(weight, base + column, get_written(weight, base + column) - lr * g)


@njit(cache=True, nogil=True)
def _momentum_row(sums, at, weight, base, first, second, row, width, constants):
    lr, beta1, decay = constants[0], constants[2], constants[6]
    for column in range(width):
        g = _decayed(sums, at, weight, base, column, decay)
        velocity = beta1 * get_written(first, base + column) + g
        put(first, base + column, velocity)
        put(weight, base + column, get_written(weight, base + column) - lr * velocity)


@njit(cache=True, nogil=True)
def _adagrad_row(sums, at, weight, base, first, second, row, width, constants):
    lr, eps, decay = constants[0], constants[1], constants[6]
    for column in range(width):
        g = _decayed(sums, at, weight, base, column, decay)
        total = get_written(first, base + column) + g * g
        put(first, base + column, total)
        put(weight, base + column, get_written(weight, base + column) - lr * g / (np.sqrt(total) + eps))


@njit(cache=True, nogil=True, fastmath={"reassoc"})
def _sum_of_squares(sums, at, width):
    """Sum in the lanes of a vector: a sum in sequence would wait for every addition."""
    squares = sums.dtype.type(0)
    for column in range(width):
        value = get_written(sums, at + column)
        squares += value * value
    return squares


@njit(cache=True, nogil=True)
def _rowwise_adagrad_row(sums, at, weight, base, first, second, row, width, constants):
    lr, eps, decay = constants[0], constants[1], constants[6]
    if decay != 0:  # else the pass would change nothing
        for column in range(width):
            put(sums, at + column, _decayed(sums, at, weight, base, column, decay))
    total = first[row] + _sum_of_squares(sums, at, width) / sums.dtype.type(width)
    first[row] = total
    factor = lr / (np.sqrt(total) + eps)
    for column in range(width):
        put(weight, base + column, get_written(weight, base + column) - factor * get_written(sums, at + column))


@njit(cache=True, nogil=True)
def _adam_row(sums, at, weight, base, first, second, row, width, constants):
    lr, eps, beta1, beta2, beta1_rest, beta2_rest, decay = constants
    one = sums.dtype.type(1)
    for column in range(width):
        g = _decayed(sums, at, weight, base, column, decay)
        mean = beta1 * get_written(first, base + column) + (one - beta1) * g
        square = beta2 * get_written(second, base + column) + (one - beta2) * g * g
        put(first, base + column, mean)
        put(second, base + column, square)
        step = lr * (mean / beta1_rest) / (np.sqrt(square / beta2_rest) + eps)
        put(weight, base + column, get_written(weight, base + column) - step)


def _make_kernel(update_row):
    @njit(cache=True, nogil=True)
    def update_rows(
        start, stop, indptr, bags, grad, sample_weight, positions, bag_scale, unique, weight, first, second, constants
    ):
        width = grad.shape[1]
        row_bytes = width * weight.itemsize
        sums = np.empty((_BLOCK_ROWS, width), grad.dtype)
        flat_sums = sums.reshape(-1)
        for begin in range(start, stop, _BLOCK_ROWS):
            end = min(begin + _BLOCK_ROWS, stop)
            pointers = indptr[begin : end + 1]
            # The table is far larger than any cache: its rows travel while their gradients are summed.
            for place in range(begin, end):
                prefetch_row(weight.ctypes.data + unique[place] * row_bytes, row_bytes, True)
            sum_rows(0, end - begin, pointers, bags, grad, sample_weight, 1, positions, bag_scale, None, sums)
            for place in range(begin, end):
                row, at = np.int64(unique[place]), (place - begin) * width
                update_row(flat_sums, at, weight, row * width, first, second, row, width, constants)

    return update_rows


_KERNELS = {
    "sgd": _make_kernel(_sgd_row),
    "momentum": _make_kernel(_momentum_row),
    "adagrad": _make_kernel(_adagrad_row),
    "rowwise_adagrad": _make_kernel(_rowwise_adagrad_row),
    "adam": _make_kernel(_adam_row),
}
