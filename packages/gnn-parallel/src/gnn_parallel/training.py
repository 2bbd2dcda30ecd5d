"""The training loop behind ``gnn-parallel train``: plan, train, validate, test, and say what was measured.

It is the six lines of the README with reports around them. Every rank runs it; rank 0 shows progress.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from core_kernels import PartitionBook, datasets
from core_kernels.comm import Group
from core_kernels.console import progress, say
from core_kernels.datasets import GraphData
from core_kernels.interconnect import Interconnect
from gnn_parallel.clock import TERMS
from gnn_parallel.engine import Engine
from gnn_parallel.errors import input_error
from gnn_parallel.exchange import TAGS
from gnn_parallel.models import SampledGNN, make_model
from gnn_parallel.plan import Plan
from gnn_parallel.planner import choose_strategy
from gnn_parallel.race import race_strategies

__all__ = ["TrainJob", "load_dataset", "make_plan", "settle_terms", "train_on_rank"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainJob:
    """What to train, on what, for how long; small enough to send to every rank.

    Attributes:
        dataset: ``"movielens"``, ``"sbm"`` or a folder of ``.npy`` files.
        model: Name of a model.
        hidden: Columns between layers.
        fanouts: Neighbours per layer, the hop at the seeds first.
        batch_size: Seeds per step over all ranks.
        epochs: Epochs.
        strategy: ``"auto"`` or a strategy.
        learning_rate: Of Adam.
        dropout: Between layers.
        heads: Of attention layers.
        seed: Of weights, batches and sampling.
        placement: ``"replicated"`` or ``"sharded"`` features.
        cache: Copies of other ranks' rows, when sharded.
        dtype: Type of features and weights.
        interconnect: A saved interconnect file; measured when left out.
        race: Steps for which strategies predicted to be close are measured before the choice; 0 for none.
        is_shown: Whether rank 0 prints.
    """

    dataset: str = "movielens"
    model: str = "sage"
    hidden: int = 64
    fanouts: tuple[int, ...] = (10, 10)
    batch_size: int = 512
    epochs: int = 5
    strategy: str = "auto"
    learning_rate: float = 0.003
    dropout: float = 0.5
    heads: int = 4
    seed: int = 0
    placement: str = "replicated"
    cache: str = "0"
    dtype: str = "float32"
    interconnect: str = ""
    race: int = 0
    is_shown: bool = True

    def make_model(self, data: GraphData) -> SampledGNN:
        """Build the model, with equal weights on every rank."""
        return make_model(
            self.model,
            data.num_features,
            self.hidden,
            data.num_classes,
            len(self.fanouts),
            heads=self.heads,
            dropout=self.dropout,
            seed=self.seed,
            dtype=getattr(torch, self.dtype),
        )


def load_dataset(name: str, dtype: str = "float32") -> GraphData:
    """Return a data set with features and labels.

    Args:
        name: ``"movielens"``, ``"sbm"`` (a generated graph with planted classes) or a folder of ``.npy`` files.
        dtype: ``"float32"`` or ``"float64"``, the type of the features.

    Raises:
        InputError: An unknown name, or data without features, labels or masks.
    """
    if name == "movielens":
        data = datasets.movielens()
    elif name == "sbm":
        data = datasets.sbm(20_000, num_classes=20, num_features=64)
    elif Path(name).is_dir():
        data = datasets.npy_folder(name)
    else:
        raise input_error("dataset", name, "movielens, sbm or an existing folder", "correct the spelling or the path")
    missing = [
        part for part in ("features", "labels", "train_mask", "val_mask", "test_mask") if getattr(data, part) is None
    ]
    if missing:
        raise input_error("dataset", name, f"{', '.join(missing)} as well", "add the missing files to the folder")
    return replace(data, features=data.features.to(getattr(torch, dtype)))


def make_plan(job: TrainJob, data: GraphData, partition: PartitionBook, group: Group | None, **options: Any) -> Plan:
    """Plan a job; see :func:`gnn_parallel.plan`."""
    if job.interconnect:
        options = {"interconnect": Interconnect.load(job.interconnect)} | options
    return choose_strategy(
        data.graph,
        job.make_model(data),
        features=data.features,
        partition=partition,
        fanouts=job.fanouts,
        batch_size=job.batch_size,
        seeds=data.train_mask.nonzero().view(-1),
        cache=job.cache,
        placement=job.placement,
        strategy=job.strategy,
        seed=job.seed,
        group=group,
        **options,
    )


def train_on_rank(group: Group, job: TrainJob, partition: PartitionBook) -> dict[str, Any]:
    """Run a job on one rank.

    Args:
        group: The ranks.
        job: The job, the same on every rank.
        partition: One part per rank.

    Returns:
        The report: ``strategy``, ``candidates``, ``epochs``, ``test_accuracy``, ``world_size``, ``predicted``,
        ``measured``; equal on every rank.
    """
    data = load_dataset(job.dataset, job.dtype)
    shows = job.is_shown and group.rank == 0
    plan = make_plan(job, data, partition, group)
    if job.race and job.strategy == "auto":
        plan = race_strategies(plan, job.make_model(data), group, job.race)
    if shows:
        say(plan.explain())
    model = job.make_model(data)
    engine = Engine(plan, model, group)
    optimizer = torch.optim.Adam(model.parameters(), lr=job.learning_rate, weight_decay=5e-4)
    train_ids, val_ids, test_ids = (
        mask.nonzero().view(-1) for mask in (data.train_mask, data.val_mask, data.test_mask)
    )
    epochs = []
    for epoch in range(job.epochs):
        epochs.append(_train_epoch(engine, optimizer, train_ids, data.labels, epoch, shows))
        epochs[-1]["val_accuracy"] = engine.evaluate(val_ids, data.labels)
        engine.clock.take()
        if shows:
            say(
                f"epoch {epoch + 1}/{job.epochs}  loss {epochs[-1]['loss']:.4f}  "
                f"validation {epochs[-1]['val_accuracy']:.1%}  {sum(epochs[-1]['seconds'].values()):.2f} s"
            )
        _log.info("rank %d epoch %d %s", group.rank, epoch, epochs[-1])
    return _report(plan, epochs, engine.evaluate(test_ids, data.labels))


def _train_epoch(
    engine: Engine, optimizer: torch.optim.Optimizer, seeds: Tensor, labels: Tensor, epoch: int, shows: bool
) -> dict[str, Any]:
    group, total = engine.group, torch.zeros(1, dtype=torch.float64)
    before = group.counters.snapshot()
    started = time.perf_counter()
    with progress(f"epoch {epoch + 1}", engine.plan.steps_per_epoch if shows else None) as advance:
        for batch in engine.loader(seeds, labels, epoch):
            optimizer.zero_grad()
            loss = F.cross_entropy(engine(batch), batch.y)
            engine.backward(loss)
            with engine.clock("compute"):
                optimizer.step()
            if len(batch.seeds):
                total += float(loss.detach()) * batch.share
            advance()
    elapsed = time.perf_counter() - started
    terms = settle_terms(group, engine.clock.take(), elapsed)
    after = group.counters.snapshot()
    sent = [after.get(tag, _NOTHING)["sent_bytes"] - before.get(tag, _NOTHING)["sent_bytes"] for tag in TAGS]
    by_tag = group.all_reduce(torch.tensor(sent, dtype=torch.float64), tag="report")
    return {
        "loss": float(group.all_reduce(total, tag="report")) / engine.plan.steps_per_epoch,
        "val_accuracy": 0.0,
        "seconds": terms,
        "bytes": int(by_tag.sum()),
        "bytes_by_tag": dict(zip(TAGS, map(int, by_tag.tolist()), strict=True)),
    }


def settle_terms(group: Group, terms: dict[str, float], elapsed: float) -> dict[str, float]:
    """Return the seconds of an epoch by term over all ranks.

    A collective's own time is that of the rank that came last; others spend the difference waiting for that rank to
    compute, so it counts as compute.
    """
    mine = torch.tensor([*terms.values(), elapsed], dtype=torch.float64)
    average = dict(zip([*TERMS, "total"], (group.all_reduce(mine, tag="report") / group.size).tolist(), strict=True))
    least = dict(zip(TERMS, group.all_reduce(mine, op="min", tag="report").tolist()[:-1], strict=True))
    settled = {term: least[term] if term in ("shuffle", "reduce") else average[term] for term in TERMS}
    settled["compute"] = average["total"] - sum(seconds for term, seconds in settled.items() if term != "compute")
    return settled


_NOTHING = {"sent_bytes": 0}


def _report(plan: Plan, epochs: list[dict[str, Any]], test_accuracy: float) -> dict[str, Any]:
    # The first epoch pays for warming up; the median of the others is what an epoch takes.
    settled = epochs[1:] or epochs
    measured = (
        {term: sorted(e["seconds"][term] for e in settled)[len(settled) // 2] for term in TERMS} if epochs else {}
    )
    return {
        "strategy": plan.strategy,
        "candidates": {
            c.strategy: {
                "predicted_seconds": c.predicted_seconds if math.isfinite(c.predicted_seconds) else None,
                "bytes": c.bytes,
                "seconds": c.seconds,
                "reason": c.reason,
            }
            for c in plan.candidates
        },
        "epochs": epochs,
        "test_accuracy": test_accuracy,
        "world_size": plan.world_size,
        "predicted": plan.predicted.seconds,
        "measured": measured,
        "planning_seconds": plan.planning_seconds,
    }
