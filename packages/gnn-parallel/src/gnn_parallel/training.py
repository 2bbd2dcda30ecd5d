"""The training loop behind ``gnn-parallel train``: plan, train, validate, test, and say what was measured.

It is the six lines of the README with reports around them. Every rank runs it; rank 0 shows progress and writes files.
"""

from __future__ import annotations

import json
import logging
import math
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from core_kernels import PartitionBook
from core_kernels.comm import Group
from core_kernels.console import progress, say
from gnn_parallel.checkpoint import load_checkpoint, save_checkpoint
from gnn_parallel.clock import TERMS, settle_terms
from gnn_parallel.engine import Batch, Engine
from gnn_parallel.errors import input_error
from gnn_parallel.exchange import TAGS
from gnn_parallel.features import ShardedFeatures, StoredFeatures
from gnn_parallel.jobs import LabelledGraph, TrainJob, make_plan
from gnn_parallel.plan import Plan

__all__ = ["batch_loss", "format_share", "train_on_rank"]

_log = logging.getLogger(__name__)


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
    data = job.load()
    run = _Run(group, job, data, make_plan(job, data, partition, group))
    first = load_checkpoint(job.resume, run.engine, run.optimizer) if job.resume else 0
    if first >= job.epochs:
        expected = f"more than the {first} of checkpoint {job.resume}"
        raise input_error("epochs", job.epochs, expected, f"pass --epochs {first + 5}")
    for epoch in range(first, job.epochs):
        if job.replan_every and epoch > first and (epoch - first) % job.replan_every == 0:
            run.replan(partition)
        run.train_epoch(epoch)
    if job.save:
        save_checkpoint(job.save, run.engine, run.optimizer, job.epochs)
    report = _report(run.engine.plan, run.epochs, run.evaluate(data.test_ids))
    run.engine.close()
    return report


def batch_loss(batch: Batch, output: Tensor) -> Tensor:
    """Return the mean loss over a rank's part of a batch: cross entropy of classes, or of links."""
    assert batch.y is not None
    if batch.pairs is None:
        return F.cross_entropy(output, batch.y)
    scores = (output[batch.pairs[0]] * output[batch.pairs[1]]).sum(1)
    return F.binary_cross_entropy_with_logits(scores, batch.y.to(scores.dtype))


class _Run:
    """Engine, optimizer and report of a job on one rank."""

    def __init__(self, group: Group, job: TrainJob, data: LabelledGraph, plan: Plan):
        self.group, self.job, self.data = group, job, data
        self.shows = job.is_shown and group.rank == 0
        self.epochs: list[dict[str, Any]] = []
        if self.shows:
            say(plan.explain())
        self.engine = Engine(plan, job.make_model(data), group)
        self.optimizer = torch.optim.Adam(self.engine.model.parameters(), lr=job.learning_rate, weight_decay=5e-4)

    def replan(self, partition: PartitionBook) -> None:
        """Plan again on the machine as it is now, and go on under the new plan where it is another."""
        plan = make_plan(self.job, self.data, partition, self.group)
        before = self.engine.plan
        if (plan.strategy, plan.num_hosts) != (before.strategy, before.num_hosts):
            if self.shows:
                say(f"going on under {plan.predicted.name} instead of {before.predicted.name}")
            self.engine = self.engine.follow(plan, self.optimizer)

    def train_epoch(self, epoch: int) -> None:
        """Train and validate an epoch and add it to the report."""
        engine, job = self.engine, self.job
        total, sent = torch.zeros(1, dtype=torch.float64), engine.ranks.sent_bytes()
        reads = _reads(engine)
        started = time.perf_counter()
        with progress(f"epoch {epoch + 1}", engine.plan.steps_per_epoch if self.shows else None) as advance:
            for batch in engine.loader(self.data.train_ids, self.data.labels, epoch):
                total += self._train_step(batch)
                advance()
        elapsed = time.perf_counter() - started
        mine = engine.clock.take()
        found = {
            "epoch": epoch,
            "strategy": engine.plan.strategy,
            "loss": float(self.group.all_reduce(total, tag="report")) / engine.plan.steps_per_epoch,
            "val_accuracy": None,
            "seconds": settle_terms(self.group, mine, elapsed),
            **_sum_bytes(engine, sent),
            "imbalance": _imbalance(self.group, mine["sample"] + mine["load"] + mine["compute"]),
            "hit_rate": _hit_rate(self.group, reads, _reads(engine)),
        }
        found["val_accuracy"] = self.evaluate(self.data.val_ids)
        engine.clock.take()
        self.epochs.append(found)
        self._tell(found, job)

    def evaluate(self, items: Tensor) -> float | None:
        """Return the accuracy through all neighbours, or through sampled ones; ``None`` where there are no items."""
        if not items.shape[-1]:
            return None
        fanouts = self.engine.plan.fanouts if self.job.validation == "sampled" else None
        return self.engine.evaluate(items, self.data.labels, fanouts)

    def _train_step(self, batch: Batch) -> float:
        """Train a step; returns this rank's part of the mean loss."""
        engine = self.engine
        self.optimizer.zero_grad()
        loss = batch_loss(batch, engine(batch))
        engine.backward(loss)
        if self.job.clip:
            engine.clip_grad_norm_(self.job.clip)
        with engine.clock("compute"):
            self.optimizer.step()
        return float(loss.detach()) * batch.share if len(batch.seeds) else 0.0

    def _tell(self, found: dict[str, Any], job: TrainJob) -> None:
        _log.info("rank %d %s", self.group.rank, json.dumps(found))
        if job.log and self.group.rank == 0:
            with open(job.log, "a") as file:
                file.write(json.dumps(found) + "\n")
        if self.shows:
            say(
                f"epoch {found['epoch'] + 1}/{job.epochs}  loss {found['loss']:.4f}  "
                f"validation {format_share(found['val_accuracy'])}  {sum(found['seconds'].values()):.2f} s"
            )


def format_share(share: float | None) -> str:
    """Return a share as a percentage, or a dash where there is none.

    >>> format_share(0.5), format_share(None)
    ('50.0%', '-')
    """
    return "-" if share is None else f"{share:.1%}"


def _sum_bytes(engine: Engine, before: dict[str, int]) -> dict[str, Any]:
    """Return the bytes all ranks have sent since ``before``, whole and by tag."""
    now = engine.ranks.sent_bytes()
    sent = torch.tensor([now.get(tag, 0) - before.get(tag, 0) for tag in TAGS], dtype=torch.float64)
    by_tag = engine.group.all_reduce(sent, tag="report")
    return {"bytes": int(by_tag.sum()), "bytes_by_tag": dict(zip(TAGS, map(int, by_tag.tolist()), strict=True))}


def _imbalance(group: Group, busy_seconds: float) -> float:
    """Return the longest over the average time that ranks worked."""
    mine = torch.tensor([busy_seconds], dtype=torch.float64)
    longest = float(group.all_reduce(mine, op="max", tag="report"))
    return longest / max(float(group.all_reduce(mine, tag="report")) / group.size, 1e-12)


def _reads(engine: Engine) -> tuple[int, int]:
    """Return the rows looked up so far, and those of them that were not at hand."""
    features = engine.features
    if isinstance(features, ShardedFeatures):
        return features.rows_read, features.rows_fetched
    if isinstance(features, StoredFeatures):
        rows = features.store.counters.rows
        return sum(rows.values()), rows["disk"]
    return 0, 0


def _hit_rate(group: Group, before: tuple[int, int], after: tuple[int, int]) -> float:
    """Return the share of rows, over all ranks, that were at hand; 1 where all are."""
    counts = torch.tensor([a - b for a, b in zip(after, before, strict=True)], dtype=torch.float64)
    read, missed = group.all_reduce(counts, tag="report").tolist()
    return 1.0 - missed / read if read else 1.0


def _report(plan: Plan, epochs: list[dict[str, Any]], test_accuracy: float | None) -> dict[str, Any]:
    # The first epoch pays for warming up; the median of the others is what an epoch takes.
    settled = epochs[1:] or epochs
    measured = (
        {term: sorted(e["seconds"][term] for e in settled)[len(settled) // 2] for term in TERMS} if epochs else {}
    )
    return {
        "strategy": plan.strategy,
        "num_hosts": plan.num_hosts,
        "candidates": {
            c.name: {
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
