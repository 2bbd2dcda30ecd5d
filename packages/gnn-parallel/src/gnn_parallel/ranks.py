"""Which ranks talk to whom: all of them, those of one host, and those with the same number on every host.

A strategy's exchange runs *inside* a host. With one host that is the whole group. With several, every host holds all
features and trains on its share of the batch, and gradients are summed over the whole group; the columns that NFP
spreads over the ranks of a host are summed *across* hosts, over the ranks that hold the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from core_kernels.comm import Group
from gnn_parallel.background import BackgroundThread
from gnn_parallel.errors import input_error

__all__ = ["Early", "Ranks", "check_hosts"]


@dataclass(frozen=True)
class Early:
    """What prepares batches in the background.

    Attributes:
        group: The ranks of a host, for the thread alone; its bytes count with those of the host's group.
        thread: The thread.
    """

    group: Group
    thread: BackgroundThread


@dataclass(frozen=True)
class Ranks:
    """The groups a rank belongs to.

    Attributes:
        whole: All ranks, host by host.
        inside: The ranks of this host.
        across: The ranks with this rank's number, one per host.
        num_hosts: Number of hosts.
    """

    whole: Group
    inside: Group
    across: Group
    num_hosts: int

    @classmethod
    def of(cls, group: Group, num_hosts: int) -> Ranks:
        """Return the groups of this rank; they are made once per group and number of hosts.

        Args:
            group: All ranks.
            num_hosts: Hosts, each with as many ranks.

        Collective: all ranks of ``group``.
        """
        check_hosts(num_hosts, group.size)
        # Kept on the group itself, so that they go when it goes.
        made: dict[int, Ranks] = group.__dict__.setdefault("_ranks_by_hosts", {})
        if num_hosts not in made:
            made[num_hosts] = cls._make(group, num_hosts)
        return made[num_hosts]

    @classmethod
    def _make(cls, group: Group, num_hosts: int) -> Ranks:
        if num_hosts == 1:
            return cls(group, group, Group.single(group.device), 1)
        per_host = group.size // num_hosts
        host, number = divmod(group.rank, per_host)
        inside = group.subgroup(range(host * per_host, (host + 1) * per_host))
        return cls(group, inside, group.subgroup(range(number, group.size, per_host)), num_hosts)

    @property
    def place(self) -> int:
        """Which share of a batch is this rank's: hosts share out the nodes that ranks of one number own."""
        return self.inside.rank * self.num_hosts + (self.whole.rank // self.inside.size)

    @cached_property
    def early(self) -> Early:
        """A second group of the ranks of this host, and the thread that uses it; the first use is collective.

        Engines share it, so that their collectives keep one order on all ranks.
        """
        group = self.inside.subgroup(range(self.inside.size))
        group.counters = self.inside.counters
        return Early(group, BackgroundThread("gnn-parallel batches"))

    def set_step(self, step: int) -> None:
        """Announce the training step to all groups, for error messages."""
        for group in (self.whole, self.inside, self.across):
            group.set_step(step)

    def sent_bytes(self) -> dict[str, int]:
        """Return the bytes this rank has sent per tag, over all its groups."""
        sent: dict[str, int] = {}
        for group in {id(g): g for g in (self.whole, self.inside, self.across)}.values():
            for tag, counted in group.counters.snapshot().items():
                sent[tag] = sent.get(tag, 0) + counted["sent_bytes"]
        return sent


def check_hosts(num_hosts: int, world_size: int) -> None:
    """Raise unless ``world_size`` ranks can be shared out over ``num_hosts`` hosts.

    Raises:
        InputError: The number is not a divisor.
    """
    if num_hosts < 1 or world_size % num_hosts:
        divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
        expected = f"a divisor of world_size={world_size}: one of {', '.join(map(str, divisors))}"
        raise input_error("num_hosts", num_hosts, expected, "give every host as many ranks")
