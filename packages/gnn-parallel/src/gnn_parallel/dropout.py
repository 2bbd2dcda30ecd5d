"""Dropout that does not depend on who computes: masks are keyed by seed, step, layer, node and column.

A node's activations may be computed by several ranks in a step, and by others under another strategy. With a mask drawn
from a stream they would differ; with a keyed mask, losses and gradients stay equal over strategies and ranks.
"""

from __future__ import annotations

import contextvars
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from core_kernels import random
from gnn_parallel.errors import input_error

__all__ = ["keyed_dropout", "sampling_step"]

_LAYER_OFFSET = 1 << 20
"""Keeps masks apart from the sampler's draws, whose layers count from 0."""

_COLUMNS_PER_DRAW = 4
"""64 random bits decide four columns, 16 bits each: p is met up to 2**-17."""

_step: contextvars.ContextVar[tuple[int, int]] = contextvars.ContextVar("gnn_parallel_step", default=(0, 0))


@contextmanager
def sampling_step(seed: int, step: int) -> Iterator[None]:
    """Name the step whose masks :func:`keyed_dropout` draws; the engine does this around every call."""
    token = _step.set((seed, step))
    try:
        yield
    finally:
        _step.reset(token)


def keyed_dropout(x: Tensor, node_ids: Tensor, p: float, layer: int, training: bool = True) -> Tensor:
    """Zero a share of the activations and scale up the rest, the same way on every rank.

    Args:
        x: ``[rows, width]`` activations.
        node_ids: int64 ``[rows]``, node of each row.
        p: Share to zero, in [0, 1).
        layer: Number that tells this use from others in the model.
        training: Whether to do anything at all.

    >>> x = torch.ones(2, 4)
    >>> torch.equal(keyed_dropout(x, torch.tensor([7, 8]), 0.5, 0)[1:], keyed_dropout(x[1:], torch.tensor([8]), 0.5, 0))
    True
    """
    if not 0 <= p < 1:
        raise input_error("p", p, "a share in [0, 1)", "pass 0 for none")
    if not training or p == 0:
        return x
    seed, step = _step.get()
    groups = torch.arange(-(-x.shape[1] // _COLUMNS_PER_DRAW), device=x.device)
    bits = random.random_bits(seed, step, _LAYER_OFFSET + layer, node_ids.view(-1, 1), groups)
    is_kept = bits.view(torch.int16)[:, : x.shape[1]] >= round(p * 2**16) - 2**15
    return x * is_kept.to(x.dtype).mul_(1 / (1 - p))
