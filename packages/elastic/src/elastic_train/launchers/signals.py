"""SIGTERM to a command that has workers: they leave in good order or end, but none is left behind."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elastic_train.launchers.local import LocalJob

__all__ = ["ending_on_sigterm", "passing_on_sigterm"]


def _end(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


@contextlib.contextmanager
def _handling(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield
        return
    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def ending_on_sigterm() -> contextlib.AbstractContextManager[None]:
    """Let SIGTERM end this process the way an error does, so that open jobs are closed."""
    return _handling(_end)


def passing_on_sigterm(job: LocalJob) -> contextlib.AbstractContextManager[None]:
    """Let the first SIGTERM ask a job's workers to leave in good order; a second one ends this process."""

    def ask(number: int, _: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, _end)
        for process in job.processes.values():
            if process.poll() is None:
                process.send_signal(number)

    return _handling(ask)
