"""Chooses the strategy: count a few steps, price them with measured rates, take the cheapest.

Steps are sampled until the confidence interval of the difference between the two cheapest strategies excludes zero, or
enough have been seen. Counting touches no feature and runs no layer, and since sampling is stateless the counted steps
are exactly the first steps of training.

Source: the dry run of APT (PPoPP 2025). Where we differ: sampling stops by confidence instead of after five epochs, all
ranks' sums are compared instead of term-wise maxima, and strategies that cannot run or do not fit are kept, with
reason.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor, nn

from core_kernels import Graph, PartitionBook
from core_kernels.comm import Group
from core_kernels.interconnect import Interconnect
from gnn_parallel.adapters import find_input_layer, split_layer
from gnn_parallel.cache import choose_cached
from gnn_parallel.clock import TERMS
from gnn_parallel.cost_model import LayerShape, Price, Rates, StepSeconds, estimate_step_seconds, sent_bytes
from gnn_parallel.counts import StepCounts, count_step
from gnn_parallel.data import TrainingData
from gnn_parallel.errors import PlanMismatchError, input_error
from gnn_parallel.features import PLACEMENTS
from gnn_parallel.layers import SplitLayer
from gnn_parallel.loader import BatchSchedule, share_seeds
from gnn_parallel.plan import Candidate, Plan
from gnn_parallel.profile import measure_rates
from gnn_parallel.strategies import STRATEGIES

__all__ = ["choose_strategy", "parse_cache", "parse_fanouts"]

_MIN_STEPS, _MAX_STEPS = 3, 16
_MEASURE_SECONDS = 2.0
"""Time to spend on measuring collectives when no saved interconnect is given."""
_T_95 = {2: 12.7, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36}
"""Two-sided 95 % points of Student's t by number of samples; beyond the table the normal's."""


def choose_strategy(
    graph: Graph,
    model: nn.Module,
    *,
    features: Tensor,
    partition: PartitionBook,
    fanouts: Sequence[int],
    batch_size: int,
    interconnect: Interconnect | None = None,
    seeds: Tensor | None = None,
    cache: int | float | str = 0,
    placement: str = "replicated",
    strategy: str = "auto",
    seed: int = 0,
    num_steps: int | None = None,
    memory_bytes: int | None = None,
    rates: Rates | None = None,
    measure: bool = True,
    input_layer: str | None = None,
    group_shape: str | None = None,
    group: Group | None = None,
) -> Plan:
    """Plan the training of a model on a graph.

    Args:
        graph: Square graph.
        model: The model; its input layer has an adapter.
        features: ``[num_nodes, width]``.
        partition: One part per rank.
        fanouts: Neighbours per layer, the hop at the seeds first; -1 for all.
        batch_size: Seeds per step, over all ranks.
        interconnect: Measured cost of collectives. Left out: measured on ``group``, free for one rank.
        seeds: int64 nodes trained on; all when left out.
        cache: Copies of other ranks' rows per rank when features are sharded: rows, a share of all rows (``"10%"`` or
            a float below 1) or bytes (``"4GB"``).
        placement: ``"replicated"`` (every rank reads all features) or ``"sharded"`` (rows at their owner).
        strategy: ``"auto"``, or a strategy to use whatever its cost.
        seed: Seed of batches and sampling.
        num_steps: Steps to count; left out, until the choice is clear.
        memory_bytes: Host memory a rank may use; strategies that need more cannot run.
        rates: Measured rates; left out, measured now.
        measure: Whether to measure what is left out; else it counts as free, and only bytes tell strategies apart.
        input_layer: Dotted name of the input layer, when the model has several candidates.
        group_shape: ``"HxR"``, hosts and ranks of each; one host, or the shape ``interconnect`` was measured on.
        group: The ranks, when they exist already: planning is then shared out over them.

    Returns:
        The plan, bound to its data.

    Raises:
        InputError: An argument is out of range.
        PlanMismatchError: The partition has another number of parts than the group has ranks, or no strategy fits.

    Collective: all ranks of ``group``; they return equal plans.
    """
    started = time.perf_counter()
    data = TrainingData(graph, features, partition, seeds)
    world_size = partition.num_parts
    if group is not None and group.size != world_size:
        raise PlanMismatchError(
            f"partition has {world_size} parts, the group has {group.size} ranks; expected the same number; "
            "partition into as many parts as there are ranks"
        )
    if placement not in PLACEMENTS:
        raise input_error("placement", placement, f"one of {', '.join(PLACEMENTS)}", "choose one of them")
    if strategy != "auto" and strategy not in STRATEGIES:
        raise input_error("strategy", strategy, f"auto or one of {', '.join(STRATEGIES)}", "correct the spelling")
    fanouts = parse_fanouts(fanouts)
    name, module = find_input_layer(model, input_layer)
    layer = split_layer(module, graph)
    num_parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    shape = LayerShape.of(layer, num_parameters, graph.num_nodes, features.element_size(), placement)
    cached_rows = parse_cache(cache, graph.num_nodes, shape.input_width * shape.element_bytes)
    if cached_rows and placement == "replicated":
        raise input_error("cache", cache, 'placement="sharded"', "leave cache out: replicated rows need no copies")
    schedule = BatchSchedule(data.train_ids, batch_size, seed)
    if rates is None:
        rates = measure_rates(data, model, fanouts, batch_size, seed, group) if measure else Rates.free()
    if interconnect is None and group is not None and world_size > 1 and measure:
        interconnect = Interconnect.measure(group, budget_seconds=_MEASURE_SECONDS)
    price = _make_price(interconnect, group_shape, world_size)
    dry_run = _DryRun(data, layer, shape, fanouts, seed, schedule, rates, price, cached_rows, group)
    dry_run.sample(num_steps)
    candidates = dry_run.candidates(memory_bytes)
    runnable = [candidate for candidate in candidates if not candidate.reason]
    wanted = [candidate for candidate in candidates if candidate.strategy == strategy]
    if not runnable or (wanted and wanted[0].reason):
        reasons = "; ".join(f"{c.strategy}: {c.reason}" for c in candidates if c.reason)
        raise PlanMismatchError(f"strategy={strategy!r} cannot run; {reasons}; allow another strategy or more memory")
    chosen = wanted[0] if wanted else min(runnable, key=lambda candidate: candidate.predicted_seconds)
    plan = Plan(
        strategy=chosen.strategy,
        world_size=world_size,
        fanouts=fanouts,
        batch_size=batch_size,
        seed=seed,
        placement=placement,
        cached_rows=cached_rows,
        input_layer=name,
        algebra=shape.algebra,
        steps_per_epoch=schedule.steps_per_epoch,
        num_steps_sampled=len(dry_run.counts),
        candidates=tuple(candidates),
        partition={
            "method": partition.method,
            "cut_share": partition.cut / max(1, graph.num_edges),
            "balance": partition.balance,
        },
        graph_fingerprint=graph.fingerprint(),
        interconnect_fingerprint="" if interconnect is None else interconnect.fingerprint,
        planning_seconds=time.perf_counter() - started,
    )
    return plan.bind(graph, features, partition, seeds)


@dataclass
class _DryRun:
    """Counts steps and turns them into candidates."""

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


def _make_price(interconnect: Interconnect | None, group_shape: str | None, world_size: int) -> Price:
    if interconnect is None or world_size == 1:
        return lambda collective, num_bytes: 0.0
    measured = interconnect.group_shape
    fits = measured and math.prod(int(part) for part in measured.split("x")) == world_size
    shape = group_shape or (measured if fits else f"1x{world_size}")
    return lambda collective, num_bytes: interconnect.seconds(collective, num_bytes, shape)


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


def parse_fanouts(fanouts: Sequence[int] | str) -> tuple[int, ...]:
    """Return fanouts as a tuple.

    Args:
        fanouts: Integers, or text such as ``"10,10"``.

    Raises:
        InputError: Empty, not integers, or neither positive nor -1.

    >>> parse_fanouts("15,10,-1")
    (15, 10, -1)
    """
    remedy = 'pass one number per layer, such as "10,10"'
    try:
        items = fanouts.split(",") if isinstance(fanouts, str) else list(fanouts)
        parsed = tuple(int(item) for item in items)
        exact = all(float(item) == number for item, number in zip(items, parsed, strict=True))
    except (TypeError, ValueError, OverflowError):
        raise input_error("fanouts", fanouts, "integers", remedy) from None
    if not parsed or not exact or any(number < 1 and number != -1 for number in parsed):
        raise input_error("fanouts", fanouts, "integers of at least 1, or -1 for all neighbours", remedy)
    return parsed


def parse_cache(cache: int | float | str, num_nodes: int, row_bytes: int) -> int:
    """Return a cache size as a number of rows.

    Args:
        cache: Rows, a share of all rows (``"10%"`` or a float below 1), or bytes (``"4GB"``).
        num_nodes: Number of all rows.
        row_bytes: Bytes of one row.

    Raises:
        InputError: Not a size, or larger than all rows.

    >>> parse_cache("10%", 1000, 64), parse_cache("64KB", 1000, 64), parse_cache(5, 1000, 64)
    (100, 1000, 5)
    """
    remedy = 'pass rows, a share such as "10%" or a size such as "4GB"'
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
    try:
        if isinstance(cache, str) and cache.strip().endswith("%"):
            rows = round(float(cache.strip()[:-1]) / 100 * num_nodes)
        elif isinstance(cache, str) and cache.strip()[-2:].upper() in units:
            rows = int(float(cache.strip()[:-2]) * units[cache.strip()[-2:].upper()] // max(1, row_bytes))
        elif isinstance(cache, float) and cache < 1:
            rows = round(cache * num_nodes)
        else:
            rows = int(cache)
    except (ValueError, OverflowError):
        raise input_error("cache", cache, "a size", remedy) from None
    if not 0 <= rows <= num_nodes:
        raise input_error("cache", cache, f"between 0 and the graph's {num_nodes} rows, it is {rows} rows", remedy)
    return rows
