"""The command line: ``gnn-parallel partition | plan | explain | train | verify | bench``."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from core_kernels import PartitionBook, launch, partition_graph
from core_kernels.comm import Group
from core_kernels.console import CheckFailedError, CommandLine, format_bytes, format_seconds, say, table
from gnn_parallel._version import __version__
from gnn_parallel.arguments import parse_fanouts
from gnn_parallel.bench import bench_on_rank
from gnn_parallel.clock import TERMS
from gnn_parallel.errors import GnnParallelError, input_error
from gnn_parallel.jobs import LabelledGraph, TrainJob, load_dataset, make_plan
from gnn_parallel.models import MODELS
from gnn_parallel.plan import Plan
from gnn_parallel.plots import plot_training
from gnn_parallel.strategies import STRATEGIES
from gnn_parallel.training import format_share, train_on_rank
from gnn_parallel.verify import TOLERANCES, Difference, verify_strategies

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0 success, 1 a check failed, 2 wrong input.

    Args:
        argv: Arguments; those of the process when left out.
    """
    cli = CommandLine(
        "gnn-parallel",
        "Picks and runs the fastest of four ways to parallelise sampled GNN training.",
        __version__,
        (GnnParallelError, launch.RankFailedError),
    )
    example = "gnn-parallel partition --ranks 4 --out parts"
    partition = cli.command("partition", _partition, "split a graph over ranks", example)
    _add_data(partition)
    partition.add_argument("--out", required=True, metavar="DIR", help="folder to write the partition to")

    plan = cli.command("plan", _plan, "choose a strategy and say why", "gnn-parallel plan --ranks 2 --out plan.json")
    _add_data(plan)
    _add_model(plan)
    plan.add_argument("--out", metavar="FILE", help="file to save the plan to")

    explain = cli.command("explain", _explain, "explain a saved plan", "gnn-parallel explain plan.json")
    explain.add_argument("plan", metavar="FILE", help="a plan saved by gnn-parallel plan --out")

    example = """gnn-parallel train --dataset movielens --ranks 2 --model sage --hidden 64 --fanouts 10,10 --epochs 5
        torchrun --nproc-per-node 2 -m gnn_parallel.cli train --dataset movielens"""
    train = cli.command("train", _train, "plan and train", example)
    _add_data(train)
    _add_model(train)
    _add_training(train)

    example = "gnn-parallel verify --dataset movielens --ranks 3"
    verify = cli.command("verify", _verify, "compare every strategy with one process", example)
    _add_data(verify)
    _add_model(verify)
    verify.add_argument("--steps", type=int, default=2, help="training steps to compare")

    example = """gnn-parallel bench --dataset movielens --ranks 2
        gnn-parallel bench --grid --link 100 --cells cells.jsonl"""
    bench = cli.command("bench", _bench, "time every strategy", example)
    _add_data(bench)
    _add_model(bench)
    bench.add_argument("--steps", type=int, default=10, help="steps per strategy and round")
    bench.add_argument("--rounds", type=int, default=3, help="rounds, strategies interleaved")
    bench.add_argument("--grid", action="store_true", help="regret over cells on four shaped hosts (root)")
    bench.add_argument("--link", type=int, metavar="MBIT", help="with --grid: only cells of this link, 1000 or 100")
    bench.add_argument("--only", metavar="VALUES", help="with --grid: only cells with these, such as 'random 10%% 8'")
    bench.add_argument("--cells", metavar="FILE", help="with --grid: file of finished cells; a later run goes on there")
    if _is_under_torchrun() and os.environ["RANK"] != "0":
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            return cli.run(argv)
    return cli.run(argv)


def _is_under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def _add_data(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dataset", default="movielens", help="movielens, sbm or a folder of .npy files")
    parser.add_argument("--ranks", type=int, default=2, help="number of local ranks")
    parser.add_argument("--method", default="metis", choices=("metis", "random"), help="how nodes are split")
    parser.add_argument("--seed", type=int, default=0, help="seed of partition, weights, batches and sampling")
    parser.add_argument("--partition", metavar="DIR", help="a partition saved by gnn-parallel partition")
    parser.add_argument("--task", default="nodes", help="nodes (classification) or links (prediction)")


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="sage", help=f"one of {', '.join(MODELS)}")
    parser.add_argument("--hidden", type=int, default=64, help="columns between layers")
    parser.add_argument("--heads", type=int, default=4, help="heads of attention layers")
    parser.add_argument("--dropout", type=float, default=0.5, help="share of activations dropped between layers")
    parser.add_argument(
        "--fanouts", default="10,10", help="neighbours per layer, the hop at the seeds first; -1 for all"
    )
    parser.add_argument("--batch-size", type=int, default=512, help="seeds per step, over all ranks")
    parser.add_argument("--strategy", default="auto", help=f"auto or one of {', '.join(STRATEGIES)}")
    parser.add_argument("--hosts", type=int, help="hosts that work data-parallel; chosen when left out")
    parser.add_argument("--placement", default="replicated", help="replicated, sharded or disk features")
    parser.add_argument("--cache", default="0", help="rows kept of other ranks or of the disk: rows, 10%% or 4GB")
    parser.add_argument("--reuse", action="store_true", help="keep sharded rows of a batch for the next")
    parser.add_argument("--clusters", type=int, default=0, help="let batches follow the order of so many clusters")
    parser.add_argument("--mixed", action="store_true", help="compute and send activations in bfloat16")
    parser.add_argument("--trials", type=int, default=32, metavar="STEPS", help="most steps of each strategy to try")
    parser.add_argument("--dtype", default="float32", choices=("float32", "float64"), help="of features and weights")
    parser.add_argument("--interconnect", default="", metavar="FILE", help="written by core-kernels calibrate")


def _add_training(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--epochs", type=int, default=5, help="passes over the training nodes")
    parser.add_argument("--learning-rate", type=float, default=0.003, help="of Adam")
    parser.add_argument("--clip", type=float, default=0.0, help="largest norm of the gradients; 0 for any")
    parser.add_argument("--validation", default="full", choices=("full", "sampled"), help="neighbourhoods")
    parser.add_argument("--replan-every", type=int, default=0, metavar="EPOCHS", help="plan again now and then")
    parser.add_argument("--save", default="", metavar="FILE", help="checkpoint to write at the end")
    parser.add_argument("--resume", default="", metavar="FILE", help="checkpoint to go on from, of any strategy")
    parser.add_argument("--epoch-log", default="", metavar="FILE.jsonl", help="append one line per epoch")
    parser.add_argument("--timeout", type=float, default=60.0, help="longest wait for another rank, seconds")
    parser.add_argument("--plot", metavar="FILE.png", help="plot loss, accuracy and time by term")


def _job(args: argparse.Namespace) -> TrainJob:
    if args.strategy != "auto" and args.strategy not in STRATEGIES:
        raise input_error("strategy", args.strategy, f"auto or one of {', '.join(STRATEGIES)}", "correct the spelling")
    return TrainJob(
        dataset=args.dataset,
        model=args.model,
        hidden=args.hidden,
        fanouts=parse_fanouts(args.fanouts),
        batch_size=args.batch_size,
        epochs=getattr(args, "epochs", 1),
        strategy=args.strategy,
        learning_rate=getattr(args, "learning_rate", 0.003),
        dropout=args.dropout,
        heads=args.heads,
        seed=args.seed,
        placement=args.placement,
        cache=args.cache,
        dtype=args.dtype,
        interconnect=args.interconnect,
        task=args.task,
        reuse=args.reuse,
        num_clusters=args.clusters,
        num_hosts=args.hosts,
        is_mixed=args.mixed,
        num_trials=args.trials,
        clip=getattr(args, "clip", 0.0),
        validation=getattr(args, "validation", "full"),
        replan_every=getattr(args, "replan_every", 0),
        log=getattr(args, "epoch_log", ""),
        save=getattr(args, "save", ""),
        resume=getattr(args, "resume", ""),
        is_shown=args.json != "-",
    )


def _read_partition(args: argparse.Namespace, data: LabelledGraph, ranks: int) -> PartitionBook:
    if not 1 <= ranks <= data.graph.num_nodes:
        raise input_error("ranks", ranks, f"1 to {data.graph.num_nodes}, the number of nodes", "pass --ranks 2")
    if args.partition:
        return PartitionBook.load(args.partition)
    return partition_graph(data.graph, ranks, args.method, seed=args.seed, balance=data.train_mask)


def _on_ranks(args: argparse.Namespace, function: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
    """Run on local ranks, or as the rank that torchrun made of this process."""
    if _is_under_torchrun():
        return [function(launch.current_group(), *arguments)]
    return launch.run_ranks(function, args.ranks, *arguments, **options)


def _num_ranks(args: argparse.Namespace) -> int:
    return int(os.environ["WORLD_SIZE"]) if _is_under_torchrun() else args.ranks


def _partition(args: argparse.Namespace) -> dict[str, Any]:
    data = load_dataset(args.dataset)
    book = _read_partition(args, data, args.ranks)
    book.save(args.out)
    share = book.cut / max(1, data.graph.num_edges)
    sizes = book.sizes.tolist()
    table(f"{book.method} partition of {data.name}", ("part", "nodes"), list(enumerate(sizes)))
    say(f"{share:.1%} of {data.graph.num_edges} edges are cut; saved to {args.out}")
    return {"method": book.method, "num_parts": book.num_parts, "cut": book.cut, "cut_share": share, "sizes": sizes}


def _plan(args: argparse.Namespace) -> dict[str, Any]:
    job, data = _job(args), load_dataset(args.dataset, args.dtype, args.task)
    partition = _read_partition(args, data, args.ranks)
    _check_folders(out=args.out)
    plan = Plan.from_json(launch.run_ranks(_plan_on_rank, args.ranks, job, partition)[0])
    say(plan.explain())
    if args.out:
        plan.save(args.out)
        say(f"saved to {args.out}")
    return plan.to_dict()


def _plan_on_rank(group: Group, job: TrainJob, partition: PartitionBook) -> str:
    return make_plan(job, job.load(), partition, group).to_json()


def _explain(args: argparse.Namespace) -> dict[str, Any]:
    plan = Plan.load(args.plan)
    say(plan.explain())
    return plan.to_dict()


def _train(args: argparse.Namespace) -> dict[str, Any]:
    job, data = _job(args), load_dataset(args.dataset, args.dtype, args.task)
    job.make_model(data)  # complains here rather than on every rank
    for name, value, remedy in (
        ("epochs", args.epochs, "pass --epochs 5"),
        ("learning-rate", args.learning_rate, "pass --learning-rate 0.003"),
        ("timeout", args.timeout, "pass seconds, such as --timeout 60"),
    ):
        if not 0 < value < float("inf"):
            raise input_error(name, value, "a positive number", remedy)
    _check_folders(save=args.save, plot=args.plot, epoch_log=args.epoch_log)
    for name, value in (("clip", args.clip), ("replan-every", args.replan_every)):
        if not value >= 0:
            raise input_error(name, value, "at least 0", f"leave --{name} out")
    partition = _read_partition(args, data, _num_ranks(args))
    report = _on_ranks(args, train_on_rank, job, partition, timeout_seconds=args.timeout)[0]
    rows = [
        (term, format_seconds(report["predicted"][term]), format_seconds(report["measured"][term])) for term in TERMS
    ]
    totals = [sum(report[kind].values()) for kind in ("predicted", "measured")]
    table("seconds per epoch", ("term", "predicted", "measured"), [*rows, ("total", *map(format_seconds, totals))])
    say(
        f"{report['strategy']} on {report['world_size']} ranks: test accuracy {format_share(report['test_accuracy'])}, "
        f"epoch {format_seconds(totals[1])} measured, {format_seconds(totals[0])} predicted"
    )
    if args.plot:
        plot_training(report, Path(args.plot))
    return report


def _check_folders(**files: str | None) -> None:
    """Complain before the work about folders that files shall be written to."""
    for name, file in files.items():
        if file and not Path(file).parent.is_dir():
            flag = "--" + name.replace("_", "-")
            raise input_error(flag, file, f"a file in an existing folder; {Path(file).parent} is none", "make it first")


def _check_counts(**counts: int) -> None:
    for name, value in counts.items():
        if value < 1:
            raise input_error(name, value, "at least 1", f"leave --{name} out")


def _verify(args: argparse.Namespace) -> dict[str, Any]:
    _check_counts(steps=args.steps)
    job, data = _job(args), load_dataset(args.dataset, args.dtype, args.task)
    job.make_model(data)
    partition = _read_partition(args, data, _num_ranks(args))
    found = _on_ranks(args, _verify_on_rank, job, partition, args.steps)[0]
    tolerance = TOLERANCES[data.features.dtype]
    rows, result = [], {}
    for strategy, difference in found.items():
        if isinstance(difference, str):
            rows.append((strategy, "cannot run", difference, ""))
            result[strategy] = {"reason": difference}
            continue
        verdict = "ok" if difference.largest <= tolerance else "DIFFERS"
        rows.append((strategy, f"{difference.loss:.1e}", f"{difference.gradients:.1e}", verdict))
        result[strategy] = {
            "loss": difference.loss,
            "gradients": difference.gradients,
            "worst": difference.worst_gradient,
        }
    table(f"largest relative difference to one process, {args.dtype}", ("strategy", "loss", "gradients", ""), rows)
    document = {"strategies": result, "tolerance": tolerance, "world_size": _num_ranks(args), "dtype": args.dtype}
    wrong = [name for name, d in found.items() if not isinstance(d, str) and not d.largest <= tolerance]
    if wrong:
        raise CheckFailedError(f"{', '.join(wrong)} differ by more than {tolerance:g}", document)
    return document


def _verify_on_rank(
    group: Group, job: TrainJob, partition: PartitionBook, num_steps: int
) -> dict[str, Difference | str]:
    data = job.load()
    return verify_strategies(
        group,
        data.graph,
        lambda: job.make_model(data),
        data.features,
        data.labels,
        partition,
        data.train_ids,
        job.fanouts,
        job.batch_size,
        num_steps,
        job.seed,
        placement=job.placement,
        cache=job.cache,
        reuse=job.reuse,
        num_hosts=job.num_hosts,
    )


def _bench(args: argparse.Namespace) -> dict[str, Any]:
    if args.grid:
        from gnn_parallel.grid import Grid, show_grid

        return show_grid(args.link, args.cells, Grid().matching(args.only or ""))
    _check_counts(steps=args.steps, rounds=args.rounds)
    job, data = _job(args), load_dataset(args.dataset, args.dtype, args.task)
    partition = _read_partition(args, data, _num_ranks(args))
    result = _on_ranks(args, bench_on_rank, job, partition, args.steps, args.rounds)[0]
    rows = [
        (
            name,
            format_seconds(cell["predicted_step_seconds"]),
            format_seconds(cell["measured_step_seconds"]),
            format_bytes(cell["step_bytes"]),
        )
        for name, cell in result["strategies"].items()
    ]
    table(f"{job.model} on {job.dataset}, {args.ranks} ranks", ("strategy", "predicted", "measured", "bytes"), rows)
    say(f"chosen {result['chosen']}, fastest {result['fastest']}, regret {result['regret']:.2f}")
    return result


if __name__ == "__main__":
    raise SystemExit(main())
