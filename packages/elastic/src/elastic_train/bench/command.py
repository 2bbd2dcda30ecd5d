"""The sub-command ``bench``: all measurements, as tables and as one dict."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from core_kernels.console import say, table
from elastic_train.bench.changes import measure_change, measure_restart, measure_scale_in, measure_vote
from elastic_train.bench.kept import KeptRows
from elastic_train.bench.peers import measure_torchft, measure_torchrun
from elastic_train.bench.survival import measure_kill
from elastic_train.errors import input_error

__all__ = ["run_bench"]


_SIDE_BY_SIDE = ("system", "change", "state_megabytes", "step_seconds", "pause_seconds", "recovery_seconds")


def run_bench(
    megabytes: Sequence[float],
    changes: Sequence[str],
    step_seconds: float,
    parts: Sequence[str],
    prepare_step_seconds: float = 0.1,
    keep_in: str | None = None,
    is_resumed: bool = False,
) -> dict[str, Any]:
    """Measure and show.

    Args:
        megabytes: Sizes of the state.
        changes: Numbers of workers before and after, ``OLD:NEW``.
        step_seconds: What a step sleeps, in place of an accelerator's work.
        parts: Among ``change``, ``restart``, ``prepare``, ``scale-in``, ``vote`` and ``peers``.
        prepare_step_seconds: The same, where throughput is measured while a newcomer gets ready.
        keep_in: JSON file that gets each change and size as soon as it is measured.
        is_resumed: Whether to leave out what that file holds already.

    Returns:
        ``sizes``, one entry per system, change and size, with ``pause_seconds`` (from the last step of the old workers
        to the first of all, that step included), ``restart_seconds`` (the same when the job is stopped in good order
        and started again), ``step_seconds``, ``broadcast_bytes_per_second`` and ``prepare_throughput`` where measured;
        and the other parts under their names.
    """
    sizes = [(_workers(change), size) for size in megabytes for change in changes]
    settings = {"step_seconds": step_seconds, "prepare_step_seconds": prepare_step_seconds,
                "parts": [part for part in parts if part not in ("scale-in", "vote")]}  # fmt: skip
    kept = KeptRows(keep_in, settings, is_resumed)
    result: dict[str, Any] = {"settings": settings, "sizes": []}
    for number, ((old, new), size) in enumerate(sizes, 1):
        change, begin = f"{old} to {new}", time.monotonic()
        rows = kept.find(change, size)
        if rows:
            say(f"{number} of {len(sizes)}: {change}, {size:g} MB: kept from before")
        else:
            rows = _measure_size(old, new, size, step_seconds, parts, prepare_step_seconds)
            kept.add(change, size, rows)
            say(f"{number} of {len(sizes)}: {change}, {size:g} MB: done in {time.monotonic() - begin:.0f} s")
        result["sizes"] += rows
    _show_sizes(result["sizes"], parts)
    if "scale-in" in parts:
        result["scale_in"] = [measure_scale_in(3, megabytes[0], step_seconds, leader) for leader in (False, True)]
        keys = ("change", "step_seconds", "longest_step_seconds", "longest_over_median", "steps_redone")
        _show("Leaving in good order", keys, result["scale_in"])
    if "vote" in parts:
        result["vote"] = [measure_vote(workers) for workers in (2, 4)]
        _show("Commit vote, of a step of 50 ms", ("workers", "vote_seconds", "vote_over_step"), result["vote"])
    return result


def _measure_size(
    old: int, new: int, size: float, step_seconds: float, parts: Sequence[str], prepare_step_seconds: float
) -> list[dict[str, Any]]:
    """Measure one change and size; returns a row per system."""
    row: dict[str, Any] = {"system": "elastic-train", "change": f"{old} to {new}", "state_megabytes": size}
    if "change" in parts:
        row |= measure_change(old, new, size, step_seconds)
    if "restart" in parts:
        row["restart_seconds"] = measure_restart(old, new, size, step_seconds)
    if "prepare" in parts:
        slow = measure_change(old, new, size, prepare_step_seconds, in_background=True)
        row |= {"prepare_throughput": slow["prepare_throughput"], "prepare_step_seconds": slow["step_seconds"]}
    if {"change", "restart"} <= set(parts):
        row["restart_over_pause"] = row["restart_seconds"] / row["pause_seconds"]
    if "peers" not in parts:
        return [row]
    row["recovery_seconds"] = measure_kill(new, size, step_seconds)["recovery_seconds"]
    return [row, *_measure_peers(old, new, size, step_seconds)]


def _workers(change: str) -> tuple[int, int]:
    old, _, new = change.partition(":")
    if not (old.isdigit() and new.isdigit() and 0 < int(old) < int(new)):
        raise input_error("changes", change, "OLD:NEW with 0 < OLD < NEW", "write for example 2:3")
    return int(old), int(new)


def _measure_peers(old: int, new: int, megabytes: float, step_seconds: float) -> list[dict[str, Any]]:
    torchft = measure_torchft(old, new, megabytes, step_seconds)
    if torchft is None:
        say("torchft is not installed, so it is left out; pip install torchft==0.2.0")
    return [*([torchft] if torchft else []), measure_torchrun(old, new, megabytes, step_seconds)]


def _show(title: str, keys: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
    table(title, [key.replace("_", " ") for key in keys], [[_cell(row.get(key)) for key in keys] for row in rows])


def _cell(value: Any) -> Any:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else value


def _show_sizes(rows: Sequence[dict[str, Any]], parts: Sequence[str]) -> None:
    own, place = [row for row in rows if row["system"] == "elastic-train"], ("change", "state_megabytes")
    if "change" in parts:
        keys = ("step_seconds", "broadcast_bytes_per_second", "pause_seconds", "limit_seconds", "pause_over_limit")
        _show("Growing while training", (*place, *keys, "switch_seconds"), own)
    if "restart" in parts:
        _show("Stopping and restarting", (*place, "restart_seconds", "restart_over_pause"), own)
    if {"change", "prepare"} & set(parts):
        _show("While a newcomer gets ready", (*place, "prepare_step_seconds", "prepare_throughput"), own)
    if "peers" in parts:
        _show("Workers join, then one is killed", _SIDE_BY_SIDE, rows)
