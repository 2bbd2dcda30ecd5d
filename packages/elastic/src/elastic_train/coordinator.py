"""What the leader does about membership: one pure function from what it sees to the next generation.

Members report a phase in their own leased record. The decision depends on nothing else, so a new leader takes over in
mid-course without being told anything, and the function is tested on every combination.

========  =============================================================================
phase     meaning
========  =============================================================================
ready     prepared, waits to be taken in
running   trains in ``generation``
failed    lost a peer in ``generation``, waits for a generation of the survivors
========  =============================================================================

Where several processes hold one replica of a sharded model, they come and go together: while one of them is missing,
the others do not count.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from elastic_train.generation import Generation

__all__ = ["Change", "Limits", "Member", "decide", "whole_replicas"]

_COHORT_SECONDS = 60.0


@dataclass(frozen=True)
class Member:
    """A worker as its record shows it.

    Attributes:
        worker: Its id.
        phase: ``"ready"``, ``"running"`` or ``"failed"``.
        generation: Number of the generation it runs or failed in, 0 before the first.
        host: Host name.
        pid: Process id there.
        pid_started: Start time of the process in kernel ticks, which tells it from a later one of the same id.
        joined: Order of joining.
        is_leaving: Whether it asked to leave.
        broken: Newest generation whose group it could not connect.
        address: Address its sockets bind to.
        replaces: Worker whose place it takes in the same switch, empty for none.
        step: Steps it has committed.
        compute_seconds: Running mean of its own part of a step, before it waits for others.
        samples_per_second: Running mean of the job's throughput as it sees it.
        num_timed: Steps in these means.
        cohort: Name of a set of newcomers that join in one switch, empty for none.
        cohort_size: Their number.
        replica: Name of the replica that it holds a shard of, empty when it holds the whole model.
        replica_size: Processes of the replica.
        data: How often its data loader lets a sample count, ``"exactly once"`` or ``"at least once"``.
        can_restore: Whether it can begin at a checkpoint.
    """

    worker: str
    phase: str = "ready"
    generation: int = 0
    host: str = ""
    pid: int = 0
    pid_started: int = 0
    joined: float = 0.0
    is_leaving: bool = False
    broken: int = 0
    address: str = ""
    replaces: str = ""
    step: int = 0
    compute_seconds: float = 0.0
    samples_per_second: float = 0.0
    num_timed: int = 0
    cohort: str = ""
    cohort_size: int = 1
    replica: str = ""
    replica_size: int = 1
    data: str = ""
    can_restore: bool = False


@dataclass(frozen=True)
class Limits:
    """How many workers a job may have."""

    min_workers: int = 1
    max_workers: int = 64


@dataclass(frozen=True)
class Change:
    """What the leader writes next: a commit of the newest generation, or a new one of ``members``."""

    members: tuple[str, ...]
    reason: str


def decide(newest: Generation | None, alive: dict[str, Member], limits: Limits, now: float = 0.0) -> Change | None:
    """Return what to do about membership now.

    Args:
        newest: The newest generation, ``None`` before the first.
        alive: Workers whose lease holds and whose process lives.
        limits: Bounds on the number of workers.
        now: The time, on the clock of ``Member.joined``; newcomers of an incomplete cohort wait for a minute.

    Returns:
        A change, or ``None`` to wait.

    >>> decide(None, {"a": Member("a")}, Limits(min_workers=1)).members
    ('a',)
    """
    alive = whole_replicas(alive)
    ready = sorted(
        (m for m in alive.values() if m.phase == "ready"),
        key=lambda m: (not m.replaces, m.joined, m.replica, m.worker),
    )
    newcomers = [m.worker for m in ready if not m.is_leaving]
    if newest is None:
        enough = len(newcomers) >= limits.min_workers
        return Change(tuple(newcomers[: limits.max_workers]), "start") if enough else None
    newcomers = [w for w in newcomers if _has_its_cohort(alive[w], ready, now)]
    failed = [m for m in alive.values() if m.phase == "failed"]
    running = [m for m in alive.values() if m.phase == "running"]
    if failed:
        return _recover(newest, alive, failed, running)
    if newest.status == "commit" and not running and newcomers and all(alive[w].can_restore for w in newcomers):
        enough = len(newcomers) >= limits.min_workers  # all who trained are lost: go on from a checkpoint
        return Change(tuple(newcomers[: limits.max_workers]), "restart") if enough else None
    if newest.status == "prepare":
        if all(w in alive and alive[w].phase == "running" and alive[w].generation >= newest.number
               for w in newest.members):  # fmt: skip
            return Change(newest.members, "commit")
        is_broken = any(m.broken >= newest.number for m in alive.values())
        if all(w in alive for w in newest.members) and not is_broken:
            return None
        base = [w for w in newest.members if w in alive and alive[w].phase == "running"]
        # Who was to be replaced still runs, and stays when its replacement died.
        base += sorted(m.worker for m in running if m.worker not in newest.members)
        if not running:  # the first generation lost a member before it ran
            enough = len(newcomers) >= limits.min_workers
            return Change(tuple(newcomers[: limits.max_workers]), "start") if enough else None
        return _resize(newest, base, newcomers, alive, limits, is_forced=True)
    return _resize(newest, [w for w in newest.members if w in alive], newcomers, alive, limits)


def whole_replicas(alive: dict[str, Member]) -> dict[str, Member]:
    """Return the members without those of incomplete replicas; what is said of one holds for its whole replica.

    >>> alive = {name: Member(name, replica=name[:2], replica_size=2) for name in ("r0.0", "r0.1", "r1.1")}
    >>> list(whole_replicas(alive))
    ['r0.0', 'r0.1']
    """
    if not any(member.replica for member in alive.values()):
        return alive
    replicas: dict[str, list[Member]] = {}
    for member in alive.values():
        replicas.setdefault(member.replica or member.worker, []).append(member)
    whole = {}
    for members in replicas.values():
        if len(members) == 1 and not members[0].replica:
            whole[members[0].worker] = members[0]
        elif len(members) >= members[0].replica_size:
            shared = {
                "joined": max(m.joined for m in members),
                "is_leaving": any(m.is_leaving for m in members),
                "replaces": next((m.replaces for m in members if m.replaces), ""),
            }
            whole.update((m.worker, replace(m, **shared)) for m in members)
    return whole


def _has_its_cohort(member: Member, ready: list[Member], now: float) -> bool:
    """Whether all that are to join with a newcomer are ready, or it has waited long enough for them."""
    present = sum(m.cohort == member.cohort for m in ready)
    return not member.cohort or present >= member.cohort_size or now - member.joined > _COHORT_SECONDS


def _recover(
    newest: Generation, alive: dict[str, Member], failed: list[Member], running: list[Member]
) -> Change | None:
    """Gather the survivors once all of them know of the failure."""
    if running:
        return None
    is_given_up = any(max(m.generation, m.broken) >= newest.number for m in failed)
    if not is_given_up and all(w in alive for w in newest.members):
        return None
    order = {worker: rank for rank, worker in enumerate(newest.members)}
    survivors = sorted((m.worker for m in failed), key=lambda w: (order.get(w, len(order)), w))
    return Change(tuple(survivors), "failure")


def _resize(
    newest: Generation,
    base: list[str],
    newcomers: list[str],
    alive: dict[str, Member],
    limits: Limits,
    is_forced: bool = False,
) -> Change | None:
    """Let those go that want to, take in those that wait."""
    replaced = {alive[w].replaces for w in newcomers}
    replicas = {alive[w].replica for w in replaced if w in alive} - {""}
    replaced |= {w for w in alive if alive[w].replica in replicas}
    staying = [w for w in base if not alive[w].is_leaving and w not in replaced]
    wanted = (staying + newcomers)[: limits.max_workers]
    if len(wanted) < limits.min_workers:
        wanted = (base + newcomers)[: limits.max_workers]
    lost = [w for w in newest.members if w not in alive and w not in wanted]
    if not wanted or (lost and not is_forced):
        return None  # those who still train will notice and report
    if tuple(wanted) == newest.members and not is_forced:
        return None
    grows, shrinks = any(w in newcomers for w in wanted), len(staying) < len(base)
    reason = "replace" if grows and shrinks else "scale-out" if grows else "scale-in"
    return Change(tuple(wanted), reason)
