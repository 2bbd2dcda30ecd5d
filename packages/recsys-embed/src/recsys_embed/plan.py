"""What the planner decided: which rows are replicated, and what every choice was predicted to cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from core_kernels.console import format_bytes, format_seconds
from core_kernels.plan import PlanDocument

__all__ = ["Candidate", "Plan", "TableShape"]


@dataclass(frozen=True)
class TableShape:
    """A table as a plan knows it."""

    name: str
    num_embeddings: int
    embedding_dim: int


@dataclass(frozen=True)
class Candidate:
    """One size of the hot tier and its predicted cost per step and rank.

    Attributes:
        num_hot_rows: Rows replicated.
        access_share: Part of all accesses that they answer.
        step_seconds: Predicted time of a step.
        exposed_seconds: Communication that nothing hides.
        hidden_seconds: Communication behind compute.
        work_seconds: Gathering, merging and updating rows.
        sent_bytes: Payload that leaves a rank, by kind.
        memory_bytes: Rows and states on a rank.
    """

    num_hot_rows: int
    access_share: float
    step_seconds: float
    exposed_seconds: float
    hidden_seconds: float
    work_seconds: float
    sent_bytes: dict[str, float]
    memory_bytes: float


@dataclass(frozen=True)
class Plan(PlanDocument):
    """A choice of hot rows for given tables and ranks; ``save`` and ``load`` keep it in one JSON file.

    Attributes:
        tables: The tables it is for.
        world_size: The ranks it is for.
        batch_size: Samples per rank and step.
        hot_rows: Replicated rows by table, ascending.
        prefetch: Whether rows are fetched a batch ahead.
        chosen: The choice's prediction.
        candidates: All sizes that were priced, ascending.
        reason: Why this size, in words.
        interconnect: Name of the interconnect, and its fingerprint.
        pooled: Tables whose owners return partial pools instead of rows; deterministic mode fetches rows all the same.
    """

    schema: ClassVar[str] = "recsys_embed.plan"
    version: ClassVar[int] = 1

    tables: tuple[TableShape, ...]
    world_size: int
    batch_size: int = 0
    hot_rows: dict[str, list[int]] = field(default_factory=dict)
    prefetch: bool = True
    chosen: Candidate | None = None
    candidates: tuple[Candidate, ...] = ()
    reason: str = "no hot tier was asked for"
    interconnect: str = ""
    pooled: tuple[str, ...] = ()

    @classmethod
    def without_tier(cls, tables: Sequence[Any], world_size: int) -> Self:
        """Return the plan that replicates nothing."""
        return cls(shapes_of(tables), world_size)

    @property
    def num_hot_rows(self) -> int:
        """Rows that every rank holds."""
        return sum(len(rows) for rows in self.hot_rows.values())

    def explain(self) -> str:
        """Return the choice, its reason and its prediction as text."""
        num_rows = sum(t.num_embeddings for t in self.tables)
        lines = [
            f"{len(self.tables)} tables, {num_rows:,} rows, {self.world_size} ranks x {self.batch_size} samples",
            f"hot tier: {self.num_hot_rows:,} rows; {self.reason}",
        ]
        if self.pooled:
            lines.append(f"partial pools instead of rows: {', '.join(self.pooled)}")
        if self.chosen is None:
            return "\n".join(lines)
        c = self.chosen
        lines += [
            f"share of accesses: {100 * c.access_share:.1f} %",
            f"step: {format_seconds(c.step_seconds)} predicted, of which {format_seconds(c.exposed_seconds)} exposed "
            f"communication and {format_seconds(c.work_seconds)} row work; {format_seconds(c.hidden_seconds)} of "
            "communication hidden",
            "sent per rank and step: " + ", ".join(f"{k} {format_bytes(v)}" for k, v in c.sent_bytes.items()),
            f"memory per rank: {format_bytes(c.memory_bytes)}",
            f"interconnect: {self.interconnect}",
            "",
            f"{'hot rows':>10} {'accesses':>9} {'step':>10} {'exposed':>10} {'sent':>10} {'memory':>10}",
        ]
        for k in self.candidates:
            mark = " <-" if k.num_hot_rows == c.num_hot_rows else ""
            lines.append(
                f"{k.num_hot_rows:>10,} {100 * k.access_share:>7.1f} % {format_seconds(k.step_seconds):>10} "
                f"{format_seconds(k.exposed_seconds):>10} {format_bytes(sum(k.sent_bytes.values())):>10} "
                f"{format_bytes(k.memory_bytes):>10}{mark}"
            )
        return "\n".join(lines)


def shapes_of(tables: Sequence[Any]) -> tuple[TableShape, ...]:
    """Return what a plan keeps of tables."""
    return tuple(TableShape(t.name, t.num_embeddings, t.embedding_dim) for t in tables)
