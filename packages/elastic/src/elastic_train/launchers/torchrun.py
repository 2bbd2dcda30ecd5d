"""A script started by torchrun: its environment names a meeting point, from which a job is formed.

The worker of rank 0 opens a store and leaves its address at the meeting point; the others read it there. On one host
the store is a folder that only its owner can read; over several hosts rank 0 serves it at its interface, and the job's
token must be in ``ELASTIC_TRAIN_TOKEN``, as torchrun's meeting point answers anybody.

Callers may not assume that torchrun knows of changes: workers that join are started with ``elastic-train add``, and
when a worker fails, torchrun ends the others as it always does. With ``ELASTIC_TRAIN_STORE`` set, that store is used.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from elastic_train.errors import StoreError, input_error
from elastic_train.stores import StoreServer

__all__ = ["TorchrunPlace", "find_torchrun", "open_torchrun_store"]

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_kept: list[Any] = []  # what rank 0 serves for as long as its process lives


@dataclass(frozen=True)
class TorchrunPlace:
    """What torchrun tells a worker.

    Attributes:
        rank: Rank of this worker.
        world_size: Workers that were started together.
        local_world_size: Those of this host.
        address: ``host:port`` of the meeting point.
        run: Name of the run and how often it was restarted; the job's name.
        is_served: Whether the agent serves the meeting point, or rank 0 has to.
    """

    rank: int
    world_size: int
    local_world_size: int
    address: tuple[str, int]
    run: str
    is_served: bool


def find_torchrun(environment: Mapping[str, str]) -> TorchrunPlace | None:
    """Return what torchrun says in an environment, ``None`` when it did not start this process.

    >>> find_torchrun({}) is None
    True
    >>> place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "7"}
    >>> find_torchrun(place).run
    'none-0'
    """
    if any(name not in environment for name in _NEEDED):
        return None
    try:
        rank, size, port = (int(environment[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        local = int(environment.get("LOCAL_WORLD_SIZE", size))
    except ValueError as error:
        found = {name: environment[name] for name in _NEEDED}
        raise input_error("environment", found, "whole numbers", "start the script with torchrun") from error
    restarts = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    run = f"{environment.get('TORCHELASTIC_RUN_ID', 'none')}-{restarts}"
    is_served = environment.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true"
    return TorchrunPlace(rank, size, local, (environment["MASTER_ADDR"], port), run, is_served)


def open_torchrun_store(place: TorchrunPlace, interface: str, timeout_seconds: float = 60.0) -> str:
    """Agree on a store with the other workers of torchrun; returns its address.

    Args:
        place: What torchrun says.
        interface: Address of this host that a served store binds to.
        timeout_seconds: Longest wait for the others.

    Raises:
        InputError: Several hosts and no token.
        StoreError: The meeting point or rank 0 cannot be reached.

    Collective: all workers that torchrun started.
    """
    is_host, timeout = place.rank == 0 and not place.is_served, timedelta(seconds=timeout_seconds)
    key = f"elastic-train/{place.run}"
    try:
        meeting = dist.TCPStore(*place.address, is_master=is_host, wait_for_workers=False, timeout=timeout)
        if place.rank > 0:
            return meeting.get(key).decode()
        address = _open(place, interface)
        meeting.set(key, address)
    except (RuntimeError, dist.DistError) as error:
        host, port = place.address
        raise StoreError(
            f"the meeting point {host}:{port} of torchrun does not answer: expected rank 0 there within "
            f"{timeout_seconds:g} s; see what it printed, or set ELASTIC_TRAIN_STORE"
        ) from error
    _kept.append(meeting)
    print(f"elastic-train: job {place.run}, store {address}", file=sys.stderr, flush=True)
    return address


def _open(place: TorchrunPlace, interface: str) -> str:
    if place.local_world_size == place.world_size:
        return f"file://{tempfile.mkdtemp(prefix='elastic-train-')}"
    token = os.environ.get("ELASTIC_TRAIN_TOKEN")
    if not token:
        raise input_error("ELASTIC_TRAIN_TOKEN", None, "the job's secret on every host", "export it before torchrun")
    server = StoreServer(token, interface)
    _kept.append(server)
    return server.address
