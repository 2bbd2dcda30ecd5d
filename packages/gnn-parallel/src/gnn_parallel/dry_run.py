"""Counts a few steps and turns the counts into what every strategy costs per epoch.

Steps are sampled until the 95 % confidence interval of the difference between the two cheapest strategies excludes
zero, or enough have been seen. With several ranks, each counts other steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from core_kernels.comm import Group
from gnn_parallel.cache import choose_cached
from gnn_parallel.clock import TERMS
from gnn_parallel.cost_model import LayerShape, Price, Rates, StepSeconds, estimate_step_seconds, sent_bytes
from gnn_parallel.counts import StepCounts, count_step
from gnn_parallel.data import TrainingData
from gnn_parallel.layers import SplitLayer
from gnn_parallel.loader import BatchSchedule, share_seeds
from gnn_parallel.plan import Candidate
from gnn_parallel.strategies import STRATEGIES

__all__ = ["DryRun"]

_MIN_STEPS, _MAX_STEPS = 3, 16
_T_95 = {2: 12.7, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36}
"""Two-sided 95 % points of Student's t by number of samples; beyond the table 2.2 and 2.0."""


@dataclass
class DryRun:
    """Counts steps and turns them into candidates.

    Attributes:
        data: Graph, features and partition.
        layer: The input layer.
        shape: Its numbers.
        fanouts: Neighbours per layer.
        seed: Seed of the sampler.
        schedule: The batches.
        rates: Measured rates.
        price: Prices of collectives.
        cached_rows: Copies of other ranks' rows per rank.
        group: The ranks that share the counting, or ``None``.
    """

    data: TrainingData
    layer: SplitLayer
    shape: LayerShape
    fanouts: tuple[int, ...]
    seed: int
    schedule: BatchSchedule
    rates: Rates
    price: Price
    cached_rows: int
    group: Group | None

    def __post_init__(self) -> None:
        self.counts: list[StepCounts] = []
        self.seconds: dict[str, list[StepSeconds]] = {name: [] for name in STRATEGIES}
        self.batches = self.schedule.batches(0)
        self.held = {name: self._held(name) for name in ("gdp", "dnp")} if self.shape.placement == "sharded" else {}

    def sample(self, num_steps: int | None) -> None:
        """Count steps until the choice is clear, or ``num_steps``."""
        limit = min(len(self.batches), _MAX_STEPS if num_steps is None else num_steps)
        ranks = 1 if self.group is None else self.group.size
        while len(self.counts) < limit:
            first = len(self.counts)
            steps = range(first, min(first + max(ranks, 1), limit))
            for counts in self._count(list(steps)):
                self.counts.append(counts)
                for name, seconds in self.seconds.items():
                    seconds.append(estimate_step_seconds(name, counts, self.shape, self.rates, self.price))
            if num_steps is None and len(self.counts) >= _MIN_STEPS and self._is_clear():
                return

    def candidates(self, memory_bytes: int | None) -> list[Candidate]:
        """Return what every strategy costs per epoch."""
        return [self._candidate(name, memory_bytes) for name in STRATEGIES]

    def _candidate(self, name: str, memory_bytes: int | None) -> Candidate:
        mean, steps = StepCounts.mean(self.counts), self.schedule.steps_per_epoch
        step = self.seconds[name]
        terms = {term: steps * sum(getattr(s, term) for s in step) / len(step) for term in TERMS}
        needed = self._memory_bytes(name, mean)
        reason = self.layer.obstacles().get(name, "")
        if not reason and memory_bytes is not None and needed > memory_bytes:
            reason = f"needs {needed} bytes of memory per rank, {memory_bytes} are allowed"
        by_tag = {}
        if not reason or name not in self.layer.obstacles():
            by_tag = {tag: round(steps * float(sent.sum())) for tag, sent in sent_bytes(name, mean, self.shape).items()}
        return Candidate(
            strategy=name,
            reason=reason,
            predicted_seconds=math.inf if reason else sum(terms.values()),
            spread_seconds=steps * _half_width([s.total for s in step]),
            seconds=terms,
            bytes=sum(by_tag.values()),
            bytes_by_tag=by_tag,
            memory_bytes=needed,
        )

    def _count(self, steps: list[int]) -> list[StepCounts]:
        if self.group is None or self.group.size == 1:
            return [self._count_one(step) for step in steps]
        # Every rank counts one of the steps; the counts are then put together.
        size, rank = self.group.size, self.group.rank
        mine = self._count_one(steps[rank]) if rank < len(steps) else None
        length = sum(1 if f.name not in _PAIRS else size for f in fields(StepCounts)) * size
        flat = torch.zeros(1, length, dtype=torch.float64)
        if mine is not None:
            flat = torch.cat([getattr(mine, f.name).reshape(-1) for f in fields(StepCounts)]).view(1, -1)
        rows = self.group.all_gather_v(flat, counts=[1] * size, tag="planning")[0][: len(steps)]
        return [_unflatten(row, size) for row in rows]

    def _count_one(self, step: int) -> StepCounts:
        data, world_size = self.data, self.data.partition.num_parts
        shares = share_seeds(self.batches[step], data.owner, world_size)
        arguments = (data.graph, data.owner, self.layer, self.fanouts, self.seed, step, shares)
        counts = count_step(*arguments, self.held.get("gdp"))
        if self.cached_rows:
            counts = replace(counts, fetch_dnp=count_step(*arguments, self.held["dnp"]).fetch_dnp)
        return counts

    def _held(self, strategy: str) -> list[Tensor]:
        data = self.data
        held = []
        for rank in range(data.partition.num_parts):
            cached = choose_cached(
                data.graph, data.owner, rank, self.cached_rows, data.train_ids, self.fanouts, strategy
            )
            mask = data.owner == rank
            mask[cached] = True
            held.append(mask)
        return held

    def _is_clear(self) -> bool:
        """Whether the 95 % interval of the difference of the two cheapest excludes zero."""
        runnable = [name for name in STRATEGIES if name not in self.layer.obstacles()]
        totals = {name: [s.total for s in self.seconds[name]] for name in runnable}
        best, second = sorted(runnable, key=lambda name: sum(totals[name]))[:2]
        differences = [b - a for a, b in zip(totals[best], totals[second], strict=True)]
        return sum(differences) / len(differences) > _half_width(differences)

    def _memory_bytes(self, name: str, counts: StepCounts) -> int:
        shape, row_bytes = self.shape, self.shape.input_width * self.shape.element_bytes
        num_nodes, sizes = self.data.graph.num_nodes, self.data.partition.sizes
        if name == "nfp":
            features = num_nodes * row_bytes / self.data.partition.num_parts
            rows = float(counts.sources.sum() if shape.projects_sources else counts.destinations.sum())
        else:
            held = float(sizes.max()) + self.cached_rows if shape.placement == "sharded" else num_nodes
            features = held * row_bytes
            rows = float(
                {"gdp": counts.destinations, "dnp": counts.owned_destinations}.get(
                    name, counts.virtual_rows.sum(0)
                ).max()
            )
        return round(features + rows * (row_bytes + 2 * shape.projected_width * shape.element_bytes))


_PAIRS = {"destinations_by_owner", "virtual_rows", "virtual_edges", "remote_roots", "fetch_gdp", "fetch_dnp"}


def _unflatten(row: Tensor, size: int) -> StepCounts:
    widths = [size * size if f.name in _PAIRS else size for f in fields(StepCounts)]
    pieces = row.split(widths)
    return StepCounts(
        *(
            p.view(size, size) if len(p) == size * size and f.name in _PAIRS else p
            for f, p in zip(fields(StepCounts), pieces, strict=True)
        )
    )


def _half_width(samples: list[float]) -> float:
    """Return the half-width of the 95 % confidence interval of the mean."""
    n = len(samples)
    if n < 2:
        return 0.0
    mean = sum(samples) / n
    variance = sum((sample - mean) ** 2 for sample in samples) / (n - 1)
    return _T_95.get(n, 2.2 if n < 16 else 2.0) * math.sqrt(variance / n)
