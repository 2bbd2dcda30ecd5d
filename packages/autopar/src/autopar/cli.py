"""The command line ``autopar``: calibrate, search, frontier, pipeline, experts, explain, export, verify, bench.

A model is named ``package.module:factory``, a function that returns ``(module, inputs)``. A cluster is a preset of the
interconnect, such as ``a100-8x8-ib``, or a file that ``calibrate`` wrote.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from autopar._version import __version__
from autopar.capture import fake_tensors, trace
from autopar.cluster import Cluster
from autopar.errors import AutoparError, ProblemError, VerificationError
from autopar.experts import ExpertPlan
from autopar.experts.command import add_experts_command
from autopar.export import export_calls
from autopar.graph import Graph
from autopar.pipeline import PipelinePlan
from autopar.pipeline import verify as verify_pipeline
from autopar.pipeline.command import add_pipeline_command
from autopar.plan import Plan
from autopar.planner import PlanFrontier, search
from autopar.presets import search_presets
from autopar.verification import load_factory, verify
from core_kernels.comm import Group
from core_kernels.console import CheckFailedError, CommandLine, format_bytes, format_seconds, say, table
from core_kernels.launch import run_ranks

__all__ = ["main"]


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    cli = CommandLine(
        "autopar", "Find and check the time-memory frontier of parallel plans.", __version__, (AutoparError,)
    )
    parser = cli.command(
        "calibrate", _calibrate, "measure this machine", "autopar calibrate --ranks 2 --out cluster.json"
    )
    parser.add_argument("--ranks", type=int, default=2, help="local ranks to measure between (default %(default)s)")
    parser.add_argument("--budget", type=float, default=12.0, help="about how many seconds to measure")
    parser.add_argument("--out", required=True, help="file for the cluster")
    example = "--model autopar.models:mlp --cluster loopback-cpu"
    parser = cli.command("search", _search, "find the fastest plan that fits", f"autopar search {example} --out p.json")
    _add_problem(parser)
    parser.add_argument("--memory", type=float, help="bytes per device; no limit when left out")
    parser.add_argument("--out", help="file for the plan")
    parser = cli.command("frontier", _frontier, "show the whole frontier", f"autopar frontier {example} --csv f.csv")
    _add_problem(parser)
    parser.add_argument("--csv", help="file for the points as CSV")
    parser.add_argument("--plot", help="image file for the plot, the usual presets marked")
    add_pipeline_command(cli, lambda args: (_read_graph(args), _read_cluster(args)))
    add_experts_command(cli, _read_cluster)
    parser = cli.command("explain", _explain, "say in words what a plan does", "autopar explain p.json --module blocks")
    parser.add_argument("plan", help="plan file")
    parser.add_argument("--module", default="", help="only modules whose path begins so")
    parser.add_argument("--diff", help="another plan file to compare with")
    parser = cli.command(
        "export", _export, "write a plan as calls of torch", "autopar export p.json --model autopar.models:mlp"
    )
    parser.add_argument("plan", help="plan file")
    parser.add_argument("--model", required=True, help="package.module:factory")
    parser = cli.command(
        "verify", _verify, "prove a plan exact on local ranks", "autopar verify p.json --model autopar.models:mlp"
    )
    parser.add_argument("plan", help="plan file")
    parser.add_argument("--model", required=True, help="package.module:factory")
    parser.add_argument("--steps", type=int, default=3, help="steps to train (default %(default)s)")
    parser.add_argument("--tolerance", type=float, default=1e-10, help="largest difference in float64")
    parser = cli.command("bench", _bench, "compare with the usual presets, predicted", f"autopar bench {example}")
    _add_problem(parser)
    return cli.run(sys.argv[1:] if argv is None else argv)


def _add_problem(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="package.module:factory")
    parser.add_argument("--cluster", required=True, help="cluster file, or preset of the interconnect")
    parser.add_argument("--devices", type=int, help="number of devices; the cluster's when left out")
    parser.add_argument("--mesh", action="append", help="mesh such as 2x4, may be repeated; all when left out")
    parser.add_argument("--eps", type=float, default=0.01, help="share of memory given up for speed of search")
    parser.add_argument("--optimizer", default="adamw", help="for the memory of its state (default %(default)s)")


def _read_cluster(args: argparse.Namespace) -> Cluster:
    cluster = Cluster.load(args.cluster) if Path(args.cluster).is_file() else Cluster.preset(args.cluster)
    return cluster.resized(args.devices) if args.devices is not None else cluster


def _read_graph(args: argparse.Namespace) -> Graph:
    with fake_tensors():
        module, inputs = load_factory(args.model)()
    return trace(module, inputs, optimizer=args.optimizer)


def _read_problem(args: argparse.Namespace) -> tuple[Graph, Cluster, Any]:
    cluster = _read_cluster(args)
    try:
        meshes: Any = [tuple(int(size) for size in mesh.split("x")) for mesh in args.mesh] if args.mesh else "all"
    except ValueError:
        raise ProblemError(f"mesh={args.mesh} is not valid: expected sizes such as 2x4; write whole numbers") from None
    return _read_graph(args), cluster, meshes


def _read_plan(path: str) -> Plan | PipelinePlan | ExpertPlan:
    """Read a plan of any kind, told apart by its schema."""
    text = Path(path).read_text()
    kinds = (PipelinePlan, ExpertPlan)
    return next((kind for kind in kinds if f'"{kind.schema}"' in text[:200]), Plan).load(path)


def _measure_cluster(group: Group, budget_seconds: float) -> Cluster:
    return Cluster.measure(group, budget_seconds)


def _calibrate(args: argparse.Namespace) -> dict[str, Any]:
    cluster = run_ranks(_measure_cluster, args.ranks, args.budget)[0]
    path = cluster.save(args.out)
    say(f"{args.ranks} ranks measured, {cluster.flops_per_second / 1e9:.1f} GFLOP/s each; written to {path}")
    return {"path": str(path), "devices": cluster.num_devices, "flops_per_second": cluster.flops_per_second}


def _find(args: argparse.Namespace) -> tuple[Graph, Cluster, PlanFrontier, float]:
    graph, cluster, meshes = _read_problem(args)
    begin = time.perf_counter()
    frontier = search(graph, cluster, meshes, args.eps)
    return graph, cluster, frontier, time.perf_counter() - begin


def _search(args: argparse.Namespace) -> dict[str, Any]:
    graph, _, frontier, seconds = _find(args)
    plan = frontier.mini_time(args.memory)
    say(graph.report())
    say(f"searched in {format_seconds(seconds)}: {len(frontier)} plans on the frontier")
    say(plan.explain().split("\n  axis")[0])
    if args.out:
        plan.save(args.out)
    return _row(plan) | {"points": len(frontier), "search_seconds": seconds}


def _row(plan: Plan) -> dict[str, Any]:
    return {"mesh": list(plan.mesh), "memory_bytes": plan.predicted.memory_bytes, "seconds": plan.seconds}


def _frontier(args: argparse.Namespace) -> dict[str, Any]:
    graph, cluster, frontier, seconds = _find(args)
    presets = search_presets(graph, cluster, args.eps)
    shown = sorted({round(i * (len(frontier) - 1) / 11) for i in range(12)})
    rows = [(f"{format_bytes(frontier.memory[i])}", format_seconds(frontier.seconds[i])) for i in shown]
    table(f"{len(frontier)} plans, searched in {format_seconds(seconds)}", ["memory per device", "step"], rows)
    if args.csv:
        frontier.to_csv(args.csv)
    marks = {name: (p.memory, p.seconds) for name, p in presets.items()}
    if args.plot:
        frontier.plot(args.plot, marks)
    points = [[m, s] for m, s in zip(frontier.memory.tolist(), frontier.seconds.tolist(), strict=True)]
    return {"points": points, "presets": marks, "exact": frontier.exact, "search_seconds": seconds}


def _explain(args: argparse.Namespace) -> dict[str, Any]:
    plan = _read_plan(args.plan)
    if args.diff:
        other = _read_plan(args.diff)
        if type(other) is not type(plan):
            raise ProblemError(
                f"{args.diff} holds a {type(other).__name__}, {args.plan} a {type(plan).__name__}; expected plans of "
                "one kind; compare like with like"
            )
        text = plan.diff(other)  # type: ignore[arg-type]
    else:
        text = plan.explain() if isinstance(plan, ExpertPlan) else plan.explain(args.module)
    say(text)
    return {"text": text}


def _export(args: argparse.Namespace) -> dict[str, Any]:
    plan = Plan.load(args.plan)
    factory = load_factory(args.model)
    with fake_tensors():
        module, inputs = factory()
    found = export_calls(plan, trace(module, inputs))
    say(found.text)
    for line in found.left_out:
        say(f"# {line}")
    return {"text": found.text, "left_out": list(found.left_out)}


def _verify(args: argparse.Namespace) -> dict[str, Any]:
    plan = _read_plan(args.plan)
    if isinstance(plan, ExpertPlan):
        raise ProblemError(f"{args.plan} holds a placement of experts; expected a plan or a pipeline; nothing to run")
    try:
        if isinstance(plan, PipelinePlan):
            found = verify_pipeline(args.model, plan, args.steps, args.tolerance)
        else:
            found = verify(args.model, plan, args.steps, args.tolerance)
    except VerificationError as error:
        raise CheckFailedError(str(error)) from error
    say(f"exact: largest difference {found.largest_error:.1e} after {args.steps} steps; collectives as predicted")
    return {"largest_error": found.largest_error, "collectives_match": found.collectives_match, "losses": found.losses}


def _bench(args: argparse.Namespace) -> dict[str, Any]:
    graph, cluster, frontier, seconds = _find(args)
    plans = search_presets(graph, cluster, args.eps) | {"fastest": frontier[-1], "least memory": frontier[0]}
    rows = [
        (name, "x".join(map(str, p.mesh)), format_bytes(p.predicted.memory_bytes), format_seconds(p.seconds))
        for name, p in plans.items()
    ]
    table(f"predicted; searched in {format_seconds(seconds)}", ["plan", "mesh", "memory per device", "step"], rows)
    return {name: _row(plan) for name, plan in plans.items()} | {"search_seconds": seconds}
