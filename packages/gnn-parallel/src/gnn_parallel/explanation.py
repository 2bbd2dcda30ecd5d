"""Puts a plan into words: the terms of all strategies side by side, what decided, and what else would pay."""

from __future__ import annotations

from typing import TYPE_CHECKING

from core_kernels.console import format_bytes, format_seconds
from gnn_parallel.clock import TERMS
from gnn_parallel.strategies import STRATEGIES

if TYPE_CHECKING:
    from gnn_parallel.plan import Candidate, Plan

__all__ = ["explain_plan"]


def explain_plan(plan: Plan) -> str:
    """Return a plan in words and numbers."""
    lines = [*_describe(plan), "", *_tabulate(plan)]
    notes = [*_compare(plan), *_tell_trial(plan), *_tell_effort(plan), *_tell_options(plan), *_tell_fewer_ranks(plan)]
    return "\n".join([*lines, "", *notes] if notes else lines)


def _describe(plan: Plan) -> list[str]:
    method, cut_share = plan.partition["method"], plan.partition["cut_share"]
    hosts = f" on {plan.num_hosts} hosts that work data-parallel" if plan.num_hosts > 1 else ""
    return [
        f"{plan.strategy}, {STRATEGIES[plan.strategy].summary}{hosts}",
        f"{plan.world_size} ranks, fanouts {','.join(map(str, plan.fanouts))}, {plan.batch_size} seeds per step, "
        f"{plan.steps_per_epoch} steps per epoch, {plan.placement} features, input layer {plan.input_layer} "
        f"({plan.algebra}), partition {method} cutting {cut_share:.1%} of edges",
    ]


def _tabulate(plan: Plan) -> list[str]:
    width = max(17, *(len(candidate.name) + 2 for candidate in plan.candidates))
    lines = [f"{'predicted per epoch':<{width + 2}}" + "".join(f"{t:>10}" for t in TERMS) + "     total      bytes"]
    for candidate in plan.candidates:
        if candidate.reason:
            lines.append(f"  {candidate.name:<{width}}cannot run: {candidate.reason}")
            continue
        terms = "".join(f"{format_seconds(candidate.seconds[term]):>10}" for term in TERMS)
        total, sent = format_seconds(candidate.predicted_seconds), format_bytes(candidate.bytes)
        lines.append(f"  {candidate.name:<{width}}{terms}{total:>10}{sent:>11}")
    return lines


def _compare(plan: Plan) -> list[str]:
    chosen = plan.predicted
    others = [c for c in plan.candidates if not c.reason and c is not chosen]
    if not others:
        return []
    second = min(others, key=lambda c: c.predicted_seconds)
    gaps = [(term, second.seconds[term] - chosen.seconds[term]) for term in TERMS]
    term, gap = max(gaps, key=lambda pair: abs(pair[1]))
    ratio = second.predicted_seconds / chosen.predicted_seconds if chosen.predicted_seconds else 1.0
    return [
        f"next best is {second.name} at {ratio:.2f}x; the largest difference is {term}: {format_seconds(abs(gap))} "
        f"{'more' if gap > 0 else 'less'} for {second.name}"
    ]


def _tell_trial(plan: Plan) -> list[str]:
    tried = sorted((c for c in plan.candidates if c.measured_step_seconds), key=lambda c: c.measured_step_seconds)
    if not tried:
        return []
    times = ", ".join(f"{c.name} {format_seconds(c.measured_step_seconds)}" for c in tried)
    return [f"tried: {times} per step; computing took {plan.calibration:.2f} of what was predicted"]


def _tell_effort(plan: Plan) -> list[str]:
    spent, whole = plan.counting_seconds + plan.trial_seconds, plan.num_epochs * plan.predicted.predicted_seconds
    if not spent or not whole:
        return []
    epochs = "an epoch" if plan.num_epochs == 1 else f"{plan.num_epochs} epochs"
    # A plan for another, larger machine is counted on this one.
    share = f", {spent / whole:.1%} of {epochs}" if spent < whole else ""
    return [f"counting and trials took {format_seconds(spent)}{share}"]


def _tell_options(plan: Plan) -> list[str]:
    notes = []
    chosen: Candidate = plan.predicted
    if plan.reuse:
        notes.append(f"keeping rows of the batch before saves {chosen.overlap_rows} row reads per epoch")
    if plan.num_clusters:
        notes.append(
            f"batches follow the order of {plan.num_clusters} clusters, so they are not drawn independently; compare "
            "the accuracy with a run without"
        )
    if plan.placement == "sharded" and plan.look_ahead:
        notes.append(f"{plan.look_ahead} coming batches are prepared in the background")
    if plan.placement == "disk":
        notes.append(f"{plan.cached_rows} rows stay in host memory, {plan.look_ahead} batches are read ahead")
    return notes


def _tell_fewer_ranks(plan: Plan) -> list[str]:
    if plan.recommended_ranks == plan.world_size:
        return []
    best = min(plan.fewer_ranks, key=lambda candidate: candidate.predicted_seconds)
    ratio = plan.predicted.predicted_seconds / best.predicted_seconds
    return [
        f"use fewer ranks: {best.strategy} on {best.num_ranks} is predicted {ratio:.2f}x faster, "
        f"{format_seconds(best.predicted_seconds)} per epoch"
    ]
