"""Choosing the hot tier: price sizes from none to all, take the cheapest, and none if the gain is small.

Rows are ranked by how many batches touched them; cost and gain of a row both grow with its width, so the ranking does
not depend on it. Sizes are tried geometrically, then refined around the best. All of it works on a histogram: planning
for a billion rows costs one pass over the counters.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from core_kernels.console import format_bytes
from core_kernels.interconnect import Interconnect
from recsys_embed.cost_model import Machine, Workload, price
from recsys_embed.errors import input_error
from recsys_embed.optimizers import RowOptimizer
from recsys_embed.plan import Candidate, Plan, shapes_of
from recsys_embed.profile import AccessStats
from recsys_embed.tables import EmbeddingBagConfig, check_tables
from recsys_embed.work import WorkCosts

__all__ = ["plan_tiers", "workload_of"]

_MIN_GAIN = 0.02
_NUM_SIZES = 48


def plan_tiers(
    stats: AccessStats,
    interconnect: Interconnect,
    tables: Sequence[Any],
    world_size: int,
    batch_size: int,
    optimizer: RowOptimizer,
    memory_cap: float | None = None,
    hot: str | int | float = "auto",
    dense_seconds: float = 0.0,
    prefetch: bool = True,
    pooled: str | Sequence[str] = "auto",
    dense_bytes: float = 0.0,
    work: WorkCosts | None = None,
) -> Plan:
    """Choose which rows every rank holds, and which tables return partial pools instead of rows.

    Args:
        stats: Access counts of one rank's batches.
        interconnect: Measured or assumed costs of the machine.
        tables: The tables, those of the statistics.
        world_size: Ranks.
        batch_size: Samples per rank and step.
        optimizer: Decides about memory for states.
        memory_cap: Most bytes of rows and states on a rank.
        hot: ``"auto"``, a number of rows, or a fraction of all rows below 1.
        dense_seconds: Forward and backward time of the rest of the model, behind which rows can travel.
        prefetch: Whether a pipeline will be used.
        pooled: ``"auto"``, or names of tables whose owners return partial pools (bags of many ids).
        dense_bytes: Gradients of the rest of the model, which are all-reduced over the same links.
        work: What ids and rows take of the processor, of :meth:`WorkCosts.measure`; guessed from the interconnect's
            memory rates when None, which is too low where ranks outnumber cores.

    Returns:
        The plan; it may replicate nothing.

    Raises:
        InputError: Statistics without batches, negative costs, tables that are not those of the statistics, or a cap
            below what the shards alone take.

    Cost: one pass over the counters.
    """
    tables = check_tables(tables)
    if [(t.name, t.num_embeddings) for t in tables] != [(t.name, t.num_embeddings) for t in stats.tables]:
        names = [t.name for t in stats.tables]
        raise input_error("tables", [t.name for t in tables], f"the tables of the statistics, {names}", "count again")
    if stats.num_batches == 0 or world_size < 1 or batch_size < 1:
        found = (stats.num_batches, world_size, batch_size)
        raise input_error("num_batches, world_size, batch_size", found, "at least 1 each", "count some batches")
    if not (0 <= dense_seconds < math.inf and 0 <= dense_bytes < math.inf):
        found = (dense_seconds, dense_bytes)
        raise input_error("dense_seconds, dense_bytes", found, "finite numbers of at least 0", "measure the model")
    setting = (world_size, batch_size, optimizer)
    machine = Machine(interconnect, work or WorkCosts.assumed(interconnect), dense_seconds, dense_bytes, prefetch)
    if pooled == "auto":
        pooled = _choose_pooled(stats, machine, tables, setting)
    unknown = sorted(set(pooled) - {t.name for t in tables})
    if unknown:
        raise input_error("pooled", unknown, f"'auto' or names among {[t.name for t in tables]}", "correct the names")
    workload = workload_of(stats, tables, *setting, pooled)
    by_row = [t for t in tables if t.name not in pooled]
    num_rows = sum(t.num_embeddings for t in by_row)
    limit = _rows_under(workload, memory_cap, num_rows)

    def priced(size: int) -> Candidate:
        return price(workload, machine, size)

    if hot == "auto":
        seen = min(limit, int(workload.requested_rows))
        candidates, chosen, reason = _search(priced, seen, [num_rows] if limit >= num_rows else [], world_size)
    else:
        size = int(hot * num_rows) if isinstance(hot, float) and hot < 1 else int(hot)
        if not 0 <= size <= limit:
            raise input_error("hot", hot, f"at most {limit} rows", "ask for fewer rows, or raise memory_cap")
        chosen, reason = priced(size), "the size was given"
        candidates = [priced(0), chosen] if size else [chosen]
    shown = f"{interconnect.name}, fingerprint {interconnect.fingerprint}"
    rows = stats.most_present(chosen.num_hot_rows, by_row) if chosen.num_hot_rows else {}
    prediction = (prefetch, chosen, tuple(candidates), reason, shown)
    return Plan(shapes_of(tables), world_size, batch_size, rows, *prediction, tuple(pooled))


def workload_of(
    stats: AccessStats,
    tables: Sequence[EmbeddingBagConfig],
    world_size: int,
    batch_size: int,
    optimizer: RowOptimizer,
    pooled: Sequence[str] = (),
) -> Workload:
    """Turn counts into cumulated sums, scaled from the batch size of the statistics to the planned one.

    Args:
        stats: Access counts.
        tables: The tables.
        world_size: Ranks.
        batch_size: Samples per rank and step.
        optimizer: Decides about memory for states.
        pooled: Tables whose owners return partial pools.
    """
    element_bytes = 4
    total = sum(t.num_embeddings * (t.embedding_dim + optimizer.state_columns(t.embedding_dim)) for t in tables)
    by_row = [t for t in tables if t.name not in pooled]
    groups = [np.zeros((5, 0))]
    for width in sorted({t.embedding_dim for t in by_row}):
        same = [t for t in by_row if t.embedding_dim == width]
        found = stats.histogram(same)
        seen = np.clip(found.presence / stats.num_batches, 0, 1 - 1e-12)
        q = -np.expm1(np.log1p(-seen) * batch_size / max(stats.batch_size, 1))
        q = np.where(found.presence >= stats.num_batches, 1.0, q)
        unseen = sum(t.num_embeddings for t in same) - found.num_rows.sum()
        columns = [np.append(q, 0.0), np.append(found.num_rows, unseen), np.append(found.accesses, 0)]
        row_bytes = np.full(len(q) + 1, width * element_bytes, float)
        state_bytes = row_bytes + optimizer.state_columns(width) * element_bytes
        groups.append(np.stack([*columns, row_bytes, state_bytes]))
    merged = np.concatenate(groups, axis=1)
    merged = merged[:, np.argsort(-merged[0], kind="stable")]
    q, count, accesses, row_bytes, state_bytes = merged
    touched = 1 - (1 - q) ** world_size
    scale = batch_size / max(stats.num_samples, 1)
    ids, id_row_bytes = stats.num_accesses * scale, float((accesses * row_bytes).sum()) * scale

    def running(column: np.ndarray) -> np.ndarray:
        return np.concatenate([[0.0], np.cumsum(column)])

    return Workload(
        running(count), running(count * q * row_bytes), running(count * q * touched * row_bytes), running(count * q),
        running(count * row_bytes), running(count * state_bytes), running(accesses), float(total * element_bytes), ids,
        world_size, element_bytes, id_row_bytes, *_pool_bytes(stats, tables, world_size, batch_size, pooled),
    )  # fmt: skip


def _ids_per_bag(stats: AccessStats, table: EmbeddingBagConfig) -> float:
    accesses = float(stats.histogram([table]).accesses.sum())
    return accesses / max(stats.num_samples * len(table.feature_names), 1)


def _pool_bytes(
    stats: AccessStats, tables: Sequence[EmbeddingBagConfig], world_size: int, batch_size: int, pooled: Sequence[str]
) -> tuple[float, float, float]:
    """Return the bytes of partial pools, of their ids and lengths, and of the rows added up for one batch."""
    pools_bytes = ids_bytes = rows_bytes = 0.0
    for table in (t for t in tables if t.name in pooled):
        length, bags = _ids_per_bag(stats, table), batch_size * len(table.feature_names)
        pools = bags * world_size * (1 - (1 - 1 / world_size) ** length)  # owners that hold a part of a bag
        pools_bytes += pools * table.embedding_dim * 4
        ids_bytes += 4 * (pools + bags * length)
        rows_bytes += bags * length * table.embedding_dim * 4
    return pools_bytes, ids_bytes, rows_bytes


def _choose_pooled(
    stats: AccessStats,
    machine: Machine,
    tables: Sequence[EmbeddingBagConfig],
    setting: tuple[int, int, RowOptimizer],
) -> list[str]:
    """Return the tables that are cheaper to pool at their owners, tried one by one without a hot tier."""
    num_bags = stats.num_samples * sum(len(t.feature_names) for t in tables)
    if setting[0] == 1 or stats.num_accesses <= num_bags:  # bags of one id: a pool is a row
        return []
    chosen: list[str] = []

    def seconds(pooled: list[str]) -> float:
        workload = workload_of(stats, tables, *setting, pooled)
        return price(workload, machine, 0).step_seconds

    best = seconds(chosen)
    for table in tables:
        if _ids_per_bag(stats, table) > 1 and (tried := seconds([*chosen, table.name])) < (1 - _MIN_GAIN) * best:
            chosen, best = [*chosen, table.name], tried
    return chosen


def _rows_under(workload: Workload, memory_cap: float | None, num_rows: int) -> int:
    """Return the most hot rows that fit the cap."""
    if memory_cap is None:
        return num_rows
    left = memory_cap - workload.total_state_bytes / workload.world_size
    if left < 0:
        needed = format_bytes(workload.total_state_bytes / workload.world_size)
        raise input_error("memory_cap", memory_cap, f"at least the shard of a rank, {needed}", "use more ranks")
    return int(np.interp(left, workload.state_bytes, workload.num_rows))


def _search(
    priced: Any, limit: int, more_sizes: Sequence[int], world_size: int
) -> tuple[list[Candidate], Candidate, str]:
    if world_size == 1:
        none = priced(0)
        return [none], none, "one rank holds every row anyway"
    sizes = {0, *more_sizes, *((int(s) for s in np.geomspace(1, limit, _NUM_SIZES)) if limit else ())}
    known = {size: priced(size) for size in sizes}
    for _ in range(3):
        ordered = sorted(known)
        best = min(ordered, key=lambda size: known[size].step_seconds)
        place = ordered.index(best)
        around = ordered[max(0, place - 1) : place + 2]
        for low, high in itertools.pairwise(around):
            known.setdefault((low + high) // 2, priced((low + high) // 2))
    best = min(known.values(), key=lambda c: c.step_seconds)
    none = known[0]
    gain = 1 - best.step_seconds / none.step_seconds if none.step_seconds else 0.0
    candidates = [known[size] for size in sorted(known)]
    if gain < _MIN_GAIN:
        return candidates, none, f"none: the best size would save {100 * gain:.1f} % of a step, below 2 %"
    return candidates, best, f"saves {100 * gain:.1f} % of a step against no tier"
