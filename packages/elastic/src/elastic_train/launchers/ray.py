"""Workers as actors of Ray: one actor is one worker.

Ray places actors on the hosts of its cluster and starts them; membership stays the workers' own business, as with every
launcher. ``migrate`` and ``scale`` work as for local workers. The driver serves the store unless it is given one.

    job = RayJob(train, folder, resources={"num_gpus": 1})   # train() is the function that calls elastic_train.init()
    job.scale_out(4)
    job.wait()

Ray is imported when it is needed. Callers may not assume that this was tried on a Ray cluster: it is tested against a
stand-in of the functions that it uses (``init``, ``is_initialized``, ``remote``, ``wait``, ``get``, ``kill``).
"""

from __future__ import annotations

import importlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elastic_train.controller import Controller
from elastic_train.errors import ElasticError, JobStateError, input_error
from elastic_train.launchers.orders import OrderBook
from elastic_train.stores import StoreServer, open_store

__all__ = ["RayJob", "WorkerActor"]

_logger = logging.getLogger(__name__)


class WorkerActor:
    """What runs in an actor: one worker."""

    def run(self, function: Callable[[], Any], environment: dict[str, str]) -> None:
        """Train until the job ends or this worker has left.

        Args:
            function: The training function.
            environment: The worker's place in the job; its interface is this host's address unless named.
        """
        os.environ.update(environment)
        os.environ.setdefault("ELASTIC_TRAIN_INTERFACE", host_address())
        Path(os.environ["ELASTIC_TRAIN_EVENTS"]).parent.mkdir(parents=True, exist_ok=True)
        function()


def host_address() -> str:
    """Return the address of this host that others reach it by; loopback when it has no other."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: only asks which way a packet would leave
        except OSError:
            return "127.0.0.1"
        return probe.getsockname()[0]


class RayJob:
    """The worker actors of one job.

    Args:
        function: Called in each worker; begins with ``elastic_train.init()``.
        folder: Where each host keeps the events of its workers; made when it is not there.
        job_id: Name of the job.
        min_workers: Workers that the job waits for at its start.
        max_workers: Most workers.
        resources: Options of the actors, such as ``{"num_gpus": 1}``.
        store: Address of the job's store; by default this process serves one.
        token: The job's token; made when left out and this process serves the store.
        interface: Address that the served store binds to; this host's own by default.

    Raises:
        ElasticError: Ray is not installed.
    """

    def __init__(
        self,
        function: Callable[[], Any],
        folder: str | Path,
        job_id: str = "job",
        min_workers: int = 1,
        max_workers: int = 64,
        resources: dict[str, Any] | None = None,
        store: str | None = None,
        token: str | None = None,
        interface: str | None = None,
    ):
        if not callable(function):
            raise input_error("function", function, "a function without arguments", "pass the training function")
        if not 1 <= min_workers <= max_workers:
            raise input_error("min_workers", min_workers, f"between 1 and max_workers={max_workers}", "correct them")
        self._ray = _import_ray()
        if not self._ray.is_initialized():
            self._ray.init()
        Path(folder).mkdir(parents=True, exist_ok=True)
        self.job_id, self._function, self._max_workers = job_id, function, max_workers
        token = token or os.environ.get("ELASTIC_TRAIN_TOKEN") or (secrets.token_hex(16) if store is None else None)
        self._server = StoreServer(token or "", interface or host_address()) if store is None else None
        self.store = store if self._server is None else self._server.address
        assert self.store is not None
        self._opened = open_store(self.store, token)
        self._orders = OrderBook(self._opened, job_id, f"ray-{os.getpid()}")
        self._environment = {
            "ELASTIC_TRAIN_STORE": self.store,
            "ELASTIC_TRAIN_JOB": job_id,
            "ELASTIC_TRAIN_MIN_WORKERS": str(min_workers),
            "ELASTIC_TRAIN_MAX_WORKERS": str(max_workers),
            "ELASTIC_TRAIN_EVENTS": str(Path(folder).absolute() / f"{job_id}-events.jsonl"),
            **({"ELASTIC_TRAIN_TOKEN": token} if token else {}),
        }
        self._actor_class = (
            self._ray.remote(**(resources or {}))(WorkerActor) if resources else self._ray.remote(WorkerActor)
        )
        self._started = 0
        self.workers: dict[str, tuple[Any, Any]] = {}
        self.ended: dict[str, BaseException | None] = {}

    def scale_out(self, num_workers: int = 1, replaces: str = "") -> list[str]:
        """Start actors, each of which is a worker; see ``LocalJob.scale_out``.

        Raises:
            JobStateError: The job would have more than its most workers.
        """
        if len(self.workers) + num_workers > self._max_workers:
            raise JobStateError(
                f"{len(self.workers)} + {num_workers} workers are too many: expected at most {self._max_workers}; "
                "start fewer"
            )
        is_late, first, names = self._started > 0, self._started, []
        for _ in range(num_workers):
            name = f"ray{self._started}"
            self._started += 1
            environment = {**self._environment, "ELASTIC_TRAIN_WORKER": name}
            if is_late and num_workers > 1:
                environment["ELASTIC_TRAIN_COHORT"] = f"ray{first}:{num_workers}"
            if replaces:
                self._opened.put(f"{self.job_id}/replace/{name}", {"worker": replaces})
            actor = self._actor_class.remote()
            self.workers[name] = (actor, actor.run.remote(self._function, environment))
            names.append(name)
        return names

    def scale_in(self, workers: list[str] | int) -> list[str]:
        """Ask workers to leave at the end of a step; returns their ids."""
        return Controller(self._opened, self.job_id).scale_in(workers)

    def migrate(self, worker: str) -> str:
        """Start an actor that takes the place of a worker; see ``LocalJob.migrate``."""
        return self.scale_out(1, replaces=worker)[0]

    def serve_orders(self) -> list[str]:
        """Note which workers have ended, and start those that are ordered; returns the ids of the new ones."""
        references = {reference: name for name, (_, reference) in self.workers.items()}
        if references:
            done, _ = self._ray.wait(list(references), num_returns=len(references), timeout=0)
            for reference in done:
                self._note_end(references[reference], reference)
        started = []
        for count, replaces in self._orders.take():
            try:
                started += self.scale_out(count, replaces)
            except JobStateError as error:
                _logger.warning("an order is refused: %s", error)
        return started

    def _note_end(self, worker: str, reference: Any) -> None:
        actor, _ = self.workers.pop(worker)
        try:
            self._ray.get(reference)
            self.ended[worker] = None
        except Exception as error:  # whatever the worker raised, or that its host was lost
            _logger.warning("worker %s failed: %s", worker, error)
            self.ended[worker] = error
        self._ray.kill(actor)

    def wait(self, timeout_seconds: float | None = None) -> dict[str, BaseException | None]:
        """Wait until all workers have ended, and start those that are ordered meanwhile.

        Returns:
            What each worker raised, ``None`` when it ended well.

        Raises:
            TimeoutError: Some still run.
        """
        deadline = float("inf") if timeout_seconds is None else time.monotonic() + timeout_seconds
        while self.workers:
            if time.monotonic() > deadline:
                raise TimeoutError(f"workers {sorted(self.workers)} still run after {timeout_seconds} s")
            self.serve_orders()
            time.sleep(0.1)
        self._orders.close()
        return dict(self.ended)

    def close(self) -> None:
        """Kill the actors that still run, and stop serving the store."""
        for actor, _ in self.workers.values():
            self._ray.kill(actor)
        self.workers = {}
        self._opened.close()
        if self._server is not None:
            self._server.close()

    def __enter__(self) -> RayJob:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _import_ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ElasticError(
            "Ray is not installed: expected the package ray for RayJob; pip install ray, or use LocalJob"
        ) from error
