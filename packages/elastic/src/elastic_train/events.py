"""Events of a job, one JSON object per line, so that every pause can be looked up."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

__all__ = ["EventLog", "read_events"]


class EventLog:
    """Writes the events of one worker.

    Args:
        path: File shared by all workers of a host; ``None`` writes nothing. Lines are appended whole.
        worker: Id of this worker.
    """

    def __init__(self, path: str | Path | None, worker: str):
        self._path, self._worker = path, worker

    def write(self, event: str, **fields: Any) -> None:
        """Append one event with the time and this worker's id."""
        if self._path is None:
            return
        line = json.dumps({"t": time.time(), "worker": self._worker, "event": event, **fields}) + "\n"
        with open(self._path, "a") as file:
            file.write(line)


def read_events(path: str | Path) -> list[dict[str, Any]]:
    """Return the events of a file in order of time."""
    return sorted((json.loads(line) for line in Path(path).read_text().splitlines()), key=lambda event: event["t"])
