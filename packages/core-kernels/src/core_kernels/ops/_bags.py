"""Reading the arguments that describe embedding bags."""

from __future__ import annotations

import torch
from torch import Tensor

from core_kernels.errors import ArgumentTypeError, argument_error
from core_kernels.ops._checks import check_floating, check_ids_tensor, check_indptr

__all__ = ["check_table", "dense", "is_mean", "read_bags", "sample_weights"]


def check_table(weight: Tensor) -> None:
    """Raise unless ``weight`` is a floating-point matrix."""
    check_floating("weight", weight)
    if weight.dim() != 2:
        raise argument_error("weight.shape", tuple(weight.shape), "(rows, width)", "pass the table as a matrix")


def read_bags(ids: Tensor, offsets: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return ids [n] and offsets [bags + 1], checked; without offsets every row of ids is a bag."""
    if offsets is not None:
        ids = check_ids_tensor("ids", ids)
        check_indptr("offsets", offsets, ids.shape[0])
        return ids, offsets
    length = ids.shape[1] if ids.dim() == 2 else 1
    num_bags = ids.shape[0]
    return check_ids_tensor("ids", ids.flatten()), torch.arange(num_bags + 1, device=ids.device) * length


def sample_weights(per_sample_weights: Tensor | None, ids: Tensor, weight: Tensor) -> Tensor | None:
    """Return one factor per id in the table's dtype, or None."""
    if per_sample_weights is None:
        return None
    factors = per_sample_weights.flatten()
    if factors.shape != ids.shape:
        raise argument_error(
            "per_sample_weights.shape", tuple(per_sample_weights.shape), f"one factor for each of {ids.shape[0]} ids",
            "pass a tensor of the shape of ids",
        )  # fmt: skip
    if factors.dtype != weight.dtype:
        raise ArgumentTypeError(f"per_sample_weights are {factors.dtype}; expected {weight.dtype} like weight; convert")
    return factors


def is_mean(mode: str) -> bool:
    """Return whether bags are averaged."""
    if mode not in ("sum", "mean"):
        raise argument_error(
            "mode", mode, '"sum" or "mean"', "use segment_reduce on gathered rows for other reductions"
        )
    return mode == "mean"


def dense(tensor: Tensor | None) -> Tensor | None:
    """Return the tensor contiguous; None stays None."""
    return None if tensor is None else tensor.contiguous()
