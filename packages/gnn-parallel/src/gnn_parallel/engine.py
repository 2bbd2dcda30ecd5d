"""Runs a plan: sampled training steps whose input layer is computed by one of four strategies.

The model above its input layer runs data-parallel under every strategy. The input layer is replaced, for the time of a
call, by the strategy's permute, shuffle, execute and reshuffle; the model itself is never changed, and its state dict
keeps its keys.

Gradients are those of the mean loss over the global batch: each rank's loss is weighted by its share of the seeds and
gradients are summed over ranks. Under NFP a rank holds the authoritative columns of the input weights and only their
gradient; :meth:`Engine.state_dict` puts the columns of all ranks together, so a checkpoint does not know under which
strategy it was made.

Callers may not assume that optimizers that mix the entries of a tensor (LAMB, Muon) are exact under NFP.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from core_kernels import ops
from core_kernels.comm import Group
from gnn_parallel.adapters import find_input_layer, split_layer
from gnn_parallel.cache import choose_cached
from gnn_parallel.clock import TermClock
from gnn_parallel.data import TrainingData
from gnn_parallel.dropout import sampling_step
from gnn_parallel.errors import PlanMismatchError, UnsupportedLayerError, input_error
from gnn_parallel.features import FeatureTable, ReplicatedFeatures, ShardedFeatures, column_slices
from gnn_parallel.loader import BatchSchedule, share_seeds
from gnn_parallel.plan import Plan
from gnn_parallel.strategies import STRATEGIES, Context, NodeFeatureParallel, Strategy
from gnn_parallel.strategies.base import id_dtype_for

__all__ = ["Batch", "Engine", "InputBlock", "answering"]


@dataclass(frozen=True)
class InputBlock:
    """Stands for the input layer's block in ``model(blocks, x)``: which rows come out, not how.

    Attributes:
        dst_ids: int64 ``[num_dst]``, node ids of the rows.
    """

    dst_ids: Tensor

    @property
    def num_dst(self) -> int:
        """Number of rows that come out."""
        return len(self.dst_ids)

    def edge_index(self) -> None:
        """Return nothing: the edges may be on other ranks. PyG-style calls pass it on to the input layer."""


class _InputRows:
    """Stands for the input features in ``model(blocks, x)``; only the input layer may read them."""

    def __getitem__(self, key: Any) -> _InputRows:
        return self

    def __getattr__(self, name: str) -> Any:
        raise UnsupportedLayerError(
            f"the model reads .{name} of its input features before the input layer; expected the input layer to come "
            "first, since strategies spread its inputs over ranks; transform features beforehand"
        )


@dataclass
class Batch:
    """One step of one rank, sampled and shuffled, ready to compute.

    Attributes:
        seeds: int64, this rank's seeds; may be empty.
        y: Labels of the seeds, when the loader was given labels.
        num_seeds_total: Seeds of all ranks.
        step: Step of the sampler.
        blocks: Blocks of the layers above the input layer, lowest first.
        destinations: Node ids of the input layer's result rows.
        work: What the strategy prepared.
        strategy: The strategy that prepared it.
    """

    seeds: Tensor
    y: Tensor | None
    num_seeds_total: int
    step: int
    blocks: list[Any]
    destinations: Tensor
    work: Any
    strategy: Strategy

    @property
    def share(self) -> float:
        """This rank's share of the batch."""
        return len(self.seeds) / self.num_seeds_total


class Engine:
    """Trains a model under a plan.

    Args:
        plan: From :func:`gnn_parallel.plan`, or loaded and given data by :meth:`Plan.bind`.
        model: Called as ``model(blocks, x)``; its input layer has an adapter. Weights must be equal on all ranks.
        group: The ranks; one rank when left out.

    Raises:
        PlanMismatchError: The plan is for another graph, partition or number of ranks, or has no data.
        UnsupportedLayerError: The strategy needs more of the input layer than it has.

    Collective: ``loader``, calls, ``backward``, ``state_dict``, ``predict`` by all ranks in the same order.
    """

    def __init__(self, plan: Plan, model: nn.Module, group: Group | None = None):
        self.plan, self.model = plan, model
        self.group = group or Group.single()
        self.data = _checked_data(plan, self.group)
        self.input_name, self._input_module = find_input_layer(model, plan.input_layer or None)
        self.clock = TermClock()
        self.layer = split_layer(self._input_module, self.data.graph)
        self._check_layer()
        self._columns = column_slices(self.layer.input_width, self.group.size)[self.group.rank]
        self._context = self._make_context()
        self.strategy = self._make_strategy(plan.fanouts[-1])
        sharded = self.layer.column_parameters() if plan.strategy == "nfp" and self.group.size > 1 else []
        self._column_parameters = {id(parameter) for parameter in sharded}
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
        plan, data = self.plan, self.data
        context = Context(
            data.graph,
            ReplicatedFeatures(data.features),
            data.owner,
            self.group,
            self.layer,
            plan.fanouts[-1],
            plan.seed,
            len(plan.fanouts) - 1,
            plan.placement,
            self.clock,
        )
        context.features = self._make_features()
        if plan.strategy == "nfp":
            context.placement = "replicated"  # of this rank's columns
        return context

    def _make_features(self) -> FeatureTable:
        plan, data = self.plan, self.data
        if plan.strategy == "nfp":
            return ReplicatedFeatures(data.features[:, self._columns].contiguous())
        if plan.placement == "replicated":
            return ReplicatedFeatures(data.features)
        cached = choose_cached(
            data.graph, data.owner, self.group.rank, plan.cached_rows, data.train_ids, plan.fanouts, plan.strategy
        )
        return ShardedFeatures(
            self.group, data.features, data.owner, cached, id_dtype_for(data.graph.num_nodes), self.clock
        )

    def _make_strategy(self, fanout: int) -> Strategy:
        context = replace(self._context, fanout=fanout)
        if self.plan.strategy == "nfp":
            return NodeFeatureParallel(context, self._columns)
        return STRATEGIES[self.plan.strategy](context)

    # -- steps -------------------------------------------------------------------------------------------------------

    def loader(
        self, seeds: Tensor, labels: Tensor | None = None, epoch: int = 0, *, shuffle: bool = True
    ) -> Iterator[Batch]:
        """Yield this rank's part of every step of an epoch.

        Args:
            seeds: int64 node ids to train on, the same on every rank.
            labels: ``[num_nodes]``; gives batches their ``y``.
            epoch: Number of the epoch; it changes order and samples.
            shuffle: Whether the order is random.

        Every rank gets the same number of batches.
        """
        schedule = BatchSchedule(seeds, self.plan.batch_size, self.plan.seed, shuffle)
        for index, batch in enumerate(schedule.batches(epoch)):
            yield self._prepare(
                batch, labels, epoch * schedule.steps_per_epoch + index, self.plan.fanouts, self.strategy
            )

    def batch_at(self, seeds: Tensor, step: int, labels: Tensor | None = None) -> Batch:
        """Return this rank's part of one step, counted from the start of training. Collective."""
        schedule = BatchSchedule(seeds, self.plan.batch_size, self.plan.seed)
        epoch, index = divmod(step, schedule.steps_per_epoch)
        return self._prepare(schedule.batches(epoch)[index], labels, step, self.plan.fanouts, self.strategy)

    def _prepare(
        self, seeds: Tensor, labels: Tensor | None, step: int, fanouts: tuple[int, ...], strategy: Strategy
    ) -> Batch:
        self.group.set_step(step)
        mine = share_seeds(seeds, self.data.owner, self.group.size)[self.group.rank]
        blocks: list[Any] = []
        with self.clock("sample"):
            if len(fanouts) > 1:
                blocks = ops.sample_blocks(self.data.graph, mine, list(fanouts[:-1]), seed=self.plan.seed, step=step)
            destinations = blocks[0].src_ids if blocks else mine
        work = strategy.prepare(destinations, step)
        return Batch(
            mine, None if labels is None else labels[mine], len(seeds), step, blocks, destinations, work, strategy
        )

    def __call__(self, batch: Batch) -> Tensor:
        """Return the model's output for this rank's seeds."""
        with self.clock("compute"):
            rows = batch.strategy(batch.work)
            with answering(self._input_module, rows), sampling_step(self.plan.seed, batch.step):
                output = self.model([InputBlock(batch.destinations), *batch.blocks], _InputRows())
        self._last = (batch, output)
        return output

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of the mean loss over the whole batch to the parameters of every rank.

        Args:
            loss: Mean loss over this rank's seeds of the last call; without seeds, any value.
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
            self._reduce_gradients()

    def _reduce_gradients(self) -> None:
        if self.group.size == 1:
            return
        shared = [p for p in self.model.parameters() if p.requires_grad and id(p) not in self._column_parameters]
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in shared:
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
        for parameters in by_dtype.values():
            for parameter in parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            grads = [parameter.grad for parameter in parameters]
            flat = torch.cat([grad.reshape(-1) for grad in grads])
            self.group.all_reduce(flat, tag="parameter_gradients", out=flat)
            for grad, piece in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(piece.view_as(grad))

    # -- parameters that NFP spreads over ranks ----------------------------------------------------------------------

    def whole_tensor(self, parameter: nn.Parameter, value: Tensor) -> Tensor:
        """Return a parameter-shaped tensor with every rank's authoritative columns in place.

        Args:
            parameter: The parameter it belongs to.
            value: Its value, gradient or optimizer state.

        Collective: all ranks, for the same parameter.
        """
        if id(parameter) not in self._column_parameters:
            return value.detach().clone()
        mine = torch.zeros_like(value)
        mine[:, self._columns] = value.detach()[:, self._columns]
        return self.group.all_reduce(mine, tag="checkpoint", out=mine)

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradient of every parameter, whole, by name. Collective."""
        return {
            name: self.whole_tensor(
                parameter, torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            )
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }

    def state_dict(self) -> dict[str, Tensor]:
        """Return the model's state dict, whole, under every strategy and number of ranks. Collective."""
        parameters = dict(self.model.named_parameters())
        return {
            name: self.whole_tensor(parameters[name], value) if name in parameters else value.detach().clone()
            for name, value in self.model.state_dict().items()
        }

    def optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the optimizer's state dict, whole, to be loaded under any strategy and number of ranks. Collective."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        document = optimizer.state_dict()
        state = {
            index: {
                key: self.whole_tensor(parameters[index], value)
                if isinstance(value, Tensor) and value.shape == parameters[index].shape
                else value
                for key, value in entries.items()
            }
            for index, entries in document["state"].items()
        }
        return {**document, "state": state}

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scale gradients so that their norm over all parameters is at most ``max_norm``; returns the norm before.

        Collective. Columns that other ranks hold are counted once.
        """
        if not max_norm > 0:
            raise input_error("max_norm", max_norm, "a positive number", "pass the largest norm you allow")
        with_grad = [p for p in self.model.parameters() if p.grad is not None]
        spread = [p.grad[:, self._columns] for p in with_grad if id(p) in self._column_parameters]
        squares = sum((grad.double().square().sum() for grad in spread), torch.zeros((), dtype=torch.float64))
        squares = self.group.all_reduce(squares, tag="clip")
        shared = [p.grad for p in with_grad if id(p) not in self._column_parameters]
        norm = float(sum((grad.double().square().sum() for grad in shared), squares).sqrt())
        if norm > max_norm:
            for parameter in with_grad:
                parameter.grad.mul_(max_norm / norm)
        return norm

    # -- evaluation --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, seeds: Tensor, labels: Tensor, fanouts: tuple[int, ...] | None = None) -> float:
        """Return the accuracy on some nodes, with all neighbours unless ``fanouts`` says otherwise. Collective.

        Args:
            seeds: int64 node ids, the same on every rank.
            labels: ``[num_nodes]`` class numbers.
            fanouts: As for training; ``None`` takes all neighbours in every layer.
        """
        fanouts = fanouts or (-1,) * len(self.plan.fanouts)
        strategy = self._make_strategy(fanouts[-1])
        schedule = BatchSchedule(seeds, max(1, self.plan.batch_size), self.plan.seed, shuffle=False)
        was_training = self.model.training
        self.model.eval()
        correct = torch.zeros(1, dtype=torch.int64)
        for step, chunk in enumerate(schedule.batches(0)):
            batch = self._prepare(chunk, labels, step, fanouts, strategy)
            correct += (self(batch).argmax(1) == batch.y).sum()
        self.model.train(was_training)
        self._last = None
        return int(self.group.all_reduce(correct, tag="evaluation")) / len(seeds)


@contextmanager
def answering(module: nn.Module, rows: Tensor) -> Iterator[None]:
    """Let ``module`` answer calls with rows computed elsewhere."""
    own = module.__dict__.get("forward")  # set by the user or a wrapper; usually there is none
    module.forward = lambda *args, **kwargs: rows
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


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
