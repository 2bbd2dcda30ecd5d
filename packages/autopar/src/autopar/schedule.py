"""What a plan makes every rank do, in order: the common ground of prediction and execution.

A :class:`Schedule` is a plan read back against its graph: per operator its configuration, per input the steps that
bring the tensor there, per shared tensor the steps to the layout it is handed on in. The executor runs it, the
prediction adds it up.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from autopar.cluster import Cluster
from autopar.cost_model import (
    conversion_cost,
    copied_bytes,
    internal_messages,
    local_bytes,
    operator_seconds,
    saved_bytes,
    working_bytes,
)
from autopar.errors import PlanMismatchError
from autopar.graph import Graph
from autopar.placement import Layout, parse_layout
from autopar.plan import OperatorPlan, ParameterPlan, Plan
from autopar.resharding import Message, Step, step_messages, steps_between
from autopar.retention import storage_needs
from autopar.rules import Configuration, configurations, rule_of

__all__ = ["Schedule"]


@dataclass(eq=False)
class Schedule:
    """A plan against its graph.

    Attributes:
        configs: Configuration per operator, ``None`` for leaves.
        stored: Layout of each leaf.
        drops: Leaves whose gathered copies are dropped after use.
        delivery: Steps from an operator's output to the layout its readers share; absent when nothing is shared.
        delivered: That layout.
        feeds: Per operator, per input, the steps from what is handed on to what is wanted.
        final: Steps from the result, as its operator makes it, to the layout in which it leaves.
    """

    graph: Graph
    mesh: tuple[int, ...]
    configs: list[Configuration | None]
    stored: dict[int, Layout]
    drops: set[int]
    delivery: dict[int, tuple[Step, ...]]
    delivered: dict[int, Layout]
    feeds: list[list[tuple[Step, ...]]]
    final: tuple[Step, ...] = ()

    @classmethod
    def of(
        cls,
        graph: Graph,
        mesh: Sequence[int],
        operators: dict[str, OperatorPlan],
        parameters: dict[str, ParameterPlan],
        given: Layout | None = None,
        result: Layout | None = None,
    ) -> Schedule:
        """Read a plan's layouts.

        Args:
            graph: What they were planned for.
            mesh: Sizes of the axes.
            operators: Layouts of operators, by name.
            parameters: Layouts of parameters and buffers, by name in the module.
            given: Layout in which the first leaf comes in, of a part of a step; whole when left out.
            result: Layout in which the result leaves; whole when left out.

        Raises:
            PlanMismatchError: A layout is no configuration of its operator, or cannot be reached.
        """
        mesh, whole = tuple(mesh), (-1,) * len(mesh)
        found = cls(graph, mesh, [], {}, set(), {}, {}, [])
        layouts: list[Layout] = []
        for position, operator in enumerate(graph.operators):
            if operator.is_leaf:
                planned = parameters.get(operator.target)
                layout = parse_layout(planned.stored) if planned else whole
                if position == 0 and given is not None:
                    layout = given
                found.stored[position] = layout
                if planned and planned.drop:
                    found.drops.add(position)
                found.configs.append(None)
                part = operators.get(operator.name)
            else:
                part = operators.get(operator.name)
                config = _find_configuration(graph, position, part, mesh)
                layout = config.output
                found.configs.append(config)
            layouts.append(layout)
            found.feeds.append([])
            for slot, source in enumerate(operator.inputs):
                have = found.delivered.get(source, layouts[source])
                config = found.configs[position]
                assert config is not None
                found.feeds[-1].append(found._steps(source, have, config.inputs[slot]))
            if part is not None and part.delivered:
                found.delivered[position] = parse_layout(part.delivered)
                found.delivery[position] = found._steps(position, layout, found.delivered[position])
        found.final = found._steps(graph.result, layouts[graph.result], whole if result is None else result)
        return found

    def _steps(self, position: int, have: Layout, want: Layout) -> tuple[Step, ...]:
        info = self.graph.operators[position].output
        steps = steps_between(have, want, info.shape, self.mesh, info.has_gradient)
        if steps is None:
            raise PlanMismatchError(
                f"{self.graph.operators[position].name}: no way from layout {have} to {want} for shape {info.shape}; "
                "expected layouts of this search; search again"
            )
        return steps

    @classmethod
    def of_plan(cls, graph: Graph, plan: Plan) -> Schedule:
        """Read a whole plan, after checking that it belongs to the graph."""
        plan.check(graph)
        return cls.of(graph, plan.mesh, plan.operators, plan.parameters)

    def messages(
        self, coordinate: Sequence[int] | None = None, repeats: int = 1, once: Collection[tuple[int, int]] = ()
    ) -> list[Message]:
        """Return every collective of one training step, as the rank at ``coordinate`` sees it.

        Args:
            coordinate: Place on the mesh; the first when left out.
            repeats: How often the graph runs in a step.
            once: What runs once in a step all the same: (operator, input) of a feed, (operator, -1) of a delivery.
        """
        found: list[Message] = []
        for position, operator in enumerate(self.graph.operators):
            config = self.configs[position]
            if config is not None:
                found += internal_messages(operator, config, self.mesh, coordinate) * repeats
            for slot, source in enumerate(operator.inputs):
                sent = self._messages_of(source, self.feeds[position][slot], coordinate)
                if source in self.drops and self.is_needed(position, slot):
                    sent += [message for message in sent if not message.backward]
                found += sent * (1 if (position, slot) in once else repeats)
            sent = self._messages_of(position, self.delivery.get(position, ()), coordinate)
            found += sent * (1 if (position, -1) in once else repeats)
        return found + self._messages_of(self.graph.result, self.final, coordinate) * repeats

    def _messages_of(self, source: int, steps: Sequence[Step], coordinate: Sequence[int] | None) -> list[Message]:
        info = self.graph.operators[source].output
        size = info.dtype.itemsize
        found: list[Message] = []
        for step in steps:
            found += step_messages(step, info.shape, size, self.mesh, info.has_gradient, coordinate)
        return found

    def counted_messages(self, coordinate: Sequence[int] | None = None) -> dict[str, dict[str, int]]:
        """Return calls and bytes sent per ``"axis.collective.phase"``, as the groups' counters count them."""
        return count_messages(self.messages(coordinate))

    def is_needed(self, position: int, slot: int) -> bool:
        """Whether an operator keeps this input for its backward pass."""
        return self._needs[position][slot]

    @property
    def _needs(self) -> list[list[bool]]:
        if not hasattr(self, "_needs_found"):
            self._needs_found = storage_needs(self.graph)
        return self._needs_found

    def compute_seconds(self, cluster: Cluster) -> float:
        """Return the seconds of all operators without re-scheduling and without what they communicate inside."""
        total = 0.0
        for operator, config in zip(self.graph.operators, self.configs, strict=True):
            if config is not None:
                total += operator_seconds(operator, config, self.mesh, cluster)
        return total

    def working_sets(self, cluster: Cluster) -> list[int]:
        """Return the working set of every operator, or its gathered parameter where that is larger."""
        sets = []
        for position, (operator, config) in enumerate(zip(self.graph.operators, self.configs, strict=True)):
            if config is None:
                sets.append(0)
                continue
            largest = max(working_bytes(operator, config, self.mesh), self._moving_bytes(position, config))
            for slot, source in enumerate(operator.inputs):
                leaf = self.graph.operators[source]
                if leaf.kind == "parameter":
                    cost = conversion_cost(self.feeds[position][slot], leaf.output, self.mesh, cluster, True)
                    if cost.gathers:
                        copies = 2 if source in self.drops else 1
                        largest = max(largest, copies * local_bytes(leaf.output, config.inputs[slot], self.mesh))
            sets.append(largest)
        return sets

    def _moving_bytes(self, position: int, config: Configuration) -> int:
        """Return what gradients take together while those of an operator's inputs, or its own, are re-scheduled."""
        operator = self.graph.operators[position]
        pairs = zip(operator.input_info, config.inputs, strict=True)
        gradients = sum(local_bytes(info, layout, self.mesh) for info, layout in pairs if info.has_gradient)
        most = 0
        for slot, source in enumerate(operator.inputs):
            info = self.graph.operators[source].output
            for step in self.feeds[position][slot] if info.has_gradient else ():
                most = max(most, gradients + copied_bytes(step, info, self.mesh))
        for step in self.delivery.get(position, ()) if operator.output.has_gradient else ():
            handed = local_bytes(operator.output, step.after, self.mesh)
            most = max(most, handed + copied_bytes(step, operator.output, self.mesh))
        return most

    def waiting_gradients(self) -> list[int]:
        """Return per operator the bytes of gradients that wait for earlier operators while its backward runs.

        A tensor with several readers has a gradient from the backward of its last reader on until that of its producer.
        """
        last_reader: dict[int, int] = {}
        root = list(range(len(self.graph.operators)))
        for position, operator in enumerate(self.graph.operators):
            if not operator.is_leaf and rule_of(operator.kind).is_view and operator.inputs:
                root[position] = root[operator.inputs[0]]
            else:
                for source in operator.inputs:
                    last_reader[root[source]] = position
        change = [0] * (len(self.graph.operators) + 1)
        for position, last in last_reader.items():
            operator, config = self.graph.operators[position], self.configs[position]
            if config is not None and operator.output.has_gradient and last > position + 1:
                size = local_bytes(operator.output, config.output, self.mesh)
                change[position + 1] += size
                change[last] -= size
        return list(itertools.accumulate(change[:-1]))

    def backward_bytes(self, kept: Sequence[float], cluster: Cluster) -> int:
        """Return the most that saved tensors, waiting gradients and a working set take together in the backward pass.

        Args:
            kept: Per operator the bytes that its backward is the last to use.
            cluster: As for :meth:`working_sets`.
        """
        saved = itertools.accumulate(kept)
        parts = zip(saved, self.waiting_gradients(), self.working_sets(cluster), strict=True)
        return round(max(map(sum, parts), default=0))

    def operator_saved_bytes(self) -> int:
        """Return what operators keep besides their inputs."""
        pairs = zip(self.graph.operators, self.configs, strict=True)
        return sum(saved_bytes(operator, config, self.mesh) for operator, config in pairs if config is not None)


def count_messages(messages: Sequence[Message]) -> dict[str, dict[str, int]]:
    """Return calls and bytes sent per ``"axis.collective.phase"``."""
    counts: dict[str, dict[str, int]] = {}
    for message in messages:
        tag = f"{message.axis}.{message.collective}.{'backward' if message.backward else 'forward'}"
        entry = counts.setdefault(tag, {"calls": 0, "sent_bytes": 0})
        entry["calls"] += 1
        entry["sent_bytes"] += message.sent_bytes
    return dict(sorted(counts.items()))


def _find_configuration(graph: Graph, position: int, part: OperatorPlan | None, mesh: tuple[int, ...]) -> Configuration:
    operator = graph.operators[position]
    if part is not None:
        inputs = tuple(parse_layout(text) for text in part.inputs)
        output = parse_layout(part.output)
        for config in configurations(operator, mesh):
            if config.inputs == inputs and config.output == output:
                return config
    raise PlanMismatchError(
        f"the plan has no valid configuration for {operator.name} ({operator.kind}) on mesh {mesh}; expected one of "
        f"{len(configurations(operator, mesh))}; search again"
    )
