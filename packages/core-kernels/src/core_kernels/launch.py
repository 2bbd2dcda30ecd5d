"""Start local ranks, or find the group this process already belongs to.

``run_ranks`` starts worker processes on this machine, gives each a :class:`~core_kernels.comm.Group` and returns what
they return. A program started by ``torchrun`` or Slurm asks ``current_group`` for its group instead. The ranks
rendezvous through a file, so no port is fixed, and their sockets stay on the loopback interface.

Callers may not assume that module state of the launcher exists in a rank: each rank is a fresh interpreter.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from core_kernels._ranks import RankFailedError, RankSet, RankSettings
from core_kernels.comm.group import Group
from core_kernels.errors import argument_error

if TYPE_CHECKING:
    from core_kernels.testing.faults import FaultPlan

__all__ = ["RankFailedError", "current_group", "run_ranks"]

# The group of this process: set inside a rank of run_ranks, or by the first current_group() elsewhere.
_current: Group | None = None


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    threads: int = 1,
    timeout_seconds: float = 60.0,
    backend: str = "gloo",
    env: dict[str, str] | None = None,
    faults: FaultPlan | None = None,
    deadline_seconds: float | None = None,
) -> list[Any]:
    """Run ``fn(group, *args)`` on local ranks and return their results in rank order.

    Args:
        fn: A function defined at the top of a module; ``torch.distributed`` is initialised when it is called.
        world_size: Number of ranks.
        *args: Passed to every rank, by pickle.
        threads: Threads of each rank (OpenMP and torch).
        timeout_seconds: Longest wait for one collective.
        backend: ``"gloo"``, or ``"nccl"`` with rank ``r`` on CUDA device ``r``.
        env: Environment variables to add.
        faults: Faults to inject, for tests.
        deadline_seconds: Longest time for the whole run, start-up included; ``None`` sets no limit.

    Returns:
        One result per rank.

    Raises:
        BaseException: The first failure of a rank, as it was raised there; notes carry its traceback and where the
            other ranks were.
        RankFailedError: A rank died or ``deadline_seconds`` passed; the message names rank, signal, collective, tag.

    All ranks have ended when this returns or raises, and end with the calling process if that is killed.
    """
    ranks = RankSet(RankSettings(world_size, threads, timeout_seconds, backend, env, faults))
    try:
        results = ranks.run(fn, args, deadline_seconds)
    except BaseException:
        ranks.kill()
        raise
    ranks.close()
    return results


def current_group(timeout_seconds: float = 600.0) -> Group:
    """Return the group this process was started in.

    Inside ``run_ranks`` that is the rank's group; with ``torch.distributed`` initialised, its default group; under
    ``torchrun`` or Slurm (``srun`` with ``MASTER_ADDR`` set), a group initialised from the environment, on NCCL when
    CUDA is available and on gloo otherwise; else a group of one.

    Args:
        timeout_seconds: Longest wait for one collective, when the group is made here.

    Collective: the first call, by all ranks of the job. A group made here is destroyed when the program ends.

    >>> current_group().size
    1
    """
    global _current
    if _current is None:
        _current = _join_environment(timeout_seconds)
    return _current


def _join_environment(timeout_seconds: float) -> Group:
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        return Group(timeout_seconds=timeout_seconds)
    if "SLURM_PROCID" in os.environ and "RANK" not in os.environ and int(os.environ.get("SLURM_NTASKS", "1")) > 1:
        os.environ["RANK"] = os.environ["SLURM_PROCID"]
        os.environ["WORLD_SIZE"] = os.environ["SLURM_NTASKS"]
        os.environ["LOCAL_RANK"] = os.environ.get("SLURM_LOCALID", "0")
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return Group.single()
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        remedy = "export them in the job script, or start with torchrun"
        raise argument_error("environment", missing, "MASTER_ADDR and MASTER_PORT to be set", remedy)
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "nccl"
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    dist.init_process_group(backend, init_method="env://", timeout=timedelta(seconds=timeout_seconds))
    atexit.register(_leave_job)
    return Group(timeout_seconds=timeout_seconds)


def _leave_job() -> None:
    """End the group that this process joined, unless the program has done so itself."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
