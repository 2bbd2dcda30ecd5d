"""Who is still there: processes of this host by the kernel's word, others by their leases.

A worker of this host whose process is gone counts as lost at once. One whose lease ran out although its process is
there hangs: it is killed, so that its connections close and its peers notice. A worker of another host whose lease ran
out cannot be killed from here; this process's connections to that host are shut instead, which frees a collective that
waits for it just the same.

Callers may not assume that a process that lacks processor time is spared for ever: after three leases it counts as
hung.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import time
from pathlib import Path

from elastic_train.coordinator import Member

__all__ = ["Watch", "cut_connections", "is_gone", "start_ticks"]

_logger = logging.getLogger(__name__)


class Watch:
    """Remembers members from look to look, and strikes those whose lease ran out meanwhile.

    Args:
        worker: This worker.
        lease_seconds: Length of a lease.

    Attributes:
        seen: The members at the last look.
    """

    def __init__(self, worker: str, lease_seconds: float):
        self._worker, self._lease_seconds = worker, lease_seconds
        self._host = socket.gethostname()
        self.seen: dict[str, Member] = {}
        self._suspects: dict[str, tuple[Member, float]] = {}
        self._looked = float("-inf")

    def strike(self, found: dict[str, Member]) -> list[str]:
        """Deal with members whose lease ran out; returns those that were killed or cut off.

        Args:
            found: The members whose lease holds.

        Who was not looking itself when the lease ran out, as it was paused, judges nobody.
        """
        now = time.monotonic()
        is_watching, self._looked = now - self._looked < self._lease_seconds / 2, now
        struck = []
        for worker, member in self.seen.items():
            if is_watching and worker not in found and worker != self._worker and member.phase != "left":
                if member.host == self._host and member.pid != os.getpid():
                    self._suspects[worker] = (member, now)
                elif member.host != self._host:
                    cut_connections(member.address)
                    struck.append(worker)
        self.seen = found
        for worker, (member, since) in list(self._suspects.items()):
            if worker in found or is_gone(member):
                del self._suspects[worker]
            elif _is_stopped(member.pid) or now - since > 2 * self._lease_seconds:
                del self._suspects[worker]
                struck.append(worker)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(member.pid, signal.SIGKILL)
        return struck


def cut_connections(address: str) -> int:
    """Shut this process's TCP connections to an address; returns how many there were."""
    num_cut = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            connection = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue  # no socket, or closed since
        with connection:
            try:
                is_stream = connection.type == socket.SOCK_STREAM and connection.family in (
                    socket.AF_INET, socket.AF_INET6)  # fmt: skip
                peer = connection.getpeername()[0] if is_stream else None
                if is_stream and peer == address:
                    connection.shutdown(socket.SHUT_RDWR)
                    num_cut += 1
            except OSError:
                pass  # listens, or is closed already
    return num_cut


def _process_fields(pid: int) -> list[str]:
    """Return what the kernel says of a process, from its state on; ``["X"]`` when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["X"]


def start_ticks(pid: int) -> int:
    """Return when a process started, 0 when it is gone or a zombie."""
    fields = _process_fields(pid)
    return 0 if fields[0] in "ZX" else int(fields[19])


def _is_stopped(pid: int) -> bool:
    """Whether a process was stopped by a signal or a debugger."""
    return _process_fields(pid)[0] in "Tt"


def is_gone(member: Member) -> bool:
    """Whether a member ran on this host and its process has ended."""
    if member.host != socket.gethostname() or member.pid == os.getpid():
        return False
    return start_ticks(member.pid) != member.pid_started
