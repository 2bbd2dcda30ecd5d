"""Checks that a plan fits, and that all ranks were given the same: errors on every rank instead of a hang."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from recsys_embed.errors import PlanMismatchError
from recsys_embed.plan import Plan
from recsys_embed.tables import EmbeddingBagConfig

if TYPE_CHECKING:
    from recsys_embed.collection import TieredEmbeddingBagCollection

__all__ = ["check_agreement", "check_plan"]


def check_plan(tables: Sequence[EmbeddingBagConfig], plan: Plan, world_size: int) -> None:
    """Raise unless a plan is for these tables and ranks.

    Raises:
        PlanMismatchError: Other tables, another number of ranks, a hot row that does not exist, or hot rows in a table
            that owners pool.
    """
    expected = [(t.name, t.num_embeddings, t.embedding_dim) for t in tables]
    found = [(t.name, t.num_embeddings, t.embedding_dim) for t in plan.tables]
    if found != expected:
        raise PlanMismatchError(f"the plan is for the tables {found}; these are {expected}; plan again")
    if plan.world_size != world_size:
        raise PlanMismatchError(
            f"the plan has world_size={plan.world_size}; expected {world_size}, the ranks of the group; plan for "
            f"{world_size}"
        )
    rows = {t.name: t.num_embeddings for t in tables}
    for name, hot in plan.hot_rows.items():
        if name not in rows or (hot and not 0 <= min(hot) <= max(hot) < rows[name]) or len(set(hot)) != len(hot):
            raise PlanMismatchError(
                f"the plan's hot rows of {name!r} are not distinct rows in [0, {rows.get(name)}); plan again"
            )
    for name in plan.pooled:
        if name not in rows or plan.hot_rows.get(name):
            raise PlanMismatchError(
                f"the plan pools {name!r} at its owners; expected a table without hot rows, one of {sorted(rows)}; "
                "plan again"
            )


def check_agreement(embeddings: TieredEmbeddingBagCollection) -> None:
    """Raise on every rank when the plan does not fit one of them, or ranks differ in what they were given. Collective.

    Raises:
        PlanMismatchError: Names the first rank that differs from rank 0.
    """
    problem = ""
    try:
        check_plan(embeddings.tables, embeddings.plan, embeddings.group.size)
    except PlanMismatchError as error:
        problem = str(error)
    tables = [asdict(t) for t in embeddings.tables]
    settings = (embeddings.deterministic, embeddings.reduction, embeddings.id_policy, embeddings.seed)
    mine = (problem, tables, embeddings.plan.fingerprint, embeddings.optimizer.describe(), settings)
    everyone = embeddings.group.all_gather_object(mine, tag="agree")
    fields = {"tables": 1, "plans": 2, "optimisers": 3, "settings": 4}
    for what, column in fields.items():
        values = [entry[column] for entry in everyone]
        different = [rank for rank, value in enumerate(values) if value != values[0]]
        if different:
            raise PlanMismatchError(
                f"ranks have different {what}: rank {different[0]} has {values[different[0]]}, rank 0 has {values[0]}; "
                "build the collection with the same arguments on every rank"
            )
        if problem:  # the same on every rank by now: they agree about the tables
            raise PlanMismatchError(problem)
