"""Planned faults: kill, stop or delay a rank at a chosen moment of a chosen collective.

The plan travels to the ranks with the launch, and ``comm.Group`` lets it strike as a collective begins; nothing is
patched. "Kill rank 2 at step 5 during all_reduce" is ``FaultPlan.kill(2, step=5, during="all_reduce")``, where steps
are those the program announces with ``group.set_step``. A program without steps counts calls instead.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from core_kernels.errors import argument_error

__all__ = ["Fault", "FaultPlan"]

_ACTIONS = ("kill", "stop", "delay")


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        action: ``"kill"`` (SIGKILL), ``"stop"`` (SIGSTOP, the process hangs) or ``"delay"`` (sleeps ``seconds``).
        rank: Rank it strikes.
        during: Name of the collective, such as ``"all_reduce"``; ``None`` matches all.
        step: Announced step at which it strikes; ``None`` matches all.
        tag: Tag of the collective; ``None`` matches all.
        call: Number of matching collectives to let pass first.
        seconds: Length of a delay; for kill and stop, how long after the collective's begin.
    """

    action: str
    rank: int
    during: str | None = None
    step: int | None = None
    tag: str | None = None
    call: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.action not in _ACTIONS:
            raise argument_error("action", self.action, f"one of {', '.join(_ACTIONS)}", "choose one of them")
        if self.rank < 0 or self.call < 0 or self.seconds < 0:
            raise argument_error("fault", self, "rank, call and seconds of at least 0", "count from 0")

    def matches(self, collective: str, tag: str, step: int) -> bool:
        """Whether a collective is one this fault waits for."""
        return self.during in (None, collective) and self.tag in (None, tag) and self.step in (None, step)


@dataclass(frozen=True)
class FaultPlan:
    """Faults of one launch; pass it as ``run_ranks(..., faults=plan)``.

    Attributes:
        faults: The faults, each strikes once.

    >>> plan = FaultPlan.kill(2, step=5, during="all_reduce") + FaultPlan.delay(0, 0.1, during="broadcast")
    >>> [fault.action for fault in plan.faults]
    ['kill', 'delay']
    """

    faults: tuple[Fault, ...] = ()

    @classmethod
    def kill(
        cls,
        rank: int,
        during: str | None = None,
        step: int | None = None,
        tag: str | None = None,
        call: int = 0,
        seconds: float = 0.0,
    ) -> Self:
        """Kill a rank with SIGKILL."""
        return cls((Fault("kill", rank, during, step, tag, call, seconds),))

    @classmethod
    def stop(
        cls,
        rank: int,
        during: str | None = None,
        step: int | None = None,
        tag: str | None = None,
        call: int = 0,
        seconds: float = 0.0,
    ) -> Self:
        """Stop a rank with SIGSTOP: it keeps its connections and never answers."""
        return cls((Fault("stop", rank, during, step, tag, call, seconds),))

    @classmethod
    def delay(
        cls,
        rank: int,
        seconds: float,
        during: str | None = None,
        step: int | None = None,
        tag: str | None = None,
        call: int = 0,
    ) -> Self:
        """Make a rank ``seconds`` late for a collective."""
        return cls((Fault("delay", rank, during, step, tag, call, seconds),))

    def __add__(self, other: FaultPlan) -> FaultPlan:
        return FaultPlan(self.faults + other.faults)

    def for_rank(self, rank: int) -> FaultInjector | None:
        """Return what strikes one rank, ``None`` when nothing does."""
        mine = [fault for fault in self.faults if fault.rank == rank]
        return FaultInjector(mine) if mine else None


class FaultInjector:
    """The faults of one rank, counting the collectives it starts.

    Args:
        faults: Faults of this rank.
        send_signal: How a signal is sent to this process; tests pass their own.
    """

    def __init__(self, faults: list[Fault], send_signal: Callable[[int], None] | None = None):
        self._waiting = [[fault, fault.call] for fault in faults]
        self._send_signal = send_signal or (lambda number: os.kill(os.getpid(), number))

    def strike(self, collective: str, tag: str, step: int) -> None:
        """Let the faults strike that wait for this collective."""
        for entry in list(self._waiting):
            fault, passes_left = entry
            if not fault.matches(collective, tag, step):
                continue
            if passes_left > 0:
                entry[1] -= 1
                continue
            self._waiting.remove(entry)
            self._act(fault)

    def _act(self, fault: Fault) -> None:
        if fault.action == "delay":
            time.sleep(fault.seconds)
            return
        number = signal.SIGKILL if fault.action == "kill" else signal.SIGSTOP
        if fault.seconds > 0:
            timer = threading.Timer(fault.seconds, self._send_signal, (number,))
            timer.daemon = True
            timer.start()
        else:
            self._send_signal(number)
