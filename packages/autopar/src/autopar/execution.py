"""A plan applied: an ordinary module that runs this rank's part of the captured step.

The module interprets the captured graph on local parts, with the planned re-scheduling before each operator, and
returns the whole loss on every rank. Parameters keep their names and hold this rank's shard; ``state_dict`` gives
DTensors, so that distributed checkpoints work, and ``load_state_dict`` takes DTensors or full tensors.

Every rank passes the same global batch; the module takes its part. Make the optimiser from the applied module.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from autopar.collectives import MeshGroups, convert
from autopar.errors import PlanMismatchError
from autopar.graph import Graph
from autopar.local_operators import LocalContext, run_operator
from autopar.placement import R, shard
from autopar.plan import Plan
from autopar.resharding import Step
from autopar.schedule import Schedule
from autopar.sharded import ShardedModule, register
from core_kernels.comm import Group

__all__ = ["ParallelModule", "apply", "check_ranks_agree", "dropping", "take_inputs"]

# Gathered parameters that are not kept for the backward pass: address of the copy, and how to gather it again.
Dropped = dict[int, Callable[[], Tensor]]


def apply(
    model: nn.Module,
    plan: Plan,
    graph: Graph,
    group: Group | None = None,
    verify: bool = True,
    seed: int = 0,
) -> ParallelModule:
    """Return a module that trains ``model`` by a plan on the ranks of a group.

    Args:
        model: The module that was traced, with real parameters, equal on all ranks.
        plan: A plan of its frontier.
        graph: Its captured step.
        group: The ranks; :func:`core_kernels.launch.current_group` when left out.
        verify: Check that all ranks apply the same plan to the same parameter values.
        seed: Key of dropout.

    Raises:
        PlanMismatchError: The plan belongs to another model, mesh or torch version, or ranks disagree.

    Collective: all ranks of ``group``.

    >>> from autopar import Cluster, models, search, trace
    >>> model, batch = models.mlp()
    >>> graph = trace(model, batch)
    >>> plan = search(graph, Cluster.preset("loopback-cpu", 1)).mini_time()
    >>> parallel = apply(model, plan, graph)
    >>> torch.equal(parallel(*batch), model(*batch))
    True
    """
    if group is None:
        from core_kernels.launch import current_group

        group = current_group()
    plan.check(graph)
    size = 1
    for axis in plan.mesh:
        size *= axis
    if size != group.size:
        raise PlanMismatchError(
            f"the group has {group.size} ranks; expected {size}, the mesh {tuple(plan.mesh)} of the plan; start as "
            "many ranks, or choose a plan for this many"
        )
    parallel = ParallelModule(model, plan, graph, group, seed)
    if verify:
        check_ranks_agree(group, plan.fingerprint, model)
    return parallel


def check_ranks_agree(group: Group, fingerprint: str, model: nn.Module) -> None:
    """Check that all ranks hold one plan and the same parameter values.

    Raises:
        PlanMismatchError: They do not.
    """
    if group.size == 1:
        return
    sums = [float(p.detach().double().sum()) for p in model.parameters()]
    if len(set(map(str, group.all_gather_object((fingerprint, sums))))) > 1:
        raise PlanMismatchError(
            "ranks hold different plans or parameter values; expected the same on all; seed every rank alike, or "
            "broadcast the plan and the parameters from one rank"
        )


class ParallelModule(ShardedModule):
    """A module that runs a plan; made by :func:`apply`.

    Attributes:
        plan: The plan.
        groups: Groups along the mesh axes, with the bytes they counted.
        step: Number of training steps so far, one key of dropout; set it when resuming.
    """

    def __init__(self, model: nn.Module, plan: Plan, graph: Graph, group: Group, seed: int):
        super().__init__(MeshGroups(group, plan.mesh))
        self.plan, self.step = plan, 0
        self._schedule = Schedule.of_plan(graph, plan)
        numbers = {operator.name: number for number, operator in enumerate(graph.operators)}
        self._context = LocalContext(tuple(plan.mesh), self.groups.coordinate, self.groups, seed, 0, numbers)
        self._tensors: dict[int, Tensor] = {}
        self._num_reads = [len(read) for read in graph.consumers()]
        self._adopt(model)

    def _adopt(self, model: nn.Module) -> None:
        """Register this rank's part of every parameter and buffer under its own name."""
        graph, mesh = self._schedule.graph, self.plan.mesh
        full = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
        made: dict[str, Tensor] = {}
        for position, layout in self._schedule.stored.items():
            operator = graph.operators[position]
            if operator.kind not in ("parameter", "buffer"):
                continue
            local = shard(full[operator.target].detach(), layout, mesh, self.groups.coordinate).clone()
            made[operator.target] = nn.Parameter(local) if operator.kind == "parameter" else local
            self._layouts[operator.target] = layout
            self._tensors[position] = made[operator.target]
        home = {id(full[name]): name for name in made}
        for name, tensor in full.items():
            first = home.get(id(tensor))
            if first is not None:
                self._layouts[name] = self._layouts[first]
                register(self, name, made[first])
            else:  # the step never reads it
                own = tensor.detach().clone()
                self._layouts[name] = (R,) * len(mesh)
                register(self, name, nn.Parameter(own) if isinstance(tensor, nn.Parameter) else own)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the loss of a global batch, whole on every rank.

        Collective: all ranks, with the same inputs. Backward is collective too.
        """
        self._check_inputs(inputs)
        self._context.step = self.step
        schedule, graph = self._schedule, self._schedule.graph
        values: dict[int, Any] = {}
        loss: Any = None
        left = list(self._num_reads)
        given = iter(inputs)
        for position, operator in enumerate(graph.operators):
            if operator.is_leaf:
                if operator.kind == "input":
                    value: Any = next(given)
                elif operator.kind == "constant":
                    value = graph.constants[operator.name]
                else:
                    value = self._tensors[position]
            else:
                config = schedule.configs[position]
                assert config is not None
                taken, dropped = take_inputs(schedule, position, values, self.groups)
                with dropping(dropped):
                    value = run_operator(operator, config, taken, self._context)
                for source in operator.inputs:
                    left[source] -= 1
                    if left[source] == 0:
                        values.pop(source, None)
            if position == graph.result:
                loss = convert(value, schedule.final, self.groups)
            if position in schedule.delivery:
                value = convert(value, schedule.delivery[position], self.groups, keeps_view=operator.is_leaf)
            values[position] = value
        if self.training and torch.is_grad_enabled():
            self.step += 1
        return loss

    def _check_inputs(self, inputs: Sequence[Tensor]) -> None:
        wanted = [operator.output for operator in self._schedule.graph.operators if operator.kind == "input"]
        shapes = [tuple(value.shape) for value in inputs]
        if shapes != [info.shape for info in wanted]:
            raise PlanMismatchError(
                f"inputs have shapes {shapes}; expected {[info.shape for info in wanted]}, the global batch that was "
                "traced; pass that batch on every rank, or trace and search again for this one"
            )

    def predicted_collectives(self) -> dict[str, dict[str, int]]:
        """Return the calls and bytes of one training step that the plan predicts for this rank, as counted."""
        return self._schedule.counted_messages(self.groups.coordinate)


def take_inputs(
    schedule: Schedule,
    position: int,
    values: dict[int, Any],
    groups: MeshGroups,
    ready: Mapping[tuple[int, int], Tensor] = MappingProxyType({}),
) -> tuple[list[Any], Dropped]:
    """Return the inputs of an operator in the layouts it wants, and which of them are not kept but gathered again.

    Args:
        schedule: The plan, read.
        position: Which operator.
        values: What has been computed and not let go of.
        groups: Groups along the axes.
        ready: Inputs that were brought there before, by (operator, input).
    """
    inputs: list[Any] = []
    dropped: Dropped = {}
    for slot, source in enumerate(schedule.graph.operators[position].inputs):
        if (position, slot) in ready:
            inputs.append(ready[position, slot])
            continue
        steps, value = schedule.feeds[position][slot], values[source]
        fed = convert(value, steps, groups, schedule.graph.operators[source].is_leaf) if steps else value
        if source in schedule.drops and steps:
            dropped[fed.untyped_storage().data_ptr()] = lambda v=value, s=steps: _gather_again(v, s, groups)
        inputs.append(fed)
    return inputs, dropped


def dropping(dropped: Dropped) -> Any:
    """Return a context in which autograd saves the way back to these tensors instead of them."""
    if not dropped:
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: _pack(tensor, dropped), _unpack)


def _gather_again(stored: Tensor, steps: Sequence[Step], groups: MeshGroups) -> Tensor:
    with torch.no_grad():
        return convert(stored.detach(), steps, groups)


def _pack(tensor: Tensor, dropped: Dropped) -> Any:
    """Keep the way back to a gathered parameter instead of the gathered copy."""
    again = dropped.get(tensor.untyped_storage().data_ptr())
    if again is None:
        return tensor
    return again, tensor.size(), tensor.stride(), tensor.storage_offset()


def _unpack(packed: Any) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    again, size, stride, offset = packed
    return again().as_strided(size, stride, offset)
