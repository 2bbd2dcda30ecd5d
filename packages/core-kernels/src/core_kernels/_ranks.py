"""The launcher's side of a set of local rank processes: start, run a function on all, find the first failure, stop.

A failure anywhere ends the set: the launcher waits a moment for the ranks that can still answer, so that a peer's
"connection closed" does not hide the rank that really failed, then kills all of them. Nothing survives the launcher
(see ``_rank_main``).
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe, spawn
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from core_kernels.comm._status import StatusBoard
from core_kernels.errors import CollectiveError, CoreKernelsError, argument_error

__all__ = ["RankFailedError", "RankSet", "RankSettings"]

_GRACE_SECONDS = 0.25
_GRACE_AFTER_COLLECTIVE_ERROR_SECONDS = 1.5


class RankFailedError(CoreKernelsError, RuntimeError):
    """A rank process died, did not end in time, or raised something that cannot be sent back.

    Attributes:
        rank: The rank that failed first.
        world_size: Number of ranks.
    """

    def __init__(self, message: str, rank: int = -1, world_size: int = 0):
        super().__init__(message)
        self.rank, self.world_size = rank, world_size


@dataclass(frozen=True)
class RankSettings:
    """How to start the ranks; see :func:`core_kernels.launch.run_ranks`.

    Attributes:
        namespaces: Network namespace of each rank, empty when all share the launcher's.
        hosts: Name of each rank's host, empty when all share the launcher's.
    """

    world_size: int
    threads: int = 1
    timeout_seconds: float = 60.0
    backend: str = "gloo"
    env: dict[str, str] | None = None
    faults: Any = None
    namespaces: Sequence[str] = ()
    hosts: Sequence[str] = ()


@dataclass
class _Rank:
    process: subprocess.Popen
    connection: Connection


@dataclass
class _Failure:
    rank: int
    error: BaseException
    died: bool


class RankSet:
    """A running set of rank processes.

    Args:
        settings: How to start them.
    """

    def __init__(self, settings: RankSettings):
        if settings.world_size < 1:
            raise argument_error("world_size", settings.world_size, "at least 1", "pass the number of ranks")
        if settings.backend not in ("gloo", "nccl"):
            raise argument_error("backend", settings.backend, "'gloo' or 'nccl'", "choose one of the two")
        self.settings = settings
        self.is_usable = True
        self._folder = Path(tempfile.mkdtemp(prefix="sextet-ranks-"))
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._board = StatusBoard(self._folder / "status", settings.world_size, create=True)
        self._lifeline, self._ranks = -1, []
        lifeline_read, self._lifeline = os.pipe()
        try:
            for rank in range(settings.world_size):
                self._ranks.append(self._start_rank(rank, lifeline_read))
        except BaseException:
            self.kill()
            raise
        finally:
            os.close(lifeline_read)

    def pids(self) -> list[int]:
        """Return the process id of every rank."""
        return [rank.process.pid for rank in self._ranks]

    def run(self, fn: Callable[..., Any], args: Sequence[Any], deadline_seconds: float | None = None) -> list[Any]:
        """Call ``fn(group, *args)`` on every rank and return the results in rank order.

        Raises:
            BaseException: The first failure of a rank, as it was raised there, with that rank's traceback as a note.
            RankFailedError: A rank died, or ``deadline_seconds`` passed.
        """
        task = _describe_task(fn, args)
        for rank in self._ranks:
            # A rank that died while idle is found, and named, when its answer is awaited.
            with contextlib.suppress(OSError):
                rank.connection.send_bytes(task)
        results, failures = self._collect(deadline_seconds)
        if not failures:
            return results
        first = min(failures, key=lambda failure: (not failure.died, isinstance(failure.error, CollectiveError)))
        first.error.add_note(self._where_ranks_are(first.rank))
        # Ranks that all answered with a fault of the caller's are in step and can go on.
        all_answered = len(failures) + sum(result is not _MISSING for result in results) == len(self._ranks)
        if not all_answered or any(f.died or isinstance(f.error, CollectiveError) for f in failures):
            self.kill()
        raise first.error

    def close(self) -> None:
        """Let the ranks end; kill those that do not within two seconds."""
        for rank in self._ranks:
            with contextlib.suppress(OSError):
                rank.connection.send_bytes(b"")
        limit = time.monotonic() + 2.0
        for rank in self._ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.process.wait(max(0.0, limit - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """End all ranks at once, stopped ones too, and free everything."""
        self.is_usable = False
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.wait()
            rank.connection.close()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
            self._board.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start_rank(self, rank: int, lifeline_fd: int) -> _Rank:
        settings = self.settings
        ours, theirs = Pipe()
        on_main_thread = threading.current_thread() is threading.main_thread()
        arguments = (theirs.fileno(), lifeline_fd, os.getpid(), on_main_thread)
        code = f"import sys; sys.path[:] = {sys.path!r}; from core_kernels._rank_main import main; main(*{arguments!r})"
        process = subprocess.Popen(
            [sys.executable, "-c", code], env=self._environment(rank), pass_fds=(theirs.fileno(), lifeline_fd)
        )
        theirs.close()
        config = {
            "rank": rank,
            "world_size": settings.world_size,
            "threads": settings.threads,
            "timeout_seconds": settings.timeout_seconds,
            "backend": settings.backend,
            "faults": settings.faults,
            "namespace": settings.namespaces[rank] if settings.namespaces else None,
            "rendezvous": str(self._folder / "rendezvous"),
            "status": str(self._folder / "status"),
        }
        with contextlib.suppress(BrokenPipeError):  # found again, with its exit code, when the answer is awaited
            ours.send_bytes(pickle.dumps(config))
        return _Rank(process, ours)

    def _environment(self, rank: int) -> dict[str, str]:
        threads = str(self.settings.threads)
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        return {
            "GLOO_SOCKET_IFNAME": loopback,
            **os.environ,
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.settings.world_size),
            **({"SEXTET_HOST": self.settings.hosts[rank]} if self.settings.hosts else {}),
            **(self.settings.env or {}),
        }

    def _collect(self, deadline_seconds: float | None) -> tuple[list[Any], list[_Failure]]:
        results: list[Any] = [_MISSING] * len(self._ranks)
        failures: list[_Failure] = []
        waiting = {rank.connection: number for number, rank in enumerate(self._ranks)}
        end = float("inf") if deadline_seconds is None else time.monotonic() + deadline_seconds
        while waiting:
            left = end - time.monotonic()
            # An endless wait still wakes up now and then, so that an interrupt reaches a launcher off the main thread.
            for connection in wait(list(waiting), min(max(left, 0.0), 5.0)):
                number = waiting.pop(connection)
                outcome = self._receive(number)
                if not isinstance(outcome, _Failure):
                    results[number] = outcome
                    continue
                failures.append(outcome)
                late = isinstance(outcome.error, CollectiveError)
                grace = _GRACE_AFTER_COLLECTIVE_ERROR_SECONDS if late else _GRACE_SECONDS
                end = min(end, time.monotonic() + grace)
            if waiting and time.monotonic() >= end:
                if not failures:
                    failures.append(self._overdue(sorted(waiting.values()), deadline_seconds or 0.0))
                break
        return results, failures

    def _receive(self, number: int) -> Any:
        rank, size = self._ranks[number], self.settings.world_size
        try:
            kind, *content = pickle.loads(rank.connection.recv_bytes())
        except (EOFError, OSError):
            return _Failure(number, RankFailedError(self._death_of(number), number, size), died=True)
        if kind == "result":
            return content[0]
        data, summary, text = content
        if data is None:
            error: BaseException = RankFailedError(f"rank {number} of {size} raised {summary}", number, size)
        else:
            error = pickle.loads(data)
        error.add_note(f"raised on rank {number} of {size}:\n{text.rstrip()}")
        return _Failure(number, error, died=False)

    def _death_of(self, number: int) -> str:
        try:
            code = self._ranks[number].process.wait(2.0)
        except subprocess.TimeoutExpired:
            code = 0
        how = f"died with {signal.Signals(-code).name}" if code < 0 else f"ended without a result (exit code {code})"
        remedy = (
            "look for the kernel's out-of-memory killer or a fault in native code"
            if code < 0
            else ("look for a call of os._exit or sys.exit")
        )
        return f"rank {number} of {self.settings.world_size} {how} {self._board.read(number)}; {remedy}"

    def _overdue(self, late: list[int], seconds: float) -> _Failure:
        size = self.settings.world_size
        names = (
            f"rank {late[0]} of {size} was" if len(late) == 1 else f"ranks {', '.join(map(str, late))} of {size} were"
        )
        message = f"{names} not done after deadline_seconds={seconds:g}; rank {late[0]} was {self._board.read(late[0])}"
        return _Failure(
            late[0], RankFailedError(f"{message}; raise the deadline or look there", late[0], size), died=True
        )

    def _where_ranks_are(self, failed: int) -> str:
        lines = []
        for number, rank in enumerate(self._ranks):
            if number != failed:
                status = self._board.read(number)
                state = "gone, last seen " if rank.process.poll() is not None else _stopped(rank.process.pid)
                lines.append(f"  rank {number}: {state}{status}, for {status.seconds:.1f} s")
        return "\n".join(["where the other ranks were:", *lines]) if lines else "there was no other rank"


_MISSING = object()


def _stopped(pid: int) -> str:
    import psutil

    try:
        return "stopped by a signal, " if psutil.Process(pid).status() == psutil.STATUS_STOPPED else ""
    except psutil.Error:
        return ""


def _describe_task(fn: Callable[..., Any], args: Sequence[Any]) -> bytes:
    try:
        call = pickle.dumps((fn, tuple(args)))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise argument_error(
            "fn", fn, f"a function and arguments that can be pickled ({error})", "define fn at the top of a module"
        ) from error
    module = sys.modules.get(getattr(fn, "__module__", ""), None)
    needs_main = b"__main__" in call
    preparation = spawn.get_preparation_data("rank") if needs_main else {}
    preparation.pop("authkey", None)  # refuses to be pickled, and nothing here uses it
    return pickle.dumps(
        {
            "main": preparation or None,
            "module": (module.__name__, getattr(module, "__file__", None)) if module and not needs_main else None,
            "call": call,
        }
    )
