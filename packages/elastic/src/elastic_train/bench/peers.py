"""The same changes under torchrun and torchft, where they are installed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from elastic_train.bench._logs import changeover_seconds, read_logs, wait_until
from elastic_train.bench.changes import QUIET, free_port
from elastic_train.bench.survival import longest_gap_after

__all__ = ["measure_torchft", "measure_torchrun"]


@contextmanager
def _processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Give a list whose processes are ended afterwards."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        yield started
    finally:
        for process in started:
            process.terminate()
        for process in started:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _agent(folder: Path, port: int, num_workers: int, megabytes: float, step_seconds: float) -> subprocess.Popen[bytes]:
    """Start an agent of torchrun."""
    # Without the variable both agents of torch 2.13 die a minute after the second one starts.
    environment = {**os.environ, **QUIET, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", f"--nproc-per-node={num_workers}",
        "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=bench", "--max-restarts=3",
        "-m", "elastic_train.bench._plain", str(folder), str(megabytes), str(step_seconds),
    ]  # fmt: skip
    quiet = subprocess.DEVNULL
    return subprocess.Popen(command, env=environment, stdout=quiet, stderr=quiet)


def measure_torchrun(megabytes: float, step_seconds: float) -> dict[str, Any]:
    """Let a job of two take a third under torchrun, then lose a worker; all are restarted from a checkpoint."""
    with tempfile.TemporaryDirectory() as name, _processes() as started:
        folder, port = Path(name), free_port()
        started.append(_agent(folder, port, 2, megabytes, step_seconds))
        wait_until(lambda: sum(line["size"] == 2 for line in read_logs(folder)) >= 50, "the start under torchrun")
        called = time.monotonic()
        started.append(_agent(folder, port, 1, megabytes, step_seconds))
        wait_until(lambda: sum(line["size"] == 3 for line in read_logs(folder)) >= 60, "the join under torchrun")
        join = changeover_seconds(read_logs(folder), 2, 3, called)
        newest = max(folder.glob("plain-*.jsonl"), key=lambda path: path.stat().st_mtime)
        struck = time.monotonic()
        os.kill(int(newest.stem.removeprefix("plain-")), 9)
        wait_until(lambda: read_logs(folder)[-1]["at"] > struck + 2.0 and _is_steady(folder), "recovery under torchrun")
        recovery = longest_gap_after(read_logs(folder), struck)
    return {"system": "torchrun", "join_seconds": join, "recovery_seconds": recovery}


def _is_steady(folder: Path, num_lines: int = 10) -> bool:
    """Whether the last lines came without a long break."""
    last = read_logs(folder)[-num_lines:]
    return len(last) == num_lines and last[-1]["at"] - last[0]["at"] < 2.0 and time.monotonic() - last[-1]["at"] < 2.0


def measure_torchft(megabytes: float, step_seconds: float) -> dict[str, Any] | None:
    """Let a job of two replicas take a third under torchft, then lose one; ``None`` where it is not installed."""
    if importlib.util.find_spec("torchft") is None:
        return None
    from torchft.coordination import LighthouseServer  # pyright: ignore

    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=100, heartbeat_timeout_ms=1000)
    try:
        with tempfile.TemporaryDirectory() as name, _processes() as started:
            folder = Path(name)
            command = [sys.executable, "-m", "elastic_train.bench._torchft", name, str(megabytes), str(step_seconds)]
            environment = {**os.environ, **QUIET, "GLOO_SOCKET_IFNAME": "lo"}

            def start(replica: str, niceness: int) -> None:
                quiet, place = subprocess.DEVNULL, lighthouse.address().rsplit(":", 1)
                address = f"http://127.0.0.1:{place[1]}"
                whole = ["nice", "-n", str(niceness), *command, replica, address]
                started.append(subprocess.Popen(whole, env=environment, stdout=quiet, stderr=quiet))

            start("r0", 0)
            start("r1", 0)
            wait_until(lambda: sum(line["size"] == 2 for line in read_logs(folder)) >= 60, "the start under torchft")
            called = time.monotonic()
            start("r2", 19)
            wait_until(lambda: sum(line["size"] == 3 for line in read_logs(folder)) >= 60, "the join under torchft")
            join = longest_gap_after(read_logs(folder, "r0.jsonl"), called)
            struck = time.monotonic()
            started[2].kill()
            wait_until(lambda: sum(line["at"] > struck and line["size"] == 2 for line in read_logs(folder)) >= 20,
                       "recovery under torchft")  # fmt: skip
            recovery = longest_gap_after(read_logs(folder), struck)
    finally:
        lighthouse.shutdown()
    return {"system": "torchft", "join_seconds": join, "recovery_seconds": recovery}
