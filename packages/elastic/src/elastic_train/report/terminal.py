"""A page in the terminal that shows a running job: workers, generation, throughput, the last events.

On a terminal the page is drawn anew in its place; elsewhere, as in a log file, one page follows the other as plain
text.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from elastic_train.controller import Controller
from elastic_train.coordinator import Member
from elastic_train.events import read_events

__all__ = ["page", "watch"]

_CLEAR = "\x1b[H\x1b[2J"


def page(status: dict[str, Any], members: dict[str, Member], events: Sequence[dict[str, Any]], now: float) -> str:
    """Return the page of a moment as text.

    Args:
        status: What :meth:`elastic_train.Controller.status` says.
        members: The workers' records.
        events: The job's events, in order of time; the last ones are shown.
        now: The time, seconds since 1970.
    """
    lines = [
        f"job {_plain(status['job'])}   generation {status['generation']} ({status['status']})   "
        f"leader {_plain(status['leader'] or '-')}   step {status['step']}   "
        f"{status['samples_per_second']:.1f} samples/s",
        "",
        f"{'worker':<24}{'host':<18}{'phase':<10}{'step':>8}{'compute':>11}",
    ]
    for worker, member in sorted(members.items(), key=lambda item: _place(status["members"], item[0])):
        phase = "leaving" if member.is_leaving else member.phase
        compute = f"{1e3 * member.compute_seconds:.1f} ms" if member.num_timed else ""
        lines.append(f"{_plain(worker):<24}{_plain(member.host):<18}{phase:<10}{member.step:>8}{compute:>11}")
    if not members:
        lines.append("(no worker)")
    if events:
        lines += ["", "last events"]
    for event in [event for event in events if event["event"] != "progress"][-8:]:
        details = " ".join(f"{k}={v}" for k, v in event.items() if k not in ("t", "worker", "event"))
        ago = f"{now - event['t']:.1f} s ago"
        lines.append(_plain(f"{ago:>14}  {event['worker']:<16} {event['event']:<11} {details}")[:118])
    return "\n".join(lines) + "\n"


def _place(members: Sequence[str], worker: str) -> tuple[int, str]:
    return (members.index(worker) if worker in members else len(members), worker)


def _plain(text: str) -> str:
    """Leave out what could move the cursor."""
    return "".join(character if character.isprintable() else "?" for character in text)


def watch(
    controller: Controller,
    events: Path | None = None,
    interval_seconds: float = 1.0,
    num_pages: int | None = None,
    out: TextIO | None = None,
) -> dict[str, Any]:
    """Show a job until interrupted, or until all its workers have gone.

    Args:
        controller: The job.
        events: Its event log, if it is on this host.
        interval_seconds: Time between two pages.
        num_pages: Pages to show; ``None`` for as many as it takes.
        out: Where to; standard output by default.

    Returns:
        The last status.
    """
    out = out or sys.stdout
    shown, has_run, status = 0, False, controller.status()
    try:
        while True:
            members = controller.members()
            found = read_events(events) if events is not None and events.exists() else []
            text = page(status, members, found, time.time())
            out.write(_CLEAR + text if out.isatty() else text + "\n")
            out.flush()
            shown, has_run = shown + 1, has_run or bool(members)
            if shown == num_pages or (has_run and not members):
                break
            time.sleep(interval_seconds)
            status = controller.status()
    except KeyboardInterrupt:
        out.write("\n")
    return status
