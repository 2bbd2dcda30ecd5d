"""The sub-command ``autopar experts``: simulate placements on recorded or synthetic routings, write a plan."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from autopar.cluster import Cluster
from autopar.experts.layer import ExpertLayer
from autopar.experts.planner import plan
from autopar.experts.simulator import simulate
from autopar.experts.statistics import expected_counts, load_counts, zipf_counts
from core_kernels.console import CommandLine, format_bytes, format_seconds, say, table

__all__ = ["add_experts_command"]

_EXAMPLES = """autopar experts --cluster a100-nvlink-8 --experts 32 --width 1024 --hidden 4096 --zipf 1.2
autopar experts --cluster cluster.json --routing counts.npy --width 512 --hidden 2048 --out experts.json"""


def add_experts_command(cli: CommandLine, read_cluster: Callable[[argparse.Namespace], Cluster]) -> None:
    """Add the sub-command.

    Args:
        cli: The program.
        read_cluster: Reads the cluster from ``--cluster`` and ``--devices``.
    """
    parser = cli.command(
        "experts", lambda args: _run(args, read_cluster), "place the experts of a mixture-of-experts layer", _EXAMPLES
    )
    parser.add_argument("--cluster", required=True, help="cluster file, or preset of the interconnect")
    parser.add_argument("--devices", type=int, help="number of devices; the cluster's when left out")
    parser.add_argument("--width", type=int, required=True, help="size of a token")
    parser.add_argument("--hidden", type=int, required=True, help="size between the two maps of an expert")
    parser.add_argument("--element-bytes", type=int, default=4, help="bytes of a number (default %(default)s)")
    parser.add_argument("--memory", type=float, help="bytes per device for experts; no limit when left out")
    parser.add_argument("--routing", help="recorded counts, .npy [steps, experts, devices]")
    parser.add_argument("--experts", type=int, default=16, help="synthetic: number of experts (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=8192, help="synthetic: tokens per device (default %(default)s)")
    parser.add_argument("--steps", type=int, default=32, help="synthetic: steps (default %(default)s)")
    parser.add_argument("--zipf", type=float, default=1.0, help="synthetic: exponent, 0 is even (default %(default)s)")
    parser.add_argument("--drift", type=float, default=0.05, help="synthetic: change per step (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="synthetic: seed (default %(default)s)")
    parser.add_argument("--fixed-homes", action="store_true", help="experts keep their homes; only replicas are placed")
    parser.add_argument("--out", help="file for the plan that fits the last steps")


def _run(args: argparse.Namespace, read_cluster: Callable[[argparse.Namespace], Cluster]) -> dict[str, Any]:
    cluster = read_cluster(args)
    layer = ExpertLayer.feed_forward(cluster, args.width, args.hidden, args.element_bytes, args.memory)
    if args.routing:
        routings = load_counts(args.routing)
    else:
        devices = cluster.num_devices
        routings = zipf_counts(args.steps, args.experts, devices, args.tokens, args.zipf, args.drift, args.seed)
    reports = simulate(layer, routings, moves_homes=not args.fixed_homes)
    rows = [
        (name, format_seconds(r.seconds), f"{r.balance:.2f}", format_bytes(r.exchange_bytes),
         format_bytes(r.transfer_bytes), f"{r.num_replicas:.1f}")
        for name, r in reports.items()
    ]  # fmt: skip
    columns = ["placement", "mean step", "balance", "tokens moved", "replicas moved", "replicas"]
    table(f"{len(routings)} steps of {routings.shape[1]} experts on {cluster.num_devices} devices", columns, rows)
    found = plan(layer, expected_counts(list(routings)), moves_homes=not args.fixed_homes)
    say(found.explain())
    if args.out:
        found.save(args.out)
    return {name: asdict(report) for name, report in reports.items()} | {"plan": found.to_dict()}
