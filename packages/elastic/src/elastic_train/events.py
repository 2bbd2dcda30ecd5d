"""Events of a job, one JSON object per line, so that every pause can be looked up."""

from __future__ import annotations

import json
import logging
import math
import time
from pathlib import Path
from typing import Any

from elastic_train.errors import input_error

__all__ = ["EventLog", "read_events"]

_logger = logging.getLogger(__name__)


class EventLog:
    """Writes the events of one worker; training goes on when they cannot be written, such as to a full disk.

    Args:
        path: File shared by all workers of a host; ``None`` writes nothing. Lines are appended whole.
        worker: Id of this worker.
    """

    def __init__(self, path: str | Path | None, worker: str):
        self._path, self._worker, self._is_failing = path, worker, False

    def write(self, event: str, **fields: Any) -> None:
        """Append one event with the time and this worker's id."""
        if self._path is None:
            return
        line = json.dumps({"t": time.time(), "worker": self._worker, "event": event, **fields}) + "\n"
        try:
            with open(self._path, "a") as file:
                file.write(line)
            self._is_failing = False
        except OSError as error:
            if not self._is_failing:
                _logger.warning("events of worker %s are not written: %s; make room or correct the path",
                                self._worker, error)  # fmt: skip
            self._is_failing = True


def read_events(path: str | Path) -> list[dict[str, Any]]:
    """Return the events of a file in order of time.

    Raises:
        InputError: A line is damaged; the message has its number. A last line without an end is left out, as a worker
            may be writing it.
    """
    events = []
    for number, line in enumerate(Path(path).read_bytes().splitlines(keepends=True), 1):
        if not line.strip():
            continue
        try:
            event = json.loads(line)
            is_whole = isinstance(event, dict) and isinstance(event["worker"], str) and isinstance(event["event"], str)
            if not is_whole or not math.isfinite(event["t"]):
                raise ValueError("it has other fields")
        except (ValueError, KeyError, TypeError) as error:
            if not line.endswith(b"\n"):
                break
            shown = line[:60].decode("utf-8", "replace").rstrip("\n")
            expected, remedy = "a JSON object with t, worker and event", "delete the line or restore the file"
            raise input_error(f"{path}, line {number}", shown, expected, remedy) from error
        events.append(event)
    return sorted(events, key=lambda event: event["t"])
