"""How long the survivors of a killed worker stand still."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from elastic_train.bench._logs import gaps, median_step, read_log, read_logs, wait_until
from elastic_train.bench.changes import start_job

__all__ = ["longest_gap_after", "measure_kill"]


def longest_gap_after(lines: list[dict[str, Any]], moment: float, seconds: float = 1e9) -> float:
    """Return the longest time without the end of a step, over all workers, from a moment on.

    >>> longest_gap_after([{"at": 1.0}, {"at": 2.0}, {"at": 5.0}, {"at": 6.0}], 2.5)
    3.0
    """
    return max(gap for gap, line in gaps(lines) if moment < line["at"] < moment + seconds)


def measure_kill(num_workers: int, megabytes: float, step_seconds: float) -> dict[str, Any]:
    """Kill a worker of a job; returns the longest time without a step."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with start_job(folder, megabytes, step_seconds, num_workers) as job:
            wait_until(lambda: len(read_log(folder / "w0.jsonl")) >= 30, "the start of the job")
            struck = time.monotonic()
            job.processes[f"w{num_workers - 1}"].kill()
            size = num_workers - 1
            wait_until(lambda: sum(line["size"] == size for line in read_log(folder / "w0.jsonl")) >= 10, "recovery")
            lines = read_logs(folder)
    step = median_step(read_log_of(lines), num_workers)
    return {"recovery_seconds": longest_gap_after(lines, struck), "step_seconds": step}


def read_log_of(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one line per step, the first of each."""
    first: dict[int, dict[str, Any]] = {}
    for line in lines:
        first.setdefault(line["step"], line)
    return list(first.values())
