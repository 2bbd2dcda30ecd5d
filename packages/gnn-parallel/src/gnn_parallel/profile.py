"""Measures how fast this machine does what a step consists of, on the workload's own batches.

Every rate is processor time divided by the counted work behind it, times how long one rank alone takes per second of
it: other load on the machine does not enter. All ranks of a group measure at the same time, so that ranks that share
memory bandwidth see each other's load. How much longer they take because they share cores is kept apart as
*contention*.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from core_kernels import ops
from core_kernels.comm import Group
from core_kernels.interconnect import Interconnect
from gnn_parallel.adapters import find_input_layer, split_layer
from gnn_parallel.arguments import parse_shape
from gnn_parallel.cost_model import Rates
from gnn_parallel.data import TrainingData
from gnn_parallel.dropout import sampling_step
from gnn_parallel.input_layer import InputBlock, answering
from gnn_parallel.layers import SplitLayer, View
from gnn_parallel.loader import Schedule
from gnn_parallel.ranks import Ranks
from gnn_parallel.strategies.base import sample_in_edges
from gnn_parallel.strategies.snp import split_by_source_owner

__all__ = ["left_as_it_is", "measure_layouts", "measure_rates"]

T = TypeVar("T")

_MIN_REPEATS, _MAX_REPEATS, _PART_SECONDS = 3, 15, 0.1
"""Repetitions of each part: at least 3, more while they are quick."""

_MESSAGE_ROWS = 256
"""Rows of 64 numbers sent to every rank to measure what messages cost the processor."""


def measure_rates(
    data: TrainingData, model: nn.Module, fanouts: tuple[int, ...], schedule: Schedule, group: Group | None = None
) -> Rates:
    """Measure on this rank's share of the first batch.

    Args:
        data: Graph, features and partition.
        model: The model; left as it is.
        fanouts: Neighbours per layer, the hop at the seeds first.
        schedule: The batches.
        group: The ranks; one rank measures alone when left out.

    Returns:
        The rates, the average over ranks.

    Collective: all ranks of ``group``.
    """
    group = group or Group.single()
    _, module = find_input_layer(model)
    layer = split_layer(module, data.graph)
    shares = schedule.share(0, schedule.positions(0)[0], data.owner, data.partition.num_parts)
    seeds = max((s.seeds for s in shares), key=len) if group.size == 1 else shares[group.rank].seeds
    if not len(seeds):
        seeds = data.train_ids[:1]
    with left_as_it_is(model):
        bench = _Bench(data, model, module, layer, fanouts, schedule.seed, seeds, group)
        rates = torch.tensor(bench.measure(), dtype=torch.float64)
    return Rates(*(group.all_reduce(rates, tag="planning") / group.size).tolist())


def measure_layouts(group: Group, group_shape: str | None, budget_seconds: float) -> Interconnect:
    """Measure collectives over all ranks, and with several hosts also inside a host and across hosts.

    Args:
        group: The ranks.
        group_shape: ``"HxR"``; read from the ranks' host names when left out.
        budget_seconds: Time for each kind of group.

    Returns:
        One interconnect with the curves of all shapes, the same on every rank.

    Collective: all ranks of ``group``.
    """
    whole = Interconnect.measure(group, group_shape=group_shape, budget_seconds=budget_seconds)
    hosts, per_host = parse_shape(whole.group_shape)
    if hosts == 1 or per_host == 1 or hosts * per_host != group.size:
        return whole
    ranks, curves = Ranks.of(group, hosts), dict(whole.curves)
    for part, shape in ((ranks.inside, f"1x{per_host}"), (ranks.across, f"{hosts}x1")):
        found = Interconnect.measure(part, group_shape=shape, budget_seconds=budget_seconds)
        curves[shape] = group.broadcast_object(found.curves[shape], tag="planning")
    return replace(whole, curves=curves)


@contextmanager
def left_as_it_is(model: nn.Module) -> Iterator[None]:
    """Restore gradients, buffers and mode of a model; optimizers inside must have a learning rate of 0."""
    grads = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    was_training = model.training
    model.train()
    try:
        yield
    finally:
        model.train(was_training)
        for parameter, grad in grads:
            parameter.grad = grad
        for buffer, value in buffers:
            buffer.copy_(value)


class _Bench:
    """The parts of one step, each to be timed by itself."""

    def __init__(
        self,
        data: TrainingData,
        model: nn.Module,
        module: nn.Module,
        layer: SplitLayer,
        fanouts: tuple[int, ...],
        seed: int,
        seeds: Tensor,
        group: Group,
    ):
        self.data, self.model, self.module, self.layer = data, model, module, layer
        self.fanouts, self.seed, self.seeds, self.group = fanouts, seed, seeds, group
        self.optimizer = torch.optim.Adam(model.parameters(), lr=0.0)

    def measure(self) -> list[float]:
        """Return the fields of :class:`Rates`, in order."""
        sample_seconds, (blocks, destinations, indptr, sources) = self._time(self._sample)
        num_edges = len(sources) + sum(block.num_edges for block in blocks)
        features = self.data.features
        element, width = features.element_size(), self.layer.input_width
        table, local, disk = features, sources, 0.0
        if isinstance(self.data.source, Path):
            unique, local = ops.unique_relabel(sources[:0], sources)
            started = time.perf_counter()
            table = features[unique.long()]  # once: the next time it would come from the system's memory
            disk_seconds = time.perf_counter() - started
            disk = disk_seconds / max(1, table.numel() * element)
        graph = View(table, indptr, local).graph()
        read_seconds, aggregated = self._time(lambda: ops.spmm(graph, table))
        project_seconds, rows = self._time(lambda: self._project(aggregated))
        row_seconds, _ = self._time(
            lambda: ops.scatter_add(ops.gather(rows, _reversed(rows)), _reversed(rows), len(rows))
        )
        owner, parts = self.data.owner[sources.long()], self.data.partition.num_parts
        split_seconds, _ = self._time(lambda: split_by_source_owner(indptr, sources, owner, parts))

        def step() -> None:
            self._step(blocks, destinations, table, indptr, local)

        used, started = time.process_time(), time.perf_counter()
        step_seconds, _ = self._time(step)
        together = (time.perf_counter() - started) / max(time.process_time() - used, 1e-9)
        alone = self._stretch_alone(step)
        projected = getattr(self.layer, "projected_width", self.layer.output_width)
        row_bytes = max(1, rows.numel() * element)
        upper = max(0.0, step_seconds - read_seconds - project_seconds)
        rates = [
            sample_seconds / max(1, num_edges),
            read_seconds / max(1, len(sources) * width * element),
            project_seconds / max(1, 4 * len(aggregated) * width * projected),
            row_seconds / (2 * row_bytes),
            split_seconds / max(1, len(sources)),
            upper,
        ]
        return [*(rate * alone for rate in rates), disk, max(1.0, together / alone), *self._measure_messages()]

    def _measure_messages(self) -> tuple[float, float]:
        """Return the processor time per exchanged byte, and of a collective of no size."""
        group, found = self.group, []
        if group.size == 1:
            return 0.0, 0.0
        for num_rows in (1, _MESSAGE_ROWS):
            rows, counts = torch.zeros(num_rows * group.size, 64), [num_rows] * group.size
            group.all_to_all_v(rows, counts, counts, tag="planning")
            used = time.process_time()
            for _ in range(_MIN_REPEATS):  # as often on every rank
                group.all_to_all_v(rows, counts, counts, tag="planning")
            found.append((time.process_time() - used) / _MIN_REPEATS)
        exchanged = 2 * (group.size - 1) * _MESSAGE_ROWS * rows.element_size() * rows.shape[1]
        return max(0.0, found[1] - found[0]) / exchanged, found[0]

    def _stretch_alone(self, part: Callable[[], object]) -> float:
        """Return how long a part takes over the processor time it uses, on rank 0 while the other ranks wait."""
        self.group.barrier()
        stretch = torch.ones(1, dtype=torch.float64)
        if self.group.rank == 0:
            found = []
            for _ in range(_MIN_REPEATS):
                used, started = time.process_time(), time.perf_counter()
                part()
                found.append((time.perf_counter() - started) / max(time.process_time() - used, 1e-9))
            stretch[0] = min(found)  # what else runs on the machine only adds
        return max(float(self.group.broadcast(stretch, tag="planning")), 1e-9)

    def _time(self, part: Callable[[], T]) -> tuple[float, T]:
        """Run once to warm up, then on the clock; returns the median of processor seconds, and the last result."""
        result = part()
        self.group.barrier()
        seconds: list[float] = []
        started = time.perf_counter()
        while len(seconds) < _MIN_REPEATS or (
            time.perf_counter() - started < _PART_SECONDS and len(seconds) < _MAX_REPEATS
        ):
            used = time.process_time()
            result = part()
            seconds.append(time.process_time() - used)
        return statistics.median(seconds), result

    def _sample(self) -> tuple[list, Tensor, Tensor, Tensor]:
        graph, depth = self.data.graph, len(self.fanouts) - 1
        blocks = ops.sample_blocks(graph, self.seeds, list(self.fanouts[:-1]), seed=self.seed) if depth else []
        destinations = blocks[0].src_ids if blocks else self.seeds
        edges = sample_in_edges(graph, destinations, self.fanouts[-1], self.seed, 0, depth, self.layer)
        return (blocks, destinations, *edges)

    def _project(self, aggregated: Tensor) -> Tensor:
        width = getattr(self.layer, "projected_width", self.layer.output_width)
        weight = torch.zeros(width, self.layer.input_width, dtype=aggregated.dtype, requires_grad=True)
        rows = torch.nn.functional.linear(aggregated, weight)
        rows.backward(torch.ones_like(rows))
        return rows.detach()

    def _step(self, blocks: list, destinations: Tensor, table: Tensor, indptr: Tensor, local: Tensor) -> None:
        self.optimizer.zero_grad()
        scale = self.layer.destination_scale
        # Which rows are read does not matter for the time, only how many.
        roots = torch.arange(len(destinations)) % max(1, len(table))
        view = View(
            table,
            indptr,
            local,
            None if self.layer.source_scale is None else table.new_ones(len(local)),
            roots,
            None if scale is None else scale[destinations],
        )
        self.layer.load(view)
        rows = self.layer.whole(view)
        with answering(self.module, rows), sampling_step(self.seed, 0):
            output = self.model([InputBlock(destinations), *blocks], None)
        torch.nn.functional.cross_entropy(output, output.argmax(1)).backward()
        self.optimizer.step()


def _reversed(rows: Tensor) -> Tensor:
    return torch.arange(len(rows) - 1, -1, -1)
