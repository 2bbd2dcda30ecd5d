"""Is the planner right? Times every strategy over a grid of widths, partitions, links and caches on shaped hosts.

Four hosts with one rank each, features sharded by owner, links limited in both directions by the kernel. Each cell is
planned from measurements on those links and then every strategy is run, interleaved; *regret* is the time of the chosen
one over the time of the fastest.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from core_kernels import PartitionBook, datasets, partition_graph
from core_kernels.comm import Group
from core_kernels.datasets import GraphData
from core_kernels.interconnect import Interconnect
from core_kernels.testing.hosts import HostsError, ShapedHosts, skip_reason
from gnn_parallel.bench import time_strategies
from gnn_parallel.race import race_strategies
from gnn_parallel.training import TrainJob, make_plan

__all__ = ["Grid", "run_grid", "summarize"]

_MEASURE_SECONDS = 40.0
"""Enough for messages of a megabyte at 100 Mbit/s; smaller ones pass within the burst that links allow."""


@dataclass(frozen=True)
class Grid:
    """The cells: the product of the fields that are tuples.

    Attributes:
        hidden: Columns between layers.
        methods: Partition methods.
        link_mbit: Rates of the hosts' links.
        caches: Copies of other ranks' rows, as shares.
        num_hosts: Hosts of one rank each.
        num_nodes: Nodes of the generated graph.
        num_features: Feature columns.
        batch_size: Seeds per step over all ranks.
        fanouts: Neighbours per layer.
        num_steps: Steps per strategy and round.
        num_rounds: Rounds.
        race_steps: Steps of the race of the strategies predicted to be close; 0 for none.
    """

    hidden: tuple[int, ...] = (8, 32, 128, 512)
    methods: tuple[str, ...] = ("metis", "random")
    link_mbit: tuple[int, ...] = (1000, 100)
    caches: tuple[str, ...] = ("0%", "10%")
    num_hosts: int = 4
    num_nodes: int = 20_000
    num_features: int = 256
    batch_size: int = 128
    fanouts: tuple[int, ...] = (10, 10)
    num_steps: int = 2
    num_rounds: int = 3
    race_steps: int = 3

    @property
    def num_cells(self) -> int:
        """Number of cells."""
        return len(self.hidden) * len(self.methods) * len(self.link_mbit) * len(self.caches)


def run_grid(grid: Grid) -> Iterator[dict[str, Any]]:
    """Yield one result per cell; see :func:`gnn_parallel.bench.time_strategies` for its keys.

    Raises:
        HostsError: Shaped hosts cannot run here; the message says what is missing.
    """
    reason = skip_reason()
    if reason:
        raise HostsError(reason)
    data = _make_data(grid)
    books = {method: partition_graph(data.graph, grid.num_hosts, method) for method in grid.methods}
    for mbit in grid.link_mbit:
        with ShapedHosts([1] * grid.num_hosts, link_rate_mbit=mbit) as hosts:
            interconnect = hosts.run(_prepare_on_rank, grid)[0]
            for method, cache, hidden in itertools.product(grid.methods, grid.caches, grid.hidden):
                cell = {"link_mbit": mbit, "partition": method, "cache": cache, "hidden": hidden}
                yield cell | hosts.run(_cell_on_rank, grid, cell, books[method], interconnect)[0]


def summarize(cells: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Return mean and worst regret of the planner, of its race, and of always taking GDP, and the prediction error."""
    cells = list(cells)
    return {
        "mean_regret": statistics.mean(cell["regret"] for cell in cells),
        "worst_regret": max(cell["regret"] for cell in cells),
        "mean_raced_regret": statistics.mean(cell["raced_regret"] for cell in cells),
        "worst_raced_regret": max(cell["raced_regret"] for cell in cells),
        "mean_gdp_regret": statistics.mean(cell["gdp_ratio"] for cell in cells),
        "worst_gdp_regret": max(cell["gdp_ratio"] for cell in cells),
        "median_prediction_error": statistics.median(cell["median_prediction_error"] for cell in cells),
        "num_cells": len(cells),
    }


_data: dict[Grid, GraphData] = {}


def _make_data(grid: Grid) -> GraphData:
    if grid not in _data:
        _data[grid] = datasets.sbm(
            grid.num_nodes, num_classes=20, average_degree=15, num_features=grid.num_features, seed=1
        )
    return _data[grid]


def _prepare_on_rank(group: Group, grid: Grid) -> Interconnect:
    _make_data(grid)
    return Interconnect.measure(group, group_shape=f"{group.size}x1", budget_seconds=_MEASURE_SECONDS)


def _cell_on_rank(
    group: Group, grid: Grid, cell: dict[str, Any], partition: PartitionBook, interconnect: Interconnect
) -> dict[str, Any]:
    data = _make_data(grid)
    job = TrainJob(
        hidden=cell["hidden"],
        fanouts=grid.fanouts,
        batch_size=grid.batch_size,
        dropout=0.0,
        placement="sharded",
        cache=cell["cache"],
        is_shown=False,
    )
    plan = make_plan(job, data, partition, group, interconnect=interconnect)
    started = time.perf_counter()
    raced = race_strategies(plan, job.make_model(data), group, grid.race_steps) if grid.race_steps else plan
    race_seconds = torch.tensor([time.perf_counter() - started], dtype=torch.float64)
    result = time_strategies(group, job, data, plan, grid.num_steps, grid.num_rounds)
    measured = {name: cell["measured_step_seconds"] for name, cell in result["strategies"].items()}
    return result | {
        "raced": raced.strategy,
        "raced_regret": measured[raced.strategy] / min(measured.values()),
        "planning_seconds": plan.planning_seconds,
        "race_seconds": float(group.all_reduce(race_seconds, op="max", tag="report")),
        "steps_sampled": plan.num_steps_sampled,
    }
