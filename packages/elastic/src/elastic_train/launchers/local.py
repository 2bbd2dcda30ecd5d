"""Start and stop the workers of a job on this host, one process each.

The launcher starts processes and sends signals, nothing else: membership is the workers' own business, so a job goes on
when its launcher is gone. Workers get their place through environment variables, see :func:`elastic_train.init`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from elastic_train.controller import Controller
from elastic_train.errors import JobStateError, input_error

__all__ = ["LocalJob"]


class LocalJob:
    """The worker processes of one job.

    Args:
        command: Program and arguments of a worker; a name that ends in ``.py`` runs under this Python.
        folder: Where the store and the events of the job are; made when it is not there.
        job_id: Name of the job.
        min_workers: Workers that the job waits for at its start.
        max_workers: Most workers of the job.
        environment: Variables to add.
        niceness: Added to the scheduling priority of workers that do not start the job, so that their start takes
            less from those that train.
        prefix: Worker ids are this and a number; another one than ``"w"`` adds to a job that runs already.
    """

    def __init__(
        self,
        command: Sequence[str],
        folder: str | Path,
        job_id: str = "job",
        min_workers: int = 1,
        max_workers: int = 64,
        environment: dict[str, str] | None = None,
        niceness: int = 0,
        prefix: str = "w",
    ):
        if not command:
            raise input_error("command", list(command), "a program", "name the training script")
        if not 1 <= min_workers <= max_workers:
            raise input_error("min_workers", min_workers, f"between 1 and max_workers={max_workers}", "correct them")
        self._command = [sys.executable, *command] if command[0].endswith(".py") else list(command)
        self.folder, self.job_id = Path(folder), job_id
        self.folder.mkdir(parents=True, exist_ok=True)
        self.store = f"file://{self.folder.absolute()}"
        self.events = self.folder / f"{job_id}-events.jsonl"
        self._max_workers, self._niceness, self._prefix, self._started = max_workers, niceness, prefix, 0
        self._environment = {
            **os.environ,
            "ELASTIC_TRAIN_STORE": self.store,
            "ELASTIC_TRAIN_JOB": job_id,
            "ELASTIC_TRAIN_MIN_WORKERS": str(min_workers),
            "ELASTIC_TRAIN_MAX_WORKERS": str(max_workers),
            "ELASTIC_TRAIN_EVENTS": str(self.events),
            **(environment or {}),
        }
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def scale_out(self, num_workers: int = 1) -> list[str]:
        """Start workers, which join when they are ready; returns their ids.

        Raises:
            JobStateError: The job would have more than its most workers.
        """
        running = sum(process.poll() is None for process in self.processes.values())
        if running + num_workers > self._max_workers:
            raise JobStateError(
                f"{running} + {num_workers} workers are too many: expected at most {self._max_workers}; start fewer"
            )
        is_late = bool(self.processes) or self._prefix != "w"
        names, first = [], self._started
        for _ in range(num_workers):
            name = f"{self._prefix}{self._started}"
            self._started += 1
            command = (
                ["nice", "-n", str(self._niceness), *self._command] if is_late and self._niceness else self._command
            )
            environment = {**self._environment, "ELASTIC_TRAIN_WORKER": name}
            if is_late and num_workers > 1:
                environment["ELASTIC_TRAIN_COHORT"] = f"{self._prefix}{first}:{num_workers}"
            self.processes[name] = subprocess.Popen(command, env=environment)
            names.append(name)
        return names

    def wait_for_workers(self, num_workers: int, timeout_seconds: float = 60.0) -> None:
        """Wait until the newest generation has this many members.

        Raises:
            JobStateError: All workers ended, or the time is over.
        """
        controller = Controller(self.store, self.job_id)
        deadline = time.monotonic() + timeout_seconds
        try:
            while len(members := controller.status()["members"]) < num_workers:
                ended = all(process.poll() is not None for process in self.processes.values())
                if ended or time.monotonic() > deadline:
                    why = "all workers ended" if ended else f"{timeout_seconds:g} s passed"
                    raise JobStateError(
                        f"job {self.job_id!r} has {len(members)} members: expected {num_workers}, but {why}; "
                        "read what the workers printed"
                    )
                time.sleep(0.05)
        finally:
            controller.close()

    def scale_in(self, workers: Sequence[str]) -> None:
        """Ask workers to leave at the end of a step."""
        controller = Controller(self.store, self.job_id)
        try:
            controller.scale_in(workers)
        finally:
            controller.close()

    def wait(self, timeout_seconds: float | None = None) -> dict[str, int]:
        """Wait until all workers have ended; returns their exit codes."""
        return {name: process.wait(timeout_seconds) for name, process in self.processes.items()}

    def close(self) -> None:
        """Kill the workers that still run."""
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()

    def __enter__(self) -> LocalJob:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
