"""Measures what ids and rows cost the processor, with all ranks busy at once.

A few small collections train, each heavy in one thing (ids, distinct rows, bytes of rows, a hot tier); what their steps
take of the processor is fitted by non-negative least squares. Processor time does not count waiting for links, so the
rates of a machine do not depend on its network.

Ranks may outnumber cores: a loop that all ranks run at the same time tells how much longer their work takes then.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

import numpy as np
import torch
from torch import nn

from core_kernels.comm import Group
from recsys_embed.collection import TieredEmbeddingBagCollection
from recsys_embed.optimizers import SGD, RowOptimizer
from recsys_embed.plan import Plan, shapes_of
from recsys_embed.prefetch import PrefetchPipeline
from recsys_embed.tables import EmbeddingBagConfig, KeyedJaggedTensor
from recsys_embed.work import WorkLoad

__all__ = ["measure_work"]

#: (ids, distinct rows, width, hot rows): every one is heavy in one thing.
_POINTS = (
    (64, 64, 4, 0),
    (64, 64, 4, 32),
    (64, 64, 4, 64),
    (16384, 64, 4, 0),
    (8192, 64, 64, 0),
    (4096, 4096, 4, 0),
    (2048, 2048, 64, 0),
    (2048, 2048, 64, 1024),
    (64, 64, 64, 4096),  # all rows, and most of them in vain
)


_RATES = ("per_step", "per_tier", "per_exchange", "per_id", "per_id_byte", "per_row", "per_row_byte", "per_hot_byte")


def measure_work(group: Group, optimizer: RowOptimizer | None = None, steps: int = 6) -> dict[str, Any]:
    """Return the fields of :class:`recsys_embed.work.WorkCosts`, the same on every rank.

    Args:
        group: The ranks that will train.
        optimizer: How rows will be updated; SGD when None.
        steps: Steps per collection, after two that are not counted.

    Collective; takes 2 to 5 seconds.
    """
    found = [_measure_point(group, optimizer or SGD(0.01), steps, *point) for point in _POINTS]
    loads = np.array([[1.0, *astuple(load)] for load, _ in found])
    seconds = group.all_reduce(torch.tensor([s for _, s in found], dtype=torch.float64), "mean", tag="work")
    rates = dict(zip(_RATES, _fit(loads, seconds.numpy()), strict=True))
    return {**rates, "ranks_per_core": _ranks_per_core(group), "name": f"measured on {group.size} ranks"}


def _measure_point(
    group: Group, optimizer: RowOptimizer, steps: int, num_ids: int, num_rows: int, width: int, num_hot: int
) -> tuple[WorkLoad, float]:
    """Train a small collection; return its load and this rank's processor seconds per step."""
    tables = [EmbeddingBagConfig("probe", max(num_rows, num_hot), width, ["ids"])]
    plan = Plan(shapes_of(tables), group.size, hot_rows={"probe": list(range(num_hot))} if num_hot else {})
    embeddings = TieredEmbeddingBagCollection(tables, plan, optimizer, group)
    order = torch.arange(num_ids) * 7919 % num_rows
    batch = KeyedJaggedTensor.from_dense(["ids"], order.view(-1, 1))
    model, begin = _Model(embeddings), 0.0
    with PrefetchPipeline(model, None, embeddings) as pipe:
        for number, item in enumerate(pipe([batch] * (steps + 2))):
            if number == 2:
                begin = time.process_time()
            model(item).backward()
    seconds = (time.process_time() - begin) / steps
    cold, row_bytes = max(num_rows - num_hot, 0), 4.0 * width
    kinds = (float(num_hot > 0), float(cold > 0))
    load = WorkLoad(*kinds, num_ids, num_ids * row_bytes, cold, cold * row_bytes, num_hot * row_bytes)
    return load, seconds


class _Model(nn.Module):
    """As little as a model can be."""

    def __init__(self, embeddings: TieredEmbeddingBagCollection):
        super().__init__()
        self.embeddings = embeddings

    def forward(self, batch: KeyedJaggedTensor) -> torch.Tensor:
        return self.embeddings(batch).values().sum()


def _fit(loads: np.ndarray, seconds: Sequence[float] | np.ndarray) -> list[float]:
    """Return non-negative rates with ``loads @ rates`` near ``seconds``, by relative error."""
    from scipy.optimize import nnls

    scale = loads.max(0)
    weights = 1 / np.asarray(seconds)
    rates, _ = nnls(loads / scale * weights[:, None], np.ones(len(loads)))
    return (rates / scale).tolist()


def _ranks_per_core(group: Group, busy_seconds: float = 0.1) -> float:
    """Return how much longer a loop takes than its processor time while all ranks run it, at least 1."""
    group.barrier("work")
    begin, start = time.perf_counter(), time.process_time()
    while time.process_time() - start < busy_seconds:
        pass
    own = torch.tensor((time.perf_counter() - begin) / (time.process_time() - start), dtype=torch.float64)
    return max(1.0, group.all_reduce(own, "mean", tag="work").item())
