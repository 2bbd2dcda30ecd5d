"""Rows of the benchmark that are done, kept in its JSON file, so that a run that was cut short can be resumed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from elastic_train.errors import input_error

__all__ = ["KeptRows"]


class KeptRows:
    """The finished changes and sizes of a run.

    Args:
        path: The JSON file, rewritten whole after each change and size; ``None`` keeps nothing.
        settings: What the figures depend on; a file of other settings is not resumed.
        is_resumed: Whether to begin with what the file holds.

    Raises:
        InputError: The file is damaged or has other settings.

    >>> kept = KeptRows(None, {"step_seconds": 0.02})
    >>> kept.add("2 to 3", 6.0, [{"change": "2 to 3", "state_megabytes": 6.0}])
    >>> kept.find("2 to 3", 6.0), kept.find("2 to 3", 100.0)
    ([{'change': '2 to 3', 'state_megabytes': 6.0}], [])
    """

    def __init__(self, path: str | Path | None, settings: dict[str, Any], is_resumed: bool = False):
        self._path, self._settings = None if path is None else Path(path), settings
        self._rows: list[dict[str, Any]] = []
        if is_resumed and self._path is None:
            raise input_error("resume", is_resumed, "a JSON file to resume from", "name it with --json FILE")
        if is_resumed and self._path is not None and self._path.exists():
            self._rows = self._read(self._path)

    def _read(self, path: Path) -> list[dict[str, Any]]:
        try:
            kept = json.loads(path.read_bytes())
            rows, settings = kept["sizes"], kept["settings"]
            if not all(isinstance(row["change"], str) and row["state_megabytes"] > 0 for row in rows):
                raise ValueError("it has other fields")
        except (OSError, ValueError, KeyError, TypeError) as error:
            remedy = "delete it, or run without --resume"
            raise input_error(f"{path}", str(error)[:60], "a result of elastic-train bench", remedy) from error
        if settings != self._settings:
            remedy = "give the same arguments, or run without --resume"
            raise input_error(f"settings in {path}", settings, f"those of this run, {self._settings}", remedy)
        return rows

    def find(self, change: str, megabytes: float) -> list[dict[str, Any]]:
        """Return the rows of a change and size, none when it was not finished."""
        return [row for row in self._rows if (row["change"], row["state_megabytes"]) == (change, megabytes)]

    def add(self, change: str, megabytes: float, rows: list[dict[str, Any]]) -> None:
        """Keep the rows of a change and size."""
        self._rows = [row for row in self._rows if (row["change"], row["state_megabytes"]) != (change, megabytes)]
        self._rows += rows
        if self._path is not None:
            new = self._path.with_name(self._path.name + ".new")
            new.write_text(json.dumps({"settings": self._settings, "sizes": self._rows}, indent=1) + "\n")
            os.replace(new, self._path)
