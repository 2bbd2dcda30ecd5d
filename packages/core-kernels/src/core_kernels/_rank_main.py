"""What runs inside a rank process: tie its life to the launcher's, join the group, then serve tasks.

The launcher starts ``main`` with two inherited descriptors: a connection for tasks and results, and a pipe it never
writes to. When the launcher is gone, however it went, the pipe closes and the rank exits; on Linux the kernel also
kills the rank, which reaches even a stopped one.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import os
import pickle
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

__all__ = ["enter_network_namespace", "load_module", "main"]

_PR_SET_PDEATHSIG = 1
_CLONE_NEWNET = 0x40000000


def main(connection_fd: int, lifeline_fd: int, launcher_pid: int, die_with_thread: bool) -> None:
    """Serve the launcher until it says stop or is gone.

    Args:
        connection_fd: Descriptor of the connection to the launcher.
        lifeline_fd: Read end of a pipe whose other end only the launcher holds.
        launcher_pid: Process id of the launcher.
        die_with_thread: Let the kernel kill this process when the launching thread ends; set when that is the
            launcher's main thread.
    """
    for fd in (connection_fd, lifeline_fd):
        os.set_inheritable(fd, False)
    if die_with_thread and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher_pid:
        os._exit(1)
    threading.Thread(target=_exit_when_closed, args=(lifeline_fd,), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher gets the interrupt and ends its ranks itself
    connection = Connection(connection_fd)
    config = pickle.loads(connection.recv_bytes())
    try:
        group = _join(config)
    except Exception as error:
        _send_error(connection, error)
        _leave(1)
    while True:
        with contextlib.suppress(EOFError):
            message = connection.recv_bytes()
            if message:
                _serve(connection, group, message)
                continue
        _leave(0)


def enter_network_namespace(name: str) -> None:
    """Move the calling thread into a named network namespace; must run before other threads start sockets."""
    fd = os.open(f"/var/run/netns/{name}", os.O_RDONLY)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(fd, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter network namespace {name!r}")
    finally:
        os.close(fd)


def load_module(name: str, path: str | None) -> ModuleType:
    """Import a module by name, or from its file when its name does not lead there (test files, plug-ins)."""
    if name in sys.modules:
        return sys.modules[name]
    if path is None or importlib_finds(name, path):
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load module {name!r} from {path}")
    _register_parents(name)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _register_parents(name: str) -> None:
    """Make sure that the packages above a module are known, empty where there are none: pickle imports them all.

    A test runner may name a file after its folders, ``tests.unit.test_x``, whether or not those are packages.
    """
    parts = name.split(".")
    for depth in range(1, len(parts)):
        parent = ".".join(parts[:depth])
        try:
            importlib.import_module(parent)
        except ModuleNotFoundError:
            stand_in = ModuleType(parent, "Stands in for a folder that is no package.")
            stand_in.__path__ = []
            sys.modules[parent] = stand_in


def importlib_finds(name: str, path: str) -> bool:
    """Whether importing ``name`` would load the file ``path``."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return False
    return spec is not None and spec.origin is not None and os.path.realpath(spec.origin) == os.path.realpath(path)


def _join(config: dict[str, Any]) -> Any:
    if config["namespace"]:
        enter_network_namespace(config["namespace"])
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from core_kernels import launch
    from core_kernels.comm import Group
    from core_kernels.comm._status import StatusBoard

    torch.set_num_threads(config["threads"])
    rank, world_size, seconds = config["rank"], config["world_size"], config["timeout_seconds"]
    if config["backend"] == "nccl":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(
        config["backend"],
        init_method=f"file://{config['rendezvous']}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=seconds),
    )
    group = Group(timeout_seconds=seconds)
    group._status = (StatusBoard(config["status"], world_size), rank)
    if config["faults"] is not None:
        group._faults = config["faults"].for_rank(rank)
    launch._current = group
    return group


def _serve(connection: Connection, group: Any, message: bytes) -> None:
    try:
        task = pickle.loads(message)
        if task["main"] is not None:
            from multiprocessing import spawn

            spawn.prepare(task["main"])
        elif task["module"] is not None:
            load_module(*task["module"])
        fn, args = pickle.loads(task["call"])
        answer = pickle.dumps(("result", fn(group, *args)))
    except BaseException as error:  # the launcher must hear of sys.exit and pytest.skip too, which are no Exception
        _send_error(connection, error)
    else:
        connection.send_bytes(answer)


def _send_error(connection: Connection, error: BaseException) -> None:
    text = "".join(traceback.format_exception(error))
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:  # a user's exception class may raise anything when pickled; its text is sent instead
        data = None
    summary = f"{type(error).__name__}: {error}"
    connection.send_bytes(pickle.dumps(("error", data, summary, text)))


def _exit_when_closed(lifeline_fd: int) -> None:
    with contextlib.suppress(OSError):
        os.read(lifeline_fd, 1)
    os._exit(1)


def _leave(code: int) -> None:
    # No interpreter shutdown: a transport thread that waits for a dead peer would hold it up.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a closed pipe, a closed file
            stream.flush()
    os._exit(code)
