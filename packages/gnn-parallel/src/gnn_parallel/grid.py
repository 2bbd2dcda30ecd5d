"""Is the planner right? Times every strategy over a grid of widths, partitions, links and caches on shaped hosts.

Four hosts with one rank each, features sharded by owner, links limited in both directions by the kernel. Each cell is
planned from measurements on those links, as any user's plan is, and then every strategy is run, interleaved; *regret*
is the time of the chosen one over the time of the fastest. Batches on the fast link are larger, so that bytes weigh as
much there as the time of a message.

Finished cells are kept in a file of one JSON line each; a later run with the same file goes on after the last.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import signal
import statistics
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core_kernels import PartitionBook, datasets, partition_graph
from core_kernels.comm import Group
from core_kernels.console import progress, say, table
from core_kernels.interconnect import Interconnect
from core_kernels.testing.hosts import HostsError, ShapedHosts, skip_reason
from gnn_parallel.bench import time_strategies
from gnn_parallel.errors import input_error
from gnn_parallel.jobs import LabelledGraph, TrainJob, make_plan

__all__ = ["Grid", "run_grid", "show_grid", "summarize"]

_AXES = ("link_mbit", "partition", "cache", "hidden")
_PAYLOAD_SHARE = 0.95
"""Of a link's rate, after headers."""


@dataclass(frozen=True)
class Grid:
    """The cells: the product of the fields that are tuples.

    Attributes:
        hidden: Columns between layers.
        methods: Partition methods.
        link_mbit: Rates of the hosts' links.
        batch_sizes: Seeds per step over all ranks, for each rate.
        caches: Copies of other ranks' rows, as shares.
        num_hosts: Hosts of one rank each.
        num_nodes: Nodes of the generated graph.
        num_features: Feature columns.
        fanouts: Neighbours per layer.
        num_steps: Steps per strategy and round.
        num_rounds: Rounds.
        num_epochs: Epochs that plans are for; counting and trials may take 5 % of them.
        measure_seconds: Time to measure the links for. The default is enough for messages of a megabyte at 100 Mbit/s;
            smaller ones pass within the burst that links allow.
    """

    hidden: tuple[int, ...] = (8, 32, 128, 512)
    methods: tuple[str, ...] = ("metis", "random")
    link_mbit: tuple[int, ...] = (1000, 100)
    batch_sizes: tuple[int, ...] = (512, 128)
    caches: tuple[str, ...] = ("0%", "10%")
    num_hosts: int = 4
    num_nodes: int = 200_000
    num_features: int = 256
    fanouts: tuple[int, ...] = (10, 10)
    num_steps: int = 4
    num_rounds: int = 6
    num_epochs: int = 5
    measure_seconds: float = 30.0

    def __post_init__(self) -> None:
        if len(self.batch_sizes) != len(self.link_mbit):
            expected = f"one per rate of link_mbit, {len(self.link_mbit)} of them"
            raise input_error("batch_sizes", self.batch_sizes, expected, "pass as many")

    def only(self, link_mbit: int) -> Grid:
        """Return the cells of one link."""
        if link_mbit not in self.link_mbit:
            raise input_error("link", link_mbit, f"one of {', '.join(map(str, self.link_mbit))}", "choose one of them")
        batch_size = self.batch_sizes[self.link_mbit.index(link_mbit)]
        return Grid(**{**self.__dict__, "link_mbit": (link_mbit,), "batch_sizes": (batch_size,)})

    def matching(self, words: str) -> Grid:
        """Return the cells that have all values named: of partition, cache or width, such as ``"random 10% 8"``."""
        axes = {"methods": self.methods, "caches": self.caches, "hidden": self.hidden}
        named = set(words.split())
        unknown = named - {str(value) for values in axes.values() for value in values}
        if unknown:
            expected = "values of " + ", ".join(f"{name} ({', '.join(map(str, v))})" for name, v in axes.items())
            raise input_error("only", words, expected, f"leave out {' '.join(sorted(unknown))}")
        chosen = {name: tuple(v for v in values if str(v) in named) or values for name, values in axes.items()}
        return Grid(**{**self.__dict__, **chosen})

    def cells(self, link_mbit: int) -> list[dict[str, Any]]:
        """Return the cells of a link, by axis."""
        batch_size = self.batch_sizes[self.link_mbit.index(link_mbit)]
        return [
            {
                "link_mbit": link_mbit,
                "partition": method,
                "cache": cache,
                "hidden": hidden,
                "batch_size": batch_size,
                "num_nodes": self.num_nodes,
            }
            for method, cache, hidden in itertools.product(self.methods, self.caches, self.hidden)
        ]


def run_grid(grid: Grid, finished: Iterable[dict[str, Any]] = ()) -> Iterator[dict[str, Any]]:
    """Yield one result per cell; see :func:`gnn_parallel.bench.time_strategies` for its keys.

    Args:
        grid: The cells.
        finished: Results of earlier runs, whose cells are left out.

    Raises:
        HostsError: Shaped hosts cannot run here; the message says what is missing.
    """
    reason = skip_reason()
    if reason:
        raise HostsError(reason)
    done = list(finished)
    for mbit in grid.link_mbit:
        missing = [cell for cell in grid.cells(mbit) if not any(cell.items() <= result.items() for result in done)]
        if not missing:
            continue
        data = _make_data(grid)
        books = {method: partition_graph(data.graph, grid.num_hosts, method) for method in grid.methods}
        with _ending_on_signals(), ShapedHosts([1] * grid.num_hosts, link_rate_mbit=mbit) as hosts:
            interconnect = hosts.run(_prepare_on_rank, grid)[0]
            for cell in missing:
                yield cell | hosts.run(_cell_on_rank, grid, cell, books[cell["partition"]], interconnect)[0]


@contextlib.contextmanager
def _ending_on_signals() -> Iterator[None]:
    """Let SIGTERM end this process the way an interrupt does, so that namespaces are removed and ranks end."""

    def end(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def show_grid(link_mbit: int | None = None, cells_file: str | None = None, grid: Grid | None = None) -> dict[str, Any]:
    """Run the cells that are missing, show the table and return cells and summary.

    Args:
        link_mbit: Only the cells of this link.
        cells_file: File with one finished cell per line; new ones are appended.
        grid: The cells, the default grid when left out.
    """
    grid = grid or Grid()
    grid = grid if link_mbit is None else grid.only(link_mbit)
    wanted = [cell for mbit in grid.link_mbit for cell in grid.cells(mbit)]
    path = None if cells_file is None else Path(cells_file)
    kept = [json.loads(line) for line in path.read_text().splitlines()] if path is not None and path.exists() else []
    results = [r for r in kept if any(cell.items() <= r.items() for cell in wanted)]
    with progress("cells", len(wanted)) as advance:
        advance(len(results))
        for result in run_grid(grid, results):
            results.append(result)
            if path is not None:
                with path.open("a") as file:
                    file.write(json.dumps(result) + "\n")
            advance(note=f"regret {result['regret']:.2f}")
    rows = [
        (
            " ".join(str(cell[axis]) for axis in _AXES),
            cell["chosen"],
            cell["modelled"],
            cell["fastest"],
            *(f"{cell[kind]:.2f}" for kind in ("regret", "modelled_regret", "gdp_ratio")),
            *(f"{cell[kind]:.0%}" for kind in ("median_prediction_error", "modelled_error", "planning_share")),
            f"{cell['bandwidth_ratio']:.2f}",
        )
        for cell in results
    ]
    columns = (
        *(" ".join(_AXES), "chosen", "model", "fastest", "regret", "model's", "always gdp"),
        *("error", "model's", "planning", "over bytes"),
    )
    table("time over time of the fastest strategy, four hosts", columns, rows)
    summary = summarize(results)
    say(
        f"regret mean {summary['mean_regret']:.3f} worst {summary['worst_regret']:.2f}; without a trial "
        f"{summary['mean_modelled_regret']:.3f} and {summary['worst_modelled_regret']:.2f}; always gdp "
        f"{summary['mean_gdp_regret']:.2f} and {summary['worst_gdp_regret']:.2f}; median prediction error "
        f"{summary['median_prediction_error']:.0%}, without a trial {summary['median_modelled_error']:.0%}; counting "
        f"and trials at most {summary['worst_planning_share']:.1%} of {grid.num_epochs} epochs"
    )
    return {"cells": results, "summary": summary}


def summarize(cells: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Return mean and worst regret of the planner, of its model alone and of always taking GDP, and their errors."""
    cells = list(cells)
    found: dict[str, float] = {"num_cells": len(cells)}
    for name, key in (("regret", "regret"), ("modelled_regret", "modelled_regret"), ("gdp_regret", "gdp_ratio")):
        found[f"mean_{name}"] = statistics.mean(cell[key] for cell in cells)
        found[f"worst_{name}"] = max(cell[key] for cell in cells)
    for key in ("prediction_error", "modelled_error"):
        errors = [error for cell in cells for error in cell[f"{key}s"].values()]
        found[f"median_{key}"] = statistics.median(errors)
    found["worst_planning_share"] = max(cell["planning_share"] for cell in cells)
    return found


_data: dict[tuple[int, int], LabelledGraph] = {}


def _make_data(grid: Grid) -> LabelledGraph:
    key = (grid.num_nodes, grid.num_features)
    if key not in _data:
        made = datasets.sbm(grid.num_nodes, num_classes=20, average_degree=15, num_features=grid.num_features, seed=1)
        _data[key] = LabelledGraph.of(made)
    return _data[key]


def _prepare_on_rank(group: Group, grid: Grid) -> Interconnect:
    _make_data(grid)
    return Interconnect.measure(group, group_shape=f"{group.size}x1", budget_seconds=grid.measure_seconds)


def _cell_on_rank(
    group: Group, grid: Grid, cell: dict[str, Any], partition: PartitionBook, interconnect: Interconnect
) -> dict[str, Any]:
    data = _make_data(grid)
    job = TrainJob(
        hidden=cell["hidden"],
        fanouts=grid.fanouts,
        batch_size=cell["batch_size"],
        epochs=grid.num_epochs,
        dropout=0.0,
        placement="sharded",
        cache=cell["cache"],
        is_shown=False,
    )
    plan = make_plan(job, data, partition, group, interconnect=interconnect)
    result = time_strategies(group, job, data, plan, grid.num_steps, grid.num_rounds)
    chosen = result["strategies"][plan.strategy]
    epoch_seconds = chosen["measured_step_seconds"] * plan.steps_per_epoch
    bytes_per_second = _PAYLOAD_SHARE * cell["link_mbit"] * 1e6 / 8
    return result | {
        "planning_share": (plan.counting_seconds + plan.trial_seconds) / (plan.num_epochs * epoch_seconds),
        "counting_share": plan.counting_seconds / epoch_seconds,
        "steps_sampled": plan.num_steps_sampled,
        "bandwidth_ratio": chosen["measured_step_seconds"] / (chosen["link_bytes"] / bytes_per_second),
    }
