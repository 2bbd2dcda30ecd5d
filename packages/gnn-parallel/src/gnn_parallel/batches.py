"""Makes this rank's part of every step: samples blocks, shuffles ids and reads features.

None of it knows weights or gradients, so it may run ahead of training: where features are sharded, a background thread
with a group of its own prepares coming batches while the caller computes and exchanges activations; where they lie on
disk, rows of coming batches are read ahead. What a batch holds does not depend on when it was made.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from core_kernels import ops
from gnn_parallel.clock import TermClock
from gnn_parallel.data import TrainingData
from gnn_parallel.features import StoredFeatures
from gnn_parallel.loader import Schedule, Share
from gnn_parallel.plan import Plan
from gnn_parallel.ranks import Ranks
from gnn_parallel.strategies import Context, Strategy

__all__ = ["Batch", "BatchMaker", "StepRequest"]


@dataclass
class Batch:
    """One step of one rank, sampled and shuffled, ready to compute.

    Attributes:
        seeds: int64, this rank's seeds; may be empty.
        y: Labels of the seeds, when the loader was given labels; 1 or 0 for every pair in link prediction.
        pairs: int64 ``[2, pairs]``, positions in ``seeds``, in link prediction.
        share: This rank's share of the batch.
        step: Step of the sampler.
        blocks: Blocks of the layers above the input layer, lowest first.
        destinations: Node ids of the input layer's result rows.
        work: What the strategy prepared.
        strategy: The strategy that prepared it.
    """

    seeds: Tensor
    y: Tensor | None
    pairs: Tensor | None
    share: float
    step: int
    blocks: list[Any]
    destinations: Tensor
    work: Any
    strategy: Strategy


@dataclass(frozen=True)
class StepRequest:
    """Which step to prepare.

    Attributes:
        share: This rank's part of the batch.
        weight: Its share of the loss.
        step: Step of the sampler.
        labels: ``[num_nodes]``, or ``None``.
        fanouts: Neighbours per layer, the hop at the seeds first.
        strategy: The strategy that shall compute it.
    """

    share: Share
    weight: float
    step: int
    labels: Tensor | None
    fanouts: tuple[int, ...]
    strategy: Strategy


@dataclass
class _Sampled:
    """A step with the blocks above the input layer."""

    request: StepRequest
    blocks: list[Any]
    destinations: Tensor


@dataclass(frozen=True)
class BatchMaker:
    """Prepares batches, here or in the background.

    Attributes:
        plan: The plan.
        data: Its data.
        ranks: The ranks.
        context: What strategies work with; its ``early_clock`` takes the seconds of preparing.
        clock: Takes the seconds that the caller waits for batches.
    """

    plan: Plan
    data: TrainingData
    ranks: Ranks
    context: Context
    clock: TermClock

    def schedule(self, items: Tensor, shuffle: bool = True) -> Schedule:
        """Return the batches of some seeds or pairs."""
        plan = self.plan
        return self.data.schedule(
            items,
            plan.batch_size,
            plan.seed,
            shuffle=shuffle,
            num_clusters=plan.num_clusters,
            num_negatives=plan.num_negatives,
        )

    def request(
        self,
        schedule: Schedule,
        epoch: int,
        positions: Tensor,
        step: int,
        labels: Tensor | None,
        fanouts: tuple[int, ...],
        strategy: Strategy,
    ) -> StepRequest:
        """Return this rank's part of the batch at some positions of a schedule."""
        shares = schedule.share(epoch, positions, self.data.owner, self.ranks.whole.size)
        mine, num_items = shares[self.ranks.place], sum(share.num_items for share in shares)
        return StepRequest(mine, mine.num_items / num_items, step, labels, fanouts, strategy)

    def make(self, request: StepRequest) -> Batch:
        """Return one batch, after all that are being prepared."""
        if not self.context.is_early:
            return self._prepare(request)
        return self._take(self.ranks.early.thread.submit(self._prepare_early, request))

    def epoch(self, schedule: Schedule, epoch: int, labels: Tensor | None, strategy: Strategy) -> Iterator[Batch]:
        """Yield the batches of an epoch; every rank gets the same number."""
        plan, first = self.plan, epoch * schedule.steps_per_epoch
        requests = (
            self.request(schedule, epoch, positions, first + index, labels, plan.fanouts, strategy)
            for index, positions in enumerate(schedule.positions(epoch))
        )
        if plan.placement == "disk":
            return self._read_ahead(requests)
        return self._work_ahead(requests) if self.context.is_early else map(self._prepare, requests)

    def settle(self) -> None:
        """Return when no batch is being prepared in the background."""
        if self.context.is_early:
            self.ranks.early.thread.settle()

    # -- in the background -------------------------------------------------------------------------------------------

    def _work_ahead(self, requests: Iterable[StepRequest]) -> Iterator[Batch]:
        """Yield batches while coming ones are prepared."""
        waiting: deque[Future[Any]] = deque()
        for request in requests:
            waiting.append(self.ranks.early.thread.submit(self._prepare_early, request))
            if len(waiting) > self.plan.look_ahead:
                yield self._take(waiting.popleft())
        while waiting:
            yield self._take(waiting.popleft())

    def _prepare_early(self, request: StepRequest) -> tuple[Batch, dict[str, float]]:
        with torch.no_grad():
            return self._prepare(request), self.context.early_clock.take()

    def _take(self, future: Future[Any]) -> Batch:
        """Wait for a batch; the time counts to what preparing it consisted of, in proportion."""
        started = time.perf_counter()
        batch, terms = future.result()
        waited, busy = time.perf_counter() - started, sum(terms.values())
        for term, seconds in terms.items():
            self.clock.seconds[term] += waited * seconds / busy if busy else 0.0
        return batch

    # -- from disk ---------------------------------------------------------------------------------------------------

    def _read_ahead(self, requests: Iterable[StepRequest]) -> Iterator[Batch]:
        """Yield batches while rows of coming ones are read."""
        waiting: deque[tuple[_Sampled, Any]] = deque()
        for request in requests:
            sampled = self._sample(request)
            waiting.append((sampled, self._permute_ahead(sampled)))
            if len(waiting) > self.plan.look_ahead:
                yield self._complete(*waiting.popleft())
        while waiting:
            yield self._complete(*waiting.popleft())

    def _permute_ahead(self, sampled: _Sampled) -> Any:
        strategy = sampled.request.strategy
        parcel = strategy.permute(sampled.destinations, sampled.request.step)
        coming = strategy.reads_ahead(parcel) if self.plan.look_ahead else None
        if coming is not None and isinstance(self.context.features, StoredFeatures):
            with self.context.early_clock("load"):
                self.context.features.prefetch(coming)
        return parcel

    # -- one batch ---------------------------------------------------------------------------------------------------

    def _prepare(self, request: StepRequest) -> Batch:
        sampled = self._sample(request)
        return self._complete(sampled, request.strategy.permute(sampled.destinations, request.step))

    def _sample(self, request: StepRequest) -> _Sampled:
        self.context.early_group.set_step(request.step)
        seeds, upper = request.share.seeds, list(request.fanouts[:-1])
        with self.context.early_clock("sample"):
            graph, seed = self.data.graph, self.plan.seed
            blocks = ops.sample_blocks(graph, seeds, upper, seed=seed, step=request.step) if upper else []
        return _Sampled(request, blocks, blocks[0].src_ids if blocks else seeds)

    def _complete(self, sampled: _Sampled, parcel: Any) -> Batch:
        request = sampled.request
        share, labels = request.share, request.labels
        return Batch(
            share.seeds,
            share.y if share.y is not None or labels is None else labels[share.seeds],
            share.pairs,
            request.weight,
            request.step,
            sampled.blocks,
            sampled.destinations,
            request.strategy.shuffle(parcel),
            request.strategy,
        )
