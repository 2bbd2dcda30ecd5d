"""The plan: which strategy, for what, and why, as one JSON file.

A plan holds predicted seconds and bytes of every strategy, so that it can explain itself, and a fingerprint of the
graph it was made for. The data itself is bound in memory and never saved.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from torch import Tensor

from core_kernels import Graph, PartitionBook
from core_kernels.plan import PlanDocument
from gnn_parallel.data import TrainingData
from gnn_parallel.errors import PlanMismatchError
from gnn_parallel.explanation import explain_plan
from gnn_parallel.features import PLACEMENTS

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
        num_ranks: Ranks it is priced for.
        num_hosts: Hosts that work data-parallel; the strategy spreads the input layer over the ranks of each.
        overlap_rows: Rows per epoch that keeping the previous batch saves from being fetched.
        modelled_seconds: Of an epoch, as the model alone predicts, before any trial.
        measured_step_seconds: Of the steps of a trial; 0 without one.
        link_seconds: Of an epoch, what its collectives take by themselves.
    """

    strategy: str
    reason: str
    predicted_seconds: float
    spread_seconds: float
    seconds: dict[str, float]
    bytes: int
    bytes_by_tag: dict[str, int]
    memory_bytes: int
    num_ranks: int = 1
    num_hosts: int = 1
    overlap_rows: int = 0
    modelled_seconds: float = 0.0
    measured_step_seconds: float = 0.0
    link_seconds: float = 0.0

    @property
    def name(self) -> str:
        """The strategy, with the number of hosts where there are several."""
        return self.strategy if self.num_hosts == 1 else f"{self.strategy} x{self.num_hosts} hosts"


@dataclass(frozen=True)
class Plan(PlanDocument):
    """How a model is trained on a graph by several ranks.

    Attributes:
        strategy: The strategy chosen.
        world_size: Number of ranks.
        fanouts: Neighbours per layer, the hop at the seeds first; -1 for all.
        batch_size: Seeds per step over all ranks.
        seed: Seed of the order of batches and of sampling.
        placement: ``"replicated"``, ``"sharded"`` or ``"disk"`` features.
        cached_rows: Copies of other ranks' rows per rank, or rows kept in host memory over a disk.
        input_layer: Name of the input layer in the model.
        algebra: How its states merge.
        steps_per_epoch: Steps that use every seed once.
        num_steps_sampled: Steps the counts were taken from.
        candidates: All strategies on all ranks.
        partition: Method, cut and balance of the partition.
        graph_fingerprint: Of the graph.
        interconnect_fingerprint: Of the measured machine.
        num_hosts: Hosts that work data-parallel.
        reuse: Whether rows of a batch are kept for the next.
        look_ahead: Batches that are prepared in the background (sharded) or whose rows are read from disk ahead.
        num_clusters: Clusters whose order batches follow; 0 for independent batches.
        num_negatives: Negatives per pair in link prediction.
        is_mixed: Whether activations are computed and travel in 16 bits (bfloat16).
        num_epochs: Epochs the plan was made for.
        fewer_ranks: What the best strategy would cost on fewer ranks.
        calibration: Measured over predicted seconds of the steps that were tried, what links take left out; by so much
            the predictions of strategies that were not tried are scaled, what links take left out.
        planning_seconds: What planning took.
        counting_seconds: Of that, for counting steps.
        trial_seconds: Of that, for steps that were tried.
    """

    schema: ClassVar[str] = "gnn_parallel.plan"
    version: ClassVar[int] = 3

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
    num_hosts: int = 1
    reuse: bool = False
    look_ahead: int = 0
    num_clusters: int = 0
    num_negatives: int = 1
    is_mixed: bool = False
    num_epochs: int = 1
    fewer_ranks: tuple[Candidate, ...] = ()
    calibration: float = 1.0
    planning_seconds: float = 0.0
    counting_seconds: float = 0.0
    trial_seconds: float = 0.0

    @property
    def predicted(self) -> Candidate:
        """The candidate that was chosen."""
        return self.candidate(self.strategy, self.num_hosts)

    @property
    def data(self) -> TrainingData | None:
        """Graph, features and partition, once bound."""
        return self.__dict__.get("_data")

    @property
    def recommended_ranks(self) -> int:
        """Ranks on which an epoch is predicted to be fastest; fewer than ``world_size`` where ranks do not pay."""
        best = min((self.predicted, *self.fewer_ranks), key=lambda candidate: candidate.predicted_seconds)
        return best.num_ranks if best is not self.predicted else self.world_size

    def candidate(self, strategy: str, num_hosts: int = 1) -> Candidate:
        """Return what was predicted for a strategy."""
        return next(c for c in self.candidates if (c.strategy, c.num_hosts) == (strategy, num_hosts))

    def bind(
        self, graph: Graph, features: Tensor | str | Path, partition: PartitionBook, seeds: Tensor | None = None
    ) -> Plan:
        """Give the plan its data, after checking that it is the data the plan was made for; returns the plan.

        Raises:
            PlanMismatchError: The graph is another one, or the partition is for another number of ranks.
        """
        if graph.fingerprint() != self.graph_fingerprint:
            raise PlanMismatchError(
                f"the plan was made for graph {self.graph_fingerprint}, this one is {graph.fingerprint()}; "
                "expected the same graph; load it, or plan again"
            )
        self._check_fields()
        if partition.num_parts != self.world_size:
            raise PlanMismatchError(
                f"partition has {partition.num_parts} parts; expected world_size={self.world_size}, as in the plan; "
                "partition into as many parts as there are ranks"
            )
        source = features if isinstance(features, Tensor) else Path(features)
        return self.with_data(TrainingData(graph, source, partition, seeds))

    def _check_fields(self) -> None:
        """Raise when the file says what no planner writes."""
        lowest = {"batch_size": 1, "steps_per_epoch": 1, "num_hosts": 1, "num_negatives": 1}
        lowest |= dict.fromkeys(("cached_rows", "look_ahead", "num_clusters"), 0)
        wrong = [name for name, least in lowest.items() if getattr(self, name) < least]
        wrong += ["placement"] if self.placement not in PLACEMENTS else []
        wrong += ["fanouts"] if not self.fanouts else []
        if (self.strategy, self.num_hosts) not in [(c.strategy, c.num_hosts) for c in self.candidates]:
            wrong.append("strategy")
        if wrong:
            shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in wrong)
            raise PlanMismatchError(f"the plan says {shown}; expected values as a planner writes them; plan again")

    def with_data(self, data: TrainingData) -> Plan:
        """Give the plan data that is known to be its own; returns the plan."""
        self.__dict__["_data"] = data
        return self

    def explain(self) -> str:
        """Return the plan in words and numbers: the terms of every strategy side by side, and why the choice."""
        return explain_plan(self)
