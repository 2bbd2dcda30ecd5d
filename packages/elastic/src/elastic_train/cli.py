"""The command line: run a script elastically, watch and steer the job, simulate a cluster.

Exit codes: 0 success, 1 a worker failed, 2 wrong input.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core_kernels.console import CheckFailedError, CommandLine, format_seconds, say, table
from elastic_train._version import __version__
from elastic_train.errors import ElasticError, input_error

if TYPE_CHECKING:
    from elastic_train.launchers import LocalJob

__all__ = ["main"]

_PARTS = ("change", "restart", "prepare", "scale-in", "vote", "peers")
_FORMATS = ("pollux", "philly", "tiresias", "alibaba")


def _run(args: argparse.Namespace) -> dict[str, Any]:
    from elastic_train.launchers import LocalJob
    from elastic_train.stores import StoreServer

    least, _, most = args.workers.partition(":")
    if not least.isdigit() or not (most.isdigit() or not most):
        raise input_error("workers", args.workers, "N or MIN:MAX", "write for example --workers 2:8")
    command, store, token = [args.script, *args.arguments], args.store, None
    with contextlib.ExitStack() as stack:
        if args.serve:
            token = os.environ.get("ELASTIC_TRAIN_TOKEN") or secrets.token_hex(16)
            store = stack.enter_context(StoreServer(token, args.interface)).address
            say(f"token of the job: {token}")
        environment = {"ELASTIC_TRAIN_INTERFACE": args.interface}
        job = stack.enter_context(
            LocalJob(
                command, args.folder, args.job, int(least), int(most or least), environment, store=store, token=token
            )
        )
        job.scale_out(int(least))
        say(f"job {args.job} runs {least} workers; its store is {job.store}")
        return _wait(job)


def _add(args: argparse.Namespace) -> dict[str, Any]:
    from elastic_train.launchers import LocalJob

    command, prefix = [args.script, *args.arguments], f"{socket.gethostname()}-{os.getpid()}-"
    environment = {"ELASTIC_TRAIN_INTERFACE": args.interface}
    with LocalJob(
        command, args.folder, args.job, environment=environment, niceness=args.nice, prefix=prefix, store=args.store
    ) as job:
        names = job.scale_out(args.count)
        say(f"started {', '.join(names)}")
        return _wait(job)


def _wait(job: LocalJob) -> dict[str, Any]:
    codes = job.wait()
    if any(codes.values()):
        raise CheckFailedError(f"workers ended with {codes}", {"exit_codes": codes})
    return {"exit_codes": codes}


def _controlled(args: argparse.Namespace) -> Any:
    from elastic_train.controller import Controller

    return Controller(args.store, args.job)


def _status(args: argparse.Namespace) -> dict[str, Any]:
    with contextlib.closing(_controlled(args)) as controller:
        status = controller.status()
    title = f"job {status['job']}: generation {status['generation']} ({status['status']}), leader {status['leader']}"
    table(title, ["worker", "phase"], list(status["workers"].items()))
    say(f"step {status['step']}, {status['samples_per_second']:.1f} samples per second")
    return status


def _leave(args: argparse.Namespace) -> dict[str, Any]:
    with contextlib.closing(_controlled(args)) as controller:
        controller.scale_in(args.workers)
    say(f"asked {', '.join(args.workers)} to leave")
    return {"asked": args.workers}


def _scale(args: argparse.Namespace) -> dict[str, Any]:
    if args.change == 0:
        raise input_error("change", args.change, "another number than 0", "write for example +2 or -1")
    with contextlib.closing(_controlled(args)) as controller:
        if args.change > 0:
            controller.scale_out(args.change)
            say(f"ordered {args.change} workers")
            return {"ordered": args.change}
        asked = controller.scale_in(-args.change)
    say(f"asked {', '.join(asked)} to leave")
    return {"asked": asked}


def _migrate(args: argparse.Namespace) -> dict[str, Any]:
    with contextlib.closing(_controlled(args)) as controller:
        controller.migrate(args.worker)
    say(f"ordered a worker in the place of {args.worker}")
    return {"replaces": args.worker}


def _profile(args: argparse.Namespace) -> dict[str, Any]:
    with contextlib.closing(_controlled(args)) as controller:
        points = controller.profile(args.min, args.max, args.timeout_seconds)
    rows = [(p.num_workers, f"{p.samples_per_second:.1f}", f"{p.efficiency:.2f}") for p in points]
    table(f"job {args.job}", ["workers", "samples per second", "efficiency"], rows)
    return {"points": [p._asdict() for p in points]}


def _events(args: argparse.Namespace) -> dict[str, Any]:
    from elastic_train.events import read_events

    events = read_events(args.file)
    begin = events[0]["t"] if events else 0.0
    known = ("t", "worker", "event")
    rows = [
        (f"{e['t'] - begin:.3f}", e["worker"], e["event"], " ".join(f"{k}={v}" for k, v in e.items() if k not in known))
        for e in events
    ]
    table(str(args.file), ["seconds", "worker", "event", "details"], rows)
    return {"events": events}


def _simulate(args: argparse.Namespace) -> dict[str, Any]:
    from elastic_train.scheduler import Cluster, policy, simulate
    from elastic_train.scheduler.policies.quota import proportional_quotas

    jobs = _read_trace(args)
    if args.load != 1.0:
        jobs = jobs.at_load(args.load)
    if args.jobs and args.jobs > jobs.num_jobs:
        jobs = jobs.repeated(args.jobs, args.gpus)
    elif args.jobs:
        jobs = jobs.first(args.jobs)
    cluster = Cluster(args.gpus, args.rescale_seconds, args.start_seconds, args.round_seconds)
    results = []
    for name in args.policy:
        needs_quota = name in ("strict-quota", "pps")
        settings = {"quotas": proportional_quotas(jobs, args.gpus)} if needs_quota else {}
        results.append(simulate(jobs, policy(name, **settings), cluster).summary())
    keys = ("mean_completion_seconds", "p95_completion_seconds", "p95_wait_seconds")
    rows = [
        (r["policy"], *(format_seconds(r[key]) for key in keys), f"{r['utilization']:.1%}", f"{r['fairness']:.2f}",
         r["num_rescales"])
        for r in results
    ]  # fmt: skip
    columns = ["policy", "mean completion", "95 %", "95 % wait", "utilization", "fairness", "rescales"]
    table(f"{jobs.num_jobs} jobs on {args.gpus} GPUs", columns, rows)
    return {"results": results}


def _bench(args: argparse.Namespace) -> dict[str, Any]:
    from elastic_train.bench.command import run_bench

    return run_bench(args.megabytes, args.changes, args.step_seconds, args.parts, args.prepare_step_seconds)


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


def _command_line() -> CommandLine:
    cli = CommandLine(
        "elastic-train", "Adds and removes workers of a running PyTorch job without stopping it.", __version__,
        (ElasticError,),
    )  # fmt: skip
    run = cli.command(
        "run", _run, "start a training script on this host", "elastic-train run --workers 2:8 --folder /tmp/j train.py"
    )
    run.add_argument("--workers", default="1:64", help="workers to start, or MIN:MAX; starts MIN")
    add = cli.command(
        "add", _add, "start more workers of a running job", "elastic-train add --folder /tmp/j --count 2 train.py"
    )
    add.add_argument("--count", type=int, default=1, help="workers to start")
    add.add_argument("--nice", type=int, default=0, help="added to the scheduling priority of the new workers")
    run.add_argument("--serve", action="store_true", help="serve the store over TCP, for workers of other hosts")
    for parser in (run, add):
        parser.add_argument("--folder", default=".elastic-train", help="where the store and the events are")
        parser.add_argument("--store", help="address of the job's store, when it is not in the folder")
        parser.add_argument("--interface", default="127.0.0.1", help="address of this host that sockets bind to")
        parser.add_argument("--job", default="job", help="job id")
        parser.add_argument("script")
        parser.add_argument("arguments", nargs=argparse.REMAINDER)
    _add_control(cli)
    events = cli.command("events", _events, "show a job's events", "elastic-train events /tmp/j/job-events.jsonl")
    events.add_argument("file", type=Path)
    _add_simulate(cli)
    bench = cli.command(
        "bench", _bench, "measure what changes cost, beside a restart, torchrun and torchft",
        "elastic-train bench --megabytes 6 100 --changes 2:3 --json bench.json",
    )  # fmt: skip
    bench.add_argument("--megabytes", type=float, nargs="+", default=[6.0, 100.0], help="sizes of the state")
    bench.add_argument("--changes", nargs="+", default=["2:3"], metavar="OLD:NEW", help="numbers of workers")
    bench.add_argument("--step-seconds", type=float, default=0.02, help="what a step sleeps")
    bench.add_argument("--prepare-step-seconds", type=float, default=0.1, help="the same while a newcomer gets ready")
    bench.add_argument("--parts", nargs="+", default=list(_PARTS), choices=_PARTS, help="what to measure")
    return cli


def _add_control(cli: CommandLine) -> None:
    place = "--store file:///tmp/j"
    status = cli.command("status", _status, "show a running job", f"elastic-train status {place}")
    leave = cli.command(
        "scale-in", _leave, "let workers leave at the end of a step", f"elastic-train scale-in {place} w1"
    )
    scale = cli.command("scale", _scale, "grow or shrink a running job", f"elastic-train scale {place} +2")
    migrate = cli.command("migrate", _migrate, "replace a worker by a fresh one", f"elastic-train migrate {place} w1")
    profile = cli.command("profile", _profile, "measure throughput at each number of workers",
                          f"elastic-train profile {place} --min 1 --max 4")  # fmt: skip
    for parser in (status, leave, scale, migrate, profile):
        parser.add_argument("--store", required=True, help="address of the job's store")
        parser.add_argument("--job", default="job", help="job id")
    leave.add_argument("workers", nargs="+", help="ids of workers")
    scale.add_argument("change", type=int, help="workers to add, +2, or to let go, -1")
    migrate.add_argument("worker", help="id of the worker")
    profile.add_argument("--min", type=int, default=1, help="fewest workers; the job stays there")
    profile.add_argument("--max", type=int, required=True, help="most workers")
    profile.add_argument("--timeout-seconds", type=float, default=120.0, help="longest wait for one size")


def _add_simulate(cli: CommandLine) -> None:
    parser = cli.command(
        "simulate", _simulate, "run a trace of jobs under scheduling policies",
        "elastic-train simulate --trace workload-1.csv --gpus 64 --policy tiresias elastic-tiresias",
    )  # fmt: skip
    parser.add_argument("--trace", required=True, help="CSV of jobs, plain or .gz")
    parser.add_argument("--format", choices=_FORMATS, default="pollux")
    parser.add_argument("--applications", help="folder of measured step times of a Pollux workload")
    parser.add_argument("--policy", nargs="+", default=["tiresias", "elastic-tiresias"])
    parser.add_argument("--gpus", type=int, default=64)
    parser.add_argument("--jobs", type=int, help="first so many jobs, or the trace repeated to so many")
    parser.add_argument("--load", type=float, default=1.0, help="how much faster jobs arrive than in the trace")
    parser.add_argument("--rescale-seconds", type=float, default=0.5)
    parser.add_argument("--start-seconds", type=float, default=30.0)
    parser.add_argument("--round-seconds", type=float, default=60.0)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return _command_line().run(argv)


if __name__ == "__main__":
    sys.exit(main())
