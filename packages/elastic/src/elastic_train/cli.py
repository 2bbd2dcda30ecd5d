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
from typing import TYPE_CHECKING, Any

from core_kernels.console import CheckFailedError, CommandLine, say, table
from elastic_train._version import __version__
from elastic_train.errors import ElasticError, input_error
from elastic_train.launchers import command as launch_command
from elastic_train.report import command as report_command
from elastic_train.scheduler import command as scheduler_command

if TYPE_CHECKING:
    from elastic_train.launchers import LocalJob

__all__ = ["main"]

_PARTS = ("change", "restart", "prepare", "scale-in", "vote", "peers")


def _run(args: argparse.Namespace) -> dict[str, Any]:
    from elastic_train.launchers import LocalJob
    from elastic_train.stores import StoreServer

    least, most = launch_command.read_limits(args.workers)
    command, store, token = [args.script, *args.arguments], args.store, None
    with contextlib.ExitStack() as stack:
        if args.serve:
            token = os.environ.get("ELASTIC_TRAIN_TOKEN") or secrets.token_hex(16)
            store = stack.enter_context(StoreServer(token, args.interface)).address
            say(f"token of the job: {token}")
        environment = {"ELASTIC_TRAIN_INTERFACE": args.interface}
        job = stack.enter_context(
            LocalJob(
                command, args.folder, args.job, least, most, environment, store=store, token=token,
                in_background=args.background, num_shards=args.shards,
            )
        )  # fmt: skip
        job.scale_out(least)
        say(f"job {args.job} runs {least} workers; its store is {job.store}")
        return _wait(job)


def _add(args: argparse.Namespace) -> dict[str, Any]:
    from elastic_train.controller import Controller
    from elastic_train.launchers import LocalJob

    # a mistyped job would be a new one, trained beside the one that was meant
    Controller.of_job(args.store or f"file://{os.path.abspath(args.folder)}", args.job).close()
    command, prefix = [args.script, *args.arguments], f"{socket.gethostname()}-{os.getpid()}-"
    environment = {"ELASTIC_TRAIN_INTERFACE": args.interface}
    with LocalJob(
        command, args.folder, args.job, environment=environment, niceness=args.nice, prefix=prefix, store=args.store,
        in_background=args.background, num_shards=args.shards,
    ) as job:  # fmt: skip
        names = job.scale_out(args.count)
        say(f"started {', '.join(names)}")
        return _wait(job)


def _wait(job: LocalJob) -> dict[str, Any]:
    from elastic_train.launchers.signals import passing_on_sigterm

    with passing_on_sigterm(job):
        codes = job.wait()
    if any(codes.values()):
        raise CheckFailedError(f"workers ended with {codes}", {"exit_codes": codes})
    return {"exit_codes": codes}


def _controlled(args: argparse.Namespace) -> Any:
    from elastic_train.controller import Controller

    return Controller.of_job(args.store, args.job)


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


def _bench(args: argparse.Namespace) -> dict[str, Any]:
    from elastic_train.bench.command import run_bench

    keep_in = None if args.json == "-" else args.json
    return run_bench(
        args.megabytes, args.changes, args.step_seconds, args.parts, args.prepare_step_seconds, keep_in, args.resume
    )


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
        parser.add_argument("--shards", type=int, default=1, help="processes of a worker that hold the model together")
        parser.add_argument("--background", action="store_true", help="newcomers get ready on idle time only")
        parser.add_argument("script")
        parser.add_argument("arguments", nargs=argparse.REMAINDER)
    _add_control(cli)
    report_command.add_commands(cli)
    launch_command.add_commands(cli)
    scheduler_command.add_commands(cli)
    bench = cli.command(
        "bench", _bench, "measure what changes cost, beside a restart, torchrun and torchft",
        "elastic-train bench --megabytes 6 100 --changes 2:3 --json bench.json",
    )  # fmt: skip
    bench.add_argument("--megabytes", type=float, nargs="+", default=[6.0, 100.0], help="sizes of the state")
    bench.add_argument("--changes", nargs="+", default=["2:3"], metavar="OLD:NEW", help="numbers of workers")
    bench.add_argument("--step-seconds", type=float, default=0.02, help="what a step sleeps")
    bench.add_argument("--prepare-step-seconds", type=float, default=0.1, help="the same while a newcomer gets ready")
    bench.add_argument("--parts", nargs="+", default=list(_PARTS), choices=_PARTS, help="what to measure")
    bench.add_argument("--resume", action="store_true", help="leave out changes and sizes that --json FILE holds")
    return cli


def _add_control(cli: CommandLine) -> None:
    place = "--store file:///tmp/j"
    leave = cli.command(
        "scale-in", _leave, "let workers leave at the end of a step", f"elastic-train scale-in {place} w1"
    )
    scale = cli.command("scale", _scale, "grow or shrink a running job", f"elastic-train scale {place} +2")
    migrate = cli.command("migrate", _migrate, "replace a worker by a fresh one", f"elastic-train migrate {place} w1")
    profile = cli.command("profile", _profile, "measure throughput at each number of workers",
                          f"elastic-train profile {place} --min 1 --max 4")  # fmt: skip
    for parser in (leave, scale, migrate, profile):
        parser.add_argument("--store", required=True, help="address of the job's store")
        parser.add_argument("--job", default="job", help="job id")
    leave.add_argument("workers", nargs="+", help="ids of workers")
    scale.add_argument("change", type=int, help="workers to add, +2, or to let go, -1")
    migrate.add_argument("worker", help="id of the worker")
    profile.add_argument("--min", type=int, default=1, help="fewest workers; the job stays there")
    profile.add_argument("--max", type=int, required=True, help="most workers")
    profile.add_argument("--timeout-seconds", type=float, default=120.0, help="longest wait for one size")


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    from elastic_train.launchers.signals import ending_on_sigterm

    with ending_on_sigterm():
        return _command_line().run(argv)


if __name__ == "__main__":
    sys.exit(main())
