"""Chooses the strategy: count a few steps, price them with measured rates, take the cheapest.

Counting (:mod:`gnn_parallel.dry_run`) touches no feature and runs no layer, and since sampling is stateless the counted
steps are exactly the first steps of training.

Source: the dry run of APT (PPoPP 2025). Where we differ: sampling stops by confidence instead of after five epochs, all
ranks' sums are compared instead of term-wise maxima, and strategies that cannot run or do not fit are kept, with
reason.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from torch import Tensor, nn

from core_kernels import Graph, PartitionBook
from core_kernels.comm import Group
from core_kernels.interconnect import Interconnect
from gnn_parallel.adapters import find_input_layer, split_layer
from gnn_parallel.cost_model import LayerShape, Price, Rates
from gnn_parallel.data import TrainingData
from gnn_parallel.dry_run import DryRun
from gnn_parallel.errors import PlanMismatchError, input_error
from gnn_parallel.features import PLACEMENTS
from gnn_parallel.loader import BatchSchedule
from gnn_parallel.plan import Candidate, Plan
from gnn_parallel.profile import measure_rates
from gnn_parallel.strategies import STRATEGIES

__all__ = ["choose_strategy", "parse_cache", "parse_fanouts"]

_MEASURE_SECONDS = 2.0
"""Time to spend on measuring collectives when no saved interconnect is given."""


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
    _check_choices(world_size, group, placement, strategy)
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
    dry_run = DryRun(data, layer, shape, fanouts, seed, schedule, rates, price, cached_rows, group)
    dry_run.sample(num_steps)
    candidates = dry_run.candidates(memory_bytes)
    plan = Plan(
        strategy=_choose(strategy, candidates),
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
        partition=_describe_partition(partition, graph),
        graph_fingerprint=graph.fingerprint(),
        interconnect_fingerprint="" if interconnect is None else interconnect.fingerprint,
        planning_seconds=time.perf_counter() - started,
    )
    return plan.bind(graph, features, partition, seeds)


def _check_choices(world_size: int, group: Group | None, placement: str, strategy: str) -> None:
    if group is not None and group.size != world_size:
        raise PlanMismatchError(
            f"partition has {world_size} parts, the group has {group.size} ranks; expected the same number; "
            "partition into as many parts as there are ranks"
        )
    if placement not in PLACEMENTS:
        raise input_error("placement", placement, f"one of {', '.join(PLACEMENTS)}", "choose one of them")
    if strategy != "auto" and strategy not in STRATEGIES:
        raise input_error("strategy", strategy, f"auto or one of {', '.join(STRATEGIES)}", "correct the spelling")


def _choose(strategy: str, candidates: list[Candidate]) -> str:
    """Return the strategy asked for, or the cheapest; raise when it cannot run."""
    runnable = [candidate for candidate in candidates if not candidate.reason]
    wanted = [candidate for candidate in candidates if candidate.strategy == strategy]
    if not runnable or (wanted and wanted[0].reason):
        reasons = "; ".join(f"{c.strategy}: {c.reason}" for c in candidates if c.reason)
        raise PlanMismatchError(f"strategy={strategy!r} cannot run; {reasons}; allow another strategy or more memory")
    return strategy if wanted else min(runnable, key=lambda candidate: candidate.predicted_seconds).strategy


def _describe_partition(partition: PartitionBook, graph: Graph) -> dict[str, float | str]:
    cut_share = partition.cut / max(1, graph.num_edges)
    return {"method": partition.method, "cut_share": cut_share, "balance": partition.balance}


def _make_price(interconnect: Interconnect | None, group_shape: str | None, world_size: int) -> Price:
    if interconnect is None or world_size == 1:
        return lambda collective, num_bytes: 0.0
    measured = interconnect.group_shape
    fits = measured and math.prod(int(part) for part in measured.split("x")) == world_size
    shape = group_shape or (measured if fits else f"1x{world_size}")
    return lambda collective, num_bytes: interconnect.seconds(collective, num_bytes, shape)


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
