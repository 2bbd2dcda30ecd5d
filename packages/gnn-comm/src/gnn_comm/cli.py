"""The command line ``gnn-comm``: topology, partition, plan, explain, simulate, verify, train, bench.

Graphs are named as in :mod:`gnn_comm.sources`, topologies by preset name or file (or ``auto``). A partition is a
folder, a plan one file.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from core_kernels.console import CheckFailedError, CommandLine, format_bytes, format_seconds, say, table
from core_kernels.topology import PRESETS, Topology, TopologyError, pair_table
from gnn_comm._version import __version__
from gnn_comm.bench_cli import add_bench
from gnn_comm.errors import GnnCommArgumentError, GnnCommError, PlanCheckError
from gnn_comm.gradients import COMPRESSIONS
from gnn_comm.layers import MODELS, build_model
from gnn_comm.partitioning import METHODS, Partition, partition
from gnn_comm.plan import Plan
from gnn_comm.planner import PLANNERS, plan
from gnn_comm.sources import load_graph_data

__all__ = ["main"]

_Command = Callable[[argparse.Namespace], dict[str, Any] | None]


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    cli = _CommandLine(
        "gnn-comm", "Plan and run full-graph embedding exchange over the real topology.", __version__, (GnnCommError,)
    )
    _add_topo(cli)
    _add_planning(cli)
    _add_running(cli)
    return cli.run(sys.argv[1:] if argv is None else argv)


class _CommandLine(CommandLine):
    """A command line whose commands look for the folders of their outputs before they begin."""

    def command(self, name: str, function: _Command, summary: str, example: str) -> argparse.ArgumentParser:
        def checked(args: argparse.Namespace) -> dict[str, Any] | None:
            for option in ("out", "json"):
                _check_output(f"--{option}", getattr(args, option, None))
            return function(args)

        return super().command(name, checked, summary, example)


def _check_output(option: str, path: str | None) -> None:
    """Refuse a file that could not be written at the end, before any work is done."""
    if path not in (None, "-") and not Path(path).resolve().parent.is_dir():
        raise GnnCommArgumentError(
            f"{option} {path}: expected a place in an existing folder; {Path(path).parent} is none; make it first"
        )


def _add_topo(cli: CommandLine) -> None:
    parser = cli.command(
        "topo",
        _topo,
        "show, import or measure a topology",
        "gnn-comm topo show dgx1\ngnn-comm topo import topo.xml --out machine.json\ngnn-comm topo measure --ranks 4",
    )
    parser.add_argument("action", choices=("show", "import", "measure"))
    parser.add_argument("topology", nargs="?", default="auto", help=_TOPOLOGY_HELP)
    parser.add_argument("--out", help="write the topology to this file (JSON, or YAML by its suffix)")
    parser.add_argument("--ranks", type=int, default=4, help="local ranks to measure between (default %(default)s)")


def _add_planning(cli: CommandLine) -> None:
    parser = cli.command(
        "partition",
        _partition,
        "split a graph over the devices of a topology",
        "gnn-comm partition --graph rmat:14 --topology dgx1 --out parts",
    )
    _add_graph_arguments(parser)
    parser.add_argument("--out", help="folder for the partition")
    parser = cli.command(
        "plan",
        _plan,
        "plan the exchange for a graph",
        "gnn-comm plan --graph rmat:14 --topology dgx1 --explain\n"
        "gnn-comm plan --partition parts --topology dgx1 --out p.npz",
    )
    _add_graph_arguments(parser)
    _add_plan_arguments(parser)
    parser.add_argument("--explain", action="store_true", help="say in words what the plan does")
    parser.add_argument("--out", help="file for the plan (.npz)")
    parser = cli.command(
        "explain", _explain, "say in words what a saved plan does", "gnn-comm explain p.npz --partition parts"
    )
    parser.add_argument("plan", help="plan file")
    parser.add_argument("--partition", help="its partition, for the lower bound")
    parser = cli.command(
        "simulate",
        _simulate,
        "run a plan on simulated links, without barriers",
        "gnn-comm simulate p.npz\ngnn-comm simulate p.npz --width 64",
    )
    parser.add_argument("plan", help="plan file")
    parser.add_argument("--width", type=int, help="float32 values per row (default: as planned)")


def _add_running(cli: CommandLine) -> None:
    parser = cli.command(
        "verify", _verify, "prove a plan right by replay and on local ranks", "gnn-comm verify p.npz --partition parts"
    )
    parser.add_argument("plan", help="plan file")
    parser.add_argument("--partition", required=True, help="its partition")
    parser.add_argument("--topology", help="topology it is to run on (default: the plan's own)")
    parser.add_argument("--no-run", action="store_true", help="only replay, start no ranks")
    parser = cli.command(
        "train",
        _train,
        "train a model on local ranks, by several planners",
        "gnn-comm train --dataset sbm:2000 --ranks 4 --planner auto\n"
        "gnn-comm train --dataset movielens --ranks 2 --model gat --planner p2p,auto,replication",
    )
    parser.add_argument("--dataset", default="sbm:2000", help="graph (default %(default)s)")
    parser.add_argument("--ranks", type=int, default=4, help="local ranks (default %(default)s)")
    parser.add_argument("--topology", help="topology to plan for (default: one host with this many ranks, measured)")
    parser.add_argument(
        "--method", choices=METHODS[:-1], default="hierarchical", help="partition (default %(default)s)"
    )
    parser.add_argument("--planner", default="auto", help="planners, comma-separated (default %(default)s)")
    parser.add_argument("--model", choices=MODELS, default="gcn", help="model (default %(default)s)")
    parser.add_argument("--hidden", type=int, default=64, help="width between layers (default %(default)s)")
    parser.add_argument("--layers", type=int, default=2, help="number of layers (default %(default)s)")
    parser.add_argument("--epochs", type=int, default=10, help="epochs (default %(default)s)")
    parser.add_argument("--quantize-rows", type=int, choices=(8, 4), help="bits per value of exchanged rows (lossy)")
    parser.add_argument("--compress-gradients", choices=COMPRESSIONS, help="compress parameter gradients (lossy)")
    parser.add_argument("--seed", type=int, default=0)
    add_bench(cli)


_TOPOLOGY_HELP = f"preset ({', '.join(PRESETS)}, hosts<N>, <N>x<machine>), file, or auto (default)"


def _add_graph_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--graph", help="rmat:SCALE, grid:SIDE, sbm:NODES, movielens, a folder or an edge list")
    parser.add_argument("--topology", default="auto", help=_TOPOLOGY_HELP)
    parser.add_argument(
        "--method", choices=METHODS[:-1], default="hierarchical", help="partition (default %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0)


def _add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--partition", help="folder of a partition, instead of --graph")
    parser.add_argument("--planner", choices=PLANNERS, default="auto", help="planner (default %(default)s)")
    parser.add_argument("--width", type=int, default=256, help="float32 values per row (default %(default)s)")
    parser.add_argument("--layers", type=int, default=2, help="layers, for replication (default %(default)s)")


# ---- commands --------------------------------------------------------------------------------------------------------


def _topology(name: str) -> Topology:
    """Read a topology by preset name or file."""
    if name == "auto" or Path(name).exists():
        return Topology.load(name)
    try:
        return Topology.preset(name)
    except ValueError as error:
        raise TopologyError(f"{name!r} is neither a file nor a preset: {error}") from error


def _topo(args: argparse.Namespace) -> dict[str, Any]:
    if args.action == "import" and not args.out:
        raise GnnCommArgumentError("import writes a file; expected --out; pass --out machine.json")
    if args.action == "measure":
        from core_kernels import launch
        from core_kernels.topology.measure import measure_topology

        topology = launch.run_ranks(measure_topology, args.ranks)[0]
    else:
        topology = _topology(args.topology)
    say(topology.draw())
    table(f"{topology.name} ({topology.source})", *pair_table(topology))
    if args.out:
        topology.save(args.out)
        say(f"written to {args.out}")
    return topology.to_dict()


def _split(args: argparse.Namespace, topology: Topology) -> Partition:
    if getattr(args, "partition", None):
        return Partition.load(args.partition)
    if not args.graph:
        raise GnnCommArgumentError("no graph is given; expected --graph or --partition; pass one of them")
    return partition(load_graph_data(args.graph, seed=args.seed).graph, topology, args.method, seed=args.seed)


def _partition(args: argparse.Namespace) -> dict[str, Any]:
    topology = _topology(args.topology)
    split = _split(args, topology)
    report = split.report(topology)
    rows = [(name, report[name]) for name in ("cut_edges", "remote_rows", "max_remote_rows", "between_host_rows")]
    table(f"{report['method']} partition in {report['num_parts']} parts", ("count", "value"), rows)
    busiest = list(report["rows_per_link"].items())[:8]
    table("busiest links, every copy sent straight", ("link", "rows"), busiest)
    if args.out:
        split.save(args.out)
        say(f"written to {args.out}")
    return report


def _plan(args: argparse.Namespace) -> dict[str, Any]:
    topology = _topology(args.topology)
    split = _split(args, topology)
    made = plan(split, topology, args.planner, args.width, seed=args.seed, num_layers=args.layers)
    summary = made.summary()
    if args.explain:
        say(made.explain())
    else:
        rows = [(name, format_seconds(seconds)) for name, seconds in made.considered.items()]
        table(f"planner: {made.planner}, {summary['num_stages']} stages", ("considered", "estimate"), rows)
        say(
            f"lower bound {format_seconds(summary['lower_bound_seconds'])}, links at {summary['bound_ratio']:.3f} of it"
        )
    if args.out:
        made.save(args.out)
        say(f"written to {args.out}")
    return summary


def _explain(args: argparse.Namespace) -> dict[str, Any]:
    made = Plan.load(args.plan, Partition.load(args.partition) if args.partition else None)
    say(made.explain())
    return made.summary() | {"explanation": made.explain()}


def _simulate(args: argparse.Namespace) -> dict[str, Any]:
    from gnn_comm.cost_model import row_bytes_of
    from gnn_comm.simulator import simulate

    made = Plan.load(args.plan)
    row_bytes = made.row_bytes if args.width is None else row_bytes_of(args.width)
    result: dict[str, Any] = {"row_bytes": row_bytes}
    rows = []
    for direction in ("forward", "backward"):
        found, estimate = simulate(made, row_bytes, direction), made.estimate(row_bytes, "uint8", direction)
        result[direction] = {"seconds": found.seconds, "estimate_seconds": estimate.seconds}
        rows.append((direction, format_seconds(estimate.seconds), format_seconds(found.seconds)))
    result["resource_bytes"] = found.resource_bytes
    table(f"{made.planner}, rows of {format_bytes(row_bytes)}", ("pass", "stage by stage", "without barriers"), rows)
    busiest = sorted(found.resource_bytes.items(), key=lambda item: -item[1])[:8]
    table("busiest links", ("link", "bytes"), [(name, format_bytes(count)) for name, count in busiest])
    return result


def _verify(args: argparse.Namespace) -> dict[str, Any]:
    from gnn_comm.verify import verify_plan

    split = Partition.load(args.partition)
    result: dict[str, Any] = {"plan": args.plan, "replay": True}
    try:
        made = Plan.load(args.plan, split)
        made.validate(split, _topology(args.topology) if args.topology else None)
        if not args.no_run:
            result |= verify_plan(made, split)
    except PlanCheckError as error:
        raise CheckFailedError(str(error), result | {"replay": False, "faults": error.faults}) from error
    table("verify", ("check", "result"), [(name, value) for name, value in result.items() if isinstance(value, bool)])
    if not all(value for value in result.values() if isinstance(value, bool)):
        raise CheckFailedError("ranks disagree with the whole table", result)
    return result


def _train(args: argparse.Namespace) -> dict[str, Any]:
    from core_kernels import launch
    from core_kernels.topology import processor_topology
    from gnn_comm.training import TrainSettings, train_rank

    planners = args.planner.split(",")
    if args.ranks < 1 or not set(planners) <= set(PLANNERS):
        raise GnnCommArgumentError(
            f"--ranks {args.ranks} --planner {args.planner}: expected at least 1 rank and planners out of {PLANNERS}; "
            "correct them"
        )
    topology = _topology(args.topology) if args.topology else processor_topology(args.ranks)
    if topology.num_devices != args.ranks:
        raise GnnCommArgumentError(
            f"--ranks {args.ranks} but topology {topology.name!r} has {topology.num_devices} devices; expected equal "
            f"numbers; pass --ranks {topology.num_devices}"
        )
    settings = TrainSettings(
        args.model,
        args.hidden,
        args.layers,
        args.epochs,
        seed=args.seed,
        quantize_rows=args.quantize_rows,
        compress_gradients=args.compress_gradients,
    )
    build_model(args.model, 1, args.hidden, 1, args.layers)  # a width that does not fit is refused before data are read
    data = load_graph_data(args.dataset, seed=args.seed)
    split = partition(data.graph, topology, args.method, seed=args.seed)
    found: dict[str, Any] = {"dataset": args.dataset, "ranks": args.ranks, "model": args.model, "planners": {}}
    for name in planners:
        made = plan(split, topology, name, args.hidden, seed=args.seed, num_layers=args.layers)
        with tempfile.TemporaryDirectory() as folder:
            split.save(folder)
            made.save(Path(folder) / "plan.npz")
            ranks = launch.run_ranks(train_rank, args.ranks, folder, f"{folder}/plan.npz", data, settings)
        found["planners"][name] = ranks[0].to_dict()
    _show_training(found)
    return found


def _show_training(found: dict[str, Any]) -> None:
    rows = []
    for name, result in found["planners"].items():
        # The first epoch gathers the features and compiles; it is left out of the middle where there are others.
        epochs, exchange = (sorted(result[key][1:] or result[key]) for key in ("epoch_seconds", "exchange_seconds"))
        rows.append(
            (
                f"{name} ({result['planner']})" if name == "auto" else name,
                format_seconds(epochs[len(epochs) // 2]),
                format_seconds(exchange[len(exchange) // 2]),
                format_bytes(result["sent_bytes"]),
                f"{result['losses'][-1]:.4f}",
                f"{result['accuracy']:.3f}",
            )
        )
    columns = ("planner", "epoch", "exchange", "sent", "loss", "test accuracy")
    table(f"{found['model']} on {found['dataset']}, {found['ranks']} ranks", columns, rows)


if __name__ == "__main__":
    sys.exit(main())
