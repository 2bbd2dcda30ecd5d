"""Groups over NCCL, one per generation, and what the installed NCCL can do about membership.

By default a generation gets a fresh communicator, made in the background, and the old one is aborted: that works with
every version. NCCL 2.27 and later can also shrink and grow a communicator, at a step boundary only and not while its
operations run; :func:`nccl_features` says what is there, nothing here relies on it.

This module imports without a GPU and without NCCL. It was tested against a stand-in of torch's class only.

Callers may not assume that ``wait`` of a NCCL operation returns when it is done: torch's only orders streams. A dead
peer would never be noticed, so :class:`DeviceWork` waits for the operation itself, for a bounded time.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from elastic_train.errors import input_error

__all__ = ["DeviceWork", "connect_nccl", "nccl_features"]

# From this version on, shrinking with abort was reported to hang.
_SHRINK_ABORT_HANGS = (2, 31)
_SHRINK_SINCE, _GROW_SINCE = (2, 27), (2, 29)


def connect_nccl(store: Any, rank: int, size: int, device: torch.device | str, timeout: timedelta) -> Any:
    """Make a communicator over the members of a generation.

    Args:
        store: Where they meet, under a prefix of this generation's own.
        rank: This worker's rank.
        size: Number of members.
        device: This worker's CUDA device.
        timeout: Longest wait for one operation.

    Raises:
        InputError: torch was built without NCCL.

    Collective: all members.
    """
    kind: Any = getattr(dist, "ProcessGroupNCCL", None)
    if kind is None:
        raise input_error("device", str(device), "a build of torch with NCCL", "keep the module on the CPU")
    # Without this torch's watchdog ends the process when a peer is lost; here the survivors go on.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    options = kind.Options()
    options._timeout = timeout
    options.config.blocking = 0  # needed for an abort while an operation runs
    group = kind(store, rank, size, options)
    group.eager_connect_single_device(torch.device(device))
    return group


class DeviceWork:
    """An operation of a GPU that is waited for on the host.

    Args:
        work: Torch's handle.
        timeout_seconds: Longest wait.
    """

    def __init__(self, work: Any, timeout_seconds: float):
        self._work, self._deadline = work, time.monotonic() + timeout_seconds
        self._timeout_seconds = timeout_seconds

    def wait(self) -> None:
        """Return when the operation is done.

        Raises:
            RuntimeError: It was not done in time; the group cannot be used any more.
        """
        while not self._work.is_completed():
            if time.monotonic() > self._deadline:
                raise RuntimeError(
                    f"an operation of NCCL is not done: expected within {self._timeout_seconds:g} s; a peer was lost"
                )
            time.sleep(1e-4)
        self._work.wait()


def nccl_features() -> dict[str, Any]:
    """Return what the installed torch and NCCL offer.

    Returns:
        ``available``; ``version``, empty without NCCL; ``abort``; ``shrink`` and ``shrink_abort`` (left aside where it
        is known to hang); ``grow``.

    >>> sorted(nccl_features())
    ['abort', 'available', 'grow', 'shrink', 'shrink_abort', 'version']
    """
    kind: Any = getattr(dist, "ProcessGroupNCCL", None)
    version = _version() if kind is not None else ()
    has_shrink = hasattr(dist, "shrink_group") and version >= _SHRINK_SINCE
    return {
        "available": kind is not None,
        "version": ".".join(map(str, version)),
        "abort": hasattr(kind, "abort"),
        "shrink": has_shrink,
        "shrink_abort": has_shrink and version < _SHRINK_ABORT_HANGS,
        "grow": version >= _GROW_SINCE,
    }


def _version() -> tuple[int, ...]:
    from torch.cuda import nccl

    try:
        return tuple(int(part) for part in nccl.version()[:3])
    except (AttributeError, RuntimeError):
        return ()
