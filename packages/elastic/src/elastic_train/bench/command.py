"""The sub-command ``bench``: all measurements, as tables and as one dict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from core_kernels.console import say, table
from elastic_train.bench.changes import measure_change, measure_restart, measure_scale_in, measure_vote
from elastic_train.bench.peers import measure_torchft, measure_torchrun
from elastic_train.bench.survival import measure_kill
from elastic_train.errors import input_error

__all__ = ["run_bench"]


def run_bench(
    megabytes: Sequence[float], changes: Sequence[str], step_seconds: float, parts: Sequence[str]
) -> dict[str, Any]:
    """Measure and show.

    Args:
        megabytes: Sizes of the state.
        changes: Numbers of workers before and after, ``OLD:NEW``.
        step_seconds: What a step sleeps; ten times as long from 100 MB of state on, as such models take longer.
        parts: Among ``change``, ``restart``, ``scale-in``, ``vote`` and ``peers``.

    Returns:
        The figures of each part.
    """
    sizes = [(_workers(change), size) for size in megabytes for change in changes]
    result: dict[str, Any] = {}
    if "change" in parts:
        result["changes"] = []
        for (old, new), size in sizes:
            result["changes"].append(measure_change(old, new, size, _sleep(size, step_seconds)))
            say(f"{old} to {new}, {size:g} MB: done")
        _show_changes(result["changes"])
    if "restart" in parts:
        result["restarts"] = [measure_restart(old, new, size, _sleep(size, step_seconds)) for (old, new), size in sizes]
        _show_restarts(result)
    if "scale-in" in parts:
        result["scale_in"] = [measure_scale_in(3, megabytes[0], step_seconds, leader) for leader in (False, True)]
        keys = ("change", "step_seconds", "longest_step_seconds", "longest_over_median", "steps_redone")
        _show("Leaving in good order", keys, result["scale_in"])
    if "vote" in parts:
        result["vote"] = [measure_vote(workers) for workers in (2, 4)]
        _show("Commit vote, of a step of 50 ms", ("workers", "vote_seconds", "vote_over_step"), result["vote"])
    if "peers" in parts:
        result["peers"] = _measure_peers(megabytes[0], step_seconds)
        title = f"Two workers take a third, then one of three is killed; {megabytes[0]:g} MB"
        _show(title, ("system", "join_seconds", "recovery_seconds"), result["peers"])
    return result


def _workers(change: str) -> tuple[int, int]:
    old, _, new = change.partition(":")
    if not (old.isdigit() and new.isdigit() and 0 < int(old) < int(new)):
        raise input_error("changes", change, "OLD:NEW with 0 < OLD < NEW", "write for example 2:3")
    return int(old), int(new)


def _sleep(megabytes: float, step_seconds: float) -> float:
    return step_seconds * (10 if megabytes >= 100 else 1)


def _measure_peers(megabytes: float, step_seconds: float) -> list[dict[str, Any]]:
    join, kill = measure_change(2, 3, megabytes, step_seconds), measure_kill(3, megabytes, step_seconds)
    own = {"system": "elastic-train", "join_seconds": join["gap_seconds"], "recovery_seconds": kill["recovery_seconds"]}
    torchft = measure_torchft(megabytes, step_seconds)
    if torchft is None:
        say("torchft is not installed, so it is left out; pip install torchft==0.2.0")
    return [own, *([torchft] if torchft else []), measure_torchrun(megabytes, step_seconds)]


def _show(title: str, keys: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
    cells = [[f"{row[key]:.4g}" if isinstance(row[key], float) else row[key] for key in keys] for row in rows]
    table(title, [key.replace("_", " ") for key in keys], cells)


def _show_changes(rows: Sequence[dict[str, Any]]) -> None:
    keys = ("change", "state_megabytes", "step_seconds", "gap_seconds", "limit_seconds", "gap_over_limit")
    _show("Growing while training", (*keys, "pause_seconds", "prepare_throughput"), rows)


def _show_restarts(result: dict[str, Any]) -> None:
    gaps = {(row["change"], row["state_megabytes"]): row for row in result.get("changes", ())}
    for row in result["restarts"]:
        same = gaps.get((row["change"], row["state_megabytes"]))
        row["restart_over_gap"] = row["restart_seconds"] / same["gap_seconds"] if same else float("nan")
        row["restart_over_pause"] = row["restart_seconds"] / same["pause_seconds"] if same else float("nan")
    keys = ("change", "state_megabytes", "restart_seconds", "restart_over_gap", "restart_over_pause")
    _show("Stopping and restarting", keys, result["restarts"])
