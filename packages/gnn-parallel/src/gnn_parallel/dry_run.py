"""Counts a few steps and turns the counts into what every strategy costs per epoch.

Steps are sampled until the 95 % confidence interval of the difference between the two cheapest strategies excludes
zero, until enough have been seen, or until counting has taken its share of an epoch, whichever comes first. With
several ranks, each counts other steps.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from core_kernels.comm import Group
from core_kernels.store import place_by_hotness
from gnn_parallel.cache import choose_cached
from gnn_parallel.clock import TERMS
from gnn_parallel.cost_model import Prices, Rates, StepSeconds, estimate_step_seconds
from gnn_parallel.counts import StepCounter, StepCounts
from gnn_parallel.data import TrainingData
from gnn_parallel.layers import SplitLayer
from gnn_parallel.loader import Schedule, Share
from gnn_parallel.plan import Candidate
from gnn_parallel.strategies import STRATEGIES
from gnn_parallel.traffic import LayerShape, sent_bytes

__all__ = ["BUDGET_SHARE", "DryRun", "Layout", "Workload"]

BUDGET_SHARE = 0.05
"""Most that counting may take, as a share of the best predicted epoch; one round is counted in any case."""

_MIN_STEPS, _MAX_STEPS = 3, 16
_T_95 = {2: 12.7, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36}
"""Two-sided 95 % points of Student's t by number of samples; beyond the table 2.2 and 2.0."""


@dataclass(frozen=True)
class Workload:
    """What is trained, measured once for all layouts.

    Attributes:
        data: Graph, features and partition.
        layer: The input layer.
        shape: Its numbers.
        fanouts: Neighbours per layer.
        seed: Seed of the sampler.
        schedule: The batches.
        rates: Measured rates.
        cached_rows: Copies of other ranks' rows per rank, or rows in host memory over a disk.
        reuse: Whether rows of a batch are kept for the next.
        look_ahead: Batches prepared or read ahead.
    """

    data: TrainingData
    layer: SplitLayer
    shape: LayerShape
    fanouts: tuple[int, ...]
    seed: int
    schedule: Schedule
    rates: Rates
    cached_rows: int
    reuse: bool
    look_ahead: int = 0

    def obstacles(self) -> dict[str, str]:
        """Return why strategies cannot run here, by name."""
        found = dict(self.layer.obstacles())
        if self.shape.placement == "disk":
            for name, why in (("nfp", "holds columns of all rows"), ("snp", "reads rows for other ranks")):
                found.setdefault(name, f'{why}, which placement="disk" does not offer')
        return found


@dataclass(frozen=True)
class Layout:
    """How many ranks work, and on how many hosts data-parallel.

    Attributes:
        num_ranks: Ranks.
        num_hosts: Hosts that work data-parallel.
        prices: Prices of collectives.
        num_parts: Parts of the partition; a rank owns several when there are fewer ranks per host.
    """

    num_ranks: int
    num_hosts: int
    prices: Prices
    num_parts: int

    @property
    def ranks_per_host(self) -> int:
        """Ranks that exchange with each other."""
        return self.num_ranks // self.num_hosts

    @property
    def parts_per_rank(self) -> int:
        """Neighbouring parts that a rank owns."""
        return self.num_parts // self.ranks_per_host


class DryRun:
    """Counts steps of a workload on a layout and turns them into candidates.

    Args:
        workload: What is trained.
        layout: On how many ranks.
        group: The ranks that share the counting, or ``None``.

    Attributes:
        counts: Of every step so far.
        counting_seconds: What they took, of the slowest rank.
    """

    def __init__(self, workload: Workload, layout: Layout, group: Group | None):
        self.workload, self.layout = workload, layout
        self.group = group or Group.single()
        data = workload.data
        self.shape = replace(workload.shape, num_hosts=layout.num_hosts)
        self.rates = workload.rates.shared_by(layout.num_ranks, layout.num_parts)
        self.owner = data.owner_in_host(layout.parts_per_rank)
        self.positions = workload.schedule.positions(0)
        held = {} if self.shape.placement == "replicated" else {name: self._held(name) for name in ("gdp", "dnp")}
        self.counter = StepCounter(
            data.graph,
            self.owner,
            workload.layer,
            workload.fanouts,
            workload.seed,
            layout.ranks_per_host,
            held,
            self.shape.placement == "disk",
        )
        self.counts: list[StepCounts] = []
        self.seconds: dict[str, list[StepSeconds]] = {name: [] for name in STRATEGIES}
        self.counting_seconds = 0.0

    @property
    def is_early(self) -> bool:
        """Whether coming batches are prepared in the background."""
        is_shared = self.shape.placement == "sharded" and self.layout.ranks_per_host > 1
        return is_shared and self.workload.look_ahead > 0

    def sample(self, num_steps: int | None, budget_share: float = BUDGET_SHARE) -> None:
        """Count steps.

        Args:
            num_steps: So many; left out, until the choice is clear or the budget is spent.
            budget_share: Longest time to count for, as a share of the best predicted epoch.

        Collective: all ranks of the group.
        """
        limit = min(len(self.positions), _MAX_STEPS if num_steps is None else num_steps)
        while len(self.counts) < limit:
            first = len(self.counts)
            round_seconds = self._sample_round(range(first, min(first + self.group.size, limit)))
            if num_steps is not None:
                continue
            budget = budget_share * self._best_epoch_seconds()
            if budget and self.counting_seconds + round_seconds > budget:
                return
            if len(self.counts) >= _MIN_STEPS and self._is_clear():
                return

    def candidates(self, memory_bytes: int | None) -> list[Candidate]:
        """Return what every strategy costs per epoch."""
        return [self._candidate(name, memory_bytes) for name in STRATEGIES]

    def _sample_round(self, steps: range) -> float:
        """Let every rank count one step; returns the seconds of the slowest rank."""
        size, rank = self.group.size, self.group.rank
        started = time.perf_counter()
        mine = self._count(steps[rank]) if rank < len(steps) else None
        elapsed = time.perf_counter() - started
        if size == 1:
            assert mine is not None
            found = [mine]
        else:
            numbers = mine or StepCounts.zeros(self.layout.num_ranks)
            row = torch.cat([numbers.flatten(), torch.tensor([elapsed], dtype=torch.float64)]).view(1, -1)
            rows = self.group.all_gather_v(row, counts=[1] * size, tag="planning")[0]
            elapsed = float(rows[:, -1].max())
            found = [StepCounts.unflatten(row[:-1], self.layout.num_ranks) for row in rows[: len(steps)]]
        for counts in found:
            self.counts.append(counts)
            for name, seconds in self.seconds.items():
                prices = self.layout.prices
                seconds.append(estimate_step_seconds(name, counts, self.shape, self.rates, prices, self.is_early))
        self.counting_seconds += elapsed
        return elapsed

    def _count(self, step: int) -> StepCounts:
        before = None
        if (self.workload.reuse or self.shape.placement == "disk") and step:
            before = self.counter.count(step - 1, self._seeds(step - 1))[1]
        return self.counter.count(step, self._seeds(step), before)[0]

    def _seeds(self, step: int) -> list[Tensor]:
        """Return the seeds of every rank, host by host."""
        layout, data = self.layout, self.workload.data
        parts = data.owner if layout.num_ranks == layout.num_parts else self.owner
        shares: list[Share] = self.workload.schedule.share(0, self.positions[step], parts, layout.num_ranks)
        order = [
            number * layout.num_hosts + host
            for host in range(layout.num_hosts)
            for number in range(layout.ranks_per_host)
        ]
        return [shares[place].seeds for place in order]

    def _held(self, strategy: str) -> list[Tensor]:
        """Return per rank of a host which rows it has at hand."""
        workload, data = self.workload, self.workload.data
        held = []
        for rank in range(self.layout.ranks_per_host):
            is_disk, num_rows = self.shape.placement == "disk", workload.cached_rows
            mask = torch.zeros_like(self.owner, dtype=torch.bool) if is_disk else self.owner == rank
            if num_rows:
                hotness = data.expected_reads(self.layout.parts_per_rank, rank, workload.fanouts, strategy)
                stored = place_by_hotness(hotness, 0, num_rows).host_rows if is_disk else None
                mask[choose_cached(hotness, self.owner, rank, num_rows) if stored is None else stored] = True
            held.append(mask)
        return held

    def _best_epoch_seconds(self) -> float:
        return self.workload.schedule.steps_per_epoch * min(
            sum(s.total for s in self.seconds[name]) / len(self.seconds[name]) for name in self._runnable()
        )

    def _runnable(self) -> list[str]:
        obstacles = self.workload.obstacles()
        return [name for name in STRATEGIES if name not in obstacles]

    def _is_clear(self) -> bool:
        """Whether the 95 % interval of the difference of the two cheapest excludes zero."""
        totals = {name: [s.total for s in self.seconds[name]] for name in self._runnable()}
        best, second = sorted(totals, key=lambda name: sum(totals[name]))[:2]
        differences = [b - a for a, b in zip(totals[best], totals[second], strict=True)]
        return sum(differences) / len(differences) > half_width(differences)

    def _candidate(self, name: str, memory_bytes: int | None) -> Candidate:
        mean, steps = StepCounts.mean(self.counts), self.workload.schedule.steps_per_epoch
        step, obstacles = self.seconds[name], self.workload.obstacles()
        terms = {term: steps * sum(getattr(s, term) for s in step) / len(step) for term in TERMS}
        needed = self._memory_bytes(name, mean)
        reason = obstacles.get(name, "")
        if not reason and memory_bytes is not None and needed > memory_bytes:
            reason = f"needs {needed} bytes of memory per rank, {memory_bytes} are allowed"
        by_tag = {}
        if name not in obstacles:
            by_tag = {tag: round(steps * float(sent.sum())) for tag, sent in sent_bytes(name, mean, self.shape).items()}
        overlap = {"gdp": mean.overlap_gdp, "dnp": mean.overlap_dnp}.get(name)
        return Candidate(
            strategy=name,
            reason=reason,
            predicted_seconds=math.inf if reason else sum(terms.values()),
            spread_seconds=steps * half_width([s.total for s in step]),
            seconds=terms,
            bytes=sum(by_tag.values()),
            bytes_by_tag=by_tag,
            memory_bytes=needed,
            modelled_seconds=sum(terms.values()),
            link_seconds=steps * sum(s.link for s in step) / len(step),
            num_ranks=self.layout.num_ranks,
            num_hosts=self.layout.num_hosts,
            overlap_rows=0 if overlap is None else round(steps * float(overlap.sum())),
        )

    def _memory_bytes(self, name: str, counts: StepCounts) -> int:
        """Return the bytes of features, copies and the largest batch of the rank that needs most."""
        shape, cached = self.shape, self.workload.cached_rows
        row_bytes = shape.input_width * shape.element_bytes
        num_nodes, size = self.workload.data.graph.num_nodes, self.layout.ranks_per_host
        if name == "nfp":
            held = num_nodes / size
            rows = (counts.sources if shape.projects_sources else counts.destinations).view(-1, size).sum(1)
        else:
            largest = float(torch.bincount(self.owner, minlength=size).max())
            held = {"replicated": num_nodes, "sharded": largest + cached, "disk": cached}[shape.placement]
            by_name = {"gdp": counts.destinations, "dnp": counts.owned_destinations}
            rows = by_name.get(name, counts.virtual_rows.sum(0))
            if self.workload.reuse:
                held += float(counts.sources.max())
        per_row = row_bytes + 2 * shape.projected_width * shape.activation_bytes
        num_waiting = self.workload.look_ahead if self.is_early else 0
        return round(held * row_bytes + float(rows.max()) * (per_row + num_waiting * row_bytes))


def half_width(samples: list[float]) -> float:
    """Return the half-width of the 95 % confidence interval of the mean."""
    n = len(samples)
    if n < 2:
        return 0.0
    mean = sum(samples) / n
    variance = sum((sample - mean) ** 2 for sample in samples) / (n - 1)
    return _T_95.get(n, 2.2 if n < 16 else 2.0) * math.sqrt(variance / n)
