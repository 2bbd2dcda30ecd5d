"""A worker's agent: a background thread that keeps the worker's place in the job.

It renews the worker's lease, takes part in electing the leader, and connects the groups of new generations while the
training thread goes on. When it leads, it also decides on membership. Who leads looks at all members at every turn; the
others look at the leader, and at everybody a few times per lease or when something is amiss, so that a turn costs
little however many workers there are. See :mod:`elastic_train.liveness` for what happens to members that are lost.

An agent that cannot reach the store any more ends, and shuts the worker's connections: a worker that nobody can see
must not train on.

Callers may not assume that the agent changes what the training thread uses: it only offers groups, see ``offered``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from elastic_train.background import let_go
from elastic_train.coordinator import Limits, Member, decide
from elastic_train.election import Election
from elastic_train.errors import FencedError, StoreError
from elastic_train.events import EventLog
from elastic_train.generation import Generation, GenerationLog
from elastic_train.group import Links, connect, serve_rendezvous
from elastic_train.liveness import Watch, cut_connections, is_gone, start_ticks
from elastic_train.stores.base import Store
from elastic_train.stragglers import find_straggler

__all__ = ["Agent"]

_logger = logging.getLogger(__name__)

_PROGRESS_SECONDS = 2.0


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
        token: The job's token.
        straggler_ratio: A worker that computes this many times as long as the median is replaced; ``None`` for none.
        cohort: Name and size of a set of newcomers that join in one switch.
        num_shards: Processes that hold the model together; this worker's id then ends in a dot and its shard.

    Attributes:
        device: Where the module's gradients are.
        interface: As given.
        token: As given.
        num_shards: As given.
        limits: As given.
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
        token: str = "",
        straggler_ratio: float | None = None,
        cohort: tuple[str, int] = ("", 1),
        num_shards: int = 1,
    ):
        self._store, self._prefix, self._worker = store, f"{job}/", worker
        self.limits, self._events, self.interface = limits, events, interface
        self._lease_seconds, self._timeout_seconds, self._poll_seconds = lease_seconds, timeout_seconds, poll_seconds
        self._election = Election(store, self._prefix + "leader", worker, lease_seconds)
        self._log = GenerationLog(store, self._prefix + "generation", worker)
        self._lock, self._wake, self._stop = threading.RLock(), threading.Event(), threading.Event()
        self._publishing = threading.Lock()
        pid = os.getpid()
        self._member = Member(
            worker, "ready", 0, socket.gethostname(), pid, start_ticks(pid), time.time(), address=interface,
            cohort=cohort[0], cohort_size=cohort[1], replica=worker.rpartition(".")[0] if num_shards > 1 else "",
            replica_size=num_shards,
        )  # fmt: skip
        self._watch, self._leader = Watch(worker, lease_seconds), None
        self.token, self._straggler_ratio = token, straggler_ratio
        self.num_shards, self.device = num_shards, "cpu"
        self.connect: Callable[..., Links] = connect
        self._offer: tuple[int, Links | None] = (0, None)
        self._building, self._claimed = 0, 0
        self._due, self._look_due, self._progress_due = 0.0, 0.0, 0.0
        self._records: dict[str, tuple[int, Member]] = {}  # members as read, by key, with their version
        self._server: Any = None
        self._wants_to_leave = False
        self.newest: Generation | None = None
        self.failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=f"elastic-agent-{worker}", daemon=True)

    @property
    def worker(self) -> str:
        """Id of this worker."""
        return self._worker

    @property
    def is_leader(self) -> bool:
        """Whether this worker leads."""
        return self._election.is_leader

    @property
    def is_running(self) -> bool:
        """Whether this worker trains in a generation."""
        return self._member.phase == "running"

    def is_member_of(self, generation: Generation) -> bool:
        """Whether a generation includes this worker."""
        return self._worker in generation.members

    def describe(self, **fields: Any) -> None:
        """Set facts of this worker's record; they are published with the next renewal."""
        with self._lock:
            self._member = replace(self._member, **fields)

    def sees_workers(self) -> bool:
        """Whether a worker of the job trains at present, as far as the store says."""
        members = [Member(**entry.value) for entry in self._store.scan(f"{self._prefix}member/").values()]
        return any(m.phase in ("running", "failed") and not is_gone(m) for m in members)

    @property
    def store(self) -> Store:
        """The job's store."""
        return self._store

    @property
    def job_id(self) -> str:
        """Name of the job."""
        return self._prefix.removesuffix("/")

    def start(self) -> None:
        """Publish this worker as ready and begin."""
        self.publish_ready()
        self._thread.start()

    def publish_ready(self) -> None:
        """Publish this worker as ready, and whom it replaces."""
        order = self._store.get(f"{self._prefix}replace/{self._worker}")
        if order is not None:
            self._member = replace(self._member, replaces=order.value["worker"])
            self._store.delete(f"{self._prefix}replace/{self._worker}")
        self._publish()

    def report_running(self, generation: int) -> None:
        """Let this worker's thread publish that it trains in a generation; the training goes on meanwhile."""
        with self._lock:
            self._member = replace(self._member, phase="running", generation=generation, replaces="", num_timed=0)
            self._due = 0.0
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

    def report_step(self, step: int, compute_seconds: float, samples_per_second: float) -> None:
        """Note how fast this worker is; it is published when the lease is renewed.

        Args:
            step: Steps committed.
            compute_seconds: From getting the batch to waiting for the others.
            samples_per_second: Samples of all workers.
        """
        with self._lock:
            before, weight = self._member, 0.2 if self._member.num_timed else 1.0
            self._member = replace(
                before,
                step=step,
                compute_seconds=before.compute_seconds + weight * (compute_seconds - before.compute_seconds),
                samples_per_second=before.samples_per_second
                + weight * (samples_per_second - before.samples_per_second),
                num_timed=before.num_timed + 1,
            )

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
        with self._publishing:  # one at a time, so that the newest comes last; the training thread need not wait
            with self._lock:
                member, self._due = self._member, time.monotonic() + self._lease_seconds / 4
            self._store.put(self._key(self._worker), asdict(member), None, self._lease_seconds)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.turn()
            except FencedError as error:
                _logger.warning("another worker leads: %s", error)
            except Exception as error:
                self.failure = error
                _logger.exception("worker %s: its agent ends", self._worker)
                for address in {member.address for member in self._watch.seen.values()}:
                    cut_connections(address)
                return
            self._wake.wait(self._poll_seconds)
            self._wake.clear()

    def turn(self) -> None:
        """Look once at what has changed, and act on it."""
        is_due = time.monotonic() >= self._due or self._wants_to_leave > self._member.is_leaving
        if is_due:
            self._read_wish()
            self._publish()
        has_leader = self._leader is not None and not is_gone(self._leader)
        members = None
        if self._election.is_leader or not has_leader or self._member.phase == "failed" or self._is_time_to_look():
            members = self._look()
        if is_due or self._claimed == 0 or not self._election.is_leader:
            self._election.campaign()
        self.newest = self._log.read()
        if self._election.is_leader:
            if self._claimed != self._election.epoch:
                self._log.claim(self._election.epoch)
                self._claimed = self._election.epoch
                self._events.write("leader", epoch=self._claimed)
            self._lead(members or self._look())
            self._write_progress()
        elif members is not None:
            self._leader = members.get(self._election.leader() or "")
        self._follow()

    def _is_time_to_look(self) -> bool:
        return time.monotonic() >= self._look_due

    def _read_wish(self) -> None:
        """Leave when this process or a controller asks for it."""
        if self._member.is_leaving:
            return
        if self._wants_to_leave or self._store.delete(f"{self._prefix}leave/{self._worker}"):
            with self._lock:
                self._member = replace(self._member, is_leaving=True)

    def _look(self) -> dict[str, Member]:
        """Return the living members; strike out those that are lost."""
        self._look_due = time.monotonic() + self._lease_seconds / 5
        entries = self._store.scan(f"{self._prefix}member/")
        before = self._records
        self._records = {
            key: before[key] if key in before and before[key][0] == entry.version
            else (entry.version, Member(**entry.value))
            for key, entry in entries.items()
        }  # fmt: skip
        found = {member.worker: member for _, member in self._records.values()}
        for worker, member in list(found.items()):
            if is_gone(member):
                self._store.delete(self._key(worker), entries[self._key(worker)].version)
                self._election.depose(worker)
                del found[worker]
        for worker in self._watch.strike(found):
            self._events.write("killed", lost=worker)
        return {worker: member for worker, member in found.items() if member.phase != "left"}

    def _lead(self, members: dict[str, Member]) -> None:
        change = decide(self.newest, members, self.limits, time.time())
        if change is None:
            if self._straggler_ratio is not None and self.newest is not None and self.newest.status == "commit":
                self._replace_straggler(members)
            return
        epoch = self._election.epoch
        if change.reason == "commit":
            assert self.newest is not None
            self.newest = self._log.commit(epoch, self.newest.number)
            self._events.write("commit", generation=self.newest.number, members=list(self.newest.members))
            return
        self._server, address = serve_rendezvous(self.interface)
        self.newest = self._log.propose(epoch, change.members, address, change.reason)
        self._events.write("propose", generation=self.newest.number, members=list(change.members), reason=change.reason)

    def _write_progress(self) -> None:
        """Write how far the job is and how fast, now and then."""
        if self._member.num_timed and time.monotonic() >= self._progress_due:
            self._progress_due = time.monotonic() + _PROGRESS_SECONDS
            rate = self._member.samples_per_second
            self._events.write("progress", step=self._member.step, samples_per_second=round(rate, 3))

    def _replace_straggler(self, members: dict[str, Member]) -> None:
        """Order a replacement for a worker that holds the others up; once a minute, as a launcher has to start it."""
        assert self._straggler_ratio is not None
        slow = find_straggler(members, self._straggler_ratio)
        if slow is None or self._store.put(f"{self._prefix}slow/{slow}", {}, 0, 60.0) is None:
            return
        self._events.write("straggler", slow=slow, seconds=members[slow].compute_seconds)
        self._store.put(f"{self._prefix}order/replace-{slow}", {"count": 1, "replaces": slow})

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
            place = (self._worker, self.interface, self._timeout_seconds, self.token, self.num_shards, self.device)
            links = self.connect(generation, *place)
        except RuntimeError as error:
            self._events.write("unconnected", generation=generation.number, error=str(error)[:300])
            with self._lock:
                self._member = replace(self._member, broken=generation.number)
            self._publish()
            return
        with self._lock:
            is_newest = self._member.generation < generation.number == self._building
            if is_newest:
                if os.environ.pop("ELASTIC_TRAIN_BACKGROUND", ""):
                    let_go()  # from here on the others wait for this worker
                self._offer = (generation.number, links)
        if is_newest:
            seconds = time.monotonic() - begin
            self._events.write("connected", generation=generation.number, seconds=seconds)
        else:
            links.drop()
