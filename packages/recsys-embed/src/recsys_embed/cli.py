"""The command line: ``recsys-embed stats | calibrate | plan | explain | train | verify | bench | convert | debias``."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from core_kernels import launch
from core_kernels.comm import Group
from core_kernels.console import CheckFailedError, CommandLine, format_bytes, format_seconds, progress, say, table
from core_kernels.interconnect import Interconnect
from core_kernels.testing import ShapedHosts
from recsys_embed._version import __version__
from recsys_embed.bench import SYSTEMS, BenchJob, bench_on_rank, bench_plan, compare_systems, measure_dense
from recsys_embed.data import read_avazu, read_criteo_tsv, read_npy_days
from recsys_embed.debias import DebiasJob, run_debias
from recsys_embed.errors import RecsysEmbedError, input_error
from recsys_embed.grid import GridJob, run_grid
from recsys_embed.models import MODELS
from recsys_embed.optimizers import OPTIMIZERS, make_optimizer
from recsys_embed.plan import Plan
from recsys_embed.profile import AccessStats
from recsys_embed.training import TrainJob, load_clicks, make_plan, train_on_rank
from recsys_embed.work import WorkCosts

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0 success, 1 a check failed, 2 wrong input.

    Args:
        argv: Arguments; those of the process when left out.
    """
    cli = CommandLine(
        "recsys-embed",
        "Sharded embedding tables with a replicated hot tier and exact pre-fetching.",
        __version__,
        (RecsysEmbedError, launch.RankFailedError),
    )
    _add_planning(cli)
    _add_training(cli)
    _add_tools(cli)
    return cli.run(argv)


def _add_planning(cli: CommandLine) -> None:
    """Add `stats`, `calibrate`, `plan` and `explain`: what is known before training."""
    stats = cli.command("stats", _stats, "count accesses, show skew", "recsys-embed stats --dataset movielens")
    _add_data(stats)
    stats.add_argument("--out", metavar="FILE.npz", help="file to save the counts to")

    calibrate = cli.command(
        "calibrate",
        _calibrate,
        "measure what ids and rows take of the processor",
        "recsys-embed calibrate --ranks 4 --out work.json",
    )
    calibrate.add_argument("--ranks", type=int, default=2, help="ranks on this machine")
    calibrate.add_argument("--optimizer", choices=sorted(OPTIMIZERS), default="rowwise_adagrad", help="of the rows")
    calibrate.add_argument("--out", metavar="FILE.json", help="file to save the costs to")

    plan = cli.command("plan", _plan, "choose the hot tier and say why", "recsys-embed plan --ranks 4 --out plan.json")
    _add_data(plan)
    _add_plan(plan)
    plan.add_argument("--out", metavar="FILE", help="file to save the plan to")

    explain = cli.command("explain", _explain, "explain a saved plan", "recsys-embed explain plan.json")
    explain.add_argument("plan", metavar="FILE", help="a plan saved by recsys-embed plan --out")


def _add_training(cli: CommandLine) -> None:
    """Add `train`, `verify` and `bench`: what runs ranks."""
    train = cli.command(
        "train",
        _train,
        "train a click model",
        """recsys-embed train --dataset movielens --ranks 2 --model dlrm
        torchrun --nproc-per-node 2 -m recsys_embed.cli train --dataset criteo:train.txt""",
    )
    _add_data(train)
    _add_plan(train)
    train.add_argument("--model", choices=sorted(MODELS), default="dlrm", help="click model")
    train.add_argument("--epochs", type=int, default=2, help="passes over the data")
    train.add_argument("--deterministic", action="store_true", help="results independent of ranks and tiers, bitwise")

    verify = cli.command(
        "verify", _verify, "compare every combination with one process", "recsys-embed verify --ranks 1,2"
    )
    _add_data(verify)
    verify.add_argument("--ranks", default="1,2", help="numbers of ranks, comma-separated")
    verify.add_argument("--optimizers", default=",".join(OPTIMIZERS), help="optimisers, comma-separated")
    verify.add_argument("--steps", type=int, default=4, help="training steps to compare")
    verify.add_argument("--hot", default="0,1,sqrt,auto,all", help="sizes of the hot tier: numbers, sqrt, auto, all")
    verify.add_argument("--interconnect", default="loopback-cpu", help="preset that auto is planned for")

    bench = cli.command(
        "bench",
        _bench,
        "measure against other ways over shaped links (root)",
        "recsys-embed bench --hosts 4x1 --rate 100 --dataset criteo:criteo.npz",
    )
    bench.add_argument("--hosts", default="4x1", help="HxR: hosts, and ranks on each")
    bench.add_argument("--rate", type=float, default=100.0, help="rate of each host's link, Mbit/s")
    bench.add_argument("--dataset", default="zipf", help="zipf, zipf-even, uniform, or what train takes")
    bench.add_argument("--batch-size", type=int, default=512, help="samples per rank")
    bench.add_argument("--width", type=int, default=64, help="width of rows")
    bench.add_argument("--steps", type=int, default=12, help="steps to measure")
    bench.add_argument("--repeats", type=int, default=1, help="rounds; systems take turns")
    bench.add_argument("--systems", default=",".join(SYSTEMS), help="systems, comma-separated")
    bench.add_argument("--hot", default="auto", help="hot rows, or auto")


def _add_tools(cli: CommandLine) -> None:
    """Add `convert` and `debias`."""
    convert = cli.command(
        "convert", _convert, "number ids and write arrays", "recsys-embed convert criteo train.txt out --min-count 3"
    )
    convert.add_argument("format", choices=("criteo", "avazu", "npy-days"), help="what the source is")
    convert.add_argument("source", help="file, or folder of days")
    convert.add_argument("out", help="folder to write")
    convert.add_argument("--min-count", type=int, default=1, help="rarer values share an id")
    convert.add_argument("--days", default="0", help="days of npy-days, comma-separated")

    debias = cli.command(
        "debias", _debias, "train with and without popularity debiasing", "recsys-embed debias --backbone bprmf"
    )
    debias.add_argument("--backbone", choices=("bprmf", "lightgcn"), default="bprmf", help="backbone")
    debias.add_argument("--epochs", type=int, default=30, help="passes over the interactions")
    debias.add_argument("--seed", type=int, default=0, help="of split, values and negatives")


def _add_data(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dataset", default="movielens", help="movielens, synthetic, criteo:FILE (text or .npz) or folder:DIR"
    )
    parser.add_argument("--batch-size", type=int, default=512, help="samples per rank")
    parser.add_argument("--width", type=int, default=16, help="width of rows")


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=2, help="ranks on this machine; ignored under torchrun")
    parser.add_argument("--optimizer", choices=sorted(OPTIMIZERS), default="rowwise_adagrad", help="of the rows")
    parser.add_argument("--learning-rate", type=float, default=0.05, help="of rows and dense parameters")
    parser.add_argument("--hot", default="auto", help="hot rows: auto, a number, or a fraction such as 0.01")
    parser.add_argument("--no-prefetch", action="store_true", help="fetch rows when they are needed")
    parser.add_argument("--interconnect", default="loopback-cpu", help="preset, or FILE.json of core-kernels calibrate")
    parser.add_argument("--work", metavar="FILE.json", default="", help="costs of recsys-embed calibrate")
    parser.add_argument("--seed", type=int, default=0, help="of initial values and shuffling")


def _job(args: argparse.Namespace) -> TrainJob:
    return TrainJob(
        args.dataset,
        getattr(args, "model", "dlrm"),
        args.width,
        args.batch_size,
        getattr(args, "epochs", 1),
        args.optimizer,
        args.learning_rate,
        args.hot,
        not args.no_prefetch,
        getattr(args, "deterministic", False),
        args.interconnect,
        args.seed,
        args.work,
    )


def _stats(args: argparse.Namespace) -> dict[str, Any]:
    data = load_clicks(args.dataset)
    stats = AccessStats(data.tables(args.width))
    with progress("counting", len(data) // args.batch_size) as advance:
        for batch in data.batches(args.batch_size):
            stats.add(batch.features)
            advance()
    if args.out:
        stats.save(args.out)
    result = stats.describe()
    table(f"accesses of {args.dataset}", ["measure", "value"], [(k, f"{v:.4g}") for k, v in result.items()])
    return result


def _calibrate(args: argparse.Namespace) -> dict[str, Any]:
    costs = launch.run_ranks(measure_costs, args.ranks, args.optimizer)[0]
    if args.out:
        costs.save(args.out)
    cells = [
        (name.replace("_", " "), value if name == "name" else f"{value:.3g}") for name, value in asdict(costs).items()
    ]
    table(f"processor seconds, {args.ranks} ranks", ["cause", "seconds"], cells)
    return costs.to_dict()


def measure_costs(group: Group, optimizer: str) -> WorkCosts:
    """Measure the processors of the ranks. Collective."""
    return WorkCosts.measure(group, make_optimizer(optimizer))


def _plan(args: argparse.Namespace) -> dict[str, Any]:
    plan = make_plan(_job(args), load_clicks(args.dataset), args.ranks)
    say(plan.explain())
    if args.out:
        plan.save(args.out)
    return plan.to_dict()


def _explain(args: argparse.Namespace) -> dict[str, Any]:
    plan = Plan.load(args.plan)
    say(plan.explain())
    return {"explanation": plan.explain(), **plan.to_dict()}


def _train(args: argparse.Namespace) -> dict[str, Any] | None:
    job = _job(args)
    if "RANK" in os.environ or "SLURM_PROCID" in os.environ:
        group = launch.current_group()
        result = train_on_rank(group, job)
        return result if group.rank == 0 else None
    if args.ranks == 1:
        result = train_on_rank(Group.single(), job)
    else:
        result = launch.run_ranks(train_on_rank, args.ranks, job)[0]
    rows = [
        (i + 1, f"{e['loss']:.4f}", f"{e['auc']:.4f}", format_seconds(e["seconds"]))
        for i, e in enumerate(result["epochs"])
    ]
    table(f"{args.model} on {args.dataset}, {args.ranks} ranks", ["epoch", "loss", "AUC", "time"], rows)
    return result


def _verify(args: argparse.Namespace) -> dict[str, Any]:
    data = load_clicks(args.dataset)
    batches = [b.features for b in itertools.islice(data.batches(args.batch_size, seed=0), args.steps)]
    if len(batches) < args.steps:
        expected = f"at most {len(batches)} batches of {args.batch_size} in {args.dataset}"
        raise input_error("--steps", args.steps, expected, "ask for fewer, or for smaller batches")
    sizes, optimizers = [int(n) for n in args.ranks.split(",")], args.optimizers.split(",")
    tables, hot = data.tables(args.width), args.hot.split(",")
    job = GridJob(tables, batches, hot, sizes, optimizers, args.interconnect)
    with progress("comparing", len(sizes) * len(optimizers)) as advance:
        result = run_grid(job, advance)
    columns = ["optimizer", "ranks", "hot", "rows", "prefetch", "bitwise equal", "worst, fast mode"]
    cells = [
        (r["optimizer"], r["ranks"], r["tier"], r["hot"], r["prefetch"], r["is_bitwise_equal"],
         f"{f['worst_relative']:.1e}")
        for r, f in zip(result["cases"], result["fast"], strict=True)
    ]  # fmt: skip
    table(f"{args.steps} steps against one process with nn.EmbeddingBag", columns, cells)
    for twin in result["twins"]:
        seen = "goes unnoticed" if twin["is_bitwise_equal"] else f"differs by {twin['worst_relative']:.1e}, as it must"
        say(f"{twin['ranks']} ranks, overlap rule {twin['rule']}: {seen}")
    if not result["equal"]:
        bad = next(r for r in result["cases"] if not r["is_bitwise_equal"])
        raise CheckFailedError(f"{bad['where']} differs by {bad['worst_relative']:.1e} in {bad}", result)
    if not result["fast_within"]:
        bad = max(result["fast"], key=lambda r: r["worst_relative"])
        raise CheckFailedError(f"{bad['where']} differs by {bad['worst_relative']:.1e} in {bad}", result)
    if not result["twins_differ"]:
        raise CheckFailedError("a broken overlap rule went unnoticed; take more steps or smaller tables", result)
    return result


def measure_machine(group: Group) -> tuple[Interconnect, WorkCosts]:
    """Measure links and processors of the ranks. Collective."""
    return Interconnect.measure(group, budget_seconds=15.0), WorkCosts.measure(group)


def _bench(args: argparse.Namespace) -> dict[str, Any]:
    num_hosts, per_host = (int(n) for n in args.hosts.split("x"))
    base = BenchJob("ours", args.dataset, args.batch_size, args.width, steps=args.steps)
    hot = args.hot if args.hot == "auto" else int(args.hot)
    rows: list[dict[str, Any]] = []
    systems = args.systems.split(",")
    for system in systems:
        if system not in SYSTEMS:
            raise input_error("--systems", system, f"some of {', '.join(SYSTEMS)}", "correct the name")
    file = args.dataset.partition(":")[2]
    if file and not os.path.exists(file):  # said before the links are measured, which takes a while
        raise input_error("--dataset", args.dataset, "a file or folder that exists", "check the path")
    if "torchrec" in systems and importlib.util.find_spec("torchrec") is None:
        say("torchrec is not installed; it is left out")
        systems.remove("torchrec")
    with ShapedHosts([per_host] * num_hosts, args.rate, timeout_seconds=120.0) as hosts:
        (net, work), dense = hosts.run(measure_machine)[0], hosts.run(measure_dense, base)[0]
        plans = {
            "ours": bench_plan(base, net, hosts.world_size, dense, hot, work=work),
            "no_prefetch": bench_plan(base, net, hosts.world_size, dense, hot, prefetch=False, work=work),
        }
        say(plans["ours"].explain())
        for _ in range(args.repeats):
            jobs = [replace(base, system=system, plan=plans.get(system)) for system in systems]
            rows += [_bench_system(hosts, job, args.batch_size) for job in jobs]
    columns = ["system", "step", "samples/s", "exposed", "dense wait", "sent per rank"]
    cells = [
        (
            r["system"],
            format_seconds(r["step_seconds"]),
            f"{r['samples_per_second']:.0f}",
            format_seconds(r["exposed_seconds"]) if "exposed_seconds" in r else "",
            format_seconds(r["waited_seconds"]["dense"]) if "waited_seconds" in r else "",
            format_bytes(r["interface_bytes"]),
        )
        for r in rows
    ]
    table(f"{args.dataset}, {args.hosts} ranks, {args.rate:g} Mbit/s", columns, cells)
    chosen = plans["ours"].chosen
    own = next((r for r in rows if r["system"] == "ours"), None)
    predicted = sum(chosen.sent_bytes.values()) + own["dense_bytes"] if chosen and own else None
    if predicted and own:
        say(f"ours: {format_bytes(predicted)} predicted per rank and step, rows and dense gradients together")
    gains = compare_systems(rows, predicted)
    for name, value in gains.items():
        say(f"{name.replace('_', ' ')}: {value:.2f}")
    hot_rows = plans["ours"].num_hot_rows
    return {"rows": rows, "hot_rows": hot_rows, "predicted_bytes": predicted, "dense_seconds": dense[0], "gains": gains}


def _bench_system(hosts: ShapedHosts, job: BenchJob, batch_size: int) -> dict[str, Any]:
    """Run one system; bytes are counted on the links, over all its steps."""
    before = hosts.link_bytes()
    results = hosts.run(bench_on_rank, job)
    sent = [b["sent_bytes"] - a["sent_bytes"] for a, b in zip(before, hosts.link_bytes(), strict=True)]
    slowest = max(results, key=lambda r: r["step_seconds"])
    return {
        **slowest,
        "samples_per_second": batch_size * hosts.world_size / slowest["step_seconds"],
        "interface_bytes": sum(sent) / hosts.world_size / (job.steps + job.warmup),
    }


def _convert(args: argparse.Namespace) -> dict[str, Any]:
    if args.format == "criteo":
        data = read_criteo_tsv(args.source, args.min_count)
    elif args.format == "avazu":
        data = read_avazu(args.source, args.min_count)
    else:
        data = read_npy_days(args.source, [int(day) for day in args.days.split(",")])
    data.save(args.out)
    result = {"samples": len(data), "fields": len(data.fields), "rows": sum(data.num_rows), "folder": args.out}
    say(f"{result['samples']} samples, {result['fields']} fields, {result['rows']} rows -> {args.out}")
    return result


def _debias(args: argparse.Namespace) -> dict[str, Any]:
    result = run_debias(DebiasJob(args.backbone, epochs=args.epochs, seed=args.seed))
    columns = ["model", "recall@20", "NDCG@20", "popularity bias", "coverage"]
    names = ("recall", "ndcg", "popularity_bias", "coverage")
    cells = [(m, *(f"{result[m][n]:.4f}" for n in names)) for m in ("plain", "debiased")]
    table(f"{args.backbone}, gamma {result['gamma']:g}, beta {result['beta']:g}", columns, cells)
    return result


if __name__ == "__main__":
    raise SystemExit(main())
