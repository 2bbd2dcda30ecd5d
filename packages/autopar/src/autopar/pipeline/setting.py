"""One setting of the search: a layout of the hosts and a number of micro-batches; its best cut under a budget.

The cut becomes a plan only when it is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from autopar.graph import Graph
from autopar.pipeline.chain import Chain, StagePoint
from autopar.pipeline.costs import StageCosts
from autopar.pipeline.hosts import Placement
from autopar.pipeline.partition import Cut, Row, cut_chain
from autopar.pipeline.plan import PipelinePlan, StagePlan, UnitPlan
from autopar.pipeline.stage_space import UnitFrontier
from autopar.placement import format_layout
from autopar.plan import OperatorPlan, ParameterPlan
from autopar.planner import read_choices

__all__ = ["Setting"]


@dataclass(eq=False)
class Setting:
    """A layout of the hosts, a number of micro-batches, and how many stages there may be.

    Attributes:
        costs: Where costs come from.
        placement: Devices in a row.
        chains: Units on each of its sub-meshes.
        row: The same devices for the cut.
        count: Micro-batches of a step.
        stages: Fewest and most stages.
        flights: Per number of stages from one to the end, the micro-batches it holds.
        once_seconds: What a step takes besides, whatever the cut.
        lower: A lower bound of the time of its best cut under the budget of now.
    """

    costs: StageCosts
    placement: Placement
    chains: list[Chain]
    row: Row
    count: int
    stages: tuple[int, int]
    flights: list[int]
    once_seconds: float
    lower: float = 0.0

    def cut(self, memory: float, known: float) -> Cut | None:
        """Return the best cut under a budget; ``None`` when none is faster than ``known``."""
        numbers = sorted(set(self.flights[1:]))
        caps = [min(memory, sub_mesh.host.memory_bytes) for sub_mesh in self.placement.sub_meshes]
        times = np.array([[chain.times(k, cap) for k in numbers] for chain, cap in zip(self.chains, caps, strict=True)])
        index = np.array([0, *(numbers.index(k) for k in self.flights[1:])])
        least = float(np.min([chain.least_seconds() for chain in self.chains], axis=0).sum())
        return cut_chain(times, index, self.row, self.count, self.stages, least, known - self.once_seconds)

    def memory_of(self, cut: Cut, memory: float) -> float:
        """Return the bytes of the fullest device."""
        return max(self._stage(cut, place, memory)[2].memory for place in range(len(cut.sizes)))

    def least_memory(self) -> float:
        """Return a lower bound of the memory of any cut."""
        return float(np.min([chain.least_memory() for chain in self.chains], axis=0).max())

    def _stage(self, cut: Cut, place: int, memory: float) -> tuple[Chain, int, StagePoint]:
        """Return the chain of a stage, the micro-batches it holds, and what it costs."""
        column = self.placement.sizes.index(cut.sizes[place])
        kind = int(self.placement.kinds[cut.devices[place], column])
        cap = min(memory, self.placement.sub_meshes[kind].host.memory_bytes)
        flying = self.flights[len(cut.sizes) - place]
        return self.chains[kind], flying, self.chains[kind].at(cut.bounds[place], cut.bounds[place + 1], flying, cap)

    def plan(self, memory: float, seconds: float, cut: Cut, budget: float) -> PipelinePlan:
        """Write a cut as a plan."""
        graph = self.costs.graph
        stages = tuple(self._stage_plan(cut, place, budget) for place in range(len(cut.sizes)))
        tied = {}
        for position, users in self.costs.users.items():
            holders = sorted({int(np.searchsorted(cut.bounds, unit, side="right")) - 1 for unit in users})
            if len(holders) > 1:
                tied[graph.operators[position].target] = tuple(holders)
        plan = PipelinePlan(
            graph.module_name, graph.fingerprint, torch.__version__, self.count, memory, seconds, 0.0,
            self.once_seconds, tied, stages,
        )  # fmt: skip
        return replace(plan, simulated_seconds=plan.simulate().seconds + self.once_seconds)

    def _stage_plan(self, cut: Cut, place: int, budget: float) -> StagePlan:
        chain, flying, point = self._stage(cut, place, budget)
        start, stop = cut.bounds[place], cut.bounds[place + 1]
        variants, rows = self.costs.details(chain)
        mesh, layout = variants[point.variant]
        parts, units = self.costs.parts(self.count), self.costs.units
        states = saved = 0.0
        planned: list[UnitPlan] = []
        for unit, index in zip(range(start, stop), point.points, strict=True):
            frontier = rows[point.variant][unit]
            assert frontier is not None
            states, saved = states + frontier.points[index, 0], saved + frontier.points[index, 1]
            planned.append(_unit_plan(frontier, index, parts[unit]))
        is_last = stop == len(units)
        column = self.placement.sizes.index(cut.sizes[place])
        crosses = int(not is_last and self.placement.crosses[cut.devices[place] + cut.sizes[place]])
        operators = self.costs.graph.operators
        return StagePlan(
            first=operators[units[start].operators[0]].name,
            last=operators[units[stop - 1].operators[-1]].name,
            devices=self.placement.devices(cut.devices[place], cut.sizes[place]),
            mesh=mesh,
            boundary=format_layout(layout),
            in_flight=flying,
            states_bytes=float(states),
            saved_bytes=float(saved),
            fixed_bytes=chain.fixed_bytes(point.variant, start, stop),
            seconds=point.seconds,
            sent_bytes=0 if is_last else parts[stop].operators[0].output.num_bytes,
            send_seconds=0.0 if is_last else float(self.row.send_seconds[column, stop, crosses]),
            units=tuple(planned),
        )


def _unit_plan(frontier: UnitFrontier, index: int, part: Graph) -> UnitPlan:
    """Write a point of a unit as a plan of an equal unit: layouts carry over by the order of operators."""
    operators, parameters, _ = read_choices(frontier.space, frontier.choices[index])
    mine: dict[str, OperatorPlan] = {}
    stored: dict[str, ParameterPlan] = {}
    for here, there in zip(part.operators, frontier.space.graph.operators, strict=True):
        if there.name in operators:
            mine[here.name] = replace(operators[there.name], module=here.module)
        if there.kind in ("parameter", "buffer") and there.target in parameters:
            stored[here.target] = parameters[there.target]
    return UnitPlan(part.operators[part.result].name, mine, stored)
