"""Optimiser steps fused with the backward pass of embedding bags.

Training a large table through autograd builds a gradient row per occurrence, coalesces them, and visits the table again
to update it. These functions take the gradient of the bags instead and update the table in place: every row named gets
one exact step with its summed gradient, as the dense optimiser would give it; rows not named are not touched.

Exact means: how often and in which bags a row occurs matters through its summed gradient alone. Sums are taken in order
of occurrence (in chunks for hubs), bitwise repeatable on any number of threads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from core_kernels.errors import argument_error
from core_kernels.ops import _library
from core_kernels.ops._bags import check_table, dense, is_mean, read_bags, sample_weights
from core_kernels.ops._checks import check_bounds_mode

__all__ = ["fused_adagrad_", "fused_adam_", "fused_rowwise_adagrad_", "fused_sgd_"]


def fused_sgd_(
    weight: Tensor,
    ids: Tensor,
    offsets: Tensor | None,
    grad: Tensor,
    lr: float,
    momentum_buffer: Tensor | None = None,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    per_sample_weights: Tensor | None = None,
    mode: str = "sum",
    bounds: str = "error",
) -> None:
    """Apply SGD to the rows that the bags name.

    ``g = gradient + weight_decay * w``; with a buffer ``v = momentum * v + g``, else ``v = g``; ``w -= lr * v``.

    Args:
        weight: The table, changed in place.
        ids: As for :func:`embedding_bag`, and so are ``offsets``, ``per_sample_weights``, ``mode`` and ``bounds``.
        offsets: The bags.
        grad: Gradient of the bags [bags, width].
        lr: Learning rate.
        momentum_buffer: State like ``weight``, changed in place; rows not named keep theirs.
        momentum: Factor of the buffer.
        weight_decay: L2 penalty on the rows named.
        per_sample_weights: A factor per id.
        mode: ``"sum"`` or ``"mean"``.
        bounds: ``"error"`` or ``"unchecked"``.

    Raises:
        ArgumentError: An id outside the table, or shapes that do not fit.
        ArgumentTypeError: Wrong dtypes.

    >>> table = torch.ones(3, 1)
    >>> fused_sgd_(table, torch.tensor([2, 2]), None, torch.tensor([[1.0], [2.0]]), lr=0.5)
    >>> table.flatten().tolist()
    [1.0, 1.0, -0.5]
    """
    if momentum_buffer is None and momentum:
        raise argument_error("momentum_buffer", None, f"a buffer for momentum={momentum}", "pass zeros_like(weight)")
    name = "sgd" if momentum_buffer is None else "momentum"
    batch = (ids, offsets, grad, per_sample_weights, mode, bounds)
    _update(name, weight, (momentum_buffer, None), batch, lr=lr, beta1=momentum, weight_decay=weight_decay)


def fused_adagrad_(
    weight: Tensor,
    state: Tensor,
    ids: Tensor,
    offsets: Tensor | None,
    grad: Tensor,
    lr: float,
    eps: float = 1e-10,
    weight_decay: float = 0.0,
    per_sample_weights: Tensor | None = None,
    mode: str = "sum",
    bounds: str = "error",
) -> None:
    """Apply Adagrad to the rows that the bags name: ``s += g * g``; ``w -= lr * g / (sqrt(s) + eps)``.

    Args:
        weight: The table, changed in place.
        state: Sums of squares like ``weight``, changed in place.
        ids: As for :func:`fused_sgd_`, and so are the arguments not listed.
        offsets: The bags.
        grad: Gradient of the bags.
        lr: Learning rate.
        eps: Added to the root.
        weight_decay: L2 penalty on the rows named.
        per_sample_weights: A factor per id.
        mode: ``"sum"`` or ``"mean"``.
        bounds: ``"error"`` or ``"unchecked"``.

    Raises:
        ArgumentError: An id outside the table, or shapes that do not fit.
        ArgumentTypeError: Wrong dtypes.

    >>> table, state = torch.ones(2, 1), torch.zeros(2, 1)
    >>> fused_adagrad_(table, state, torch.tensor([1]), None, torch.tensor([[2.0]]), lr=1.0)
    >>> table.flatten().tolist(), state.flatten().tolist()
    ([1.0, 0.0], [0.0, 4.0])
    """
    batch = (ids, offsets, grad, per_sample_weights, mode, bounds)
    _update("adagrad", weight, (state, None), batch, lr=lr, eps=eps, weight_decay=weight_decay)


def fused_rowwise_adagrad_(
    weight: Tensor,
    state: Tensor,
    ids: Tensor,
    offsets: Tensor | None,
    grad: Tensor,
    lr: float,
    eps: float = 1e-10,
    weight_decay: float = 0.0,
    per_sample_weights: Tensor | None = None,
    mode: str = "sum",
    bounds: str = "error",
) -> None:
    """Apply Adagrad with one state per row: ``s += mean(g * g)``; ``w -= lr * g / (sqrt(s) + eps)``.

    Args:
        weight: The table, changed in place.
        state: Sums of mean squares [rows], changed in place.
        ids: As for :func:`fused_sgd_`, and so are the arguments not listed.
        offsets: The bags.
        grad: Gradient of the bags.
        lr: Learning rate.
        eps: Added to the root.
        weight_decay: L2 penalty on the rows named.
        per_sample_weights: A factor per id.
        mode: ``"sum"`` or ``"mean"``.
        bounds: ``"error"`` or ``"unchecked"``.

    Raises:
        ArgumentError: An id outside the table, or shapes that do not fit.
        ArgumentTypeError: Wrong dtypes.

    >>> table, state = torch.ones(2, 2), torch.zeros(2)
    >>> fused_rowwise_adagrad_(table, state, torch.tensor([1]), None, torch.tensor([[2.0, 2.0]]), lr=1.0)
    >>> table.tolist(), state.tolist()
    ([[1.0, 1.0], [0.0, 0.0]], [0.0, 4.0])
    """
    batch = (ids, offsets, grad, per_sample_weights, mode, bounds)
    _update("rowwise_adagrad", weight, (state, None), batch, lr=lr, eps=eps, weight_decay=weight_decay)


def fused_adam_(
    weight: Tensor,
    first_moment: Tensor,
    second_moment: Tensor,
    ids: Tensor,
    offsets: Tensor | None,
    grad: Tensor,
    lr: float,
    step: int,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    per_sample_weights: Tensor | None = None,
    mode: str = "sum",
    bounds: str = "error",
) -> None:
    """Apply lazy Adam to the rows that the bags name: rows not named keep their moments.

    ``m = b1 m + (1 - b1) g``; ``v = b2 v + (1 - b2) g g``; ``w -= lr * (m / (1 - b1^step)) / (sqrt(v / (1 - b2^step)) +
    eps)``.

    Args:
        weight: The table, changed in place.
        first_moment: State like ``weight``, changed in place.
        second_moment: State like ``weight``, changed in place.
        ids: As for :func:`fused_sgd_`, and so are the arguments not listed.
        offsets: The bags.
        grad: Gradient of the bags.
        lr: Learning rate.
        step: Number of this step, from 1.
        betas: Decay of the two moments.
        eps: Added to the root.
        weight_decay: L2 penalty on the rows named.
        per_sample_weights: A factor per id.
        mode: ``"sum"`` or ``"mean"``.
        bounds: ``"error"`` or ``"unchecked"``.

    Raises:
        ArgumentError: An id outside the table, shapes that do not fit, ``step`` below 1.
        ArgumentTypeError: Wrong dtypes.

    >>> table, m, v = torch.ones(2, 1), torch.zeros(2, 1), torch.zeros(2, 1)
    >>> fused_adam_(table, m, v, torch.tensor([0]), None, torch.tensor([[3.0]]), lr=0.5, step=1)
    >>> [round(value, 3) for value in table.flatten().tolist()]
    [0.5, 1.0]
    """
    if step < 1:
        raise argument_error("step", step, "at least 1", "count steps from 1")
    batch = (ids, offsets, grad, per_sample_weights, mode, bounds)
    options = {"lr": lr, "eps": eps, "beta1": betas[0], "beta2": betas[1], "weight_decay": weight_decay, "step": step}
    _update("adam", weight, (first_moment, second_moment), batch, **options)


def _update(optimizer, weight, states, batch, *, lr, eps=0.0, beta1=0.0, beta2=0.0, weight_decay=0.0, step=1) -> None:
    ids, offsets, grad, per_sample_weights, mode, bounds = batch
    checked, mean = check_bounds_mode(bounds), is_mean(mode)
    check_table(weight)
    ids, offsets = read_bags(ids, offsets)
    expected = (offsets.shape[0] - 1, weight.shape[1])
    if tuple(grad.shape) != expected or grad.dtype != weight.dtype:
        found = f"{grad.dtype} {tuple(grad.shape)}"
        raise argument_error(
            "grad", found, f"{weight.dtype} {expected}, a row per bag", "pass the gradient of the bags"
        )
    for state in states:
        shape = weight.shape[:1] if optimizer == "rowwise_adagrad" else weight.shape
        if state is not None and (state.shape != shape or state.dtype != weight.dtype or not state.is_contiguous()):
            found = f"{state.dtype} {tuple(state.shape)}"
            raise argument_error("state", found, f"contiguous {weight.dtype} {tuple(shape)}", "allocate it with zeros")
    if not weight.is_contiguous():
        raise argument_error("weight.stride()", weight.stride(), "a contiguous table", "pass weight.contiguous()")
    factors = sample_weights(per_sample_weights, ids, weight)
    with torch.no_grad():
        _embedding_update(
            weight.detach(), *states, ids, offsets, grad, factors, optimizer, mean,
            float(lr), float(eps), float(beta1), float(beta2), float(weight_decay), step, checked,
        )  # fmt: skip


def _dispatch_update(
    weight, first, second, ids, offsets, grad, sample_weight, optimizer, mean, lr, eps, beta1, beta2, weight_decay,
    step, checked,
):  # fmt: skip
    if checked:
        name = "sgd" if optimizer == "momentum" else optimizer
        _library.check_ids(f"fused_{name}_", "ids", ids, weight.shape[0])
    if ids.shape[0]:
        batch = (ids, offsets, grad.contiguous(), dense(sample_weight))
        constants = (optimizer, mean, lr, eps, beta1, beta2, weight_decay, step)
        _library.run("embedding_update_", weight, weight, first, second, *batch, *constants)


_embedding_update = _library.register("embedding_update_", _dispatch_update, lambda *args: None)
