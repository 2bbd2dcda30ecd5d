"""The sub-command ``simulate``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from core_kernels.console import CommandLine, format_seconds, say, table
from elastic_train.errors import input_error

__all__ = ["add_commands"]

_FORMATS = ("pollux", "philly", "tiresias", "alibaba", "staged")


def _simulate(args: argparse.Namespace) -> dict[str, Any]:
    return _simulate_stages(args) if args.format == "staged" else _simulate_jobs(args)


def _simulate_jobs(args: argparse.Namespace) -> dict[str, Any]:
    from elastic_train.scheduler import POLICIES, Cluster, policy, simulate
    from elastic_train.scheduler.policies.quota import proportional_quotas

    names = _known(args.policy or ["tiresias", "elastic-tiresias"], POLICIES)
    jobs = _read_trace(args)
    if args.load != 1.0:
        jobs = jobs.at_load(args.load)
    if args.jobs and args.jobs > jobs.num_jobs:
        jobs = jobs.repeated(args.jobs, args.gpus)
    elif args.jobs:
        jobs = jobs.first(args.jobs)
    cluster = Cluster(args.gpus, args.rescale_seconds, args.start_seconds, args.round_seconds)
    outcomes = []
    for name in names:
        needs_quota = name in ("strict-quota", "pps")
        settings = {"quotas": proportional_quotas(jobs, args.gpus)} if needs_quota else {}
        outcomes.append(simulate(jobs, policy(name, **settings), cluster))
    results = [outcome.summary() for outcome in outcomes]
    keys = ("mean_completion_seconds", "p95_completion_seconds", "p95_wait_seconds")
    rows = [
        (r["policy"], *(format_seconds(r[key]) for key in keys), f"{r['utilization']:.1%}", f"{r['fairness']:.2f}",
         r["num_rescales"])
        for r in results
    ]  # fmt: skip
    columns = ["policy", "mean completion", "95 %", "95 % wait", "utilization", "fairness", "rescales"]
    table(f"{jobs.num_jobs} jobs on {args.gpus} GPUs", columns, rows)
    _plot(args, outcomes, "GPUs in use", "jobs waiting")
    return {"results": results}


def _simulate_stages(args: argparse.Namespace) -> dict[str, Any]:
    from elastic_train.scheduler import STAGED_POLICIES, policy, random_staged, read_staged, simulate_staged

    names = _known(args.policy or list(STAGED_POLICIES), STAGED_POLICIES)
    if args.trace == "random":
        jobs = random_staged(args.jobs or 200, args.gpus, args.load)
    else:
        jobs = read_staged(args.trace)[: args.jobs]
    outcomes = [simulate_staged(jobs, policy(name), args.gpus) for name in names]
    results = [outcome.summary() for outcome in outcomes]
    rows = [
        (r["policy"], format_seconds(r["mean_completion_seconds"]), format_seconds(r["p95_completion_seconds"]),
         f"{r['utilization']:.1%}", f"{r['fairness']:.2f}")
        for r in results
    ]  # fmt: skip
    columns = ["policy", "mean completion", "95 %", "utilization", "fairness"]
    table(f"{len(jobs)} jobs of stages on {args.gpus} slots", columns, rows)
    _plot(args, outcomes, "slots in use", "stages waiting")
    return {"results": results}


def _known(names: Sequence[str], policies: dict[str, Any]) -> Sequence[str]:
    for name in names:
        if name not in policies:
            raise input_error("policy", name, f"one of {', '.join(sorted(policies))}", "choose one for this format")
    return names


def _plot(args: argparse.Namespace, outcomes: Sequence[Any], used: str, waiting: str) -> None:
    """Draw what was in use and what waited over time, as a page for the browser."""
    if args.plot is None:
        return
    from elastic_train.report.drawing import draw_page, draw_steps

    end = max(float(outcome.timeline[-1, 0]) for outcome in outcomes) / 3600
    parts = []
    for label, column in ((used, 1), (waiting, 3)):
        lines = [
            (outcome.policy, [(float(row[0]) / 3600, float(row[column])) for row in _thinned(outcome.timeline)])
            for outcome in outcomes
        ]
        parts.append((label, draw_steps(lines, end, label, "h")))
    args.plot.write_text(draw_page(f"{args.trace} on {args.gpus}", parts))
    say(f"wrote {args.plot}")


def _thinned(timeline: Any, most: int = 1500) -> Any:
    return timeline[:: max(len(timeline) // most, 1)]


def _read_trace(args: argparse.Namespace) -> Any:
    from elastic_train import scheduler

    if args.format == "pollux":
        return scheduler.read_pollux(args.trace, args.applications or Path(args.trace).parent / "apps", args.gpus)
    readers = {
        "philly": scheduler.read_philly,
        "tiresias": scheduler.read_tiresias,
        "alibaba": scheduler.read_alibaba,
    }
    return readers[args.format](args.trace)


def add_commands(cli: CommandLine) -> None:
    """Add the sub-command."""
    parser = cli.command(
        "simulate", _simulate, "run a trace of jobs under scheduling policies",
        "elastic-train simulate --trace workload-1.csv --gpus 64 --policy tiresias elastic-tiresias\n"
        "elastic-train simulate --trace random --format staged --gpus 32 --plot stages.html",
    )  # fmt: skip
    parser.add_argument("--trace", required=True, help="CSV of jobs, plain or .gz; of stages a JSON, or random")
    parser.add_argument("--format", choices=_FORMATS, default="pollux")
    parser.add_argument("--applications", help="folder of measured step times of a Pollux workload")
    parser.add_argument("--policy", nargs="+", metavar="NAME", help="policies to compare")
    parser.add_argument("--gpus", type=int, default=64, help="GPUs, or slots, of the cluster")
    parser.add_argument("--jobs", type=int, help="first so many jobs, or the trace repeated to so many")
    parser.add_argument("--load", type=float, default=1.0, help="how much faster jobs arrive than in the trace")
    parser.add_argument("--rescale-seconds", type=float, default=0.5)
    parser.add_argument("--start-seconds", type=float, default=30.0)
    parser.add_argument("--round-seconds", type=float, default=60.0)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw use and waiting over time, as a page")
