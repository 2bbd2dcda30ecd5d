"""The sub-command ``autopar pipeline``: search for pipelines, show the frontier, write a plan."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

from autopar.cluster import Cluster
from autopar.errors import ProblemError
from autopar.graph import Graph
from autopar.pipeline.hosts import Host
from autopar.pipeline.planner import search
from core_kernels.console import CommandLine, format_bytes, format_seconds, say, table

__all__ = ["add_pipeline_command"]

Reader = Callable[[argparse.Namespace], tuple[Graph, Cluster]]
_EXAMPLES = """autopar pipeline --model autopar.models:gpt --cluster loopback-cpu --devices 4 --sub-mesh 1 --out p.json
autopar pipeline --model yours:factory --cluster a100-8x8-ib --micro-batches 32 --memory 70e9
autopar pipeline --model yours:factory --cluster c.json --host 4 --host 4:0.5:16e9"""


def add_pipeline_command(cli: CommandLine, read_problem: Reader) -> None:
    """Add the sub-command.

    Args:
        cli: The program.
        read_problem: Reads graph and cluster from ``--model``, ``--cluster``, ``--devices`` and ``--optimizer``.
    """
    parser = cli.command(
        "pipeline",
        lambda args: _run(args, read_problem),
        "cut the model into stages, each with its own plan",
        _EXAMPLES,
    )
    parser.add_argument("--model", required=True, help="package.module:factory")
    parser.add_argument("--cluster", required=True, help="cluster file, or preset of the interconnect")
    parser.add_argument("--devices", type=int, help="number of devices; the cluster's when left out")
    parser.add_argument("--optimizer", default="adamw", help="for the memory of its state (default %(default)s)")
    parser.add_argument("--micro-batches", type=int, action="append", help="number to try, may be repeated; usual ones")
    parser.add_argument("--stages", type=int, help="number of stages; any when left out")
    parser.add_argument("--sub-mesh", type=int, action="append", help="devices a stage may have, may be repeated")
    parser.add_argument(
        "--host", action="append", metavar="N[:SPEED[:BYTES]]", help="a host of N devices, where hosts differ; repeat"
    )
    parser.add_argument("--eps", type=float, default=0.05, help="share of memory given up for speed of search")
    parser.add_argument("--memory", type=float, help="bytes per device for the plan shown; no limit when left out")
    parser.add_argument("--out", help="file for that plan")
    parser.add_argument("--csv", help="file for the points of the frontier as CSV")


def _run(args: argparse.Namespace, read_problem: Reader) -> dict[str, Any]:
    graph, cluster = read_problem(args)
    hosts = [_read_host(text) for text in args.host] if args.host else None
    begin = time.perf_counter()
    frontier = search(graph, cluster, args.micro_batches, args.stages, args.sub_mesh, hosts, args.eps)
    seconds = time.perf_counter() - begin
    plan = frontier.mini_time(args.memory)
    shown = sorted({round(i * (len(frontier) - 1) / 11) for i in range(12)})
    plans = [frontier[place] for place in shown]
    rows = [(format_bytes(p.memory), format_seconds(p.seconds), p.num_stages, p.num_micro_batches) for p in plans]
    columns = ["fullest device", "step, at most", "stages", "micro-batches"]
    table(f"{len(frontier)} pipelines, searched in {format_seconds(seconds)}", columns, rows)
    say(plan.explain())
    if args.out:
        plan.save(args.out)
    if args.csv:
        frontier.to_csv(args.csv)
    return {
        "points": [[m, s] for m, s in zip(frontier.memory.tolist(), frontier.seconds.tolist(), strict=True)],
        "memory_bytes": plan.memory,
        "seconds": plan.seconds,
        "simulated_seconds": plan.simulated_seconds,
        "stages": plan.num_stages,
        "micro_batches": plan.num_micro_batches,
        "search_seconds": seconds,
    }


def _read_host(text: str) -> Host:
    """Read a host.

    >>> _read_host("4:0.5:16e9")
    Host(num_devices=4, speed=0.5, memory_bytes=16000000000.0)
    """
    parts = text.split(":")
    try:
        if len(parts) > 3:
            raise ValueError
        return Host(int(parts[0]), *(float(part) for part in parts[1:]))
    except ValueError as error:
        if isinstance(error, ProblemError):
            raise
        raise ProblemError(
            f"host={text!r} is not valid: expected N, N:SPEED or N:SPEED:BYTES, such as 4:0.5:16e9; write numbers"
        ) from None
