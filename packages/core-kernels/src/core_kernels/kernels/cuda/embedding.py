"""Launchers of ``embedding.cuh``: the fused backward; the other parts of an embedding bag are sums and dot products."""

from __future__ import annotations

import torch
from torch import Tensor

from core_kernels.errors import argument_error
from core_kernels.kernels.cuda._instances import FLOATS, Kernel, accumulator
from core_kernels.kernels.cuda._launch import launch_threads
from core_kernels.kernels.cuda._runs import group_by_row, runs_of_equal_keys
from core_kernels.kernels.cuda._tasks import lane_layout, row_tasks, vec_for
from core_kernels.kernels.cuda.sddmm import dot_per_edge
from core_kernels.kernels.cuda.spmm import sum_rows

__all__ = [
    "KERNELS",
    "embedding_bag",
    "embedding_bag_backward",
    "embedding_bag_sample_weight_backward",
    "embedding_update_",
]

_UPDATE = Kernel("embedding_update", "embedding.cuh", FLOATS, vec=True, narrow_options={"full_state": (0, 1)})
_UPDATE_CHUNKS = Kernel("embedding_update_chunks", "embedding.cuh", FLOATS, narrow_options={"full_state": (0, 1)})
KERNELS = (_UPDATE, _UPDATE_CHUNKS)

_RULES = ("sgd", "momentum", "adagrad", "rowwise_adagrad", "adam")


def embedding_bag(
    weight: Tensor, ids: Tensor, offsets: Tensor, sample_weight: Tensor | None, mean: bool, out: Tensor
) -> None:
    """Fill ``out`` with the weighted sum or mean of each bag's table rows."""
    sum_rows(offsets, ids, weight, out, num_edges=ids.numel(), weight=sample_weight, mean=mean, cached=False)


def _bags(offsets: Tensor, num_ids: int, mean: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Return the bag of each id, and the factor of each bag for ``mean``."""
    places = torch.arange(num_ids, dtype=torch.int64, device=offsets.device)
    bag_of = torch.searchsorted(offsets, places, right=True).sub_(1)
    return bag_of, offsets.diff().clamp_min(1).to(accumulator(dtype)).reciprocal() if mean else None


def embedding_bag_backward(
    grad: Tensor, ids: Tensor, offsets: Tensor, sample_weight: Tensor | None, mean: bool, num_rows: int, out: Tensor
) -> None:
    """Fill ``out`` with the dense gradient of the table."""
    order, indptr = group_by_row(ids, num_rows)
    bag_of, scale = _bags(offsets, ids.numel(), mean, grad.dtype)
    sum_rows(
        indptr,
        bag_of[order],
        grad,
        out,
        num_edges=ids.numel(),
        weight=sample_weight,
        edge_ids=order,
        src_scale=scale,
        cached=False,
    )


def embedding_bag_sample_weight_backward(
    grad: Tensor, weight: Tensor, ids: Tensor, offsets: Tensor, mean: bool, out: Tensor
) -> None:
    """Fill ``out`` with the dot product of each id's table row and its bag's gradient."""
    dot_per_edge(offsets, ids, weight, grad, None, 1, out, mean=mean, cached=False)


def embedding_update_(
    weight: Tensor,
    first: Tensor | None,
    second: Tensor | None,
    ids: Tensor,
    offsets: Tensor,
    grad: Tensor,
    sample_weight: Tensor | None,
    optimizer: str,
    mean: bool,
    lr: float,
    eps: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    step: int,
) -> None:
    """Add up each named row's gradient and update the row once, in place."""
    if optimizer not in _RULES:
        raise argument_error("optimizer", optimizer, f"one of {', '.join(_RULES)}", "choose one of these")
    dtype, width, device = weight.dtype, weight.shape[1], weight.device
    state = first.dtype if first is not None else accumulator(dtype)
    if state not in (dtype, accumulator(dtype)):
        raise argument_error("first.dtype", state, f"{dtype} or {accumulator(dtype)}", "convert the optimiser state")
    if ids.numel() == 0 or width == 0:
        return
    full_state = int(state == accumulator(dtype))
    order, starts, row_ids = runs_of_equal_keys(ids)
    bag_of, scale = _bags(offsets, ids.numel(), mean, dtype)
    tasks = row_tasks(starts, ids.numel(), cached=False)
    vec = vec_for(dtype, width, grad)
    lanes = lane_layout(width, vec, ids.numel(), tasks.num_rows)
    partial = tasks.partial(width, accumulator(dtype), device)
    rule = (_RULES.index(optimizer), float(lr), float(eps), float(beta1), float(beta2), float(weight_decay))
    rule += (1.0 - float(beta1) ** step, 1.0 - float(beta2) ** step)
    launch_threads(
        _UPDATE.instance(dtype, vec=vec, full_state=full_state),
        tasks.num_tasks * lanes.size,
        (starts, bag_of[order], order, grad, sample_weight, scale, tasks.chunk_start, row_ids, partial, weight)
        + (first, second, tasks.num_rows, tasks.max_chunks, width, lanes.columns, lanes.size, *rule),
        device,
    )
    if partial is not None:
        launch_threads(
            _UPDATE_CHUNKS.instance(dtype, full_state=full_state),
            tasks.max_chunks * 32,
            (starts, tasks.chunk_start, row_ids, partial, weight, first, second)
            + (tasks.num_rows, tasks.max_chunks, width, *rule),
            device,
        )
