"""Reading what workers logged."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from elastic_train.errors import JobStateError

__all__ = ["changeover_seconds", "gaps", "median_step", "read_log", "read_logs", "wait_until"]


def read_log(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a log that a worker may be writing to."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def read_logs(folder: Path, pattern: str = "*.jsonl") -> list[dict[str, Any]]:
    """Return the lines of all logs in order of time."""
    lines = [line for path in folder.glob(pattern) if "events" not in path.name for line in read_log(path)]
    return sorted(lines, key=lambda line: line["at"])


def gaps(lines: list[dict[str, Any]]) -> list[tuple[float, dict[str, Any]]]:
    """Return the seconds from each line of one worker to the next, with that next line; probes left out."""
    return [(after["at"] - before["at"], after) for before, after in pairwise(lines) if "is_probe" not in after]


def median_step(lines: list[dict[str, Any]], size: int) -> float:
    """Return the median seconds of a step over ``size`` workers, without the first two."""
    return median([gap for gap, line in gaps([line for line in lines if line["size"] == size])][2:])


def changeover_seconds(lines: list[dict[str, Any]], old: int, new: int, since: float) -> float:
    """Return the time from the last step of ``old`` workers to the first of ``new`` ones, of logs in order of time."""
    after = next(line["at"] for line in lines if line["size"] == new and line["at"] > since)
    before = max(line["at"] for line in lines if line["size"] == old and line["at"] < after)
    return after - before


def wait_until(condition: Callable[[], Any], what: str, seconds: float = 240.0) -> None:
    """Wait for something.

    Raises:
        JobStateError: It did not happen in time.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise JobStateError(f"{what} did not happen: expected within {seconds:g} s; run on a quieter machine")
        time.sleep(0.2)  # seldom, as each look reads the logs and takes time from those it watches
