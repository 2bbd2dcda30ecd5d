"""Generations: who takes part in the job, agreed by one compare-and-swap.

A job's membership is a sequence of generations. One record in the store holds the newest; replacing it by
compare-and-swap is the only way to change membership, so generations form one line even when two workers believe they
lead. A leader first stamps the record with its epoch; from then on a leader of a lower epoch is refused.

    prepare --(all its members run)--> commit --(resize, failure)--> prepare (number + 1) ...
       \\--(a newcomer died)--> prepare (number + 1, without it)

Callers may not assume that a prepared generation ever runs: members build its group in the background and switch only
when all of them vote so in one training step.

Source: "Elastic Deep Learning in Multi-Tenant GPU Clusters" for keeping the old topology alive until the switch.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from elastic_train.errors import FencedError, located
from elastic_train.stores.base import Store

__all__ = ["Generation", "GenerationLog"]


@dataclass(frozen=True)
class Generation:
    """One membership of the job.

    Attributes:
        number: 1, 2, 3, …
        epoch: Epoch of the leader that wrote it.
        members: Worker ids; the position is the rank.
        address: ``host:port`` where the members meet to connect.
        status: ``"prepare"`` or ``"commit"``.
        reason: Why it was made, such as ``"start"``, ``"scale-out"``, ``"scale-in"``, ``"failure"``,
            ``"restart"``.
    """

    number: int
    epoch: int
    members: tuple[str, ...]
    address: str = ""
    status: str = "prepare"
    reason: str = "start"


class GenerationLog:
    """The record of the newest generation.

    Args:
        store: The job's store.
        key: Key of the record.
        who: The worker that writes, for messages.

    >>> from elastic_train.stores import MemoryStore
    >>> log = GenerationLog(MemoryStore(), "generation")
    >>> log.propose(epoch=1, members=("a", "b"), address="", reason="start").number
    1
    >>> log.commit(epoch=1, number=1).status
    'commit'
    """

    def __init__(self, store: Store, key: str, who: str = "?"):
        self._store, self._key, self._who = store, key, who

    def read(self) -> Generation | None:
        """Return the newest generation."""
        return self._read()[0]

    def claim(self, epoch: int) -> None:
        """Stamp the record with a new leader's epoch, which shuts out all leaders before it.

        Raises:
            FencedError: A later leader has stamped it already.
        """
        while True:
            newest, version = self._read()
            self._check(newest, epoch, "claiming leadership")
            if newest is None or newest.epoch == epoch or self._write(replace(newest, epoch=epoch), version):
                return

    def propose(self, epoch: int, members: tuple[str, ...], address: str, reason: str) -> Generation:
        """Make the next generation.

        Raises:
            FencedError: This leader has been replaced, or another change came first.
        """
        newest, version = self._read()
        self._check(newest, epoch, "proposing a generation")
        number = newest.number + 1 if newest else 1
        made = Generation(number, epoch, members, address, "prepare", reason)
        return self._replace(made, version)

    def commit(self, epoch: int, number: int) -> Generation:
        """Record that all members of a generation run it.

        Raises:
            FencedError: This leader has been replaced, or the generation is not the newest any more.
        """
        newest, version = self._read()
        self._check(newest, epoch, "committing a generation")
        if newest is None or newest.number != number:
            found = newest.number if newest else 0
            raise FencedError(f"generation {number} is not the newest: expected {found}; read the record again")
        return self._replace(replace(newest, epoch=epoch, status="commit"), version)

    def _read(self) -> tuple[Generation | None, int]:
        entry = self._store.get(self._key)
        if entry is None:
            return None, 0
        return Generation(**{**entry.value, "members": tuple(entry.value["members"])}), entry.version

    def _check(self, newest: Generation | None, epoch: int, phase: str) -> None:
        with located(phase, self._who):
            self._check_epoch(newest, epoch)

    def _check_epoch(self, newest: Generation | None, epoch: int) -> None:
        if epoch < 1 or (newest is not None and newest.epoch > epoch):
            found = newest.epoch if newest else 0
            raise FencedError(
                f"leader of epoch {epoch} is not the leader any more: expected an epoch of at least {max(found, 1)}, "
                "that of the newest leader; stop leading"
            )

    def _write(self, generation: Generation, version: int) -> bool:
        return self._store.put(self._key, asdict(generation), version) is not None

    def _replace(self, generation: Generation, version: int) -> Generation:
        if not self._write(generation, version):
            raise FencedError(
                f"generation {generation.number} was not recorded: expected version {version} of the record, another "
                "change came first; read the record again"
            )
        return generation
