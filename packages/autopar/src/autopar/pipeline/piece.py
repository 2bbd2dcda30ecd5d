"""The operators of one stage, interpreted on one micro-batch and on the stage's mesh.

Each unit runs by the schedule of its own plan, as :mod:`autopar.execution` runs a whole step. Two things differ. A
configuration has one more axis in front: the micro-batches, visited one after another. And what a parameter's
re-scheduling does without gathering is done once per step: micro-batches add to the gradient of the re-scheduled copy,
whose own re-scheduling back, the synchronisation of gradients, follows at the end of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from autopar.collectives import MeshGroups, convert
from autopar.errors import PlanMismatchError
from autopar.execution import dropping, take_inputs
from autopar.graph import Graph
from autopar.local_operators import LocalContext, run_operator
from autopar.pipeline.boundary import Boundary, enter, gather_messages, leave
from autopar.pipeline.microbatches import MicroBatches
from autopar.pipeline.plan import PipelinePlan, UnitPlan
from autopar.pipeline.units import part_of, required_operators
from autopar.placement import Layout, R, parse_layout, shard
from autopar.resharding import Message
from autopar.rules import Configuration
from autopar.schedule import Schedule

__all__ = ["Piece"]


@dataclass(eq=False)
class _Unit:
    """A unit as a stage runs it.

    Attributes:
        part: Its operators at the shapes of one micro-batch.
        positions: Their positions in the whole graph.
        schedule: Its plan against it.
        configs: Their configurations on micro-batches and mesh together; ``None`` for leaves.
        slices: Per operator the inputs that are whole but wanted by micro-batch: (input, operator read, dim).
        once: Re-scheduling of parameters that runs once per step: (operator, input), or (operator, -1) of a delivery.
        last_use: Per operator the last that reads it.
        tensors: This rank's parts of parameters and buffers, per operator.
        ready: What ``once`` has made of them in this step.
    """

    part: Graph
    positions: list[int]
    schedule: Schedule
    configs: list[Configuration | None]
    slices: dict[int, list[tuple[int, int, int]]]
    once: set[tuple[int, int]]
    last_use: dict[int, int]
    tensors: dict[int, Tensor] = field(default_factory=dict)
    ready: dict[tuple[int, int], Tensor] = field(default_factory=dict)


class Piece(nn.Module):
    """One stage.

    Args:
        graph: The captured step of the whole batch.
        batches: How it runs in micro-batches.
        plan: The pipeline.
        stage: Which stage of it.
        groups: This rank's groups along the axes of the stage's mesh.
        seed: Key of dropout.

    Attributes:
        before: How activations come in; ``None`` for the first stage.
        behind: How they go out; ``None`` for the last.
        layouts: How the stage's parameters and buffers are stored, by name in the module.
    """

    def __init__(
        self, graph: Graph, batches: MicroBatches, plan: PipelinePlan, stage: int, groups: MeshGroups, seed: int
    ):
        super().__init__()
        self.graph, self.batches, self._plan, self._stage, self._groups = graph, batches, plan, stage, groups
        names = {operator.name: position for position, operator in enumerate(graph.operators)}
        numbers = {operator.name: number for number, operator in enumerate(graph.operators)}
        mesh, timed = (batches.count, *groups.mesh), groups.behind_time()
        self._contexts = [
            LocalContext(mesh, (index, *groups.coordinate), timed, seed, 0, numbers) for index in range(batches.count)
        ]
        layout = parse_layout(plan.stages[stage].boundary)
        source = names[plan.stages[stage - 1].units[-1].result] if stage else None
        self._units: list[_Unit] = []
        for unit in plan.stages[stage].units:
            self._units.append(self._read_unit(unit, names, source, layout))
            source = names[unit.result]
        first, last = self._units[0].part, self._units[-1].part
        handed = last.operators[last.result].output
        self.before = Boundary(first.operators[0].output, groups.mesh, layout) if stage else None
        self.behind = Boundary(handed, groups.mesh, layout) if stage < plan.num_stages - 1 else None
        self._effects = self._find_effects(names)
        self.layouts = self._storage()
        self._inputs: dict[int, Tensor] = {}
        self._input_positions = [p for p, operator in enumerate(graph.operators) if operator.kind == "input"]

    def _read_unit(self, unit: UnitPlan, names: dict[str, int], source: int | None, layout: Layout) -> _Unit:
        whole, mesh = self.graph, self._groups.mesh
        trunk = [names[name] for name in unit.operators if name in names]
        trunk = [p for p in trunk if not whole.operators[p].is_leaf and whole.operators[p].output.has_gradient]
        part, positions = part_of(whole, [p for p in trunk if p != source], source, names[unit.result], self.batches)
        result = layout if part.operators[part.result].output.shape else None
        start = None if source is None else layout
        schedule = Schedule.of(part, mesh, unit.operators, unit.parameters, start, result)
        configs = [_in_time(self.batches.configs[p], c) for p, c in zip(positions, schedule.configs, strict=True)]
        once, slices = _find_once(schedule), {}
        for place, operator in enumerate(part.operators):
            config = schedule.configs[place] and self.batches.configs[positions[place]]
            for slot, read in enumerate(operator.inputs if config else ()):
                wanted = config.inputs[slot][0]
                if wanted >= 0 > self.batches.forms[positions[read]]:
                    slices.setdefault(place, []).append((slot, read, wanted))
                    self._check_slice(schedule, read, wanted, once)
        last_use = {read: place for place, operator in enumerate(part.operators) for read in operator.inputs}
        return _Unit(part, positions, schedule, configs, slices, once, last_use)

    @staticmethod
    def _check_slice(schedule: Schedule, read: int, dim: int, once: set[tuple[int, int]]) -> None:
        config = schedule.configs[read]
        layout = schedule.delivered.get(read, schedule.stored[read] if config is None else config.output)
        if dim in layout or any(place == read for place, slot in once if slot == -1):
            name = schedule.graph.operators[read].name
            raise PlanMismatchError(
                f"{name} does not change with the batch but is cut along its dim {dim} over devices and micro-batches "
                "at once; expected one of the two; search with sub_meshes=[1], or with one micro-batch"
            )

    def _find_effects(self, names: dict[str, int]) -> list[int]:
        """Return operators that are there for their effect: nobody reads them, such as those that count steps."""
        readers, stages = self.graph.consumers(), self._plan.stages
        begin = names[stages[self._stage - 1].last] + 1 if self._stage else 0
        run = range(begin, names[stages[self._stage].last] + 1)
        unread = [p for p in run if not self.graph.operators[p].is_leaf and not readers[p] and p != self.graph.result]
        needed = required_operators(self.graph, unread)
        for position in needed:
            operator = self.graph.operators[position]
            if operator.output.has_gradient and not operator.is_leaf:
                raise PlanMismatchError(
                    f"{operator.name} is kept in a buffer by {self.graph.operators[unread[0]].name}; expected buffers "
                    "that do not depend on activations, besides those of normalisations; run this module as one stage"
                )
        return needed

    def _storage(self) -> dict[str, Layout]:
        """Return how parameters and buffers are stored; whole where units do not agree."""
        found: dict[str, Layout] = {}
        whole = (R,) * len(self._groups.mesh)
        for unit in self._units:
            for place, layout in unit.schedule.stored.items():
                operator = unit.part.operators[place]
                if operator.kind in ("parameter", "buffer"):
                    found[operator.target] = layout if found.get(operator.target, layout) == layout else whole
        for position in self._effects:
            operator = self.graph.operators[position]
            if operator.kind in ("parameter", "buffer"):
                found[operator.target] = whole
        return found

    def adopt(self, tensors: dict[str, Tensor]) -> None:
        """Take this rank's parameters and buffers, by name, as :attr:`layouts` says they lie."""
        self._by_name = tensors
        for unit in self._units:
            for place, layout in unit.schedule.stored.items():
                operator = unit.part.operators[place]
                if operator.kind in ("parameter", "buffer"):
                    held = tensors[operator.target]
                    if layout != self.layouts[operator.target]:
                        held = shard(held, layout, self._groups.mesh, self._groups.coordinate)
                    unit.tensors[place] = held

    def begin(self, inputs: Sequence[Tensor], step: int) -> None:
        """Take the batch of a step, and do what is done once. Collective: all ranks of the stage."""
        self._inputs = dict(zip(self._input_positions, inputs, strict=True))
        self._copies: list[tuple[Tensor, Tensor]] = []
        for context in self._contexts:
            context.step = step
        for unit in self._units:
            for place, slot in sorted(unit.once):
                read = place if slot < 0 else unit.part.operators[place].inputs[slot]
                steps = unit.schedule.delivery[place] if slot < 0 else unit.schedule.feeds[place][slot]
                moved = convert(unit.tensors[read], steps, self._groups, keeps_view=True)
                copy = moved.detach().requires_grad_(moved.requires_grad)
                unit.ready[place, slot] = copy
                if moved.requires_grad:
                    self._copies.append((moved, copy))

    def end(self) -> None:
        """Let go of the batch; hand gradients of copies on to parameters. Collective: all ranks of the stage."""
        pairs = [(moved, copy.grad) for moved, copy in self._copies if copy.grad is not None]
        if pairs:
            torch.autograd.backward([moved for moved, _ in pairs], [grad for _, grad in pairs])
        self._inputs, self._copies = {}, []
        for unit in self._units:
            unit.ready.clear()

    def forward(self, *received: Tensor, micro_batch: Tensor) -> Tensor:
        """Run one micro-batch: from the run of activations received to the run to send, or to the loss."""
        context = self._contexts[int(micro_batch)]
        value = enter(received[0], self.before, self._groups) if self.before is not None else None
        for unit in self._units:
            value = self._run(unit, value, context)
        assert value is not None
        self._run_effects(context)
        return value if self.behind is None else leave(value, self.behind, self._groups)

    def _run(self, unit: _Unit, given: Tensor | None, context: LocalContext) -> Any:
        schedule, values, result = unit.schedule, dict[int, Any](), None
        for place, operator in enumerate(unit.part.operators):
            config = unit.configs[place]
            if config is None:
                value = given if place == 0 and given is not None else self._leaf(unit, place, context)
            else:
                sources = {read: values[read] for read in operator.inputs}
                for _, read, dim in unit.slices.get(place, ()):
                    sources[read] = shard(values[read], (dim,), context.mesh[:1], context.coordinate[:1])
                taken, dropped = take_inputs(schedule, place, sources, self._groups, unit.ready)
                with dropping(dropped):
                    value = run_operator(self.graph.operators[unit.positions[place]], config, taken, context)
                for read in operator.inputs:
                    if unit.last_use[read] == place:
                        values.pop(read, None)
            if place == unit.part.result:
                result = convert(value, schedule.final, self._groups)
            if place in schedule.delivery:
                ready = unit.ready.get((place, -1))
                value = (
                    convert(value, schedule.delivery[place], self._groups, config is None) if ready is None else ready
                )
            values[place] = value
        return result

    def _leaf(self, unit: _Unit, place: int, context: LocalContext) -> Tensor:
        operator, position = unit.part.operators[place], unit.positions[place]
        if operator.kind == "constant":
            return self.graph.constants[operator.name]
        return self._input(position, context) if operator.kind == "input" else unit.tensors[place]

    def _input(self, position: int, context: LocalContext) -> Tensor:
        form = (self.batches.forms[position],)
        return shard(self._inputs[position], form, context.mesh[:1], context.coordinate[:1])

    def _run_effects(self, context: LocalContext) -> None:
        values: dict[int, Any] = {}
        alone = LocalContext(context.mesh[:1], context.coordinate[:1])
        for position in self._effects:
            operator, config = self.graph.operators[position], self.batches.configs[position]
            if config is not None:
                taken = [values[source] for source in operator.inputs]
                values[position] = run_operator(operator, config, taken, alone)
            elif operator.kind == "input":
                values[position] = self._input(position, context)
            elif operator.kind == "constant":
                values[position] = self.graph.constants[operator.name]
            else:
                values[position] = self._by_name[operator.target]

    def messages(self) -> list[Message]:
        """Return every collective of one training step inside the stage, as this rank sees it."""
        coordinate, count = self._groups.coordinate, self.batches.count
        found: list[Message] = []
        for unit in self._units:
            found += unit.schedule.messages(coordinate, count, unit.once)
        for side, backward in ((self.before, False), (self.behind, True)):
            found += gather_messages(side, coordinate, backward) * count if side is not None else []
        return found


def _in_time(batch: Configuration | None, config: Configuration | None) -> Configuration | None:
    """Return a configuration on micro-batches and mesh together."""
    if batch is None or config is None:
        return None
    once = tuple((*a, *(axis + 1 for axis in b)) for a, b in zip(batch.once, config.once, strict=True))
    inputs = tuple((*a, *b) for a, b in zip(batch.inputs, config.inputs, strict=True))
    active = (*batch.active, *(axis + 1 for axis in config.active))
    return Configuration(inputs, (*batch.output, *config.output), once, active)


def _find_once(schedule: Schedule) -> set[tuple[int, int]]:
    """Return the re-scheduling of parameters that gathers nothing, and so can serve all micro-batches of a step."""
    found = set()
    operators = schedule.graph.operators
    for place, operator in enumerate(operators):
        if operator.kind == "parameter" and _is_free(schedule.delivery.get(place, ())):
            found.add((place, -1))
        for slot, read in enumerate(operator.inputs):
            is_own = operators[read].kind == "parameter" and read not in schedule.delivered
            if is_own and _is_free(schedule.feeds[place][slot]):
                found.add((place, slot))
    return found


def _is_free(steps: Sequence[Any]) -> bool:
    return bool(steps) and all(step.forward in ("slice", "nothing") for step in steps)
