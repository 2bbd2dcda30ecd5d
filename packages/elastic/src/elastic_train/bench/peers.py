"""The same changes under torchrun and torchft, where they are installed."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

from elastic_train.bench._logs import changeover_seconds, gaps, read_log, read_logs, wait_until
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


def measure_torchrun(old: int, new: int, megabytes: float, step_seconds: float) -> dict[str, Any]:
    """Let a job grow under torchrun, then lose a worker; all are restarted from a checkpoint.

    Returns:
        A row of the benchmark, with the same fields as for elastic-train where they have a meaning.
    """
    with tempfile.TemporaryDirectory() as name, _processes() as started:
        folder, port = Path(name), free_port()
        started.append(_agent(folder, port, old, megabytes, step_seconds))
        wait_until(
            lambda: sum(line["size"] == old for line in read_logs(folder)) >= 25 * old, "the start under torchrun"
        )
        called = time.monotonic()
        started.append(_agent(folder, port, new - old, megabytes, step_seconds))
        wait_until(
            lambda: sum(line["size"] == new for line in read_logs(folder)) >= 20 * new, "the join under torchrun"
        )
        lines = read_logs(folder)
        pause, step = changeover_seconds(lines, old, new, called), _median_step(lines, old)
        newest = max(folder.glob("plain-*.jsonl"), key=lambda path: path.stat().st_mtime)
        struck = time.monotonic()
        os.kill(int(newest.stem.removeprefix("plain-")), 9)
        wait_until(lambda: read_logs(folder)[-1]["at"] > struck + 2.0 and _is_steady(folder), "recovery under torchrun")
        recovery = longest_gap_after(read_logs(folder), struck)
    return _row("torchrun", old, new, megabytes, step) | {
        "pause_seconds": pause, "restart_seconds": pause, "recovery_seconds": recovery,
    }  # fmt: skip


def _row(system: str, old: int, new: int, megabytes: float, step_seconds: float) -> dict[str, Any]:
    place = {"system": system, "change": f"{old} to {new}", "state_megabytes": megabytes}
    return {**place, "step_seconds": step_seconds}


def _median_step(lines: list[dict[str, Any]], size: int) -> float:
    """Return the median time of a step over ``size`` workers, of which any may have logged it first."""
    first: dict[int, float] = {}
    for line in lines:
        if line["size"] == size:
            first.setdefault(line["step"], line["at"])
    times = sorted(first.values())
    return median(after - before for before, after in pairwise(times))


def _is_steady(folder: Path, num_lines: int = 10) -> bool:
    """Whether the last lines came without a long break."""
    last = read_logs(folder)[-num_lines:]
    return len(last) == num_lines and last[-1]["at"] - last[0]["at"] < 2.0 and time.monotonic() - last[-1]["at"] < 2.0


def measure_torchft(old: int, new: int, megabytes: float, step_seconds: float) -> dict[str, Any] | None:
    """Let a job grow under torchft, then lose a replica; ``None`` where it is not installed."""
    if importlib.util.find_spec("torchft") is None:
        return None
    quiet, port = subprocess.DEVNULL, free_port()
    environment = {**os.environ, **QUIET, "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory() as name, _processes() as started, _processes() as lighthouse:
        folder = Path(name)
        serve = [sys.executable, "-m", "elastic_train.bench._lighthouse", str(port)]
        lighthouse.append(subprocess.Popen(serve, stdout=quiet, stderr=quiet))
        wait_until(lambda: _answers(port), "torchft's lighthouse")
        command = [sys.executable, "-m", "elastic_train.bench._torchft", name, str(megabytes), str(step_seconds)]

        def start(replica: str, niceness: int) -> None:
            whole = ["nice", "-n", str(niceness), *command, replica, f"http://127.0.0.1:{port}"]
            started.append(subprocess.Popen(whole, env=environment, stdout=quiet, stderr=quiet))

        for index in range(old):
            start(f"r{index}", 0)
        wait_until(lambda: sum(line["size"] == old for line in read_logs(folder)) >= 30 * old, "torchft's start")
        called = time.monotonic()
        before = [gap for gap, _ in gaps(read_log(folder / "r0.jsonl"))][-25:]
        for index in range(old, new):
            start(f"r{index}", 19)
        wait_until(lambda: sum(line["size"] == new for line in read_logs(folder)) >= 20 * new, "torchft's join")
        lines = read_log(folder / "r0.jsonl")
        pause = longest_gap_after(lines, called)
        during = [gap for gap, line in gaps(lines) if line["at"] > called and line["size"] == old]
        struck = time.monotonic()
        started[new - 1].kill()
        wait_until(lambda: sum(line["at"] > struck and line["size"] == new - 1 for line in read_logs(folder)) >= 20,
                   "torchft's recovery")  # fmt: skip
        recovery = longest_gap_after(read_logs(folder), struck)
    return _row("torchft", old, new, megabytes, median(before)) | {
        "pause_seconds": pause, "recovery_seconds": recovery, "prepare_throughput": mean(before) / mean(during),
    }  # fmt: skip


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
