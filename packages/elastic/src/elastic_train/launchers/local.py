"""Start and stop the workers of a job on this host, one process each.

The launcher starts processes and sends signals, nothing else: membership is the workers' own business, so a job goes on
when its launcher is gone. Workers get their place through environment variables, see :func:`elastic_train.init`. While
it waits for them, it also starts those that a controller or a leader orders.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from elastic_train.background import can_return, hold_back, let_go
from elastic_train.controller import Controller
from elastic_train.errors import JobStateError, input_error
from elastic_train.launchers.orders import OrderBook
from elastic_train.stores import open_store

__all__ = ["LocalJob"]

_logger = logging.getLogger(__name__)

_PATIENCE_SECONDS = 60.0


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
            less from those that train; not of those in the background.
        prefix: Worker ids are this and a number; another one than ``"w"`` adds to a job that runs already.
        store: Address of the job's store; ``None`` keeps it in the folder.
        token: The job's token, for a store of another kind.
        in_background: Whether newcomers get ready on idle processor time only, see :mod:`elastic_train.background`;
            without effect where this user may not undo it.
        num_shards: Processes of one worker that hold the model together, see :mod:`elastic_train.sharding`; they are
            called ``w0.0``, ``w0.1`` and so on.
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
        store: str | None = None,
        token: str | None = None,
        in_background: bool = False,
        num_shards: int = 1,
    ):
        if not command:
            raise input_error("command", list(command), "a program", "name the training script")
        if not 1 <= min_workers <= max_workers:
            raise input_error("min_workers", min_workers, f"between 1 and max_workers={max_workers}", "correct them")
        if num_shards < 1:
            raise input_error("num_shards", num_shards, "at least 1", "use 1 for a model that fits one process")
        self._command = [sys.executable, *command] if command[0].endswith(".py") else list(command)
        self.folder, self.job_id = Path(folder), job_id
        self.folder.mkdir(parents=True, exist_ok=True)
        self.store = store or f"file://{self.folder.absolute()}"
        self._opened = open_store(self.store, token)
        self._orders = OrderBook(self._opened, job_id, prefix)
        self.events = self.folder / f"{job_id}-events.jsonl"
        self._max_workers, self._niceness, self._prefix, self._started = max_workers, niceness, prefix, 0
        self._num_shards, self._in_background = num_shards, in_background and can_return()
        self._held_back: dict[int, float] = {}
        self._environment = {
            **os.environ,
            "ELASTIC_TRAIN_STORE": self.store,
            "ELASTIC_TRAIN_JOB": job_id,
            "ELASTIC_TRAIN_MIN_WORKERS": str(min_workers),
            "ELASTIC_TRAIN_MAX_WORKERS": str(max_workers),
            "ELASTIC_TRAIN_EVENTS": str(self.events),
            **({"ELASTIC_TRAIN_TOKEN": token} if token else {}),
            "ELASTIC_TRAIN_SHARDS": str(num_shards),
            **(environment or {}),
        }
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def scale_out(self, num_workers: int = 1, replaces: str = "") -> list[str]:
        """Start workers, which join when they are ready; returns their ids.

        Args:
            num_workers: How many; those started together join in one switch.
            replaces: Worker that leaves in the same switch, for one newcomer.

        Raises:
            JobStateError: The job would have more than its most workers.
        """
        running = sum(process.poll() is None for process in self.processes.values()) // self._num_shards
        if running + num_workers > self._max_workers:
            raise JobStateError(
                f"{running} + {num_workers} workers are too many: expected at most {self._max_workers}; start fewer"
            )
        is_late = bool(self.processes) or self._prefix != "w"
        names, first = [], self._started
        for index in range(first, first + num_workers):
            whole = f"{self._prefix}{index}"
            names += [f"{whole}.{shard}" for shard in range(self._num_shards)] if self._num_shards > 1 else [whole]
        self._started += num_workers
        environment = dict(self._environment)
        if is_late and num_workers > 1:
            environment["ELASTIC_TRAIN_COHORT"] = f"{self._prefix}{first}:{len(names)}"
        for name in names:
            if replaces:
                self._opened.put(f"{self.job_id}/replace/{name}", {"worker": replaces})
            self._start(name, environment, is_late)
        return names

    def _start(self, name: str, environment: dict[str, str], is_late: bool) -> None:
        is_nice = is_late and self._niceness and not self._in_background
        command = ["nice", "-n", str(self._niceness), *self._command] if is_nice else self._command
        is_held_back = is_late and self._in_background
        mark = {"ELASTIC_TRAIN_BACKGROUND": "1"} if is_held_back else {}
        process = subprocess.Popen(command, env={**environment, **mark, "ELASTIC_TRAIN_WORKER": name})
        if is_held_back:
            hold_back(process.pid)
            self._held_back[process.pid] = time.monotonic()
        self.processes[name] = process

    def _let_go(self) -> None:
        """Let newcomers that have waited for idle time too long run normally."""
        now = time.monotonic()
        for pid in [pid for pid, since in self._held_back.items() if now - since > _PATIENCE_SECONDS]:
            del self._held_back[pid]
            with contextlib.suppress(FileNotFoundError):  # it has ended
                let_go(pid)

    def wait_for_workers(self, num_workers: int, timeout_seconds: float = 60.0) -> None:
        """Wait until the newest generation has this many members.

        Raises:
            JobStateError: All workers ended, or the time is over.
        """
        controller = Controller(self._opened, self.job_id)
        deadline = time.monotonic() + timeout_seconds
        expected = num_workers * self._num_shards
        while len(members := controller.status()["members"]) < expected:
            ended = all(process.poll() is not None for process in self.processes.values())
            if ended or time.monotonic() > deadline:
                why = "all workers ended" if ended else f"{timeout_seconds:g} s passed"
                raise JobStateError(
                    f"job {self.job_id!r} has {len(members)} members: expected {expected}, but {why}; "
                    "read what the workers printed"
                )
            time.sleep(0.05)

    def scale_in(self, workers: Sequence[str]) -> None:
        """Ask workers to leave at the end of a step."""
        Controller(self._opened, self.job_id).scale_in(workers)

    def migrate(self, worker: str) -> str:
        """Start a worker that takes the place of another, in one switch; returns its id."""
        return self.scale_out(1, replaces=worker)[0]

    def wait(self, timeout_seconds: float | None = None) -> dict[str, int]:
        """Wait until all workers have ended, and start those that are ordered meanwhile; returns their exit codes.

        Raises:
            TimeoutError: Some still run.
        """
        deadline = float("inf") if timeout_seconds is None else time.monotonic() + timeout_seconds
        while any(process.poll() is None for process in self.processes.values()):
            if time.monotonic() > deadline:
                running = sorted(name for name, process in self.processes.items() if process.poll() is None)
                raise TimeoutError(f"workers {running} still run after {timeout_seconds} s")
            self.serve_orders()
            time.sleep(0.05)
        self._orders.close()
        return {name: process.wait() for name, process in self.processes.items()}

    def serve_orders(self) -> list[str]:
        """Start the workers that a controller or a leader has ordered since; returns their ids."""
        self._let_go()
        started = []
        for count, replaces in self._orders.take():
            try:
                started += self.scale_out(count, replaces)
            except JobStateError as error:
                _logger.warning("an order is refused: %s", error)
        return started

    def close(self) -> None:
        """Kill the workers that still run."""
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()
        self._opened.close()

    def __enter__(self) -> LocalJob:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
