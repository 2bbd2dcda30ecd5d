"""The job of this process, so that a training script need not pass it around."""

from __future__ import annotations

import os
import signal
import socket
import threading
from typing import TYPE_CHECKING

from elastic_train.errors import InputError, JobStateError, input_error, located
from elastic_train.events import EventLog

if TYPE_CHECKING:
    import torch

    from elastic_train.checkpoints import Checkpoints
    from elastic_train.coordinator import Limits
    from elastic_train.job import Job, StepInfo
    from elastic_train.state import State

__all__ = ["adopt_state", "current_job", "init", "notify_batch_end", "on_resize", "wrap"]

_job: Job | None = None


def init(
    store: str | None = None,
    job_id: str | None = None,
    min_workers: int | None = None,
    max_workers: int | None = None,
    worker_id: str | None = None,
    lease_seconds: float | None = None,
    timeout_seconds: float = 10.0,
    interface: str | None = None,
    token: str | None = None,
    straggler_ratio: float | None = None,
    logical_workers: int = 0,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int = 100,
    checkpoint_keep: int = 2,
) -> Job:
    """Make this process a worker of a job; what is left out comes from the launcher's environment, torchrun's too.

    Args:
        store: Address of the job's store, see :func:`elastic_train.stores.open_store`.
        job_id: Name of the job, the same on all its workers.
        min_workers: Workers to wait for at the start, and fewest to keep when some want to leave.
        max_workers: Most workers; others wait.
        worker_id: Name of this worker, of its own; made from host and process id by default.
        lease_seconds: After this long without a sign a worker counts as lost.
        timeout_seconds: Longest wait for peers in one collective.
        interface: Address that sockets bind to; loopback unless the job spans hosts and names it here or in
            ``ELASTIC_TRAIN_INTERFACE``.
        token: The job's token, see :func:`elastic_train.stores.find_token`.
        straggler_ratio: A worker that computes this many times as long as the median of the others is replaced by a
            fresh one, which the job's launcher starts; ``None`` replaces nobody.
        logical_workers: Shares of a step whose gradients are kept apart, so that weights are bitwise the same for any
            number of workers up to this one; 0 is faster and equal to rounding.
        checkpoint: Folder for checkpoints on disk, seen by all hosts of the job. A job that finds one there when none
            of its workers is left goes on from it. ``None`` writes none.
        checkpoint_every: Steps between two checkpoints.
        checkpoint_keep: How many checkpoints stay.

    Returns:
        The job.

    Raises:
        InputError: Limits that cannot hold, or no store or job id.
        JobStateError: The job has ended already, or another worker has this id.
        StoreError: The store cannot be reached.

    On SIGTERM the worker leaves in good order at the end of a step. Torch's flight recorder, which grows with every
    group and so with every change of membership, is off in workers unless ``TORCH_FR_BUFFER_SIZE`` is set.
    """
    global _job
    from elastic_train.agent import Agent
    from elastic_train.job import Job
    from elastic_train.stores import find_token, open_store

    # torch's recorder of collectives keeps something of every group for ever, and a stack of calls per collective.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")
    place = interface or os.environ.get("ELASTIC_TRAIN_INTERFACE") or "127.0.0.1"
    address, name, worker, min_workers = _find_job(store, job_id, worker_id, min_workers, place)
    with located("init", worker):
        limits = _limits(min_workers, max_workers, logical_workers)
        if straggler_ratio is not None and not straggler_ratio > 1:
            raise input_error("straggler_ratio", straggler_ratio, "above 1", "use 1.2 or more")
        keeper = _keeper(checkpoint, checkpoint_every, checkpoint_keep)
    with located("opening the store", worker):
        secret = find_token(address, token)
        opened = open_store(address, secret)
    with located("joining", worker):
        _check_free(opened, name, worker, keeper is not None)
    lease = lease_seconds or float(os.environ.get("ELASTIC_TRAIN_LEASE_SECONDS", "2.0"))
    events = EventLog(os.environ.get("ELASTIC_TRAIN_EVENTS"), worker)
    agent = Agent(opened, name, worker, limits, events, lease, timeout_seconds, place, 0.02, secret, straggler_ratio,
                  _cohort(), _num_shards())  # fmt: skip
    _job = Job(agent, events, logical_workers=logical_workers)
    if keeper is not None:
        keeper.attach(_job)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: agent.ask_to_leave())
    return _job


def _find_job(
    store: str | None, job_id: str | None, worker: str | None, least: int | None, interface: str
) -> tuple[str, str, str, int | None]:
    """Return store, job, worker and fewest workers; what is not given comes from the environment, torchrun's too."""
    address, name = store or os.environ.get("ELASTIC_TRAIN_STORE"), job_id or os.environ.get("ELASTIC_TRAIN_JOB")
    if not name or not address:
        address, name, worker, least = _ask_torchrun(address, name, worker, least, interface)
    if not address or not name:
        missing = "store" if not address else "job_id"
        raise input_error(missing, None, "a value", "pass it, or start the script with elastic-train run")
    worker = worker or os.environ.get("ELASTIC_TRAIN_WORKER") or f"{socket.gethostname()}-{os.getpid()}"
    return address, name, worker, least


def _ask_torchrun(address, name, worker, least, interface) -> tuple:
    """Fill what is missing from the environment of torchrun, if that started this process."""
    from elastic_train.launchers.torchrun import find_torchrun, open_torchrun_store

    found = find_torchrun(os.environ)
    if found is None:
        return address, name, worker, least
    worker = worker or os.environ.get("ELASTIC_TRAIN_WORKER") or f"rank{found.rank}"
    with located("meeting the workers of torchrun", worker, found.rank):
        address = address or open_torchrun_store(found, interface)
    if least is None and "ELASTIC_TRAIN_MIN_WORKERS" not in os.environ:
        least = found.world_size
    return address, name or found.run, worker, least


def _keeper(path: str | os.PathLike[str] | None, every_steps: int, num_kept: int) -> Checkpoints | None:
    from elastic_train.checkpoints import Checkpoints

    return None if path is None else Checkpoints(path, every_steps, num_kept)


def _num_shards() -> int:
    return int(os.environ.get("ELASTIC_TRAIN_SHARDS", "1"))


def _limits(min_workers: int | None, max_workers: int | None, logical_workers: int) -> Limits:
    """Return the limits of the job; they come from the launcher where the script does not say."""
    from elastic_train.coordinator import Limits

    least = _number(min_workers, "ELASTIC_TRAIN_MIN_WORKERS", 1)
    most = _number(max_workers, "ELASTIC_TRAIN_MAX_WORKERS", max(64, least))
    if not 1 <= least <= most:
        raise input_error("min_workers", least, f"between 1 and max_workers={most}", "correct the limits")
    if logical_workers < 0 or 0 < logical_workers < least:
        expected = f"0, or at least min_workers={least}"
        raise input_error("logical_workers", logical_workers, expected, "use a multiple of the usual number of workers")
    most, size = min(most, logical_workers) if logical_workers else most, _num_shards()
    return Limits(least * size, most * size)


def _number(value: int | None, variable: str, default: int) -> int:
    return value if value is not None else int(os.environ.get(variable, default))


def _cohort() -> tuple[str, int]:
    """Return the set of newcomers that a launcher started together with this one."""
    name, _, size = os.environ.get("ELASTIC_TRAIN_COHORT", "").partition(":")
    return name, int(size or 1)


def _check_free(store, job: str, worker: str, can_restore: bool) -> None:
    from elastic_train.coordinator import Member
    from elastic_train.liveness import is_gone

    members, key = store.scan(f"{job}/member/"), f"{job}/member/{worker}"
    if key in members and is_gone(Member(**{"worker": worker, **members[key].value})):
        store.delete(key, members.pop(key).version)  # an earlier process of this id, which has ended
    if key in members:
        raise JobStateError(
            f"worker id {worker!r} is taken in job {job!r}: expected an id of its own on host {socket.gethostname()}; "
            "pass another worker_id"
        )
    newest = store.get(f"{job}/generation")
    if newest is not None and not members and not can_restore:
        raise JobStateError(
            f"job id {job!r} is taken: its generation {newest.value['number']} has ended and no worker is left; "
            "choose another job id, or name the folder of its checkpoints"
        )


def current_job() -> Job:
    """Return the job of this process.

    Raises:
        InputError: There is none yet.
    """
    if _job is None:
        raise InputError("this process has no job: expected elastic_train.init(...) before; call it first")
    return _job


def adopt_state(state: State) -> None:
    """Make ``state`` the state of this process's job, if there is one."""
    if _job is not None:
        _job.state = state


def wrap(module: torch.nn.Module) -> torch.nn.Module:
    """Sum the module's gradients over the workers of the job; returns the module itself."""
    return current_job().wrap(module)


def notify_batch_end() -> StepInfo:
    """End a training step; membership changes here."""
    return current_job().notify_batch_end()


def on_resize(callback) -> None:
    """Call ``callback(info)`` whenever membership has changed."""
    current_job().on_resize(callback)
