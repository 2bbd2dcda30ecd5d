"""Proof on the user's own model that a plan trains as one device does, with the collectives it promised.

Ranks train the same random batch for some steps in float64 under the plan, and one process does under a plan without
any split; losses, parameters and optimiser state are compared, and every rank's counted collectives with the
prediction. Dropout takes part: its draws depend on the element, so one device drops the same elements.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from autopar.capture import trace
from autopar.cluster import Cluster
from autopar.errors import ProblemError, VerificationError
from autopar.execution import ParallelModule, apply
from autopar.plan import Plan
from autopar.planner import search
from core_kernels.comm import Group
from core_kernels.launch import run_ranks

__all__ = ["Comparison", "Verification", "compare_steps", "load_factory", "train_steps", "verify"]

Factory = Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]


@dataclass(frozen=True)
class Verification:
    """What a check found.

    Attributes:
        largest_error: Largest absolute difference of any loss, parameter or optimiser state.
        collectives_match: Whether every rank sent what was predicted, call by call and byte by byte.
        losses: Loss of every step under the plan.
        counted: Collectives of the first rank in one step.
    """

    largest_error: float
    collectives_match: bool
    losses: list[float]
    counted: dict[str, dict[str, int]]


def load_factory(name: str) -> Factory:
    """Return the factory named ``package.module:function``; it returns ``(module, inputs)``.

    Raises:
        ProblemError: There is no such module or function.

    >>> load_factory("autopar.models:mlp").__name__
    'mlp'
    """
    module_name, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module_name), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ProblemError(
            f"model {name!r} cannot be loaded ({error}); expected package.module:factory, a function that returns "
            "(module, inputs); check that it can be imported from here"
        ) from error


def verify(factory: str, plan: Plan, num_steps: int = 3, tolerance: float = 1e-10, seed: int = 0) -> Verification:
    """Train under a plan and on one device, and compare.

    Args:
        factory: ``package.module:function`` that returns ``(module, inputs)``; ranks import it.
        plan: A plan for that module, on a mesh of as many ranks as this machine can start.
        num_steps: Steps of AdamW.
        tolerance: Largest absolute difference allowed.
        seed: Seed of parameters, batch and dropout.

    Returns:
        What was found.

    Raises:
        VerificationError: Numbers differ by more than ``tolerance``, or collectives are not those predicted.
    """
    size = 1
    for axis in plan.mesh:
        size *= axis
    plan.check(trace(*load_factory(factory)()))
    module, batch = _make(factory, seed)
    graph = trace(module, batch)
    whole = search(graph, Cluster.preset("loopback-cpu", 1)).mini_time()
    single = apply(module, whole, graph, Group.single(), seed=seed)
    expected_losses, expected, _ = train_steps(single, batch, num_steps)
    results = run_ranks(_train_rank, size, factory, plan, num_steps, seed, timeout_seconds=120.0)
    losses, state, counted, _ = results[0]
    error = max(abs(a - b) for a, b in zip(losses, expected_losses, strict=True))
    for name, value in expected.items():
        if value.numel():
            error = max(error, float((state[name].double() - value.double()).abs().max()))
    matches = all(result[2] == result[3] for result in results)
    found = Verification(error, matches, losses, counted)
    if not error <= tolerance or not matches:
        what = f"differ by {error:.1e}" if not error <= tolerance else f"sent {counted}, not {results[0][3]}"
        raise VerificationError(
            f"the plan on mesh {tuple(plan.mesh)} {what}; expected at most {tolerance:g} and the predicted "
            "collectives; report the plan and the model"
        )
    return found


def _make(factory: str, seed: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(seed)
    module, batch = load_factory(factory)()
    return module.double(), tuple(x.double() if x.is_floating_point() else x for x in batch)


def _train_rank(group: Group, factory: str, plan: Plan, num_steps: int, seed: int) -> Any:
    module, batch = _make(factory, seed)
    graph = trace(module, batch)
    parallel = apply(module, replace(plan, graph=graph.fingerprint), graph, group, seed=seed)
    losses, state, counted = train_steps(parallel, batch, num_steps)
    return losses, state if group.rank == 0 else None, counted, parallel.predicted_collectives()


def train_steps(
    parallel: ParallelModule, batch: tuple[Tensor, ...], num_steps: int, eps: float = 1e-8
) -> tuple[list[float], dict[str, Tensor], dict[str, dict[str, int]]]:
    """Take steps of AdamW; return losses, whole parameters and optimiser state, and one step's collectives.

    Collective: all ranks of the module.
    """
    losses, parts, counted = _train(parallel, batch, num_steps, eps)
    return losses, {name: parallel.gather(name.partition("/")[0], part) for name, part in parts.items()}, counted


@dataclass(frozen=True)
class Comparison:
    """What one rank found when it compared its part of a trained state with one device's.

    Attributes:
        largest_error: Largest absolute difference of any loss, parameter, buffer or optimiser state.
        relative_error: The same, every difference divided by one plus the value's size.
        worst: Name of the tensor where ``largest_error`` was found.
        collectives_match: Whether this rank sent what was predicted, call by call and byte by byte.
    """

    largest_error: float
    relative_error: float
    worst: str
    collectives_match: bool


def compare_steps(
    parallel: ParallelModule,
    batch: tuple[Tensor, ...],
    losses: list[float],
    whole: dict[str, Tensor],
    eps: float = 1e-8,
) -> Comparison:
    """Train as long as one device did and compare this rank's parts with what :func:`train_steps` returned there.

    Every rank compares its own parts, so nothing is gathered and a wrong copy on any rank is seen.

    Args:
        parallel: The applied module.
        batch: The global batch.
        losses: Loss of every step on one device.
        whole: Parameters, buffers and optimiser state on one device.
        eps: Of AdamW, as there. A gradient that is zero but for rounding moves its parameter by rounding over ``eps``.

    Collective: all ranks of the module.
    """
    found, parts, counted = _train(parallel, batch, len(losses), eps)
    pairs = {name: (parts[name], parallel.part(name.partition("/")[0], value)) for name, value in whole.items()}
    return Comparison(*largest_differences(pairs, found, losses), counted == parallel.predicted_collectives())


def largest_differences(
    pairs: dict[str, tuple[Tensor, Tensor]], found: list[float], losses: list[float]
) -> tuple[float, float, str]:
    """Return the largest absolute and relative difference of some pairs of tensors and of losses, and the worst name.

    Args:
        pairs: By name what was found and what was expected.
        found: Losses found.
        losses: Losses expected.
    """
    pairs = {"loss": (torch.tensor(found, dtype=torch.float64), torch.tensor(losses, dtype=torch.float64)), **pairs}
    error, relative, worst = 0.0, 0.0, ""
    for name, (mine, expected) in pairs.items():
        if not expected.numel():
            continue
        gap = (mine.detach().double() - expected.detach().double()).abs()
        largest = float(gap.max())
        if not largest <= error:  # a NaN counts as the worst
            error, worst = largest, name
        relative = max(relative, float((gap / (1 + expected.detach().double().abs())).max()))
    return error, relative, worst


def _train(
    parallel: ParallelModule, batch: tuple[Tensor, ...], num_steps: int, eps: float
) -> tuple[list[float], dict[str, Tensor], dict[str, dict[str, int]]]:
    """Return losses, this rank's parts of parameters, buffers and optimiser state, and one step's collectives."""
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3, eps=eps)
    losses, counted = [], {}
    for _ in range(num_steps):
        optimizer.zero_grad()
        parallel.groups.reset_counters()
        loss = parallel(*batch)
        loss.backward()
        counted = parallel.groups.counted()
        optimizer.step()
        losses.append(loss.item())
    return losses, parallel.parts() | optimizer_parts(parallel, optimizer), counted


def optimizer_parts(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the state that an optimiser keeps per element, as ``"<parameter>/<key>"``."""
    return {
        f"{name}/{key}": value
        for name, parameter in module.named_parameters()
        for key, value in sorted(optimizer.state[parameter].items())
        if value.shape == parameter.shape and key != "step"
    }
