"""Embedding bags: the sum or mean of some rows of a table per bag.

The gradient of the table is dense here. To train a large table, leave autograd out and give the gradient of the bags to
:mod:`core_kernels.ops.fused_optimizers`.

The bags: ``ids`` [n] and ``offsets`` int64 [bags + 1], bag b holds ``ids[offsets[b]:offsets[b + 1]]``. ``offsets=None``
makes every id a bag of its own, or every row of a matrix ``ids`` [bags, length].
"""

from __future__ import annotations

from torch import Tensor

from core_kernels.ops import _library
from core_kernels.ops._bags import check_table, dense, is_mean, read_bags, sample_weights
from core_kernels.ops._checks import check_bounds_mode
from core_kernels.ops._memory import empty_rows

__all__ = ["embedding_bag"]


def embedding_bag(
    weight: Tensor,
    ids: Tensor,
    offsets: Tensor | None = None,
    per_sample_weights: Tensor | None = None,
    mode: str = "sum",
    bounds: str = "error",
) -> Tensor:
    """Sum or average the rows of each bag.

    Args:
        weight: The table, floating point [rows, width].
        ids: Row numbers, int32 or int64 [n], or [bags, length] without ``offsets``.
        offsets: int64 [bags + 1] from 0 to n.
        per_sample_weights: A factor per id, like ``weight`` in dtype.
        mode: ``"sum"`` or ``"mean"`` (divides by the length of the bag, weighted or not).
        bounds: ``"error"`` checks the ids, ``"unchecked"`` trusts them.

    Returns:
        [bags, width]; empty bags give 0. Gradients flow to the table (dense) and the sample weights.

    Raises:
        ArgumentError: An id outside the table, offsets that do not describe the ids, unknown ``mode``.
        ArgumentTypeError: Wrong dtypes.

    Determinism: bitwise repeatable, forward and backward.

    >>> import torch
    >>> table = torch.tensor([[1.0], [10.0], [100.0]])
    >>> embedding_bag(table, torch.tensor([0, 2, 2]), torch.tensor([0, 2, 2, 3])).flatten().tolist()
    [101.0, 0.0, 100.0]
    """
    checked = check_bounds_mode(bounds)
    check_table(weight)
    ids, offsets = read_bags(ids, offsets)
    return _embedding_bag(weight, ids, offsets, sample_weights(per_sample_weights, ids, weight), is_mean(mode), checked)


def _dispatch_bag(weight, ids, offsets, sample_weight, mean, checked):
    if checked:
        _library.check_ids("embedding_bag", "ids", ids, weight.shape[0])
    out = empty_rows(weight, offsets.shape[0] - 1, weight.shape[1])
    weight = _library.contiguous_rows("embedding_bag", "weight", weight)
    if out.numel():
        _library.run("embedding_bag", weight, weight, ids, offsets, dense(sample_weight), mean, out)
    return out


def _fake_bag(weight, ids, offsets, sample_weight, mean, checked):
    return weight.new_empty(offsets.shape[0] - 1, weight.shape[1])


def _save_bag(ctx, inputs, output):
    weight, ids, offsets, sample_weight, ctx.mean, ctx.checked = inputs
    ctx.num_rows = weight.shape[0]
    ctx.save_for_backward(None if sample_weight is None else weight, ids, offsets, sample_weight)


def _bag_backward(ctx, grad):
    weight, ids, offsets, sample_weight = ctx.saved_tensors
    grad_weight = grad_factors = None
    if ctx.needs_input_grad[0]:
        grad_weight = _embedding_bag_backward(grad, ids, offsets, sample_weight, ctx.mean, ctx.num_rows, ctx.checked)
    if sample_weight is not None and ctx.needs_input_grad[3]:
        grad_factors = _sample_weight_backward(grad, weight, ids, offsets, ctx.mean, ctx.checked)
    return grad_weight, None, None, grad_factors, None, None


def _dispatch_backward(grad, ids, offsets, sample_weight, mean, num_rows, checked):
    if checked:  # again: memory shared with numpy may have changed since the forward
        _library.check_ids("embedding_bag_backward", "ids", ids, num_rows)
    out = empty_rows(grad, num_rows, grad.shape[1])
    arrays = (grad.contiguous(), ids, offsets, dense(sample_weight))
    if out.numel():
        _library.run("embedding_bag_backward", grad, *arrays, mean, num_rows, out)
    return out


def _fake_backward(grad, ids, offsets, sample_weight, mean, num_rows, checked):
    return grad.new_empty(num_rows, grad.shape[1])


def _dispatch_sample_weight_backward(grad, weight, ids, offsets, mean, checked):
    if checked:
        _library.check_ids("embedding_bag_sample_weight_backward", "ids", ids, weight.shape[0])
    out = grad.new_empty(ids.shape)
    arrays = (grad.contiguous(), weight.contiguous(), ids, offsets)
    if out.numel():
        _library.run("embedding_bag_sample_weight_backward", grad, *arrays, mean, out)
    return out


def _fake_sample_weight_backward(grad, weight, ids, offsets, mean, checked):
    return grad.new_empty(ids.shape)


_embedding_bag = _library.register("embedding_bag", _dispatch_bag, _fake_bag, _bag_backward, _save_bag)
_embedding_bag_backward = _library.register("embedding_bag_backward", _dispatch_backward, _fake_backward)
_sample_weight_backward = _library.register(
    "embedding_bag_sample_weight_backward", _dispatch_sample_weight_backward, _fake_sample_weight_backward
)
