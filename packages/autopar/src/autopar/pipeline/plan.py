"""A pipeline plan: stages, the devices each runs on, micro-batches, and what a step is predicted to cost.

Like :class:`autopar.Plan` it is one JSON file that names what it was made for and is refused elsewhere.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from autopar.errors import InfeasibleError, PlanMismatchError, ProblemError
from autopar.frontier import FrontierOfPlans
from autopar.graph import Graph
from autopar.pipeline.schedule import Simulation, simulate
from autopar.plan import OperatorPlan, ParameterPlan
from core_kernels.console import format_bytes, format_seconds
from core_kernels.plan import PlanDocument

__all__ = ["PipelineFrontier", "PipelinePlan", "StagePlan", "UnitPlan"]


@dataclass(frozen=True)
class UnitPlan:
    """How a stage runs one unit.

    Attributes:
        result: Name of the operator whose result is handed on, or of the loss.
        operators: Layouts of its operators on the stage's mesh, by name.
        parameters: Layouts of the parameters and buffers it reads, by name in the module.
    """

    result: str
    operators: dict[str, OperatorPlan]
    parameters: dict[str, ParameterPlan]


@dataclass(frozen=True)
class StagePlan:
    """One stage.

    Attributes:
        first: Name of its first operator with a gradient.
        last: Name of its last; what it returns is the value handed on, or the loss.
        devices: Numbers of its devices, hosts as they were listed.
        mesh: Mesh of these devices.
        boundary: Layout of activations between its units and at its ends.
        in_flight: Micro-batches it holds saved activations of.
        states_bytes: Parameters, gradients, optimiser state and buffers of one device.
        saved_bytes: Kept for the backward pass, per micro-batch in flight.
        fixed_bytes: Largest working set, and receive buffers of all micro-batches.
        seconds: Forward and backward of one micro-batch, with its share of what happens once per step.
        sent_bytes: Bytes of one micro-batch handed on; as many come back as gradient. 0 for the last stage.
        send_seconds: One direction of that.
        units: Its units in order.
    """

    first: str
    last: str
    devices: tuple[int, ...]
    mesh: tuple[int, ...]
    boundary: str
    in_flight: int
    states_bytes: float
    saved_bytes: float
    fixed_bytes: float
    seconds: float
    sent_bytes: int
    send_seconds: float
    units: tuple[UnitPlan, ...]

    @property
    def memory_bytes(self) -> float:
        """Bytes of one device."""
        return self.states_bytes + self.in_flight * self.saved_bytes + self.fixed_bytes

    @property
    def parameters(self) -> dict[str, ParameterPlan]:
        """How each parameter and buffer is stored, by name."""
        return {name: parameter for unit in self.units for name, parameter in unit.parameters.items()}


@dataclass(frozen=True)
class PipelinePlan(PlanDocument):
    """One way to train a module as a pipeline.

    Attributes:
        model: Class of the module.
        graph: Fingerprint of its captured step.
        torch_version: Version of torch it was captured with.
        num_micro_batches: Micro-batches of a step.
        memory: Bytes of the device that holds most.
        seconds: Bound of a step's time, from :func:`autopar.pipeline.bound_seconds`.
        simulated_seconds: The same step played by :func:`autopar.pipeline.simulate`.
        tied_seconds: Sum of gradients of parameters that several stages use, part of both times.
        tied: Parameters that several stages hold, with the stages.
        stages: In order.
    """

    schema: ClassVar[str] = "autopar.pipeline_plan"
    version: ClassVar[int] = 2

    model: str
    graph: str
    torch_version: str
    num_micro_batches: int
    memory: float
    seconds: float
    simulated_seconds: float
    tied_seconds: float
    tied: dict[str, tuple[int, ...]]
    stages: tuple[StagePlan, ...]

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.stages)

    @property
    def schedule(self) -> str:
        """``"1F1B"``, or ``"GPipe"`` with fewer micro-batches than stages."""
        return "1F1B" if self.num_micro_batches >= self.num_stages else "GPipe"

    def check(self, graph: Graph) -> None:
        """Refuse another model or torch version.

        Raises:
            PlanMismatchError: The plan was made for something else.
        """
        pairs = [
            ("model", self.graph, graph.fingerprint, "search again for this model and batch"),
            ("torch_version", self.torch_version, torch.__version__, "search again, captured graphs differ by version"),
        ]
        for name, made_for, found, remedy in pairs:
            if made_for != found:
                raise PlanMismatchError(
                    f"{name}={found!r} does not fit the plan: it was made for {name}={made_for!r}; {remedy}"
                )

    @property
    def num_devices(self) -> int:
        """Number of devices of all stages."""
        return sum(len(stage.devices) for stage in self.stages)

    def ranks(self) -> list[list[int]]:
        """Return the ranks of every stage, in the order of its mesh: ranks stand for devices in ascending order."""
        devices = sorted(device for stage in self.stages for device in stage.devices)
        return [[devices.index(device) for device in stage.devices] for stage in self.stages]

    def simulate(self, num_sliced: int = 0) -> Simulation:
        """Play a step of this plan; see :func:`autopar.pipeline.simulate`. A third of a stage's time is forward."""
        forward = [stage.seconds / 3 for stage in self.stages]
        backward = [2 * seconds for seconds in forward]
        moved = [stage.send_seconds for stage in self.stages[:-1]]
        return simulate(forward, backward, self.num_micro_batches, moved, moved, num_sliced)

    def best_slicing(self) -> tuple[int, Simulation]:
        """Return how many first micro-batches to run in halves for the shortest step, and that step.

        The fewest count among equals. The schedules of ``torch.distributed.pipelining`` do not slice; this is what one
        that does would gain.
        """
        tried = ((count, self.simulate(count)) for count in range(min(self.num_stages, self.num_micro_batches) + 1))
        return min(tried, key=lambda pair: (pair[1].seconds, pair[1].startup_seconds, pair[0]))

    def explain(self, prefix: str = "") -> str:
        """Return what the plan does, in words: totals, then every stage and its parameters.

        Args:
            prefix: Show only parameters whose name begins with it, for example ``"blocks.3"``.
        """
        played = self.simulate()
        count, sliced = self.best_slicing()
        lines = [
            f"{self.model} in {self.num_stages} stages and {self.num_micro_batches} micro-batches ({self.schedule}): "
            f"{format_bytes(self.memory)} on the fullest device, at most {format_seconds(self.seconds)} per step",
            f"  played: {format_seconds(self.simulated_seconds)}, of which {played.bubble:.0%} waiting; the last "
            f"stage begins after {format_seconds(played.startup_seconds)}",
        ]
        if count:
            lines.append(
                f"  with the first {count} forward passes in halves it would begin after "
                f"{format_seconds(sliced.startup_seconds)} and take "
                f"{format_seconds(sliced.seconds + self.tied_seconds)}"
            )
        for name, holders in self.tied.items():
            lines.append(f"  {name} is held by stages {', '.join(map(str, holders))}, which add their gradients")
        for place, stage in enumerate(self.stages):
            sent = f", hands on {format_bytes(stage.sent_bytes)}" if stage.sent_bytes else ""
            lines.append(
                f"  stage {place}: {stage.first} to {stage.last} on devices {_ranges(stage.devices)} as "
                f"{'x'.join(map(str, stage.mesh))}, activations {stage.boundary}: {format_bytes(stage.memory_bytes)} "
                f"({format_bytes(stage.states_bytes)} states, {stage.in_flight} x {format_bytes(stage.saved_bytes)} "
                f"saved), {format_seconds(stage.seconds)} per micro-batch{sent}"
            )
            lines += [
                f"    {name}: stored {parameter.stored}, used {parameter.used}"
                for name, parameter in stage.parameters.items()
                if prefix and name.startswith(prefix)
            ]
        return "\n".join(lines)

    def diff(self, other: PipelinePlan) -> str:
        """Return what differs from another plan for the same model, a line each."""
        totals = ("num_micro_batches", "num_stages", "memory", "seconds")
        pairs = [(name, getattr(self, name), getattr(other, name)) for name in totals]
        lines = [f"{name}: {mine} | {theirs}" for name, mine, theirs in pairs if mine != theirs]
        for place in range(max(self.num_stages, other.num_stages)):
            here, there = (_short(plan.stages[place : place + 1]) for plan in (self, other))
            lines += [] if here == there else [f"stage {place}: {here} | {there}"]
        return "\n".join(lines)


def _short(stages: tuple[StagePlan, ...]) -> str:
    if not stages:
        return "absent"
    (stage,) = stages
    return f"{stage.first} to {stage.last} on {_ranges(stage.devices)} as {'x'.join(map(str, stage.mesh))}"


def _ranges(numbers: tuple[int, ...]) -> str:
    """Write numbers in short.

    >>> _ranges((0, 1, 2, 5, 8, 9))
    '0-2,5,8-9'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


class PipelineFrontier(FrontierOfPlans):
    """A frontier whose points are :class:`PipelinePlan`; memory in bytes of the fullest device."""

    def mini_time(self, memory: float | None = None) -> Any:
        """Return the fastest plan that fits into ``memory`` bytes on every device.

        Raises:
            InfeasibleError: Nothing fits; the message names the least memory possible and the stage that binds it.
        """
        if memory is not None and len(self) and memory < self.memory[0]:
            plan: PipelinePlan = self[0]
            place = max(range(plan.num_stages), key=lambda stage: plan.stages[stage].memory_bytes)
            raise InfeasibleError(
                f"memory={memory:g} is not feasible: the least memory found is {self.memory[0]:g} bytes "
                f"({format_bytes(self.memory[0])}), in stage {place} of {plan.num_stages}, "
                f"{plan.stages[place].first} to {plan.stages[place].last}; raise the budget, use more devices or "
                "smaller micro-batches"
            )
        return super().mini_time(memory)

    def save(self, path: str | Path) -> None:
        """Write every plan into one JSON file."""
        document = {
            "schema": "autopar.pipeline_frontier",
            "version": 1,
            "exact": self.exact,
            "plans": [self[index].to_dict() for index in range(len(self))],
        }
        Path(path).write_text(json.dumps(document) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> PipelineFrontier:
        """Read a frontier written by :meth:`save`.

        Raises:
            ProblemError: The file holds something else.
        """
        try:
            document = json.loads(Path(path).read_text())
            found = document["schema"], document["version"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ProblemError(
                f"{path} is no saved frontier ({error}); expected what save wrote; save it again"
            ) from None
        if found != ("autopar.pipeline_frontier", 1):
            raise ProblemError(
                f"{path} holds {found[0]} version {found[1]}; expected autopar.pipeline_frontier version 1; "
                "write it again with save"
            )
        plans = [PipelinePlan.from_dict(plan) for plan in document["plans"]]
        memory, seconds = [plan.memory for plan in plans], [plan.seconds for plan in plans]
        return cls(memory, seconds, plans.__getitem__, document["exact"])  # type: ignore[arg-type]
