"""Who is in a group: making groups, splitting them, and saying where a rank is when something goes wrong.

:class:`Membership` is the part of a group that does not move data. It builds groups from a process group, from a store
or for one rank, keeps the rank's record on the launcher's status board, lets planned faults strike, and turns whatever
a transport throws into a ``CollectiveError`` that names rank, world size, collective, tag and seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist

from core_kernels.comm._status import StatusBoard
from core_kernels.comm._wire import Wire
from core_kernels.comm.counters import ByteCounters
from core_kernels.comm.handle import Handle
from core_kernels.errors import ArgumentError, CollectiveError, argument_error

__all__ = ["Membership"]


# Subgroups made of the default store's groups, by their global ranks: several Groups may wrap one process group.
_num_made: dict[str, int] = {}


class Membership:
    """A rank's place in a group; see :class:`~core_kernels.comm.Group` for arguments and attributes."""

    def __init__(self, process_group: Any = None, timeout_seconds: float = 60.0):
        if not timeout_seconds > 0:
            raise argument_error("timeout_seconds", timeout_seconds, "a positive number", "pass seconds, such as 60.0")
        if process_group is None and not dist.is_initialized():
            raise argument_error(
                "process_group",
                None,
                "an initialised torch.distributed",
                "start ranks with core_kernels.launch, or use Group.single() for one rank",
            )
        self._setup(Wire(dist.group.WORLD if process_group is None else process_group), timeout_seconds)

    def _setup(self, wire: Wire | None, timeout_seconds: float) -> None:
        self._wire: Any = wire  # None in a group of one, whose collectives never reach it
        self._store: Any = None
        self._num_subgroups: dict[str, int] = {}
        self._status: tuple[StatusBoard, int] | None = None
        self._faults: Any = None
        self.rank, self.size = (wire.rank, wire.size) if wire else (0, 1)
        self.backend = wire.backend if wire else "single"
        self.device = wire.device() if wire else torch.device("cpu")
        self.timeout_seconds = timeout_seconds
        self.counters = ByteCounters()
        self.step = -1

    @classmethod
    def single(cls, device: torch.device | str = "cpu") -> Self:
        """Return a group of one rank that needs no ``torch.distributed``."""
        group = cls.__new__(cls)
        group._setup(None, 60.0)
        group.device = torch.device(device)
        return group

    @classmethod
    def from_store(
        cls, store: Any, rank: int, world_size: int, timeout_seconds: float = 60.0, backend: str = "gloo"
    ) -> Self:
        """Build a group of its own from a ``torch.distributed`` store, outside the global registry.

        Args:
            store: A store that all ranks reach; keys already in it must not be those of another live group.
            rank: This process's number.
            world_size: Number of ranks.
            timeout_seconds: Longest wait for building the group and for one collective.
            backend: ``"gloo"`` or ``"nccl"``.

        Returns:
            The group. Several may live in one process, with different members.
        """
        if backend not in ("gloo", "nccl"):
            raise argument_error("backend", backend, "'gloo' or 'nccl'", "choose one of the two")
        if world_size == 1:
            group = cls.single("cpu" if backend == "gloo" else f"cuda:{torch.cuda.current_device()}")
            group.timeout_seconds = timeout_seconds
            return group
        if backend == "gloo":
            members: Any = dist.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=timeout_seconds))
        else:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=timeout_seconds)
            members = dist.ProcessGroupNCCL(store, rank, world_size, options)
        group = cls(members, timeout_seconds)
        group._store = store
        return group

    def __repr__(self) -> str:
        where = f"backend={self.backend!r}, device={str(self.device)!r}"
        return f"{type(self).__name__}(rank={self.rank}, size={self.size}, {where})"

    @property
    def world_size(self) -> int:
        """Number of ranks, the name ``torch.distributed`` uses."""
        return self.size

    @property
    def process_group(self) -> Any:
        """The ``torch.distributed`` process group below, ``None`` for a group of one made by :meth:`single`."""
        return self._wire.process_group if self._wire else None

    def set_step(self, step: int) -> None:
        """Announce the training step, for error messages and fault plans."""
        self.step = step
        self._report("", "")

    def subgroup(self, ranks: Sequence[int], timeout_seconds: float | None = None) -> Self:
        """Return the group of some ranks of this group.

        Args:
            ranks: Ranks of this group, in the order of their new numbers; must contain this rank.
            timeout_seconds: Longest wait for one collective; this group's when ``None``.

        Returns:
            A group outside the global registry of ``torch.distributed``: use its methods, not ``dist.all_reduce(...)``.

        Collective: the ranks named, all with the same list. (``dist.new_group`` would need all ranks of the job, or
        the same number of earlier groups on each member.)
        """
        ranks, seconds = list(ranks), timeout_seconds or self.timeout_seconds
        if self.rank not in ranks or len(set(ranks)) != len(ranks) or not all(0 <= r < self.size for r in ranks):
            raise argument_error(
                "ranks", ranks, f"distinct ranks below {self.size}, {self.rank} among them", "name each member once"
            )
        if len(ranks) == 1:
            group = type(self).single(self.device)
            group.timeout_seconds = seconds
        else:
            store = dist.PrefixStore(self._name_subgroup(ranks), self._own_store())
            group = type(self).from_store(store, ranks.index(self.rank), len(ranks), seconds, self.backend)
        group._status, group._faults, group.step = self._status, self._faults, self.step
        return group

    def _own_store(self) -> Any:
        # A group that torch.distributed made keeps its keys in the default store, which has no public accessor.
        return self._store if self._store is not None else dist.distributed_c10d._get_default_store()

    def _name_subgroup(self, ranks: Sequence[int]) -> str:
        """Return a store prefix on which all members agree, and which no earlier group has used."""
        if self._store is None:
            ranks = [dist.get_global_rank(self.process_group, rank) for rank in ranks]
        name = "-".join(map(str, ranks))
        made = _num_made if self._store is None else self._num_subgroups
        made[name] = made.get(name, 0) + 1
        return f"core_kernels/{name}/{made[name]}"

    # -- running one operation ---------------------------------------------------------------------------------------

    def _start(
        self,
        collective: str,
        tag: str,
        post: Callable[[], list[Any]],
        finish: Callable[[], Any],
        async_op: bool,
    ) -> Any:
        """Post an operation; return its handle, or its result when it is synchronous."""
        with self._entered(collective, tag, time.monotonic()):
            if self._faults is not None:
                self._faults.strike(collective, tag, self.step)
            handle = Handle(self, collective, tag, post(), finish)
        return handle if async_op else handle.wait()

    @contextmanager
    def _entered(self, collective: str, tag: str, begin: float) -> Iterator[None]:
        """Record that this rank is inside a collective, and name it in whatever goes wrong there."""
        self._report(collective, tag)
        try:
            yield
        except (CollectiveError, ArgumentError):
            raise
        except RuntimeError as error:
            seconds = time.monotonic() - begin
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            if seconds >= 0.95 * self.timeout_seconds:
                reason = f"a peer did not answer within timeout_seconds={self.timeout_seconds:g} ({reason})"
            raise CollectiveError(
                f"{reason}; look at the other ranks for the first failure, or raise timeout_seconds",
                rank=self.rank,
                world_size=self.size,
                collective=collective,
                tag=tag,
                seconds=seconds,
            ) from error
        self._report("", "")

    def _report(self, collective: str, tag: str) -> None:
        if self._status is not None:
            board, slot = self._status
            board.write(slot, collective, tag, self.step)
