"""Newcomers that get ready on processor time nobody else wants.

Starting Python and importing torch takes seconds of a core. Under Linux's idle policy a newcomer runs only while no
other program wants the core, and gives it up at once when one does; a high niceness does not give it up at once, and
delays every step of those who train by some milliseconds. Before it joins, a newcomer returns to the normal policy, as
from then on others wait for it. That takes a privilege (``CAP_SYS_NICE`` or ``RLIMIT_NICE``): where it is missing,
newcomers stay as they are.
"""

from __future__ import annotations

import contextlib
import os
import threading

__all__ = ["can_return", "hold_back", "let_go"]


def can_return() -> bool:
    """Return whether this user may leave the idle policy again, by trying it in a thread of its own."""
    if not hasattr(os, "SCHED_IDLE"):
        return False
    outcome = []

    def attempt() -> None:  # a policy belongs to a thread, and ends with it
        try:
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
            outcome.append(True)
        except OSError:
            outcome.append(False)

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    return outcome == [True]


def hold_back(pid: int) -> None:
    """Let a process that was just started run on idle time; the threads it makes inherit that."""
    with contextlib.suppress(ProcessLookupError):
        os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))


def let_go(pid: int | None = None) -> int:
    """Let all threads of a process, by default this one, run normally again; returns how many were held back."""
    num_held = 0
    if not hasattr(os, "SCHED_IDLE"):
        return 0
    for name in os.listdir(f"/proc/{pid or os.getpid()}/task"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            if os.sched_getscheduler(int(name)) == os.SCHED_IDLE:
                os.sched_setscheduler(int(name), os.SCHED_OTHER, os.sched_param(0))
                num_held += 1
    return num_held
