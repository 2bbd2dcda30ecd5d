"""A job's history as one HTML file: no script, no reference to anything outside of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape
from statistics import median

from elastic_train.report.drawing import COLORS, draw_page, draw_rows, draw_steps
from elastic_train.report.summary import Run, Span

__all__ = ["render_html"]

_MOST_EVENTS = 2_000


def render_html(run: Run, title: str) -> str:
    """Return the page of a run.

    Args:
        run: The history.
        title: Heading of the page.
    """
    began = datetime.fromtimestamp(run.begin, UTC).strftime("%Y-%m-%d %H:%M:%S UTC") if run.events else "-"
    steps = [("workers", [(change.seconds, float(change.num_workers)) for change in run.changes])]
    note = '<p class="note">Grey: getting ready. A color per generation. Dashed: a worker was lost.</p>'
    parts = [
        ("", _table(("began", "lasted", "steps", "workers", "generations", "longest pause"), [_facts(run, began)])),
        ("Workers", _draw_workers(run) + note),
        ("Number of workers", draw_steps(steps, _end(run), "workers")),
    ]
    if run.throughput:
        parts.append(("Samples per second", draw_steps([("", run.throughput)], _end(run), "samples per second")))
    parts += [("Pauses", _pauses(run)), ("Generations", _generations(run)), ("", _events(run))]
    return draw_page(title, parts)


def _end(run: Run) -> float:
    return max(run.duration_seconds, 1e-3)


def _facts(run: Run, began: str) -> tuple[str, ...]:
    longest = max((pause.pause_seconds for pause in run.pauses), default=0.0)
    return (
        began, f"{run.duration_seconds:.1f} s", str(run.last_step), str(len(run.workers)), str(len(run.changes)),
        f"{longest:.3f} s",
    )  # fmt: skip


def _draw_workers(run: Run) -> str:
    rows = [(span.worker, _bars(run, span)) for span in run.workers.values()]
    lost = [(span.end_seconds, f"{span.worker} was lost") for span in run.workers.values() if span.ended == "lost"]
    return draw_rows(rows, _end(run), lost, "workers over time")


def _bars(run: Run, span: Span) -> list[tuple[float, float, str, str]]:
    joined = span.end_seconds if span.joined_seconds is None else span.joined_seconds
    bars = [(span.ready_seconds, joined, "#bbb", f"{span.worker}: getting ready")]
    ends = [*(change.seconds for change in run.changes[1:]), run.duration_seconds]
    for change, end in zip(run.changes, ends, strict=True):
        stop = min(end, span.end_seconds if span.ended != "running" else run.duration_seconds)
        if span.worker in change.members and stop > change.seconds:
            text = f"{span.worker}: generation {change.generation}, {change.num_workers} workers"
            bars.append((change.seconds, stop, COLORS[change.generation % len(COLORS)], text))
    return bars


def _pauses(run: Run) -> str:
    if not run.pauses:
        return '<p class="note">None.</p>'
    seconds = [pause.pause_seconds for pause in run.pauses]
    note = f"Median {median(seconds):.3f} s, longest {max(seconds):.3f} s, beyond the step in which they fell."
    rows = [
        (f"{p.seconds:.3f}", p.worker, p.kind, str(p.step), f"{p.pause_seconds:.4f}")
        for p in sorted(run.pauses, key=lambda p: -p.pause_seconds)[:50]
    ]
    return f'<p class="note">{note}</p>' + _table(("at, s", "worker", "kind", "step", "pause, s"), rows)


def _generations(run: Run) -> str:
    rows = [
        (str(c.generation), f"{c.seconds:.3f}", c.reason, str(c.num_workers), ", ".join(c.members)) for c in run.changes
    ]
    return _table(("number", "at, s", "reason", "workers", "members"), rows)


def _events(run: Run) -> str:
    known = ("t", "worker", "event")
    rows = [
        (f"{e['t'] - run.begin:.3f}", e["worker"], e["event"],
         " ".join(f"{name}={value}" for name, value in e.items() if name not in known))
        for e in run.events[-_MOST_EVENTS:]
    ]  # fmt: skip
    left_out = len(run.events) - len(rows)
    note = f'<p class="note">The last {len(rows)}; {left_out} before them are left out.</p>' if left_out else ""
    table = _table(("at, s", "worker", "event", "details"), rows)
    return f"<details><summary>All events ({len(run.events)})</summary>{note}{table}</details>"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"
