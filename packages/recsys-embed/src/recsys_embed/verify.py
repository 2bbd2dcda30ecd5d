"""Proof that tiers, pre-fetching and the number of ranks change nothing.

Every combination trains the same tables on the same global batches and is compared, bit by bit, with a plain run in
one process: ``nn.EmbeddingBag`` looks up, autograd gives one gradient row per id, PyTorch's ``index_add_`` sums them
per run of samples, runs are merged in the fixed tree, and the optimiser's formula is written out in PyTorch. Nothing of
the exchange and the tiers is shared with it, and of the fused kernels just the order in which row-wise Adagrad adds up
the squares of one row.

The loss is ``sum((pooled - target)^2) / 2`` averaged over samples, so that gradients depend on the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from core_kernels.comm import Group
from core_kernels.ops.fused_optimizers import fused_rowwise_adagrad_
from recsys_embed.checkpoint import gather_tables
from recsys_embed.collection import TieredEmbeddingBagCollection
from recsys_embed.optimizers import RowOptimizer, make_optimizer
from recsys_embed.plan import Plan, shapes_of
from recsys_embed.prefetch import PrefetchPipeline
from recsys_embed.tables import EmbeddingBagConfig, KeyedJaggedTensor

__all__ = ["Case", "Comparison", "compare", "hot_plan", "mean_squares", "reference_tables", "run_case", "split_batch"]

_TARGET = 0.1


@dataclass(frozen=True)
class Case:
    """One combination to check.

    Attributes:
        hot: Rows in the hot tier, the most accessed ones.
        prefetch: Whether rows are fetched ahead.
        optimizer: Name of the optimiser.
        deterministic: Bitwise mode; otherwise sums may be reordered.
        weight_decay: Of the optimiser.
    """

    hot: int
    prefetch: bool
    optimizer: str
    deterministic: bool = True
    weight_decay: float = 0.0

    def make_optimizer(self) -> RowOptimizer:
        """Return the optimiser of the case."""
        return make_optimizer(self.optimizer, 0.05, weight_decay=self.weight_decay)


@dataclass(frozen=True)
class Comparison:
    """How a run differs from the reference.

    Attributes:
        is_bitwise_equal: Whether parameters and states agree in every bit.
        worst_relative: Largest difference over the largest value of its table.
        where: The table or state that differs most.
    """

    is_bitwise_equal: bool
    worst_relative: float
    where: str


def split_batch(batch: KeyedJaggedTensor, rank: int, world_size: int) -> KeyedJaggedTensor:
    """Return a rank's samples of a global batch, a contiguous run of them."""
    size = batch.stride()
    start, stop = size * rank // world_size, size * (rank + 1) // world_size
    lengths = batch.lengths().view(-1, size)
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), batch.lengths().long().cumsum(0)])
    pieces = [slice(int(ends[f * size + start]), int(ends[f * size + stop])) for f in range(len(lengths))]
    weights = batch.weights_or_none()
    return KeyedJaggedTensor(
        batch.keys(),
        torch.cat([batch.values()[p] for p in pieces]),
        lengths[:, start:stop].reshape(-1),
        None if weights is None else torch.cat([weights[p] for p in pieces]),
    )


def hot_plan(tables: Sequence[EmbeddingBagConfig], batches: Sequence[KeyedJaggedTensor], hot: int, size: int) -> Plan:
    """Return a plan with the ``hot`` most accessed rows of the batches."""
    from recsys_embed.profile import AccessStats

    rows = AccessStats.from_batches(batches, tables, sample=None).most_present(hot) if hot else {}
    return Plan(shapes_of(tables), size, hot_rows=rows, reason="given by the check")


class _PoolOnly(nn.Module):
    def __init__(self, embeddings: TieredEmbeddingBagCollection):
        super().__init__()
        self.embeddings = embeddings

    def forward(self, batch: KeyedJaggedTensor) -> Tensor:
        return self.embeddings(batch).values()


def run_case(
    group: Group,
    tables: Sequence[EmbeddingBagConfig],
    batches: Sequence[KeyedJaggedTensor],
    case: Case,
    make_plan: Callable[..., Plan] = hot_plan,
) -> dict[str, Tensor]:
    """Train on this rank's part of the global batches; return whole tables and states. Collective."""
    plan = make_plan(tables, batches, case.hot, group.size)
    optimizer = case.make_optimizer()
    emb = TieredEmbeddingBagCollection(tables, plan, optimizer, group, deterministic=case.deterministic)
    model = _PoolOnly(emb)
    mine = [split_batch(batch, group.rank, group.size) for batch in batches]
    with PrefetchPipeline(model, None, emb, enabled=case.prefetch) as pipe:
        for batch in pipe(mine):
            difference = model(batch) - _TARGET
            (0.5 * difference.square().sum() / batch.stride()).backward()
            optimizer.lr *= 0.99  # schedules must not touch updates that were put off
    return gather_tables(emb)


def reference_tables(
    tables: Sequence[EmbeddingBagConfig], batches: Sequence[KeyedJaggedTensor], case: Case, num_leaves: int = 8
) -> dict[str, Tensor]:
    """Train the same tables in one process with ``nn.EmbeddingBag`` and written-out optimisers."""
    start = TieredEmbeddingBagCollection(tables, None, case.make_optimizer(), Group.single())
    state = {name: tensor.clone() for name, tensor in gather_tables(start).items()}
    optimizer = case.make_optimizer()
    for step, batch in enumerate(batches, 1):
        partials = [_row_gradients(tables, state, batch, leaf, num_leaves) for leaf in range(num_leaves)]
        for table in tables:
            rows, grad = _merge([p[table.name] for p in partials])
            weight = state[f"{table.name}.weight"]
            states = [state[f"{table.name}.{name}"] for name in optimizer.state_names]
            _STEPS[optimizer.name](optimizer, weight, states, rows, grad, step)
        optimizer.lr *= 0.99
    return state


def _row_gradients(
    tables: Sequence[EmbeddingBagConfig], state: dict[str, Tensor], batch: KeyedJaggedTensor, leaf: int, num_leaves: int
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the rows touched by one run of samples and their summed gradients."""
    part, size = split_batch(batch, leaf, num_leaves), batch.stride()
    found = {}
    for table in tables:
        weight = state[f"{table.name}.weight"].clone()
        bag = nn.EmbeddingBag.from_pretrained(weight, freeze=False, mode="sum", sparse=True)
        rows, values = [], []
        for feature in table.feature_names:
            ids, lengths, weights = _feature(part, feature)
            offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])[:-1]
            bag.weight.grad = None
            pooled = bag(ids, offsets, weights)
            if table.pooling == "mean":  # its own mean multiplies by a rounded reciprocal
                pooled = pooled / lengths.clamp(min=1).unsqueeze(1)
            (0.5 * (pooled - _TARGET).square().sum() / size).backward()
            if bag.weight.grad is not None:
                rows.append(bag.weight.grad._indices()[0])
                values.append(bag.weight.grad._values())
        every, grads = torch.cat(rows), torch.cat(values)
        unique, inverse = every.unique(return_inverse=True)
        found[table.name] = unique, torch.zeros(len(unique), table.embedding_dim).index_add_(0, inverse, grads)
    return found


def _feature(batch: KeyedJaggedTensor, feature: str) -> tuple[Tensor, Tensor, Tensor | None]:
    size, number = batch.stride(), batch.keys().index(feature)
    lengths = batch.lengths().long()
    start = int(lengths[: number * size].sum())
    own = lengths[number * size : (number + 1) * size]
    stop, weights = start + int(own.sum()), batch.weights_or_none()
    return batch.values()[start:stop].long(), own, None if weights is None else weights[start:stop]


def _merge(partials: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Merge neighbours until one is left; rows that a side lacks are taken over as they are."""
    while len(partials) > 1:
        merged = []
        for (rows_a, a), (rows_b, b) in zip(partials[::2], partials[1::2], strict=True):
            rows = torch.cat([rows_a, rows_b]).unique()
            out = a.new_zeros(len(rows), a.shape[1])
            out[torch.searchsorted(rows, rows_a)] = a
            both = torch.isin(rows_b, rows_a)
            place = torch.searchsorted(rows, rows_b)
            out[place[~both]] = b[~both]
            out[place[both]] += b[both]
            merged.append((rows, out))
        partials = merged
    return partials[0]


# -- the optimisers, written out -------------------------------------------------------------------------------------


def _decayed(o: Any, w: Tensor, rows: Tensor, grad: Tensor) -> Tensor:
    return grad + o.weight_decay * w[rows] if o.weight_decay else grad


def _root(x: Tensor) -> Tensor:
    return torch.from_numpy(np.sqrt(x.numpy()))  # correctly rounded; PyTorch's may be a unit off


def _sgd(o: Any, w: Tensor, states: list[Tensor], rows: Tensor, grad: Tensor, step: int) -> None:
    w[rows] -= o.lr * _decayed(o, w, rows, grad)


def _momentum(o: Any, w: Tensor, states: list[Tensor], rows: Tensor, grad: Tensor, step: int) -> None:
    states[0][rows] = o.momentum * states[0][rows] + _decayed(o, w, rows, grad)
    w[rows] -= o.lr * states[0][rows]


def _adagrad(o: Any, w: Tensor, states: list[Tensor], rows: Tensor, grad: Tensor, step: int) -> None:
    g = _decayed(o, w, rows, grad)
    states[0][rows] += g * g
    w[rows] -= o.lr * g / (_root(states[0][rows]) + o.eps)


def _rowwise_adagrad(o: Any, w: Tensor, states: list[Tensor], rows: Tensor, grad: Tensor, step: int) -> None:
    g = _decayed(o, w, rows, grad)
    states[0][rows] += mean_squares(g)
    # Division of a Python number by a tensor would round twice.
    factor = torch.tensor(o.lr, dtype=w.dtype) / (_root(states[0][rows]) + o.eps)
    w[rows] -= factor.unsqueeze(1) * g


def mean_squares(rows: Tensor) -> Tensor:
    """Return the mean of squares of every row, added up in the order of the fused kernel.

    That order belongs to the processor's vector width; the test suite checks the values against float64.
    """
    total = rows.new_zeros(len(rows))
    fused_rowwise_adagrad_(torch.zeros_like(rows), total, torch.arange(len(rows)), None, rows.contiguous(), lr=0.0)
    return total


def _adam(o: Any, w: Tensor, states: list[Tensor], rows: Tensor, grad: Tensor, step: int) -> None:
    g = _decayed(o, w, rows, grad)
    b1, b2 = (torch.tensor(b, dtype=w.dtype) for b in o.betas)
    c1, c2 = (torch.tensor(1 - b**step, dtype=w.dtype) for b in o.betas)
    states[0][rows] = b1 * states[0][rows] + (1 - b1) * g
    states[1][rows] = b2 * states[1][rows] + (1 - b2) * g * g
    w[rows] -= o.lr * (states[0][rows] / c1) / (_root(states[1][rows] / c2) + o.eps)


_STEPS: dict[str, Callable[..., None]] = {
    "sgd": _sgd,
    "momentum": _momentum,
    "adagrad": _adagrad,
    "rowwise_adagrad": _rowwise_adagrad,
    "adam": _adam,
}


def compare(found: dict[str, Tensor], expected: dict[str, Tensor]) -> Comparison:
    """Compare tables and states."""
    worst, where, equal = 0.0, "", True
    for name, value in expected.items():
        same = torch.equal(found[name], value)
        equal = equal and same
        difference = float((found[name] - value).abs().max() / value.abs().max().clamp(min=1e-30))
        if not same and difference >= worst:
            worst, where = difference, name
    return Comparison(equal, worst, where)
