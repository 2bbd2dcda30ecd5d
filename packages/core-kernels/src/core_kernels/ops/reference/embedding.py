"""Embedding bags and exact sparse optimiser steps in plain torch."""

from __future__ import annotations

import torch

from core_kernels.ops.reference.spmm import destinations

__all__ = ["embedding_bag", "embedding_bag_backward", "embedding_bag_sample_weight_backward", "embedding_update_"]


def _factors(ids, offsets, sample_weight, mean, dtype):
    """Return the bag of each position and the factor its row carries in the bag."""
    bags = destinations(offsets)
    factor = torch.ones(ids.shape[0], dtype=dtype, device=ids.device)
    if sample_weight is not None:
        factor = factor * sample_weight
    if mean:
        factor = factor / offsets.diff().clamp(min=1).to(dtype)[bags]
    return bags, factor.unsqueeze(1)


def embedding_bag(weight, ids, offsets, sample_weight, mean, out):
    """Fill ``out``: see the operator's meaning."""
    bags, factor = _factors(ids, offsets, sample_weight, mean, weight.dtype)
    out.zero_().index_add_(0, bags, factor * weight[ids.long()])


def embedding_bag_backward(grad, ids, offsets, sample_weight, mean, num_rows, out):
    """Fill ``out``: see the operator's meaning."""
    bags, factor = _factors(ids, offsets, sample_weight, mean, grad.dtype)
    out.zero_().index_add_(0, ids, factor * grad[bags])


def embedding_bag_sample_weight_backward(grad, weight, ids, offsets, mean, out):
    """Fill ``out``: see the operator's meaning."""
    bags, factor = _factors(ids, offsets, None, mean, grad.dtype)
    out.copy_((factor * grad[bags] * weight[ids.long()]).sum(1))


def embedding_update_(
    weight, first, second, ids, offsets, grad, sample_weight, optimizer, mean, lr, eps, beta1, beta2, weight_decay, step
):
    """Update in place: see the operator's meaning."""
    bags, factor = _factors(ids, offsets, sample_weight, mean, grad.dtype)
    rows, local = torch.unique(ids.long(), return_inverse=True)
    g = grad.new_zeros(rows.shape[0], grad.shape[1]).index_add_(0, local, factor * grad[bags])
    g += weight_decay * weight[rows]
    if optimizer == "momentum":
        first[rows] = beta1 * first[rows] + g
        change = first[rows]
    elif optimizer == "adagrad":
        first[rows] += g * g
        change = g / (first[rows].sqrt() + eps)
    elif optimizer == "rowwise_adagrad":
        first[rows] += (g * g).mean(1)
        change = g / (first[rows].sqrt() + eps).unsqueeze(1)
    elif optimizer == "adam":
        first[rows] = beta1 * first[rows] + (1 - beta1) * g
        second[rows] = beta2 * second[rows] + (1 - beta2) * g * g
        change = (first[rows] / (1 - beta1**step)) / ((second[rows] / (1 - beta2**step)).sqrt() + eps)
    else:
        change = g
    weight[rows] -= lr * change
