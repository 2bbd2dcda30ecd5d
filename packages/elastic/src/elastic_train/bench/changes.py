"""What it costs to grow and to shrink a job, and to restart it in another size."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

from elastic_train.bench._logs import changeover_seconds, gaps, median_step, read_log, read_logs, wait_until
from elastic_train.events import read_events
from elastic_train.launchers import LocalJob

__all__ = ["free_port", "measure_change", "measure_restart", "measure_scale_in", "measure_vote", "start_job"]

# From this size on a step over many workers takes seconds of this machine's processors, which newcomers need too.
_LARGE_MEGABYTES = 200

QUIET = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def free_port() -> int:
    """Return a port of loopback that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_job(
    folder: Path,
    megabytes: float,
    step_seconds: float,
    num_workers: int,
    min_workers: int | None = None,
    num_settling: int = 10,
    in_background: bool = True,
) -> LocalJob:
    """Start a job of the benchmark's workers; they probe the group ``num_settling`` steps after every change."""
    program = [sys.executable, "-m", "elastic_train.bench._elastic"]
    command = [*program, str(folder), str(megabytes), str(step_seconds), str(num_settling)]
    environment = QUIET | {"ELASTIC_TRAIN_LEASE_SECONDS": "10"}
    least = min_workers or num_workers
    job = LocalJob(command, folder, min_workers=least, environment=environment, niceness=19 if in_background else 0,
                   in_background=in_background)  # fmt: skip
    job.scale_out(num_workers)
    return job


def measure_change(
    old: int, new: int, megabytes: float, step_seconds: float, in_background: bool | None = None
) -> dict[str, Any]:
    """Let a job of ``old`` workers grow to ``new`` while it trains.

    Args:
        old: Workers before.
        new: Workers after, who join in one switch.
        megabytes: Size of the state.
        step_seconds: Time a step sleeps.
        in_background: Whether newcomers get ready on idle processor time. By default they do unless the state is so
            large that the old workers' steps leave none; fewer steps are looked at then.

    Returns:
        ``pause_seconds`` from the last step of the old workers to the first of all, that step included;
        ``limit_seconds``, one step plus the state's bytes over the measured bandwidth of a broadcast;
        ``switch_seconds``, how long the switch itself held a worker up; ``prepare_throughput``, steps per second while
        newcomers prepared on idle time, over that before; and what these come from, of steps also the spread, the
        range that the middle half of them lies in.
    """
    is_large = megabytes >= _LARGE_MEGABYTES
    if in_background is None:
        in_background = not is_large
    num_steps, num_settling = (8, 6) if is_large else (25, 10)
    patience = 240.0 + 0.1 * megabytes * new
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with start_job(folder, megabytes, step_seconds, old, None, num_settling, in_background) as job:
            path = folder / "w0.jsonl"
            wait_until(lambda: len(read_log(path)) >= num_steps + num_settling + 3, "the start of the job", patience)
            called = time.monotonic()
            job.scale_out(new - old)
            wait_until(lambda: _count(job, path, new) >= num_settling + 4, "the change", patience)
            lines = read_log(path)
        broadcast = next(line["broadcast_seconds"] for line in reversed(lines) if "broadcast_seconds" in line)
        before = [gap for gap, line in gaps(lines) if line["at"] < called][-num_steps:]
        during = [gap for gap, line in gaps(lines) if line["at"] > called and line["size"] == old]
        pause = changeover_seconds(lines, old, new, called)
        switch = max(line["pause_seconds"] for line in lines if line["size"] == new)
        step, after = median_step(lines, new), [gap for gap, line in gaps(lines) if line["size"] == new][2:]
        events = read_events(job.events)
    quarters = quantiles(after, n=4)
    connect = [e["seconds"] for e in events if e["event"] == "connected"]
    result = {
        "step_seconds": median(before),
        "step_seconds_after": step,
        "step_spread_seconds": quarters[2] - quarters[0],
        "broadcast_bytes_per_second": megabytes * 1e6 / broadcast,
        "limit_seconds": step + broadcast,
        "pause_seconds": pause,
        "pause_over_limit": pause / (step + broadcast),
        "switch_seconds": switch,
        "connect_seconds": max(connect),
        "prepare_seconds": sum(during),
    }
    if in_background:
        result |= {"prepare_step_seconds": median(before), "prepare_throughput": mean(before) / mean(during)}
    return result


def _count(job: LocalJob, path: Path, size: int) -> int:
    """Return the steps of a worker over ``size`` workers so far; newcomers that starve are let go meanwhile."""
    job.serve_orders()
    return sum(line["size"] == size for line in read_log(path))


def measure_scale_in(num_workers: int, megabytes: float, step_seconds: float, leader: bool) -> dict[str, Any]:
    """Let one worker leave; returns the longest step of those that stay, and whether a step was redone."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with start_job(folder, megabytes, step_seconds, num_workers, num_workers - 1) as job:
            path = folder / "w0.jsonl"
            wait_until(lambda: sum(line["size"] == num_workers for line in read_log(path)) >= 40, "the start")
            first = next(e["worker"] for e in read_events(job.events) if e["event"] == "leader")
            others = [w for w in job.processes if w != first]
            leaver, stayer = (first, others[0]) if leader else (others[0], first)
            path = folder / f"{stayer}.jsonl"
            called = time.monotonic()
            job.processes[leaver].send_signal(signal.SIGTERM)
            size = num_workers - 1
            wait_until(lambda: sum(line["size"] == size for line in read_log(path)) >= 30, "the change")
            lines = read_log(path)
            events = read_events(job.events)
        found = [(gap, line["at"]) for gap, line in gaps(lines)]
        step = median(gap for gap, _ in found)
        longest = max(gap for gap, at in found if called < at)
    return {
        "change": f"{num_workers} to {num_workers - 1}, {'the leader' if leader else 'a follower'} leaves",
        "state_megabytes": megabytes,
        "step_seconds": step,
        "longest_step_seconds": longest,
        "longest_over_median": longest / step,
        "steps_redone": sum(event["event"] == "failed" for event in events),
    }


def measure_vote(num_workers: int, step_seconds: float = 0.05) -> dict[str, Any]:
    """Return the time of a commit vote, and its part of a step of ``step_seconds``."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with start_job(folder, 1.0, step_seconds, num_workers):
            path = folder / "w0.jsonl"
            wait_until(lambda: any("vote_seconds" in line for line in read_log(path)), "the probe")
            vote = next(line["vote_seconds"] for line in read_log(path) if "vote_seconds" in line)
    return {"workers": num_workers, "vote_seconds": vote, "vote_over_step": vote / step_seconds}


def measure_restart(old: int, new: int, megabytes: float, step_seconds: float) -> float:
    """Stop a job of plain workers in good order, with a checkpoint, and start it again in another size.

    Returns:
        Seconds from the last step of the old size to the first of the new one.
    """
    with tempfile.TemporaryDirectory() as name:
        folder, processes = Path(name), []
        try:
            processes = _start_plain(folder, old, megabytes, step_seconds)
            wait_until(lambda: sum(line["size"] == old for line in read_logs(folder)) >= 20 * old, "the start")
            called = time.monotonic()
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait(60)
            processes = _start_plain(folder, new, megabytes, step_seconds)
            wait_until(lambda: any(line["size"] == new for line in read_logs(folder)), "the restart")
            return changeover_seconds(read_logs(folder), old, new, called)
        finally:
            for process in processes:
                process.kill()
                process.wait()


def _start_plain(folder: Path, size: int, megabytes: float, step_seconds: float) -> list[subprocess.Popen[bytes]]:
    port, command = str(free_port()), [sys.executable, "-m", "elastic_train.bench._plain", str(folder), str(megabytes)]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(size), "GLOO_SOCKET_IFNAME": "lo"}
    return [
        subprocess.Popen(  # quiet, as they complain of each other when they are ended
            [*command, str(step_seconds)],
            env={**os.environ, **QUIET, **place, "RANK": str(rank)},
            stderr=subprocess.DEVNULL,
        )
        for rank in range(size)
    ]
