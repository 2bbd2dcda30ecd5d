"""The whole grid of combinations against one process, and twins that must fail: what ``recsys-embed verify`` runs.

Hot tier x pre-fetching x ranks x optimiser in deterministic mode, bit by bit; the same in fast mode within rounding;
and runs with a broken overlap rule, which have to differ, so that equality is known to mean something.

Callers may not assume that ``"auto"`` is a tier of its own: a planner may choose none, or a size that is there already.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from core_kernels.comm import Group
from core_kernels.interconnect import Interconnect
from core_kernels.testing import RankPool
from recsys_embed import exchange
from recsys_embed.errors import input_error
from recsys_embed.optimizers import OPTIMIZERS, make_optimizer
from recsys_embed.planner import plan_tiers
from recsys_embed.profile import AccessStats
from recsys_embed.tables import EmbeddingBagConfig, KeyedJaggedTensor
from recsys_embed.verify import Case, compare, reference_tables, run_case

__all__ = ["RULES", "GridJob", "broken_rule", "count_hot_rows", "run_grid"]

#: Largest relative difference of fast mode: sums in another order.
FAST_TOLERANCE = 1e-6


def no_row_is_late(last_touch: Tensor, request: exchange.Request, previous: exchange.Request) -> Tensor:
    """Break the overlap rule: read every row early, updates pending or not."""
    return torch.zeros(len(request.slots), dtype=torch.bool)


def late_by_own_batch(last_touch: Tensor, request: exchange.Request, previous: exchange.Request) -> Tensor:
    """Break the overlap rule: a row is late only if the asking rank itself touched it."""
    asked = previous.slots.split(previous.recv_counts)
    blocks = request.slots.split(request.recv_counts)
    return torch.cat([torch.isin(block, own) for own, block in zip(asked, blocks, strict=True)])


RULES: dict[str, Callable[..., Tensor]] = {
    "union": exchange.find_late,
    "none": no_row_is_late,
    "local": late_by_own_batch,
}


@contextlib.contextmanager
def broken_rule(name: str) -> Iterator[None]:
    """Use another overlap rule in this process: ``"none"``, ``"local"``, or the right one, ``"union"``."""
    honest = exchange.find_late
    exchange.find_late = RULES[name]
    try:
        yield
    finally:
        exchange.find_late = honest


@dataclass(frozen=True)
class GridJob:
    """What to compare.

    Attributes:
        tables: The tables.
        batches: Global batches, one per step.
        hot: Sizes of the hot tier: a number, ``"sqrt"`` (root of all rows), ``"auto"`` (the planner's), ``"all"``.
        ranks: Numbers of ranks.
        optimizers: Names of optimisers.
        interconnect: What ``"auto"`` is planned for.
    """

    tables: Sequence[EmbeddingBagConfig]
    batches: Sequence[KeyedJaggedTensor]
    hot: Sequence[str] = ("0", "1", "sqrt", "auto", "all")
    ranks: Sequence[int] = (1, 2, 4)
    optimizers: Sequence[str] = tuple(OPTIMIZERS)
    interconnect: str = "loopback-cpu"


def count_hot_rows(job: GridJob, label: str, world_size: int) -> int:
    """Return the hot rows that a label stands for.

    Raises:
        InputError: The label is no size.
    """
    num_rows = sum(t.num_embeddings for t in job.tables)
    if label == "auto":
        stats = AccessStats.from_batches(job.batches, job.tables, sample=None)
        net, size = Interconnect.preset(job.interconnect), max(1, job.batches[0].stride() // world_size)
        return plan_tiers(stats, net, job.tables, world_size, size, make_optimizer("sgd")).num_hot_rows
    if label in ("sqrt", "all"):
        return math.isqrt(num_rows) if label == "sqrt" else num_rows
    if not label.isdigit() or int(label) > num_rows:
        raise input_error("hot", label, f"a number up to {num_rows}, sqrt, auto or all", "correct the size")
    return int(label)


def run_cases(
    group: Group, tables: Any, batches: Any, cases: Sequence[Case], rule: str = "union"
) -> list[dict[str, Tensor]]:
    """Train every case on this rank; rank 0 returns whole tables and states. Collective."""
    with broken_rule(rule):
        found = [run_case(group, tables, batches, case) for case in cases]
    return found if group.rank == 0 else []


def run_grid(job: GridJob, advance: Callable[[], Any] = lambda: None) -> dict[str, Any]:
    """Compare the whole grid.

    Args:
        job: What to compare.
        advance: Called after every (ranks, optimiser).

    Returns:
        ``cases`` (deterministic), ``fast`` and ``twins``, a row each; ``equal``, ``fast_within``, ``twins_differ``.
    """
    cases: list[dict[str, Any]] = []
    fast: list[dict[str, Any]] = []
    twins: list[dict[str, Any]] = []
    expected = {name: reference_tables(job.tables, job.batches, Case(0, False, name)) for name in job.optimizers}
    for size in job.ranks:
        labels = {label: count_hot_rows(job, label, size) for label in job.hot}
        with RankPool(size) as pool:
            for name in job.optimizers:
                wanted = [Case(hot, p, name) for hot in dict.fromkeys(labels.values()) for p in (False, True)]
                quick = [replace(case, deterministic=False) for case in wanted]
                answers = pool.run(run_cases, job.tables, job.batches, wanted + quick)[0]
                for case, state in zip(wanted + quick, answers, strict=True):
                    tier = "/".join(label for label, hot in labels.items() if hot == case.hot)
                    row = {"ranks": size, "tier": tier, **asdict(case), **asdict(compare(state, expected[name]))}
                    (cases if case.deterministic else fast).append(row)
                advance()
            if size > 1:
                twins += _run_twins(pool, job, size, expected)
    return {
        "equal": all(row["is_bitwise_equal"] for row in cases),
        "fast_within": all(row["worst_relative"] <= FAST_TOLERANCE for row in fast),
        "twins_differ": not any(row["is_bitwise_equal"] for row in twins),
        "steps": len(job.batches),
        "cases": cases,
        "fast": fast,
        "twins": twins,
    }


def _run_twins(pool: RankPool, job: GridJob, size: int, expected: dict[str, Any]) -> list[dict[str, Any]]:
    """Run with the overlap rule off, and with each rank judging by its own batch: both must differ."""
    name, rows = job.optimizers[0], []
    for rule in ("none", "local"):
        state = pool.run(run_cases, job.tables, job.batches, [Case(0, True, name)], rule)[0][0]
        rows.append({"ranks": size, "rule": rule, "optimizer": name, **asdict(compare(state, expected[name]))})
    return rows
