"""A worker's agent: a background thread that keeps the worker's place in the job.

It renews the worker's lease, takes part in electing the leader, and connects the groups of new generations while the
training thread goes on. When it leads, it also watches the others and decides on membership. A member whose process is
gone is struck out at once; one whose lease ran out although its process is there hangs, and is killed where it runs on
the same host, so that its connections close and the others notice.

Callers may not assume that the agent changes what the training thread uses: it only offers groups, see ``offered``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from elastic_train.coordinator import Limits, Member, decide
from elastic_train.election import Election
from elastic_train.errors import FencedError, StoreError
from elastic_train.events import EventLog
from elastic_train.generation import Generation, GenerationLog
from elastic_train.group import Links, connect, serve_rendezvous
from elastic_train.stores.base import Store

__all__ = ["Agent"]

_logger = logging.getLogger(__name__)


class Agent:
    """The agent of one worker.

    Args:
        store: The job's store.
        job: Job id; all keys begin with it.
        worker: Id of this worker.
        limits: Bounds on the number of workers.
        events: Where events go.
        lease_seconds: After this long without a sign a worker counts as lost.
        timeout_seconds: Longest wait for peers in a group.
        interface: Address that sockets bind to.
        poll_seconds: Time between two looks at the store.
    """

    def __init__(
        self,
        store: Store,
        job: str,
        worker: str,
        limits: Limits,
        events: EventLog,
        lease_seconds: float = 2.0,
        timeout_seconds: float = 10.0,
        interface: str = "127.0.0.1",
        poll_seconds: float = 0.02,
    ):
        self._store, self._prefix, self._worker = store, f"{job}/", worker
        self._limits, self._events, self._interface = limits, events, interface
        self._lease_seconds, self._timeout_seconds, self._poll_seconds = lease_seconds, timeout_seconds, poll_seconds
        self._election = Election(store, self._prefix + "leader", worker, lease_seconds)
        self._log = GenerationLog(store, self._prefix + "generation")
        self._lock, self._wake, self._stop = threading.RLock(), threading.Event(), threading.Event()
        pid = os.getpid()
        self._member = Member(worker, "ready", 0, socket.gethostname(), pid, _start_ticks(pid), time.time())
        self._seen: dict[str, Member] = {}
        self._suspects: dict[str, tuple[Member, float]] = {}
        self._offer: tuple[int, Links | None] = (0, None)
        self._building, self._claimed = 0, 0
        self._due, self._looked = 0.0, float("-inf")
        self._server: Any = None
        self._wants_to_leave = False
        self.newest: Generation | None = None
        self.failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=f"elastic-agent-{worker}", daemon=True)

    @property
    def is_leader(self) -> bool:
        """Whether this worker leads."""
        return self._election.is_leader

    def is_member_of(self, generation: Generation) -> bool:
        """Whether a generation includes this worker."""
        return self._worker in generation.members

    def start(self) -> None:
        """Publish this worker as ready and begin."""
        self._publish()
        self._thread.start()

    def report_running(self, generation: int) -> None:
        """Publish that this worker trains in a generation."""
        with self._lock:
            self._member = replace(self._member, phase="running", generation=generation)
        self._publish()
        self._wake.set()

    def report_failed(self, generation: int) -> int:
        """Publish that a generation failed; returns the newest one that is given up with it.

        A group that was being built beside the failed one may hold the lost peer as well, so it is given up too.
        """
        with self._lock:
            given_up = max(generation, self._building)
            self._member = replace(self._member, phase="failed", generation=given_up)
            links, self._offer = self._offer[1], (0, None)
        if links is not None:
            links.drop()
        self._publish()
        self._wake.set()
        return given_up

    def ask_to_leave(self) -> None:
        """Ask to be left out of the next generation; safe in a signal handler."""
        self._wants_to_leave = True
        self._wake.set()

    def offered(self) -> tuple[int, Links | None]:
        """Return the number of a generation that this worker can switch to, 0 for none, and its group.

        The group is ``None`` when the generation leaves this worker out.
        """
        with self._lock:
            return self._offer

    def take(self) -> Links | None:
        """Take over the offered group."""
        with self._lock:
            links = self._offer[1]
            self._offer = (0, None)
            return links

    def close(self) -> None:
        """End; the record says so until its lease runs out, so that nobody takes this worker for one that hangs."""
        self._stop.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(5)
        self._member = replace(self._member, phase="left")
        with contextlib.suppress(StoreError):
            self._publish()
            self._election.resign()

    def _key(self, worker: str) -> str:
        return f"{self._prefix}member/{worker}"

    def _publish(self) -> None:
        with self._lock:
            self._store.put(self._key(self._worker), asdict(self._member), None, self._lease_seconds)
            self._due = time.monotonic() + self._lease_seconds / 4

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._tick()
            except FencedError as error:
                _logger.info("worker %s: %s", self._worker, error)
            except Exception as error:
                self.failure = error
                _logger.exception("worker %s: its agent ends", self._worker)
                return
            self._wake.wait(self._poll_seconds)
            self._wake.clear()

    def _tick(self) -> None:
        is_due = time.monotonic() >= self._due or self._wants_to_leave > self._member.is_leaving
        if is_due:
            self._read_wish()
            self._publish()
        members = self._look()
        if is_due or self._claimed == 0 or not self._election.is_leader:
            self._election.campaign()
        self.newest = self._log.read()
        if self._election.is_leader:
            if self._claimed != self._election.epoch:
                self._log.claim(self._election.epoch)
                self._claimed = self._election.epoch
                self._events.write("leader", epoch=self._claimed)
            self._lead(members)
        self._follow()

    def _read_wish(self) -> None:
        """Leave when this process or a controller asks for it."""
        if self._member.is_leaving:
            return
        if self._wants_to_leave or self._store.delete(f"{self._prefix}leave/{self._worker}"):
            with self._lock:
                self._member = replace(self._member, is_leaving=True)

    def _look(self) -> dict[str, Member]:
        """Return the living members; strike out the dead and kill those that hang."""
        entries = self._store.scan(f"{self._prefix}member/")
        found = {entry.value["worker"]: Member(**entry.value) for entry in entries.values()}
        for worker, member in list(found.items()):
            if _is_gone(member):
                self._store.delete(self._key(worker), entries[self._key(worker)].version)
                self._election.depose(worker)
                del found[worker]
        self._kill_hung(found)
        return {worker: member for worker, member in found.items() if member.phase != "left"}

    def _kill_hung(self, found: dict[str, Member]) -> None:
        """Kill members of this host whose lease ran out while we watched, although their process is there.

        One that is stopped is killed at once. Another may just lack processor time, so it gets two more leases.
        """
        now = time.monotonic()
        is_watching, self._looked = now - self._looked < self._lease_seconds / 2, now
        for worker, member in self._seen.items():
            is_local = member.host == self._member.host and worker != self._worker
            if is_watching and worker not in found and is_local and member.phase != "left":
                self._suspects[worker] = (member, now)
        self._seen = found
        for worker, (member, since) in list(self._suspects.items()):
            if worker in found or _is_gone(member):
                del self._suspects[worker]
            elif _is_stopped(member.pid) or now - since > 2 * self._lease_seconds:
                del self._suspects[worker]
                self._events.write("killed", lost=worker)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(member.pid, signal.SIGKILL)

    def _lead(self, members: dict[str, Member]) -> None:
        change = decide(self.newest, members, self._limits)
        if change is None:
            return
        epoch = self._election.epoch
        if change.reason == "commit":
            assert self.newest is not None
            self.newest = self._log.commit(epoch, self.newest.number)
            self._events.write("commit", generation=self.newest.number, members=list(self.newest.members))
            return
        self._server, address = serve_rendezvous(self._interface)
        self.newest = self._log.propose(epoch, change.members, address, change.reason)
        self._events.write("propose", generation=self.newest.number, members=list(change.members), reason=change.reason)

    def _follow(self) -> None:
        """Begin to connect the newest generation, or offer to leave when it is without this worker."""
        newest = self.newest
        if newest is None or newest.number <= self._building or newest.number <= self._member.generation:
            return
        if newest.status == "commit" and self._worker in newest.members:
            return
        self._building = newest.number
        if self._worker in newest.members:
            threading.Thread(target=self._build, args=(newest,), daemon=True).start()
        elif self._member.phase == "running":
            with self._lock:
                self._offer = (newest.number, None)

    def _build(self, generation: Generation) -> None:
        begin = time.monotonic()
        try:
            links = connect(generation, self._worker, self._interface, self._timeout_seconds)
        except RuntimeError as error:
            self._events.write("unconnected", generation=generation.number, error=str(error)[:300])
            with self._lock:
                self._member = replace(self._member, broken=generation.number)
            self._publish()
            return
        with self._lock:
            is_newest = self._member.generation < generation.number == self._building
            if is_newest:
                self._offer = (generation.number, links)
        if is_newest:
            seconds = time.monotonic() - begin
            self._events.write("connected", generation=generation.number, seconds=seconds)
        else:
            links.drop()


def _process_fields(pid: int) -> list[str]:
    """Return what the kernel says of a process, from its state on; ``["X"]`` when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["X"]


def _start_ticks(pid: int) -> int:
    """Return when a process started, 0 when it is gone or a zombie."""
    fields = _process_fields(pid)
    return 0 if fields[0] in "ZX" else int(fields[19])


def _is_stopped(pid: int) -> bool:
    """Whether a process was stopped by a signal or a debugger."""
    return _process_fields(pid)[0] in "Tt"


def _is_gone(member: Member) -> bool:
    """Whether a member ran on this host and its process has ended."""
    return member.host == socket.gethostname() and _start_ticks(member.pid) != member.pid_started
