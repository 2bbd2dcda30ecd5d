"""The plan: which strategy, for what, and why, as one JSON file.

A plan holds predicted seconds and bytes of every strategy, so that it can explain itself, and a fingerprint of the
graph it was made for. The data itself is bound in memory and never saved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from core_kernels import Graph, PartitionBook
from core_kernels.console import format_bytes, format_seconds
from core_kernels.plan import PlanDocument
from gnn_parallel.clock import TERMS
from gnn_parallel.data import TrainingData
from gnn_parallel.errors import PlanMismatchError
from gnn_parallel.strategies import STRATEGIES

__all__ = ["Candidate", "Plan"]


@dataclass(frozen=True)
class Candidate:
    """What a strategy is predicted to cost.

    Attributes:
        strategy: Its name.
        reason: Why it cannot run; empty when it can.
        predicted_seconds: Of an epoch; infinite when it cannot run.
        spread_seconds: Half-width of the 95 % confidence interval that comes from sampling few batches.
        seconds: Of an epoch, by term.
        bytes: Sent by all ranks in an epoch.
        bytes_by_tag: The same, by kind of traffic.
        memory_bytes: Features, copies and largest batch of the rank that needs most.
        measured_step_seconds: Median of the steps of a race; 0 without one.
    """

    strategy: str
    reason: str
    predicted_seconds: float
    spread_seconds: float
    seconds: dict[str, float]
    bytes: int
    bytes_by_tag: dict[str, int]
    memory_bytes: int
    measured_step_seconds: float = 0.0


@dataclass(frozen=True)
class Plan(PlanDocument):
    """How a model is trained on a graph by several ranks.

    Attributes:
        strategy: The strategy chosen.
        world_size: Number of ranks.
        fanouts: Neighbours per layer, the hop at the seeds first; -1 for all.
        batch_size: Seeds per step over all ranks.
        seed: Seed of order and sampling.
        placement: ``"replicated"`` or ``"sharded"`` features.
        cached_rows: Copies of other ranks' rows that a rank keeps, when features are sharded.
        input_layer: Dotted name of the input layer in the model.
        algebra: How its states merge.
        steps_per_epoch: Steps that use every seed once.
        num_steps_sampled: Steps the counts were taken from.
        candidates: All strategies.
        partition: Method, cut and balance of the partition.
        graph_fingerprint: Of the graph.
        interconnect_fingerprint: Of the measured machine.
        planning_seconds: What planning took.
    """

    schema: ClassVar[str] = "gnn_parallel.plan"
    version: ClassVar[int] = 1

    strategy: str
    world_size: int
    fanouts: tuple[int, ...]
    batch_size: int
    seed: int
    placement: str
    cached_rows: int
    input_layer: str
    algebra: str
    steps_per_epoch: int
    num_steps_sampled: int
    candidates: tuple[Candidate, ...]
    partition: dict[str, float | str]
    graph_fingerprint: str
    interconnect_fingerprint: str
    planning_seconds: float = 0.0

    @property
    def predicted(self) -> Candidate:
        """The candidate that was chosen."""
        return self.candidate(self.strategy)

    @property
    def data(self) -> TrainingData | None:
        """Graph, features and partition, once bound."""
        return self.__dict__.get("_data")

    def candidate(self, strategy: str) -> Candidate:
        """Return what was predicted for a strategy."""
        return next(candidate for candidate in self.candidates if candidate.strategy == strategy)

    def bind(self, graph: Graph, features: Tensor, partition: PartitionBook, seeds: Tensor | None = None) -> Plan:
        """Give the plan its data, after checking that it is the data the plan was made for; returns the plan.

        Raises:
            PlanMismatchError: The graph is another one, or the partition is for another number of ranks.
        """
        if graph.fingerprint() != self.graph_fingerprint:
            raise PlanMismatchError(
                f"the plan was made for graph {self.graph_fingerprint}, this one is {graph.fingerprint()}; "
                "expected the same graph; load it, or plan again"
            )
        if partition.num_parts != self.world_size:
            raise PlanMismatchError(
                f"partition has {partition.num_parts} parts; expected world_size={self.world_size}, as in the plan; "
                "partition into as many parts as there are ranks"
            )
        self.__dict__["_data"] = TrainingData(graph, features, partition, seeds)
        return self

    def explain(self) -> str:
        """Return the plan in words and numbers: the terms of every strategy side by side, and why the choice."""
        chosen = self.predicted
        method, cut_share = self.partition["method"], self.partition["cut_share"]
        lines = [
            f"{self.strategy}, {STRATEGIES[self.strategy].summary}",
            f"{self.world_size} ranks, fanouts {','.join(map(str, self.fanouts))}, {self.batch_size} seeds per step, "
            f"{self.steps_per_epoch} steps per epoch, {self.placement} features, input layer {self.input_layer} "
            f"({self.algebra}), partition {method} cutting {cut_share:.1%} of edges",
            "",
            "predicted per epoch" + "".join(f"{term:>10}" for term in TERMS) + "     total      bytes",
        ]
        for candidate in self.candidates:
            if candidate.reason:
                lines.append(f"  {candidate.strategy:<17}cannot run: {candidate.reason}")
                continue
            terms = "".join(f"{format_seconds(candidate.seconds[term]):>10}" for term in TERMS)
            total, sent = format_seconds(candidate.predicted_seconds), format_bytes(candidate.bytes)
            lines.append(f"  {candidate.strategy:<17}{terms}{total:>10}{sent:>11}")
        others = [c for c in self.candidates if not c.reason and c.strategy != self.strategy]
        if others:
            second = min(others, key=lambda c: c.predicted_seconds)
            term, gap = max(((t, second.seconds[t] - chosen.seconds[t]) for t in TERMS), key=lambda pair: abs(pair[1]))
            word = "more" if gap > 0 else "less"
            lines += [
                "",
                f"next best is {second.strategy} at {second.predicted_seconds / chosen.predicted_seconds:.2f}x; the "
                f"largest difference is {term}: {format_seconds(abs(gap))} {word} for {second.strategy}",
            ]
        return "\n".join(lines)
