"""Proof on the user's own model that a pipeline trains as one device does, with the messages it promised."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from autopar.capture import trace
from autopar.cluster import Cluster
from autopar.errors import VerificationError
from autopar.execution import apply as apply_plan
from autopar.pipeline.execution import PipelineModule, apply
from autopar.pipeline.plan import PipelinePlan
from autopar.planner import search
from autopar.verification import (
    Comparison,
    Verification,
    _make,
    largest_differences,
    load_factory,
    optimizer_parts,
    train_steps,
)
from core_kernels.comm import Group
from core_kernels.launch import run_ranks

__all__ = ["compare_pipeline", "verify"]


def verify(
    factory: str, plan: PipelinePlan, num_steps: int = 3, tolerance: float = 1e-10, seed: int = 0
) -> Verification:
    """Train under a pipeline plan and on one device, and compare.

    Args:
        factory: ``package.module:function`` that returns ``(module, inputs)``; ranks import it.
        plan: A plan for that module, of as many devices as this machine can start ranks.
        num_steps: Steps of AdamW.
        tolerance: Largest absolute difference of any loss, parameter or optimiser state allowed, in float64.
        seed: Seed of parameters, batch and dropout.

    Returns:
        What was found; ``counted`` holds the messages of every rank in one step.

    Raises:
        PlanMismatchError: The plan belongs to another model.
        VerificationError: Numbers differ by more than ``tolerance``, or messages are not those predicted.
    """
    plan.check(trace(*load_factory(factory)()))
    module, batch = _make(factory, seed)
    graph = trace(module, batch)
    whole = search(graph, Cluster.preset("loopback-cpu", 1)).mini_time()
    losses, expected, _ = train_steps(apply_plan(module, whole, graph, Group.single(), seed=seed), batch, num_steps)
    results = run_ranks(
        _train_rank, plan.num_devices, factory, plan, num_steps, seed, losses, expected, timeout_seconds=120.0
    )
    compared = [result[0] for result in results]
    error = max(found.largest_error for found in compared)
    missing = set(expected) - {name for _, names, _, _ in results for name in names}
    matches = all(found.collectives_match for found in compared)
    counted = {f"rank {rank}, {tag}": c for rank, result in enumerate(results) for tag, c in result[3].items()}
    if not error <= tolerance or not matches or missing:
        what = f"differs by {error:.1e}" if not error <= tolerance else "sent other messages than predicted"
        what = f"holds no {sorted(missing)[0]}" if missing else what
        raise VerificationError(
            f"the pipeline of {plan.num_stages} stages and {plan.num_micro_batches} micro-batches {what}; expected "
            f"at most {tolerance:g} and the predicted messages; report the plan and the model"
        )
    return Verification(error, matches, results[0][2], counted)


def _train_rank(
    group: Group,
    factory: str,
    plan: PipelinePlan,
    num_steps: int,
    seed: int,
    losses: list[float],
    expected: dict[str, torch.Tensor],
) -> Any:
    module, batch = _make(factory, seed)
    graph = trace(module, batch)
    pipeline = apply(module, replace(plan, graph=graph.fingerprint), graph, group, seed=seed)
    return compare_pipeline(pipeline, batch, losses, expected)


def compare_pipeline(
    pipeline: PipelineModule, batch: tuple[torch.Tensor, ...], losses: list[float], whole: dict[str, torch.Tensor]
) -> tuple[Comparison, list[str], list[float], dict[str, dict[str, int]]]:
    """Train with AdamW as long as one device did, and compare this rank's parts with what it found.

    Args:
        pipeline: The applied pipeline.
        batch: The whole batch.
        losses: Loss of every step on one device.
        whole: Parameters, buffers and optimiser state there, from :func:`autopar.verification.train_steps`.

    Returns:
        The comparison, the names compared, this rank's losses, and the messages of one step.

    Collective: all ranks of the pipeline.
    """
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-3)
    found, counted = [], {}
    for _ in losses:
        optimizer.zero_grad()
        pipeline.reset_counters()
        found.append(pipeline.forward_backward(*batch).item())
        counted = pipeline.counted()
        optimizer.step()
    parts = pipeline.parts() | optimizer_parts(pipeline, optimizer)
    pairs = {name: (part, pipeline.part(name.partition("/")[0], whole[name])) for name, part in parts.items()}
    error, relative, worst = largest_differences(pairs, found, losses)
    matches = counted == pipeline.predicted_messages()
    return Comparison(error, relative, worst, matches), list(parts), found, counted
