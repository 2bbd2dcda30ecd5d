"""Runs a plan: sampled training steps whose input layer is computed by one of four strategies.

The model above its input layer runs data-parallel under every strategy. The input layer is replaced, for the time of a
call, by the strategy's permute, shuffle, execute and reshuffle; the model itself is never changed, and its state dict
keeps its keys.

Gradients are those of the mean loss over the global batch: each rank's loss is weighted by its share of the batch and
gradients are summed over ranks. State dicts are whole under every strategy (:mod:`gnn_parallel.parameters`), so that
training can go on under another plan at any step: :meth:`Engine.follow`.

Callers may not assume that optimizers that mix the entries of a tensor (LAMB, Muon) are exact under NFP.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from core_kernels.comm import Group
from gnn_parallel.adapters import find_input_layer, split_layer
from gnn_parallel.batches import Batch, BatchMaker
from gnn_parallel.cache import choose_cached
from gnn_parallel.clock import TermClock
from gnn_parallel.data import TrainingData
from gnn_parallel.dropout import sampling_step
from gnn_parallel.errors import PlanMismatchError, UnsupportedLayerError, input_error
from gnn_parallel.features import FeatureTable, ReplicatedFeatures, ShardedFeatures, StoredFeatures, column_slices
from gnn_parallel.input_layer import InputBlock, InputRows, answering
from gnn_parallel.parameters import SpreadParameters, used_once
from gnn_parallel.plan import Plan
from gnn_parallel.ranks import Ranks
from gnn_parallel.strategies import STRATEGIES, Context, NodeFeatureParallel, Strategy
from gnn_parallel.strategies.base import id_dtype_for

__all__ = ["Batch", "Engine"]


class Engine:
    """Trains a model under a plan.

    Args:
        plan: From :func:`gnn_parallel.plan`, or loaded and given data by :meth:`Plan.bind`.
        model: Called as ``model(blocks, x)``; its input layer has an adapter. Weights must be equal on all ranks.
        group: The ranks; one rank when left out.

    Attributes:
        clock: Seconds of this rank by term.
        parameters: Gradients and state over the ranks.

    Raises:
        PlanMismatchError: The plan is for another graph, partition or number of ranks, or has no data.
        UnsupportedLayerError: The strategy needs more of the input layer than it has.

    Collective: all methods and calls, by all ranks in the same order.
    """

    def __init__(self, plan: Plan, model: nn.Module, group: Group | None = None):
        self.plan, self.model = plan, model
        self.group = group or Group.single()
        self.data = _checked_data(plan, self.group)
        self.ranks = Ranks.of(self.group, plan.num_hosts)
        self._owner = self.data.owner_in_host(plan.num_hosts)
        self.input_name, self._input_module = find_input_layer(model, plan.input_layer or None)
        self.clock = TermClock()
        self.layer = split_layer(self._input_module, self.data.graph)
        self._check_layer()
        inside = self.ranks.inside
        self._columns = column_slices(self.layer.input_width, inside.size)[inside.rank]
        spread = used_once(self.layer.column_parameters(), model) if plan.strategy == "nfp" and inside.size > 1 else []
        self.parameters = SpreadParameters(model, spread, self._columns, self.ranks)
        self._context = self._make_context()
        self._batches = BatchMaker(plan, self.data, self.ranks, self._context, self.clock)
        self.strategy = self._make_strategy(plan.fanouts[-1])
        self._last: tuple[Batch, Tensor] | None = None

    def _check_layer(self) -> None:
        layer, plan = self.layer, self.plan
        obstacle = layer.obstacles().get(plan.strategy)
        if obstacle:
            raise UnsupportedLayerError(
                f"strategy={plan.strategy!r} cannot run input layer {self.input_name}: {obstacle}; choose gdp or dnp"
            )
        features = self.data.features
        if layer.input_width != features.shape[1]:
            expected = f"{layer.input_width} columns, the input width of {self.input_name}"
            raise input_error("features", tuple(features.shape), expected, "make the model for these features")
        dtypes = {parameter.dtype for parameter in self._input_module.parameters()}
        if dtypes and dtypes != {features.dtype}:
            expected = f"{features.dtype}, the type of the features"
            raise input_error(f"{self.input_name}.dtype", dtypes, expected, "convert with model.to(features.dtype)")

    def _make_context(self) -> Context:
        plan, data, inside = self.plan, self.data, self.ranks.inside
        is_early = plan.placement == "sharded" and plan.look_ahead > 0 and inside.size > 1
        early = (self.ranks.early.group, TermClock()) if is_early else None
        return Context(
            data.graph,
            self._make_features(*(early or (inside, self.clock))),
            self._owner,
            inside,
            self.layer,
            plan.fanouts[-1],
            plan.seed,
            len(plan.fanouts) - 1,
            "replicated" if plan.strategy == "nfp" else plan.placement,  # NFP: of this rank's columns
            self.clock,
            torch.bfloat16 if plan.is_mixed else None,
            early,
        )

    def _make_features(self, group: Group, clock: TermClock) -> FeatureTable:
        plan, data, inside = self.plan, self.data, self.ranks.inside
        if plan.strategy == "nfp":
            return ReplicatedFeatures(data.features[:, self._columns].contiguous())
        if plan.placement == "replicated":
            return ReplicatedFeatures(data.features)
        hotness = torch.zeros(data.graph.num_nodes)
        if plan.cached_rows:
            hotness = data.expected_reads(plan.num_hosts, inside.rank, plan.fanouts, plan.strategy)
        if plan.placement == "disk":
            assert isinstance(data.source, Path)  # checked when the plan was made
            return StoredFeatures(data.source, plan.cached_rows, hotness, clock)
        cached = choose_cached(hotness, self._owner, inside.rank, plan.cached_rows)
        id_dtype = id_dtype_for(data.graph.num_nodes)
        return ShardedFeatures(group, data.features, self._owner, cached, id_dtype, clock, plan.reuse)

    def _make_strategy(self, fanout: int) -> Strategy:
        context = replace(self._context, fanout=fanout)
        if self.plan.strategy == "nfp":
            return NodeFeatureParallel(context, self._columns)
        return STRATEGIES[self.plan.strategy](context)

    @property
    def features(self) -> FeatureTable:
        """Where this rank reads input features, with counters of rows where some are not at hand."""
        return self._context.features

    # -- steps -------------------------------------------------------------------------------------------------------

    def loader(
        self, seeds: Tensor, labels: Tensor | None = None, epoch: int = 0, *, shuffle: bool = True
    ) -> Iterator[Batch]:
        """Yield this rank's part of every step of an epoch.

        Args:
            seeds: int64 node ids to train on, or pairs ``[2, num_pairs]`` to predict links between, the same on every
                rank.
            labels: ``[num_nodes]``; gives batches their ``y``.
            epoch: Number of the epoch; it changes order, samples and negatives.
            shuffle: Whether the order is random.

        Every rank gets the same number of batches. Where features are sharded, ``plan.look_ahead`` coming batches are
        prepared in the background; where they lie on disk, their rows are read ahead.
        """
        schedule = self._batches.schedule(seeds, shuffle)
        self._check_labels(labels)
        return self._batches.epoch(schedule, epoch, labels, self.strategy)

    def batch_at(self, seeds: Tensor, step: int, labels: Tensor | None = None) -> Batch:
        """Return this rank's part of one step, counted from the start of training."""
        schedule = self._batches.schedule(seeds)
        self._check_labels(labels)
        if step < 0:
            raise input_error("step", step, "at least 0", "count steps from the start of training")
        epoch, index = divmod(step, schedule.steps_per_epoch)
        positions = schedule.positions(epoch)[index]
        request = self._batches.request(schedule, epoch, positions, step, labels, self.plan.fanouts, self.strategy)
        return self._batches.make(request)

    def _check_labels(self, labels: Tensor | None) -> None:
        num_nodes = self.data.graph.num_nodes
        if labels is not None and (labels.dim() == 0 or len(labels) != num_nodes):
            expected = f"{num_nodes} rows, one per node of the graph"
            raise input_error("labels", tuple(labels.shape), expected, "pass the labels of all nodes")

    def settle(self) -> None:
        """Return when no batch is being prepared in the background, so that other work can be timed."""
        self._batches.settle()

    def __call__(self, batch: Batch) -> Tensor:
        """Return the model's output for this rank's seeds."""
        self.ranks.set_step(batch.step)
        with self.clock("compute"), torch.autocast("cpu", torch.bfloat16, enabled=self.plan.is_mixed):
            rows = batch.strategy(batch.work)
            with answering(self._input_module, rows), sampling_step(self.plan.seed, batch.step):
                output = self.model([InputBlock(batch.destinations), *batch.blocks], InputRows())
        output = output.float() if self.plan.is_mixed else output
        self._last = (batch, output)
        return output

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of the mean loss over the whole batch to the parameters of every rank.

        Args:
            loss: Mean loss over this rank's part of the last call; where that is empty, any value.
        """
        if self._last is None:
            raise input_error(
                "loss", "a loss without a batch", "a loss of the last engine(batch)", "call the engine first"
            )
        (batch, output), self._last = self._last, None
        with self.clock("compute"):
            # A rank without seeds still takes part in the backward exchange.
            (loss * batch.share if len(batch.seeds) else output.sum() * 0.0).backward()
        with self.clock("reduce"):
            self.parameters.sum_gradients()

    # -- state, whole under every strategy and number of ranks ------------------------------------------------------

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradient of every parameter, whole, by name."""
        return self.parameters.gradients()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the model's state dict, whole, under every strategy and number of ranks."""
        return self.parameters.state_dict()

    def optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the optimizer's state dict, whole, to be loaded under any strategy and number of ranks."""
        return self.parameters.optimizer_state_dict(optimizer)

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scale gradients so that their norm over all parameters is at most ``max_norm``; returns the norm before."""
        return self.parameters.clip_grad_norm_(max_norm)

    def follow(self, plan: Plan, optimizer: torch.optim.Optimizer | None = None) -> Engine:
        """Return an engine that goes on under another plan, with the same model and optimizer.

        Args:
            plan: The other plan, for the same data and ranks.
            optimizer: The optimizer in use; its state is put together first.
        """
        weights = self.state_dict()
        state = None if optimizer is None else self.optimizer_state_dict(optimizer)
        self.close()
        engine = Engine(plan, self.model, self.group)
        self.model.load_state_dict(weights)
        if optimizer is not None and state is not None:
            optimizer.load_state_dict(state)
        return engine

    def close(self) -> None:
        """Finish what runs in the background, and close files of features, if there are any."""
        self.settle()
        if isinstance(self._context.features, StoredFeatures):
            self._context.features.close()

    # -- evaluation --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, seeds: Tensor, labels: Tensor | None = None, fanouts: tuple[int, ...] | None = None) -> float:
        """Return the accuracy on some nodes, or how often linked pairs score above their negatives.

        Args:
            seeds: int64 node ids, or pairs ``[2, num_pairs]``, the same on every rank.
            labels: ``[num_nodes]`` class numbers, for nodes.
            fanouts: As for training; ``None`` takes all neighbours in every layer.
        """
        fanouts, num_layers = fanouts or (-1,) * len(self.plan.fanouts), len(self.plan.fanouts)
        if len(fanouts) != num_layers:
            raise input_error("fanouts", fanouts, f"{num_layers} numbers, as in the plan", "pass one number per layer")
        self._check_labels(labels)
        if labels is None and seeds.dim() == 1:
            raise input_error("labels", None, "the class of every node", "pass labels to evaluate nodes")
        strategy, schedule = self._make_strategy(fanouts[-1]), self._batches.schedule(seeds, shuffle=False)
        was_training = self.model.training
        self.model.eval()
        found = torch.zeros(2, dtype=torch.float64)
        for step, positions in enumerate(schedule.positions(0)):
            request = self._batches.request(schedule, 0, positions, step, labels, fanouts, strategy)
            batch = self._batches.make(request)
            found += _count_right(batch, self(batch))
        self.model.train(was_training)
        self._last = None
        right, total = self.group.all_reduce(found, tag="evaluation").tolist()
        return right / total


def _count_right(batch: Batch, output: Tensor) -> Tensor:
    """Return how many answers are right, and of how many."""
    if batch.pairs is None:
        right = output.argmax(1) == batch.y
        return torch.tensor([float(right.sum()), float(len(right))], dtype=torch.float64)
    assert batch.y is not None
    scores = (output[batch.pairs[0]] * output[batch.pairs[1]]).sum(1)
    linked = scores[batch.y == 1]
    margins = linked[:, None] - scores[batch.y == 0].view(len(linked), -1)
    # An undecided comparison is worth half.
    right = (margins > 0).double() + 0.5 * (margins == 0).double()
    return torch.tensor([float(right.sum()), float(margins.numel())], dtype=torch.float64)


def _checked_data(plan: Plan, group: Group) -> TrainingData:
    data = plan.data
    if data is None:
        raise PlanMismatchError(
            "the plan has no data, since it comes from a file; expected a graph, features and a partition; "
            "call plan.bind(graph, features, partition)"
        )
    if group.size != plan.world_size:
        raise PlanMismatchError(
            f"the plan is for world_size={plan.world_size}, the group has {group.size} ranks; expected as "
            "many; plan again, with one part per rank"
        )
    return data
