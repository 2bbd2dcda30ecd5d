"""A plan: one point of the frontier, with everything needed to read it, keep it and run it.

A plan names layouts per operator, per shared tensor and per parameter, and what it is predicted to cost. It belongs to
one model (by the graph's fingerprint), one mesh and one torch version, and is refused elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from autopar.errors import PlanMismatchError
from autopar.graph import Graph
from core_kernels.console import format_bytes, format_seconds
from core_kernels.plan import PlanDocument

__all__ = ["OperatorPlan", "ParameterPlan", "Plan", "Prediction"]


@dataclass(frozen=True)
class OperatorPlan:
    """Layouts of one operator: of its tensor inputs, its output, and what its readers share (``""``: nothing)."""

    kind: str
    module: str
    inputs: tuple[str, ...]
    output: str
    delivered: str


@dataclass(frozen=True)
class ParameterPlan:
    """How a parameter or buffer is stored, how it is used, and whether a gathered copy is dropped after each use."""

    stored: str
    used: str
    drop: bool


@dataclass(frozen=True)
class Prediction:
    """What one step costs on each device.

    Attributes:
        parameter_bytes: Stored parameters; as much again for gradients.
        optimizer_bytes: Optimiser state.
        buffer_bytes: Buffers.
        saved_bytes: Kept for the backward pass, gathered parameters included.
        working_bytes: Largest working set of one operator.
        compute_seconds: Operators and optimiser.
        communication_seconds: Re-scheduling and gradient synchronisation.
        messages: ``"axis.collective.phase"`` to calls and bytes sent by the first device.
        binding: The parameter or operator that holds most memory.
        update_bytes: What the optimiser needs besides while it updates the largest parameter.
        backward_bytes: The most that is saved and worked with at one moment of the backward pass; 0 in plans of the
            first releases, which take all that is saved and the largest working set.
    """

    parameter_bytes: int
    optimizer_bytes: int
    buffer_bytes: int
    saved_bytes: int
    working_bytes: int
    compute_seconds: float
    communication_seconds: float
    messages: dict[str, dict[str, int]]
    binding: str
    update_bytes: int = 0
    backward_bytes: int = 0

    @property
    def memory_bytes(self) -> int:
        """The peak: states, and the larger of what the backward pass and what the update needs besides."""
        states = 2 * self.parameter_bytes + self.optimizer_bytes + self.buffer_bytes
        return states + max(self.backward_bytes or self.saved_bytes + self.working_bytes, self.update_bytes)

    @property
    def most_bytes(self) -> int:
        """A bound of the peak that adds up, as the search compares plans: all that is saved, and the working set."""
        states = 2 * self.parameter_bytes + self.optimizer_bytes + self.buffer_bytes
        return states + self.saved_bytes + max(self.working_bytes, self.update_bytes)

    @property
    def seconds(self) -> float:
        """Seconds of one step."""
        return self.compute_seconds + self.communication_seconds


@dataclass(frozen=True)
class Plan(PlanDocument):
    """One way to train a module on a mesh.

    Attributes:
        model: Class of the module.
        graph: Fingerprint of its captured step.
        torch_version: Version of torch it was captured with.
        mesh: Sizes of the axes.
        memory: Bytes per device by which plans are compared: an upper bound of ``predicted.memory_bytes`` but for the
            copies that re-scheduling of gradients makes.
        seconds: Seconds per step.
        operators: By name.
        parameters: By name in the module.
        predicted: The costs in parts.
    """

    schema: ClassVar[str] = "autopar.plan"
    version: ClassVar[int] = 1

    model: str
    graph: str
    torch_version: str
    mesh: tuple[int, ...]
    memory: float
    seconds: float
    operators: dict[str, OperatorPlan]
    parameters: dict[str, ParameterPlan]
    predicted: Prediction

    def check(self, graph: Graph, mesh: Sequence[int] | None = None) -> None:
        """Refuse another model, torch version or mesh.

        Raises:
            PlanMismatchError: The plan was made for something else.
        """
        pairs = [
            ("model", self.graph, graph.fingerprint, "search again for this model and batch"),
            ("torch_version", self.torch_version, torch.__version__, "search again, captured graphs differ by version"),
        ]
        if mesh is not None:
            pairs.append(("mesh", tuple(self.mesh), tuple(mesh), "start as many ranks as the plan's mesh has"))
        for name, made_for, found, remedy in pairs:
            if made_for != found:
                raise PlanMismatchError(
                    f"{name}={found!r} does not fit the plan: it was made for {name}={made_for!r}; {remedy}"
                )

    def explain(self, prefix: str = "") -> str:
        """Return what the plan does, in words: totals, then every parameter and operator.

        Args:
            prefix: Show only modules whose path begins with it, for example ``"blocks.3"``.
        """
        p = self.predicted
        lines = [
            f"{self.model} on mesh {'x'.join(map(str, self.mesh))}: {format_bytes(p.memory_bytes)} per device, "
            f"{format_seconds(p.seconds)} per step",
            f"  memory: {format_bytes(p.parameter_bytes)} parameters, as much for gradients, "
            f"{format_bytes(p.optimizer_bytes)} optimiser, {format_bytes(p.saved_bytes)} saved for backward, "
            f"{format_bytes(p.working_bytes)} working set; or {format_bytes(p.update_bytes)} to update; "
            f"most for {p.binding}",
            f"  time: {format_seconds(p.compute_seconds)} computing, "
            f"{format_seconds(p.communication_seconds)} communicating",
        ]
        lines += [
            f"  axis {tag.replace('.', ', ')}: {counts['calls']} calls, {format_bytes(counts['sent_bytes'])} sent"
            for tag, counts in p.messages.items()
        ]
        for name, parameter in self.parameters.items():
            if name.startswith(prefix):
                dropped = ", gathered again for backward" if parameter.drop else ""
                lines.append(f"  {name}: stored {parameter.stored}, used {parameter.used}{dropped}")
        for name, operator in self.operators.items():
            if operator.module.startswith(prefix):
                shared = f", handed on as {operator.delivered}" if operator.delivered else ""
                inputs = " ".join(operator.inputs)
                lines.append(f"  {name} ({operator.module or 'top'}): {inputs} -> {operator.output}{shared}")
        return "\n".join(lines)

    def diff(self, other: Plan) -> str:
        """Return what differs from another plan for the same model, a line each."""
        lines = [] if self.mesh == other.mesh else [f"mesh: {self.mesh} | {other.mesh}"]
        for mine, theirs in ((self.parameters, other.parameters), (self.operators, other.operators)):
            for name in [*mine, *(name for name in theirs if name not in mine)]:
                here, there = mine.get(name), theirs.get(name)
                lines += [] if here == there else [f"{name}: {_short(here)} | {_short(there)}"]
        return "\n".join(lines)


def _short(part: OperatorPlan | ParameterPlan | None) -> str:
    if part is None:
        return "absent"
    if isinstance(part, ParameterPlan):
        return f"{part.stored} used {part.used}{' dropped' if part.drop else ''}"
    return f"{' '.join(part.inputs)} -> {part.output}{' => ' + part.delivered if part.delivered else ''}"
