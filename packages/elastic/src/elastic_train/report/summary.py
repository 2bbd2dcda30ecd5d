"""A job's history, put together from the events of its workers.

Workers write what they see: that they are ready, switched, failed, recovered, left; the leader writes generations and,
every few seconds, the throughput. Here these become spans of workers, a list of generations and a list of pauses.

Callers may not assume that a worker without an end still runs: one that was killed on another host writes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from elastic_train.errors import input_error

__all__ = ["Change", "Pause", "Run", "Span", "summarize"]


@dataclass
class Span:
    """The life of one worker; times are seconds since the first event.

    Attributes:
        worker: Its id.
        ready_seconds: When it was ready to join.
        joined_seconds: When a generation with it ran first, ``None`` when none did.
        end_seconds: Its last event, or when it was lost.
        ended: ``"left"``, ``"lost"``, or ``"running"`` when nothing says that it ended.
    """

    worker: str
    ready_seconds: float
    joined_seconds: float | None = None
    end_seconds: float = 0.0
    ended: str = "running"


@dataclass(frozen=True)
class Change:
    """A generation that ran.

    Attributes:
        generation: Its number.
        seconds: When all its members ran it.
        num_workers: Its members' number.
        members: Their ids.
        reason: Why it was made.
    """

    generation: int
    seconds: float
    num_workers: int
    members: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Pause:
    """How long a change held a worker up.

    Attributes:
        seconds: When it ended.
        worker: Whom.
        pause_seconds: How long.
        kind: ``"switch"`` or ``"recovery"``.
        step: Steps committed at its end.
    """

    seconds: float
    worker: str
    pause_seconds: float
    kind: str
    step: int


@dataclass
class Run:
    """A job's history.

    Attributes:
        begin: Time of the first event, seconds since 1970.
        duration_seconds: From the first event to the last.
        last_step: Steps committed, as far as events say.
        workers: Spans in order of arrival.
        changes: Generations in order.
        pauses: Pauses in order of time.
        throughput: Pairs of seconds and samples per second.
        events: All events.
    """

    begin: float = 0.0
    duration_seconds: float = 0.0
    last_step: int = 0
    workers: dict[str, Span] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)
    pauses: list[Pause] = field(default_factory=list)
    throughput: list[tuple[float, float]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return everything but the events as JSON-able values."""
        content = asdict(self)
        del content["events"]
        content["workers"] = [asdict(span) for span in self.workers.values()]
        return content


def summarize(events: Sequence[dict[str, Any]]) -> Run:
    """Put a job's history together.

    Args:
        events: Events in order of time, see :func:`elastic_train.events.read_events`.

    Returns:
        The history; an empty one of no events.

    Raises:
        InputError: A field of an event has another type than workers write.

    >>> ready = {"t": 5.0, "worker": "w0", "event": "ready"}
    >>> commit = {"t": 6.0, "worker": "w0", "event": "commit", "generation": 1, "members": ["w0"]}
    >>> run = summarize([ready, commit])
    >>> run.workers["w0"].joined_seconds, run.changes[0].num_workers
    (1.0, 1)
    """
    if not events:
        return Run()
    run = Run(begin=events[0]["t"], duration_seconds=events[-1]["t"] - events[0]["t"], events=list(events))
    reasons: dict[int, str] = {}
    for event in events:
        try:
            _add(run, event, reasons)
        except (TypeError, ValueError) as error:
            name = f"event {event['event']!r} of worker {event['worker']!r} at {event['t']}"
            raise input_error(name, event, "the fields that workers write", "delete its line") from error
    return run


def _add(run: Run, event: dict[str, Any], reasons: dict[int, str]) -> None:
    at, worker, kind, step = event["t"] - run.begin, event["worker"], event["event"], int(event.get("step") or 0)
    run.last_step = max(run.last_step, step)
    span = run.workers.setdefault(worker, Span(worker, at))
    if span.ended == "running":
        span.end_seconds = at
    if kind == "propose":
        reasons[int(event.get("generation", 0))] = str(event.get("reason", ""))
    elif kind == "commit":
        _add_change(run, event, at, reasons)
    elif kind in ("switched", "recovered"):
        name = "switch" if kind == "switched" else "recovery"
        run.pauses.append(Pause(at, worker, float(event.get("seconds", 0.0)), name, step))
    elif kind == "progress":
        run.throughput.append((at, float(event.get("samples_per_second", 0.0))))
    elif kind == "left":
        span.ended = "left"
    elif kind == "killed":
        _mark_lost(run, str(event.get("lost", "")), at)


def _add_change(run: Run, event: dict[str, Any], at: float, reasons: dict[int, str]) -> None:
    members = tuple(map(str, event.get("members", ())))
    number = int(event.get("generation", 0))
    before = set(run.changes[-1].members) if run.changes else set()
    reason = reasons.get(number, "")
    run.changes.append(Change(number, at, len(members), members, reason))
    for worker in members:
        span = run.workers.setdefault(worker, Span(worker, at))
        span.joined_seconds = at if span.joined_seconds is None else span.joined_seconds
    if reason == "failure":
        for worker in before - set(members):
            _mark_lost(run, worker, at)


def _mark_lost(run: Run, worker: str, at: float) -> None:
    span = run.workers.get(worker)
    if span is not None and span.ended == "running":
        span.ended, span.end_seconds = "lost", at
