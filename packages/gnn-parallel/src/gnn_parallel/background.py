"""A thread that prepares coming batches while the caller computes, in the order in which it was asked.

Work of every rank runs in submission order on one thread, and ranks submit alike, so collectives on a group that only
this thread uses meet their peers. Once a collective has failed the group is out of step, so all later work fails at
once, with the same error.
"""

from __future__ import annotations

import atexit
import contextvars
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from core_kernels.errors import CollectiveError

__all__ = ["BackgroundThread"]

_LAST_SECONDS = 5.0
"""How long a process that ends waits for work that still runs, such as batches that nobody took."""

_open: weakref.WeakSet[BackgroundThread] = weakref.WeakSet()


class BackgroundThread:
    """Runs functions one after the other.

    Args:
        name: Of the thread.

    >>> thread = BackgroundThread("doctest")
    >>> thread.submit(max, 3, 4).result()
    4
    """

    def __init__(self, name: str):
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._broken: list[CollectiveError] = []
        # The thread must not keep this object alive, whose end is its own.
        self._thread = threading.Thread(target=_work, args=(self._tasks,), name=name, daemon=True)
        self._thread.start()
        weakref.finalize(self, self._tasks.put, None)
        _open.add(self)

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Run a function after all that were submitted before it, in a copy of the caller's context variables."""
        future: Future[Any] = Future()
        context, broken = contextvars.copy_context(), self._broken

        def task() -> None:
            try:
                if broken:
                    raise broken[0]
                future.set_result(context.run(function, *args))
            except BaseException as error:
                if isinstance(error, CollectiveError) and not broken:
                    broken.append(error)
                future.set_exception(error)

        self._tasks.put(task)
        return future

    def settle(self) -> None:
        """Return when everything submitted so far has run, whatever came of it."""
        done = threading.Event()
        self._tasks.put(done.set)
        done.wait()

    def end(self, timeout_seconds: float) -> None:
        """Let the thread end after what was submitted, and wait for that."""
        self._tasks.put(None)
        self._thread.join(timeout_seconds)


def _work(tasks: SimpleQueue[Callable[[], None] | None]) -> None:
    while True:
        task = tasks.get()
        if task is None:
            return
        task()
        del task  # a batch that was taken must not live until the next is asked for


@atexit.register
def _end_all() -> None:
    # A thread inside a collective while the interpreter shuts down could not take its lock again.
    for thread in list(_open):
        thread.end(_LAST_SECONDS)
