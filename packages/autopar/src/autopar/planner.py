"""The search for plans: every mesh of a cluster, every bound on the working set, one frontier.

Memory that adds up (states, saved tensors) is tracked exactly. The working set does not add up, only its largest
counts; so the search runs once for each bound on it with everything larger forbidden, adds the bound, and unites the
frontiers. A frontier point's memory is therefore an upper bound that is reached when its largest operator fills the
bound; the plan's own prediction is exact.

Source: TensorOpt's search options (arXiv 2004.10856): ``mini_time``, ``mini_parallelism`` and profiling.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from autopar.cluster import Cluster
from autopar.cost_model import update_bytes
from autopar.errors import InfeasibleError, ProblemError
from autopar.frontier import Frontier, FrontierOfPlans
from autopar.graph import Graph, Operator
from autopar.placement import R, divides, format_layout, parse_layout
from autopar.plan import OperatorPlan, ParameterPlan, Plan, Prediction
from autopar.schedule import Schedule
from autopar.space import SearchSpace, Storage
from autopar.tracking import track_all
from core_kernels.console import format_bytes

__all__ = ["PlanFrontier", "mini_parallelism", "plan_of", "profile", "search"]

# Combinations of choices that one elimination may hold; beyond, a mesh would take minutes and is left out.
_MAX_CELLS = 1 << 21


class PlanFrontier(FrontierOfPlans):
    """A frontier whose points are :class:`~autopar.plan.Plan`; memory in bytes."""

    def mini_time(self, memory: float | None = None) -> Any:
        """Return the fastest plan that fits into ``memory`` bytes per device, by its bound and by its predicted peak.

        Raises:
            InfeasibleError: Nothing fits; the message names the least memory possible and what binds it.
        """
        if memory is None or not len(self):
            return super().mini_time(memory)
        for index in reversed(range(int(np.searchsorted(self.memory, memory, side="right")))):
            plan = self[index]
            # The bound does not count copies made while gradients are re-scheduled; the prediction does.
            if plan.predicted.memory_bytes <= memory:
                return plan
        plan = self[0]
        least = max(self.memory[0], plan.predicted.memory_bytes)
        raise InfeasibleError(
            f"memory={memory:g} is not feasible: the least memory of any plan is {least:g} bytes "
            f"({format_bytes(least)}), most of it for {plan.predicted.binding}; raise the budget, use more devices or "
            "a smaller batch"
        )

    def save(self, path: str | Path) -> None:
        """Write every plan into one JSON file."""
        import json

        Path(path).write_text(
            json.dumps({
                "schema": "autopar.plan_frontier",
                "version": 1,
                "exact": self.exact,
                "memory": self.memory.tolist(),
                "seconds": self.seconds.tolist(),
                "plans": [self[index].to_dict() for index in range(len(self))],
            })
            + "\n"
        )  # fmt: skip

    @classmethod
    def load(cls, path: str | Path) -> PlanFrontier:
        """Read a frontier written by :meth:`save`."""
        import json

        document = json.loads(Path(path).read_text())
        if (document.get("schema"), document.get("version")) != ("autopar.plan_frontier", 1):
            raise ProblemError(
                f"{path} holds {document.get('schema')} version {document.get('version')}; expected "
                "autopar.plan_frontier version 1; write it again with save"
            )
        plans = document["plans"]
        return cls(
            document["memory"], document["seconds"], lambda i: Plan.from_dict(plans[i]), document["exact"]  # type: ignore[arg-type, return-value]
        )  # fmt: skip


def search(
    graph: Graph,
    cluster: Cluster,
    meshes: str | Sequence[Sequence[int]] = "all",
    eps: float = 0.0,
    constraints: dict[str, str] | None = None,
    max_levels: int = 3,
) -> PlanFrontier:
    """Find the frontier of step time and memory per device.

    Args:
        graph: Captured step, from :func:`autopar.trace`.
        cluster: The devices.
        meshes: ``"all"`` for every mesh of one or two axes, or a list of meshes of all devices.
        eps: 0 for the exact frontier; otherwise every exact point has one that is as fast with at most ``1 + eps``
            times the memory.
        constraints: Parameter name to the layout it must be stored in, such as ``{"head.weight": "S(0)"}``.
        max_levels: Bounds on the working set to search under, per mesh.

    Returns:
        The frontier; its points are plans. ``exact`` is false when a mesh was left out because the graph is too
        entangled for it (recurrent models on two axes).

    Raises:
        ProblemError: A mesh that is not one of all devices, or an unknown parameter.
        InfeasibleError: The constraints leave nothing.

    >>> from autopar import Cluster, models, trace
    >>> frontier = search(trace(*models.mlp(batch=64)), Cluster.preset("loopback-cpu"))
    >>> len(frontier) > 1 and frontier[0].memory < frontier[-1].memory
    True
    """
    keep = _constraint(graph, constraints or {})
    read = _read_meshes(cluster, meshes)
    spaces = [SearchSpace(graph, mesh, cluster, keep) for mesh in read if _can_hold(graph, mesh, constraints or {})]
    if not spaces:
        raise InfeasibleError(
            f"constraints={constraints} cannot be met on any of the meshes {read}; expected one placement per axis "
            "that divides the parameter's dims; drop one, or allow more meshes"
        )
    fitting = [space for space in spaces if space.fits(_MAX_CELLS)]
    if not fitting:
        raise ProblemError(
            f"on mesh {spaces[0].mesh} one elimination would hold {spaces[0].largest_table()} combinations of choices; "
            f"expected at most {_MAX_CELLS}; allow a mesh of one axis"
        )
    frontier = _search_spaces(fitting, eps, max_levels)
    frontier.exact = frontier.exact and len(fitting) == len(spaces)
    return frontier


def _read_meshes(cluster: Cluster, meshes: str | Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    if isinstance(meshes, str):
        if meshes != "all":
            raise ProblemError(f"meshes={meshes!r} is not valid: expected 'all' or a list of meshes; write [(2, 4)]")
        return cluster.meshes()
    found = [tuple(int(size) for size in mesh) for mesh in meshes]
    for mesh in found:
        if int(np.prod(mesh)) != cluster.num_devices or min(mesh, default=0) < 1:
            raise ProblemError(
                f"mesh {mesh} has {int(np.prod(mesh))} places; expected num_devices={cluster.num_devices}; choose one "
                f"of {cluster.meshes()}, or resize the cluster"
            )
    return found


def _constraint(graph: Graph, wanted: dict[str, str]) -> Callable[[str, Operator, object], bool] | None:
    if not wanted:
        return None
    layouts = {name: parse_layout(text) for name, text in wanted.items()}
    unknown = sorted(set(layouts) - {parameter.target for parameter in graph.parameters})
    if unknown:
        raise ProblemError(f"constraints name {unknown}; expected parameters of {graph.module_name}; check the names")
    return lambda kind, operator, choice: (
        kind != "storage" or operator.target not in layouts or choice.layout == layouts[operator.target]  # type: ignore[attr-defined]
    )


def _can_hold(graph: Graph, mesh: tuple[int, ...], wanted: dict[str, str]) -> bool:
    """Whether a mesh can store every constrained parameter as asked."""
    shapes = {parameter.target: parameter.output.shape for parameter in graph.parameters}
    for name, text in wanted.items():
        layout = parse_layout(text)
        if len(layout) != len(mesh) or any(form < 0 and form != R for form in layout):
            return False
        if not divides(shapes[name], layout, mesh) or any(f >= 2 for f in layout):
            return False
    return True


def _search_spaces(spaces: Iterable[SearchSpace], eps: float, max_levels: int) -> PlanFrontier:
    found: list[tuple[SearchSpace, Frontier, float]] = []
    for space in spaces:
        levels = space.working_levels(max_levels)
        space.problem()  # fixes the units of all levels
        frontiers = track_all((space.problem(level) for level in levels), eps)
        found += [(space, frontier, level) for frontier, level in zip(frontiers, levels, strict=True)]
    if not any(len(frontier) for _, frontier, _ in found):
        raise InfeasibleError("no plan meets the constraints on any mesh; drop a constraint, or allow more meshes")
    memory = np.concatenate([frontier.memory + level for _, frontier, level in found])
    seconds = np.concatenate([frontier.seconds for _, frontier, _ in found])
    source = np.repeat(np.arange(len(found)), [len(frontier) for _, frontier, _ in found])
    place = np.concatenate([np.arange(len(frontier)) for _, frontier, _ in found])
    order = np.lexsort((seconds, memory))
    kept = order[np.minimum.accumulate(np.append(np.inf, seconds[order]))[:-1] > seconds[order]]

    def plan_at(index: int) -> Any:
        space, frontier, _ = found[source[kept[index]]]
        point = frontier[int(place[kept[index]])]
        return plan_of(space, point.choices, float(memory[kept[index]]))

    exact = all(frontier.exact for _, frontier, _ in found)
    return PlanFrontier(memory[kept], seconds[kept], plan_at, exact)


def plan_of(space: SearchSpace, choices: Sequence[int], memory: float | None = None) -> Plan:
    """Return the plan that an assignment of choices stands for."""
    graph, mesh = space.graph, space.mesh
    operators, parameters, storages = read_choices(space, choices)
    schedule = Schedule.of(graph, mesh, operators, parameters)
    predicted = _predict(space, choices, storages, schedule)
    return Plan(
        graph.module_name, graph.fingerprint, torch.__version__, mesh,
        float(predicted.most_bytes) if memory is None else memory, predicted.seconds,
        operators, parameters, predicted,
    )  # fmt: skip


def read_choices(
    space: SearchSpace, choices: Sequence[int]
) -> tuple[dict[str, OperatorPlan], dict[str, ParameterPlan], dict[int, Storage]]:
    """Return what an assignment says of operators and parameters, by name, and of leaves, by position."""
    graph = space.graph
    picked = [variable.choices[choice] for variable, choice in zip(space.variables, choices, strict=True)]
    delivered: dict[int, str] = {}
    for variable, choice in zip(space.variables, picked, strict=True):
        if variable.kind == "delivery":
            delivered |= dict.fromkeys(variable.members, format_layout(choice))  # type: ignore[arg-type]
    operators: dict[str, OperatorPlan] = {}
    storages: dict[int, Storage] = {}
    for variable, choice in zip(space.variables, picked, strict=True):
        for position in variable.members:
            operator, shared = graph.operators[position], delivered.get(position, "")
            if variable.kind == "operator":
                inputs = tuple(format_layout(layout) for layout in choice.inputs)  # type: ignore[union-attr]
                output = format_layout(choice.output)  # type: ignore[union-attr]
                operators[operator.name] = OperatorPlan(operator.kind, operator.module, inputs, output, shared)
            elif variable.kind == "storage":
                storages[position] = choice  # type: ignore[assignment]
                if shared:
                    stored = format_layout(choice.layout)  # type: ignore[union-attr]
                    operators[operator.name] = OperatorPlan(operator.kind, operator.module, (), stored, shared)
    operators = {part.name: operators[part.name] for part in graph.operators if part.name in operators}
    return operators, _parameter_plans(space, storages, operators), storages


def _parameter_plans(
    space: SearchSpace, storages: dict[int, Storage], operators: dict[str, OperatorPlan]
) -> dict[str, ParameterPlan]:
    graph, readers = space.graph, space.graph.consumers()
    plans = {}
    for position, storage in storages.items():
        leaf = graph.operators[position]
        if leaf.kind not in ("parameter", "buffer"):
            continue
        uses = {operators[graph.operators[reader].name].inputs[slot] for reader, slot in readers[position]}
        stored = format_layout(storage.layout)
        plans[leaf.target] = ParameterPlan(stored, " and ".join(sorted(uses)) or stored, storage.drop)
    return plans


def _predict(
    space: SearchSpace, choices: Sequence[int], storages: dict[int, Storage], schedule: Schedule
) -> Prediction:
    graph, mesh = space.graph, space.mesh
    memory, communication, computing = 0.0, 0.0, 0.0
    kept = np.zeros(len(graph.operators))
    held: dict[str, float] = {}
    for variable, choice in zip(space.variables, choices, strict=True):
        bytes_here, seconds = variable.costs[choice]
        memory += bytes_here
        computing += seconds
        operator = graph.operators[variable.operator]
        held[operator.target or operator.name] = held.get(operator.target or operator.name, 0.0) + bytes_here
        if variable.kind == "operator":
            kept[variable.members] += bytes_here / len(variable.members)
    for edge in space.edges:
        bytes_here, seconds = edge.costs[choices[edge.source], choices[edge.target]]
        memory += bytes_here
        communication += seconds
        operator = graph.operators[space.variables[edge.source].operator]
        held[operator.target or operator.name] += bytes_here
        users = _last_users(space, schedule, edge.target)
        kept[users] += bytes_here / len(users)
    parameters = buffers = largest = 0
    for position, storage in storages.items():
        leaf = graph.operators[position]
        stored = leaf.output.num_bytes // int(
            np.prod([size for form, size in zip(storage.layout, mesh, strict=True) if form >= 0], initial=1)
        )
        if leaf.kind == "parameter":
            parameters, largest = parameters + stored, max(largest, stored)
        buffers += stored if leaf.kind == "buffer" else 0
    states = int(parameters * space.graph.state_factor)
    working = max(schedule.working_sets(space.cluster), default=0)
    binding = max(held, key=held.__getitem__)
    if working > held[binding]:
        binding = "the working set of one operator"
    saved = round(memory) - 2 * parameters - states - buffers
    return Prediction(
        parameters,
        states,
        buffers,
        saved,
        working,
        computing,
        communication,
        schedule.counted_messages(),
        binding,
        update_bytes(graph.optimizer, largest),
        min(saved + working, schedule.backward_bytes(kept.tolist(), space.cluster)),
    )


def _last_users(space: SearchSpace, schedule: Schedule, target: int) -> list[int]:
    """Return the operators whose backward is the last to use what an edge keeps: the first readers that need it."""
    variable = space.variables[target]
    if variable.kind != "delivery":
        return variable.members
    readers = space.graph.consumers()
    users = []
    for member in variable.members:
        needing = [reader for reader, slot in readers[member] if schedule.is_needed(reader, slot)]
        users.append(min(needing, default=member))
    return users


# -- other ways to ask ------------------------------------------------------------------------------------------------


def profile(graph: Graph, cluster: Cluster, parallelism: Iterable[int], eps: float = 0.01) -> dict[int, PlanFrontier]:
    """Return the frontier for each number of devices, without running anything.

    Args:
        graph: Captured step.
        cluster: The machine; its number of devices is replaced.
        parallelism: Numbers of devices, such as ``range(1, 9)``.
        eps: As in :func:`search`.
    """
    return {count: search(graph, replace(cluster, num_devices=count), eps=eps) for count in parallelism}


def mini_parallelism(
    graph: Graph, cluster: Cluster, memory: float | None = None, seconds: float | None = None, eps: float = 0.01
) -> Plan:
    """Return the plan with the fewest devices that fits, and the fastest of those.

    Args:
        graph: Captured step.
        cluster: The machine; up to its number of devices are used.
        memory: Bytes per device; the cluster's own when left out.
        seconds: Longest step allowed; no limit when left out.
        eps: As in :func:`search`.

    Every number is tried in turn, because divisibility makes feasibility jump.

    Raises:
        InfeasibleError: Even all devices do not suffice.
    """
    budget = cluster.memory_bytes if memory is None else memory
    if not budget > 0:
        raise ProblemError(f"memory={budget} is not valid: expected bytes per device; pass memory=...")
    least, fastest = np.inf, np.inf
    for count, frontier in ((n, profile(graph, cluster, [n], eps)[n]) for n in range(1, cluster.num_devices + 1)):
        least = min(least, frontier.memory[0])
        with contextlib.suppress(InfeasibleError):
            plan = frontier.mini_time(budget)
            fastest = min(fastest, plan.seconds)
            if seconds is None or plan.seconds <= seconds:
                assert int(np.prod(plan.mesh)) == count
                return plan
    found = "no plan fits" if np.isinf(fastest) else f"the fastest plan that fits takes {fastest:g} s"
    raise InfeasibleError(
        f"memory={budget:g} and seconds={seconds} are not feasible on up to {cluster.num_devices} devices: the least "
        f"memory is {least:g} bytes, {found}; relax one or add devices"
    )
