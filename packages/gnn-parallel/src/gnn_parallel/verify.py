"""Proves that a strategy changes where work is done and not the result: losses and gradients against one process.

The reference is a plain loop that knows nothing of strategies: sample all blocks of the global batch, call the model on
them, backward. Each strategy trains the same steps from the same weights on all ranks. Differences are relative to the
largest entry of the reference tensor, and to a thousandth of the step's largest gradient where that is more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core_kernels import Graph, PartitionBook, ops
from core_kernels.comm import Group
from gnn_parallel.adapters import find_input_layer, split_layer
from gnn_parallel.dropout import sampling_step
from gnn_parallel.engine import Engine
from gnn_parallel.loader import BatchSchedule
from gnn_parallel.planner import choose_strategy
from gnn_parallel.strategies import STRATEGIES

__all__ = ["TOLERANCES", "Difference", "StepResult", "compare", "run_reference", "run_strategy", "verify_strategies"]

#: Gradients smaller than this share of the largest of a step are compared with that share.
_NOTHING = 1e-3

TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-10}


@dataclass(frozen=True)
class StepResult:
    """What one training step gave: the mean loss over the batch and every gradient."""

    loss: float
    gradients: dict[str, Tensor]


@dataclass(frozen=True)
class Difference:
    """Largest relative differences over the compared steps."""

    loss: float
    gradients: float
    worst_gradient: str

    @property
    def largest(self) -> float:
        """The larger of the two."""
        return max(self.loss, self.gradients)


def run_reference(
    graph: Graph,
    model: nn.Module,
    features: Tensor,
    labels: Tensor,
    seeds: Tensor,
    fanouts: tuple[int, ...],
    batch_size: int,
    num_steps: int,
    learning_rate: float = 0.01,
    seed: int = 0,
    call: Callable[[nn.Module, list[Any], Tensor], Tensor] | None = None,
) -> list[StepResult]:
    """Train some steps in this process, without any strategy.

    Args:
        graph: The full graph.
        model: Called as ``model(blocks, x)``; trained in place by plain gradient descent.
        features: ``[num_nodes, width]``.
        labels: ``[num_nodes]``.
        seeds: Nodes trained on.
        fanouts: Neighbours per layer, the hop at the seeds first.
        batch_size: Seeds per step.
        num_steps: Steps, at most one epoch.
        learning_rate: Of gradient descent.
        seed: Of batches and sampling.
        call: How to call the model, when not as ``model(blocks, x)``.
    """
    results = []
    for step, batch in enumerate(BatchSchedule(seeds, batch_size, seed).batches(0)[:num_steps]):
        model.zero_grad()
        blocks = ops.sample_blocks(graph, batch, list(fanouts), seed=seed, step=step)
        with sampling_step(seed, step):
            x = features[blocks[0].src_ids]
            output = model(blocks, x) if call is None else call(model, blocks, x)
        loss = F.cross_entropy(output, labels[batch])
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        results.append(StepResult(float(loss.detach()), gradients))
        _descend(model, learning_rate)
    return results


def run_strategy(
    group: Group,
    strategy: str,
    graph: Graph,
    model: nn.Module,
    features: Tensor,
    labels: Tensor,
    partition: PartitionBook,
    seeds: Tensor,
    fanouts: tuple[int, ...],
    batch_size: int,
    num_steps: int,
    learning_rate: float = 0.01,
    seed: int = 0,
    **options: Any,
) -> tuple[list[StepResult], Engine]:
    """Train the same steps under a strategy; returns the results and the engine. Collective."""
    plan = choose_strategy(
        graph,
        model,
        features=features,
        partition=partition,
        fanouts=fanouts,
        batch_size=batch_size,
        seeds=seeds,
        strategy=strategy,
        seed=seed,
        num_steps=1,
        measure=False,
        group=group,
        **options,
    )
    engine = Engine(plan, model, group)
    results = []
    for batch in engine.loader(seeds, labels):
        if batch.step >= num_steps:
            break
        model.zero_grad()
        loss = F.cross_entropy(engine(batch), labels[batch.seeds])
        engine.backward(loss)
        mine = loss.detach().double() * batch.share if len(batch.seeds) else torch.zeros((), dtype=torch.float64)
        results.append(StepResult(float(group.all_reduce(mine, tag="verify")), engine.gradients()))
        _descend(model, learning_rate)
    return results, engine


def _descend(model: nn.Module, learning_rate: float) -> None:
    """Take a step of plain gradient descent; torch.optim would first import its compiler, seconds per rank."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=learning_rate)


def compare(found: list[StepResult], expected: list[StepResult]) -> Difference:
    """Return the largest relative differences between two runs."""
    worst_loss, worst, name_of_worst = 0.0, 0.0, ""
    for a, b in zip(found, expected, strict=True):
        worst_loss = max(worst_loss, abs(a.loss - b.loss) / max(abs(b.loss), 1e-30))
        largest = max((float(g.abs().max()) for g in b.gradients.values() if g.numel()), default=0.0)
        for name, reference in b.gradients.items():
            # A gradient that is zero but for rounding is judged by the size of the others.
            scale = max(float(reference.abs().max()), _NOTHING * largest, 1e-30) if reference.numel() else 1.0
            difference = float((a.gradients[name] - reference).abs().max()) / scale if reference.numel() else 0.0
            if not difference <= worst:  # a NaN counts as worst
                worst, name_of_worst = difference, name
    return Difference(worst_loss, worst, name_of_worst)


def verify_strategies(
    group: Group,
    graph: Graph,
    make_model: Callable[[], nn.Module],
    features: Tensor,
    labels: Tensor,
    partition: PartitionBook,
    seeds: Tensor,
    fanouts: tuple[int, ...],
    batch_size: int,
    num_steps: int = 3,
    seed: int = 0,
    **options: Any,
) -> dict[str, Difference | str]:
    """Compare every strategy with one process on the user's model and data.

    Args:
        group: The ranks.
        graph: The full graph.
        make_model: Builds the model, with equal weights whenever it is called.
        features: ``[num_nodes, width]``; its type is the model's.
        labels: ``[num_nodes]``.
        partition: One part per rank.
        seeds: Nodes trained on.
        fanouts: Neighbours per layer.
        batch_size: Seeds per step over all ranks.
        num_steps: Steps to compare, with weights updated in between.
        seed: Of batches and sampling.
        options: Passed on to :func:`gnn_parallel.plan`, such as ``placement`` or ``num_hosts``.

    Returns:
        Per strategy its difference, or why it cannot run.

    Collective: all ranks; every rank returns the same.
    """
    common = (features, labels)
    expected = run_reference(graph, make_model(), *common, seeds, fanouts, batch_size, num_steps, seed=seed)
    found: dict[str, Difference | str] = {}
    obstacles = split_layer(find_input_layer(make_model())[1], graph).obstacles()
    for strategy in STRATEGIES:
        if strategy in obstacles:
            found[strategy] = obstacles[strategy]
            continue
        run = (group, strategy, graph, make_model(), *common, partition, seeds, fanouts, batch_size, num_steps)
        results, _ = run_strategy(*run, seed=seed, **options)
        found[strategy] = compare(results, expected)
    return found
