"""The sub-commands ``events``, ``report``, ``status`` and ``top``."""

from __future__ import annotations

import argparse
import contextlib
import io
from pathlib import Path
from typing import Any

from core_kernels.console import CommandLine, say, table
from elastic_train.errors import input_error

__all__ = ["add_commands"]


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


def _report(args: argparse.Namespace) -> dict[str, Any]:
    from elastic_train.events import read_events
    from elastic_train.report import render_html, summarize

    run = summarize(read_events(args.file))
    if not run.events:
        raise input_error(str(args.file), "no events", "at least one", "name the event log of a job")
    rows = [
        (span.worker, f"{span.ready_seconds:.2f}",
         "-" if span.joined_seconds is None else f"{span.joined_seconds:.2f}", f"{span.end_seconds:.2f}", span.ended)
        for span in run.workers.values()
    ]  # fmt: skip
    table(f"{args.file}: {run.duration_seconds:.1f} s, {run.last_step} steps, {len(run.changes)} generations",
          ["worker", "ready", "joined", "end", ""], rows)  # fmt: skip
    pauses = [(p.worker, f"{p.seconds:.2f}", p.kind, f"{p.pause_seconds:.4f}") for p in run.pauses]
    table("Pauses", ["worker", "at, s", "kind", "pause, s"], pauses)
    if args.html:
        args.html.write_text(render_html(run, args.title or args.file.stem))
        say(f"wrote {args.html}")
    return run.as_dict()


def _status(args: argparse.Namespace) -> dict[str, Any]:
    if args.watch is not None:
        return _watch(args, args.watch, None)
    from elastic_train.controller import Controller

    with contextlib.closing(Controller.of_job(args.store, args.job)) as controller:
        status = controller.status()
    title = f"job {status['job']}: generation {status['generation']} ({status['status']}), leader {status['leader']}"
    table(title, ["worker", "phase"], list(status["workers"].items()))
    data = f"; a sample counts {status['data']}" if status["data"] else ""
    say(f"step {status['step']}, {status['samples_per_second']:.1f} samples per second{data}")
    return status


def _top(args: argparse.Namespace) -> dict[str, Any]:
    return _watch(args, args.interval_seconds, args.pages)


def _watch(args: argparse.Namespace, interval_seconds: float, num_pages: int | None) -> dict[str, Any]:
    from elastic_train.controller import Controller
    from elastic_train.report import watch

    if interval_seconds <= 0 or (num_pages is not None and num_pages < 1):
        name, value = ("pages", num_pages) if interval_seconds > 0 else ("interval", interval_seconds)
        raise input_error(name, value, "a number above 0", "leave it out for one page a second")
    events = args.events
    if events is None and args.store.startswith("file://"):
        events = Path(args.store.removeprefix("file://")) / f"{args.job}-events.jsonl"
    out = io.StringIO() if args.json == "-" else None  # JSON on standard output stands alone
    with contextlib.closing(Controller.of_job(args.store, args.job)) as controller:
        return watch(controller, events, interval_seconds, num_pages, out)


def add_commands(cli: CommandLine) -> None:
    """Add the sub-commands that show a job."""
    events = cli.command("events", _events, "show a job's events", "elastic-train events /tmp/j/job-events.jsonl")
    events.add_argument("file", type=Path)
    report = cli.command("report", _report, "what happened in a job, as tables and as a page for the browser",
                         "elastic-train report /tmp/j/job-events.jsonl --html run.html")  # fmt: skip
    report.add_argument("file", type=Path, help="event log of the job")
    report.add_argument("--html", type=Path, metavar="FILE", help="write a page with timelines; it needs no other file")
    report.add_argument("--title", help="heading of the page")
    status = cli.command("status", _status, "show a running job", "elastic-train status --store file:///tmp/j --watch")
    status.add_argument("--watch", type=float, nargs="?", const=1.0, metavar="SECONDS", help="show it again and again")
    top = cli.command("top", _top, "show a running job until it ends: workers, throughput, events",
                      "elastic-train top --store file:///tmp/j")  # fmt: skip
    top.add_argument("--interval-seconds", type=float, default=1.0, help="time between two pages")
    top.add_argument("--pages", type=int, help="end after so many")
    for parser in (status, top):
        parser.add_argument("--store", required=True, help="address of the job's store")
        parser.add_argument("--job", default="job", help="job id")
        parser.add_argument("--events", type=Path, help="event log, when it is not in the store's folder")
