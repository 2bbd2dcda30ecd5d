"""Chooses the strategy: count a few steps, price them with measured rates, try those that are close, take the fastest.

Counting (:mod:`gnn_parallel.dry_run`) touches no feature and runs no layer, and since sampling is stateless the counted
steps are exactly the first steps of training. Where two predictions are closer than the model is right, a few real
steps decide (:mod:`gnn_parallel.trial`).

Source: the dry run of APT (PPoPP 2025). Where we differ: sampling stops by confidence or by its budget instead of after
five epochs, all ranks' sums are compared instead of term-wise maxima, close strategies are tried, and strategies that
cannot run or do not fit are kept, with reason.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor, nn

from core_kernels import Graph, PartitionBook
from core_kernels.comm import Group
from core_kernels.errors import ArgumentError
from core_kernels.interconnect import Interconnect
from gnn_parallel.adapters import find_input_layer, split_layer
from gnn_parallel.arguments import parse_cache, parse_fanouts, parse_shape
from gnn_parallel.cost_model import Price, Prices, Rates
from gnn_parallel.data import TrainingData
from gnn_parallel.dry_run import BUDGET_SHARE, DryRun, Layout, Workload
from gnn_parallel.errors import PlanMismatchError, input_error
from gnn_parallel.features import PLACEMENTS
from gnn_parallel.plan import Candidate, Plan
from gnn_parallel.profile import measure_layouts, measure_rates
from gnn_parallel.ranks import check_hosts
from gnn_parallel.strategies import STRATEGIES
from gnn_parallel.traffic import LayerShape
from gnn_parallel.trial import try_strategies

__all__ = ["choose_strategy"]

_MEASURE_SECONDS = 2.0
"""Time to spend on measuring collectives when no saved interconnect is given."""

_QUICK_SECONDS = 0.1
"""Counting a step on fewer ranks is always affordable when it takes no longer than this."""


def choose_strategy(
    graph: Graph,
    model: nn.Module,
    *,
    features: Tensor | str | Path,
    partition: PartitionBook,
    fanouts: Sequence[int] | str,
    batch_size: int,
    interconnect: Interconnect | None = None,
    seeds: Tensor | None = None,
    cache: int | float | str = 0,
    placement: str = "replicated",
    strategy: str = "auto",
    num_hosts: int | None = None,
    reuse: bool = False,
    look_ahead: int = 2,
    num_clusters: int = 0,
    num_negatives: int = 1,
    is_mixed: bool = False,
    seed: int = 0,
    num_steps: int | None = None,
    num_trials: int = 32,
    num_epochs: int = 1,
    memory_bytes: int | None = None,
    rates: Rates | None = None,
    measure: bool = True,
    input_layer: str | None = None,
    group_shape: str | None = None,
    group: Group | None = None,
) -> Plan:
    """Plan the training of a model on a graph; returns the plan, bound to its data.

    Args:
        graph: Square graph.
        model: The model; its input layer has an adapter.
        features: ``[num_nodes, width]``, or the path of such a matrix as ``.npy``.
        partition: One part per rank.
        fanouts: Neighbours per layer, the hop at the seeds first; -1 for all.
        batch_size: Seeds, or pairs, per step over all ranks.
        interconnect: Measured cost of collectives. Left out: measured on ``group``, free for one rank.
        seeds: int64 nodes trained on, all when left out, or pairs ``[2, num_pairs]`` for link prediction.
        cache: Rows of others (sharded) or of the file (disk) a rank keeps: a number, ``"10%"`` or ``"4GB"``.
        placement: ``"replicated"``, ``"sharded"`` (rows at their owner) or ``"disk"`` (``features`` is a path).
        strategy: ``"auto"``, or a strategy to use whatever its cost.
        num_hosts: Hosts that work data-parallel; left out, 1 or the H of ``group_shape``, whichever is cheaper.
        reuse: Keep sharded rows of a batch for the next.
        look_ahead: Batches prepared in the background (sharded), or whose rows are read ahead (disk); 0 for none.
        num_clusters: Let batches follow an order of so many clusters. It changes what is drawn together.
        num_negatives: Negatives per pair.
        is_mixed: Compute and send activations in bfloat16.
        seed: Seed of batches and sampling.
        num_steps: Steps to count; left out, until the choice is clear or 5 % of an epoch are spent.
        num_trials: Most real steps of each strategy to try; 0 for none.
        num_epochs: Epochs the plan is for: counting and trials together may take 5 % of them.
        memory_bytes: Host memory a rank may use; strategies that need more cannot run.
        rates: Measured rates; left out, measured now.
        measure: Whether to measure what is left out; else it is free, only bytes differ, and nothing is tried.
        input_layer: Dotted name of the input layer, when the model has several candidates.
        group_shape: ``"HxR"``, hosts and ranks of each; one host, or what ``interconnect`` was measured on.
        group: The ranks, when they exist already: planning is then shared out over them.

    Raises:
        InputError: An argument is out of range.
        PlanMismatchError: The partition has another number of parts than the group has ranks, or no strategy fits.

    Collective: all ranks of ``group``; they return equal plans.
    """
    return _Planner(**locals()).plan()


@dataclass(frozen=True)
class _Planner:
    """The arguments of :func:`choose_strategy`, and what is made of them step by step."""

    graph: Graph
    model: nn.Module
    features: Tensor | str | Path
    partition: PartitionBook
    fanouts: Sequence[int] | str
    batch_size: int
    interconnect: Interconnect | None
    seeds: Tensor | None
    cache: int | float | str
    placement: str
    strategy: str
    num_hosts: int | None
    reuse: bool
    look_ahead: int
    num_clusters: int
    num_negatives: int
    is_mixed: bool
    seed: int
    num_steps: int | None
    num_trials: int
    num_epochs: int
    memory_bytes: int | None
    rates: Rates | None
    measure: bool
    input_layer: str | None
    group_shape: str | None
    group: Group | None

    def plan(self) -> Plan:
        """Measure, count, price, try, choose."""
        started = time.perf_counter()
        self._check()
        source = self.features if isinstance(self.features, Tensor) else Path(self.features)
        data = TrainingData(self.graph, source, self.partition, self.seeds)
        name, module = find_input_layer(self.model, self.input_layer)
        interconnect = self._measure_interconnect()
        workload = self._make_workload(data, module)
        runs = [self._count(workload, layout) for layout in self._layouts(interconnect)]
        candidates = [c for run in runs for c in run.candidates(self.memory_bytes)]
        chosen = _choose(self.strategy, candidates)
        plan = self._assemble(workload, name, chosen, candidates, interconnect)
        counting_seconds = sum(run.counting_seconds for run in runs)
        plan = replace(
            plan,
            num_steps_sampled=len(runs[0].counts),
            counting_seconds=counting_seconds,
            fewer_ranks=self._price_fewer_ranks(workload, interconnect, runs[0], chosen),
        ).with_data(data)
        may_try = self.measure and self.group is not None and self.group.size > 1 and self.strategy == "auto"
        if self.num_trials and may_try:
            assert self.group is not None
            plan = try_strategies(plan, self.model, self.group, self.num_trials, BUDGET_SHARE)
        return replace(plan, planning_seconds=time.perf_counter() - started).with_data(data)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.partition.num_parts

    def _check(self) -> None:
        for name, value, kinds in (
            ("partition", self.partition, (PartitionBook,)),
            ("features", self.features, (Tensor, str, Path)),
        ):
            if not isinstance(value, kinds):
                expected = " or ".join(kind.__name__ for kind in kinds)
                raise input_error(name, type(value).__name__, f"a {expected}", "convert it first")
        if self.group is not None and self.group.size != self.world_size:
            raise PlanMismatchError(
                f"partition has {self.world_size} parts, the group has {self.group.size} ranks; expected the same "
                "number; partition into as many parts as there are ranks"
            )
        for name, value, known in (
            ("placement", self.placement, PLACEMENTS),
            ("strategy", self.strategy, ("auto", *STRATEGIES)),
        ):
            if value not in known:
                raise input_error(name, value, f"one of {', '.join(known)}", "correct the spelling")
        if self.placement == "disk" and isinstance(self.features, Tensor):
            expected = 'the path of a .npy file, since placement="disk"'
            raise input_error("features", "a tensor", expected, "save it with numpy.save, or choose another placement")
        for name, value in (
            ("num_trials", self.num_trials),
            ("look_ahead", self.look_ahead),
            ("num_clusters", self.num_clusters),
        ):
            if value < 0:
                raise input_error(name, value, "at least 0", "pass 0 for none")
        if self.num_epochs < 1:
            raise input_error("num_epochs", self.num_epochs, "at least 1", "pass the epochs you mean to train")
        if self.num_steps is not None and self.num_steps < 1:
            raise input_error("num_steps", self.num_steps, "at least 1", "leave it out to count until it is clear")
        if self.num_clusters > self.graph.num_nodes:
            expected = f"at most the graph's {self.graph.num_nodes} nodes"
            raise input_error("num_clusters", self.num_clusters, expected, "pass fewer clusters, such as 64")
        if self.reuse and self.placement != "sharded":
            raise input_error("reuse", True, 'placement="sharded"', "leave reuse out: other rows are at hand anyway")
        if self.num_hosts is not None:
            check_hosts(self.num_hosts, self.world_size)

    def _measure_interconnect(self) -> Interconnect | None:
        if self.interconnect is None and self.group is not None and self.world_size > 1 and self.measure:
            return measure_layouts(self.group, self.group_shape, _MEASURE_SECONDS)
        return self.interconnect

    def _make_workload(self, data: TrainingData, module: nn.Module) -> Workload:
        fanouts, layer = parse_fanouts(self.fanouts), split_layer(module, self.graph)
        num_parameters = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        element_bytes = data.features.element_size()
        shape = LayerShape.of(layer, num_parameters, self.graph.num_nodes, element_bytes, self.placement, self.is_mixed)
        cached_rows = self._parse_cache(shape)
        schedule = data.schedule(
            data.train_ids if self.seeds is None else self.seeds,
            self.batch_size,
            self.seed,
            num_clusters=self.num_clusters,
            num_negatives=self.num_negatives,
        )
        rates = self.rates
        if rates is None:
            rates = measure_rates(data, self.model, fanouts, schedule, self.group) if self.measure else Rates.free()
        look_ahead = 0 if self.placement == "replicated" else self.look_ahead
        return Workload(data, layer, shape, fanouts, self.seed, schedule, rates, cached_rows, self.reuse, look_ahead)

    def _parse_cache(self, shape: LayerShape) -> int:
        row_bytes = shape.input_width * shape.element_bytes
        rows = parse_cache(self.cache, self.graph.num_nodes, row_bytes)
        if rows and self.placement == "replicated":
            raise input_error(
                "cache", self.cache, 'placement="sharded" or "disk"', "leave cache out: replicated rows need no copies"
            )
        limit = self.memory_bytes or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if rows * row_bytes > limit:
            expected = f"at most {limit} bytes per rank; {rows} rows of {row_bytes} bytes need {rows * row_bytes}"
            raise input_error("cache", self.cache, expected, f"cache at most {limit // row_bytes} rows")
        return rows

    def _layouts(self, interconnect: Interconnect | None) -> list[Layout]:
        """Return the layouts to compare: all ranks as one, and hosts that work data-parallel."""
        hosts, per_host = self._shape(interconnect)
        choices = [self.num_hosts] if self.num_hosts else [1] + ([hosts] if hosts > 1 and per_host > 1 else [])
        return [self._layout(interconnect, self.world_size, number) for number in choices]

    def _layout(self, interconnect: Interconnect | None, num_ranks: int, num_hosts: int) -> Layout:
        if interconnect is None or num_ranks == 1:
            return Layout(num_ranks, num_hosts, Prices(), self.world_size)
        hosts, per_host = self._shape(interconnect)
        if num_ranks < self.world_size:
            hosts, per_host = (1, num_ranks) if num_ranks <= per_host else (num_ranks // per_host, per_host)
        whole, inside = _price(interconnect, f"{hosts}x{per_host}"), num_ranks // num_hosts
        if num_hosts == 1:
            return Layout(num_ranks, 1, Prices(whole, whole), self.world_size)
        local = f"1x{inside}" if inside <= per_host else f"{inside // per_host}x{per_host}"
        prices = Prices(_price(interconnect, local, whole), whole, _price(interconnect, f"{num_hosts}x1", whole))
        return Layout(num_ranks, num_hosts, prices, self.world_size)

    def _shape(self, interconnect: Interconnect | None) -> tuple[int, int]:
        """Return hosts and ranks of each."""
        if self.group_shape:
            shape = parse_shape(self.group_shape)
            if math.prod(shape) != self.world_size:
                expected = f"H times R equal to world_size={self.world_size}"
                raise input_error("group_shape", self.group_shape, expected, "name the hosts the ranks are on")
            return shape
        measured = "" if interconnect is None else interconnect.group_shape
        shape = parse_shape(measured) if measured else (1, self.world_size)
        return shape if math.prod(shape) == self.world_size else (1, self.world_size)

    def _count(self, workload: Workload, layout: Layout) -> DryRun:
        run = DryRun(workload, layout, self.group)
        run.sample(self.num_steps)
        return run

    def _price_fewer_ranks(
        self, workload: Workload, interconnect: Interconnect | None, run: DryRun, chosen: Candidate
    ) -> tuple[Candidate, ...]:
        """Return the best strategy on one rank, one host and half the ranks, where counting a step is affordable."""
        round_seconds = run.counting_seconds / max(1, len(run.counts) // run.group.size)
        if interconnect is None or not math.isfinite(chosen.predicted_seconds):
            return ()
        if round_seconds > max(_QUICK_SECONDS, 0.01 * chosen.predicted_seconds):
            return ()
        _, per_host = self._shape(interconnect)
        found = []
        for num_ranks in sorted({1, per_host, self.world_size // 2}):
            if not 0 < num_ranks < self.world_size or self.world_size % num_ranks:
                continue
            try:
                fewer = DryRun(workload, self._layout(interconnect, num_ranks, 1), self.group)
                fewer.sample(1)
            except ArgumentError:  # the interconnect says nothing about so few ranks
                continue
            able = [
                c
                for c in fewer.candidates(self.memory_bytes)
                if not c.reason and (num_ranks > 1 or c.strategy == "gdp")
            ]
            found += [min(able, key=lambda candidate: candidate.predicted_seconds)] if able else []
        return tuple(found)

    def _assemble(
        self,
        workload: Workload,
        input_layer: str,
        chosen: Candidate,
        candidates: list[Candidate],
        interconnect: Interconnect | None,
    ) -> Plan:
        cut_share = self.partition.cut / max(1, self.graph.num_edges)
        return Plan(
            strategy=chosen.strategy,
            world_size=self.world_size,
            fanouts=workload.fanouts,
            batch_size=self.batch_size,
            seed=self.seed,
            placement=self.placement,
            cached_rows=workload.cached_rows,
            input_layer=input_layer,
            algebra=workload.shape.algebra,
            steps_per_epoch=workload.schedule.steps_per_epoch,
            num_steps_sampled=0,
            candidates=tuple(candidates),
            partition={"method": self.partition.method, "cut_share": cut_share, "balance": self.partition.balance},
            graph_fingerprint=self.graph.fingerprint(),
            interconnect_fingerprint="" if interconnect is None else interconnect.fingerprint,
            num_hosts=chosen.num_hosts,
            reuse=self.reuse,
            look_ahead=workload.look_ahead,
            num_clusters=self.num_clusters,
            num_negatives=self.num_negatives,
            is_mixed=self.is_mixed,
            num_epochs=self.num_epochs,
        )


def _choose(strategy: str, candidates: list[Candidate]) -> Candidate:
    """Return the cheapest candidate, of the strategy asked for; raise when none can run."""
    wanted = [c for c in candidates if strategy in ("auto", c.strategy)]
    runnable = [c for c in wanted if not c.reason]
    if not runnable:
        reasons = "; ".join(f"{c.name}: {c.reason}" for c in wanted)
        raise PlanMismatchError(f"strategy={strategy!r} cannot run; {reasons}; allow another strategy or more memory")
    return min(runnable, key=lambda candidate: candidate.predicted_seconds)


def _price(interconnect: Interconnect, shape: str, otherwise: Price | None = None) -> Price:
    """Return prices on a shape, or those given where the interconnect says nothing about it."""
    if otherwise is not None:
        try:
            interconnect.seconds("all_to_all", 0, shape)
        except ArgumentError:
            return otherwise
    return lambda collective, num_bytes: interconnect.seconds(collective, num_bytes, shape)
