"""Distinct ids in the order they are first seen, and local numbers for all of them."""

from __future__ import annotations

import torch
from torch import Tensor

from core_kernels.errors import ArgumentTypeError
from core_kernels.ops import _library
from core_kernels.ops._checks import check_ids_tensor

__all__ = ["unique_relabel"]


def unique_relabel(seeds: Tensor, *ids: Tensor) -> tuple[Tensor, ...]:
    """Number ids locally: the seeds first, then new ids in first-seen order.

    Args:
        seeds: int32 or int64 ids that get the first numbers, in their order (a repeated one counts once).
        *ids: Further ids of the same dtype, taken one tensor after the other.

    Returns:
        ``(unique, *local)``: the distinct ids, and for each tensor of ``ids`` the int64 positions in ``unique``.

    Raises:
        ArgumentError: A tensor is not 1-D.
        ArgumentTypeError: Not int32 or int64, or different dtypes.

    Cost: one pass; no sort.

    Determinism: the order is defined by the input alone, the same on every device.

    >>> unique, local = unique_relabel(torch.tensor([7, 3]), torch.tensor([9, 3, 9, 1]))
    >>> unique.tolist(), local.tolist()
    ([7, 3, 9, 1], [2, 1, 2, 3])
    """
    tensors = [check_ids_tensor("seeds", seeds)]
    for number, tensor in enumerate(ids):
        tensors.append(check_ids_tensor(f"ids[{number}]", tensor))
        if tensor.dtype != seeds.dtype:
            raise ArgumentTypeError(f"ids[{number}] is {tensor.dtype}; expected {seeds.dtype} like seeds; convert it")
    unique, local = _unique_relabel(torch.cat(tensors) if ids else tensors[0])
    return (unique, *local.split([tensor.shape[0] for tensor in tensors])[1:])


def _dispatch(ids):
    if ids.shape[0] == 0:
        return torch.empty_like(ids), ids.new_empty(0, dtype=torch.int64)
    return _library.run("unique_relabel", ids, ids.contiguous())


def _fake(ids):
    num_unique = torch.library.get_ctx().new_dynamic_size()
    return ids.new_empty(num_unique), ids.new_empty(ids.shape, dtype=torch.int64)


_unique_relabel = _library.register("unique_relabel", _dispatch, _fake)
