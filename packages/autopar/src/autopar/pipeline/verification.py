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
from autopar.verification import Verification, _make, load_factory, train_steps
from core_kernels.comm import Group
from core_kernels.launch import run_ranks

__all__ = ["train_pipeline", "verify"]


def verify(
    factory: str, plan: PipelinePlan, num_steps: int = 3, tolerance: float = 1e-10, seed: int = 0
) -> Verification:
    """Train under a pipeline plan and on one device, and compare.

    Args:
        factory: ``package.module:function`` that returns ``(module, inputs)``; ranks import it.
        plan: A plan for that module with one device per stage, of as many stages as this machine can start ranks.
        num_steps: Steps of AdamW.
        tolerance: Largest absolute difference of any loss, parameter or optimiser state allowed, in float64.
        seed: Seed of parameters, batch and dropout.

    Returns:
        What was found; ``counted`` holds the messages of every stage in one step.

    Raises:
        PlanMismatchError: The plan belongs to another model, or has stages of several devices.
        VerificationError: Numbers differ by more than ``tolerance``, or messages are not those predicted.
    """
    plan.check(trace(*load_factory(factory)()))
    plan.check_runnable()
    module, batch = _make(factory, seed)
    graph = trace(module, batch)
    whole = search(graph, Cluster.preset("loopback-cpu", 1)).mini_time()
    losses, expected, _ = train_steps(apply_plan(module, whole, graph, Group.single(), seed=seed), batch, num_steps)
    results = run_ranks(_train_rank, plan.num_stages, factory, plan, num_steps, seed, timeout_seconds=120.0)
    error = 0.0
    for found, state, _, _ in results:
        error = max(error, *(abs(a - b) for a, b in zip(found, losses, strict=True)))
        for name, value in state.items():
            if value.numel():
                error = max(error, float((value.double() - expected[name].double()).abs().max()))
    missing = set(expected) - {name for _, state, _, _ in results for name in state}
    matches = all(counted == predicted for _, _, counted, predicted in results)
    counted = {f"stage {place}, {tag}": c for place, result in enumerate(results) for tag, c in result[2].items()}
    if not error <= tolerance or not matches or missing:
        what = f"differs by {error:.1e}" if not error <= tolerance else "sent other messages than predicted"
        what = f"holds no {sorted(missing)[0]}" if missing else what
        raise VerificationError(
            f"the pipeline of {plan.num_stages} stages and {plan.num_micro_batches} micro-batches {what}; expected "
            f"at most {tolerance:g} and the predicted messages; report the plan and the model"
        )
    return Verification(error, matches, results[0][0], counted)


def _train_rank(group: Group, factory: str, plan: PipelinePlan, num_steps: int, seed: int) -> Any:
    module, batch = _make(factory, seed)
    graph = trace(module, batch)
    pipeline = apply(module, replace(plan, graph=graph.fingerprint), graph, group, seed=seed)
    return *train_pipeline(pipeline, batch, num_steps), pipeline.predicted_messages()


def train_pipeline(
    pipeline: PipelineModule, batch: tuple[torch.Tensor, ...], num_steps: int
) -> tuple[list[float], dict[str, torch.Tensor], dict[str, dict[str, int]]]:
    """Take steps of AdamW; return losses, the stage's parameters, buffers and optimiser state, and one step's messages.

    Collective: all ranks of the pipeline.
    """
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-3)
    losses, counted = [], {}
    for _ in range(num_steps):
        optimizer.zero_grad()
        pipeline.reset_counters()
        losses.append(pipeline.forward_backward(*batch).item())
        counted = pipeline.counted()
        optimizer.step()
    state = dict(pipeline.named_parameters(remove_duplicate=False)) | dict(
        pipeline.named_buffers(remove_duplicate=False)
    )
    state = {name: value.detach() for name, value in state.items()}
    for name, parameter in pipeline.named_parameters():
        for key, value in sorted(optimizer.state[parameter].items()):
            if value.shape == parameter.shape and key != "step":
                state[f"{name}/{key}"] = value
    return losses, state, counted
