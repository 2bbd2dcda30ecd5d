"""A plan applied: an ordinary module that runs this rank's part of the captured step.

The module interprets the captured graph on local parts, with the planned re-scheduling before each operator, and
returns the whole loss on every rank. Parameters keep their names and hold this rank's shard; ``state_dict`` gives
DTensors, so that distributed checkpoints work, and ``load_state_dict`` takes DTensors or full tensors.

Every rank passes the same global batch; the module takes its part. Make the optimiser from the applied module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autopar.collectives import MeshGroups, convert
from autopar.errors import PlanMismatchError
from autopar.graph import Graph
from autopar.local_operators import LocalContext, run_operator
from autopar.placement import Layout, R, local_shape, shard
from autopar.plan import Plan
from autopar.schedule import Schedule
from core_kernels.comm import Group

__all__ = ["ParallelModule", "apply"]


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


class ParallelModule(nn.Module):
    """A module that runs a plan; made by :func:`apply`.

    Attributes:
        plan: The plan.
        groups: Groups along the mesh axes, with the bytes they counted.
        step: Number of training steps so far, one key of dropout; set it when resuming.
    """

    def __init__(self, model: nn.Module, plan: Plan, graph: Graph, group: Group, seed: int):
        super().__init__()
        self.plan, self.groups = plan, MeshGroups(group, plan.mesh)
        self.step = 0
        self._schedule = Schedule.of_plan(graph, plan)
        numbers = {operator.name: number for number, operator in enumerate(graph.operators)}
        self._context = LocalContext(tuple(plan.mesh), self.groups.coordinate, self.groups, seed, 0, numbers)
        self._layouts: dict[str, Layout] = {}
        self._tensors: dict[int, Tensor] = {}
        self._device_mesh: Any = None
        readers = graph.consumers()
        self._num_reads = [len(read) for read in readers]
        self._adopt(model)
        self.register_state_dict_post_hook(_as_dtensors)
        self.register_load_state_dict_pre_hook(_as_shards)

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
                _register(self, name, made[first])
            else:  # the step never reads it
                own = tensor.detach().clone()
                self._layouts[name] = (R,) * len(mesh)
                _register(self, name, nn.Parameter(own) if isinstance(tensor, nn.Parameter) else own)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the loss of a global batch, whole on every rank.

        Collective: all ranks, with the same inputs. Backward is collective too.
        """
        self._check_inputs(inputs)
        self._context.step = self.step
        schedule, graph = self._schedule, self._schedule.graph
        values: dict[int, Any] = {}
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
                value = self._run(position, values)
                for source in operator.inputs:
                    left[source] -= 1
                    if left[source] == 0 and source != graph.result:
                        values.pop(source, None)
            if position in schedule.delivery and position != graph.result:
                value = convert(value, schedule.delivery[position], self.groups, keeps_view=operator.is_leaf)
            values[position] = value
        if self.training and torch.is_grad_enabled():
            self.step += 1
        return convert(values[graph.result], schedule.delivery[graph.result], self.groups)

    def _run(self, position: int, values: dict[int, Any]) -> Any:
        schedule = self._schedule
        operator, config = schedule.graph.operators[position], schedule.configs[position]
        assert config is not None
        inputs, dropped = [], {}
        for slot, source in enumerate(operator.inputs):
            steps = schedule.feeds[position][slot]
            is_leaf = schedule.graph.operators[source].is_leaf
            value = values[source]
            fed = convert(value, steps, self.groups, keeps_view=is_leaf) if steps else value
            if source in schedule.drops and steps:
                dropped[fed.untyped_storage().data_ptr()] = lambda v=value, s=steps: self._gather_again(v, s)
            inputs.append(fed)
        if not dropped:
            return run_operator(operator, config, inputs, self._context)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: _pack(t, dropped), _unpack):
            return run_operator(operator, config, inputs, self._context)

    def _gather_again(self, stored: Tensor, steps: Sequence[Any]) -> Tensor:
        with torch.no_grad():
            return convert(stored.detach(), steps, self.groups)

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

    def full_tensors(self) -> dict[str, Tensor]:
        """Return every parameter and buffer whole. Collective: all ranks."""
        return {name: self.gather(name, tensor) for name, tensor in self.parts().items()}

    def part(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's part of a whole tensor that lies like the parameter ``name`` (a view)."""
        return shard(whole, self._layouts[name], self.plan.mesh, self.groups.coordinate)

    def gather(self, name: str, local: Tensor) -> Tensor:
        """Return the whole of a tensor that lies like the parameter ``name``, such as its optimiser state.

        Collective: all ranks.
        """
        from autopar.resharding import plan_steps

        layout = self._layouts[name]
        steps = plan_steps(layout, (R,) * len(layout))
        # A copy even where nothing moves, so that the next step of the optimiser does not change it.
        return convert(local.detach().clone(), steps or (), self.groups)

    def parts(self) -> dict[str, Tensor]:
        """Return this rank's part of every parameter and buffer, each under all of its names."""
        found: dict[str, Tensor] = dict(self.named_parameters(remove_duplicate=False))
        return found | dict(self.named_buffers(remove_duplicate=False))

    def device_mesh(self) -> Any:
        """Return the mesh as ``torch.distributed`` knows it. Collective: the first call, by all ranks."""
        if self._device_mesh is None:
            from torch.distributed.device_mesh import init_device_mesh

            names = tuple(f"axis{axis}" for axis in range(len(self.plan.mesh)))
            kind = self.groups.world.device.type
            self._device_mesh = init_device_mesh(kind, tuple(self.plan.mesh), mesh_dim_names=names)
        return self._device_mesh


def _register(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Put a tensor under a dotted name, making plain modules on the way."""
    *path, last = name.split(".")
    for part in path:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module._modules[part]  # type: ignore[assignment]
    if isinstance(tensor, nn.Parameter):
        module.register_parameter(last, tensor)
    else:
        module.register_buffer(last, tensor)


def _pack(tensor: Tensor, dropped: dict[int, Callable[[], Tensor]]) -> Any:
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


def _as_dtensors(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    if not isinstance(module, ParallelModule) or module.groups.world.size == 1:
        return
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = module.device_mesh()
    for name, layout in module._layouts.items():
        placements = [Replicate() if form < 0 else Shard(form) for form in layout]
        state[prefix + name] = DTensor.from_local(state[prefix + name].detach(), mesh, placements, run_check=False)


def _as_shards(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    if not isinstance(module, ParallelModule):
        return
    for name, layout in module._layouts.items():
        value = state.get(prefix + name)
        if hasattr(value, "to_local"):
            value = value.to_local()
        elif isinstance(value, Tensor):
            own = module.parts()[name]
            sizes = local_shape(value.shape, layout, module.plan.mesh)
            if value.shape != own.shape and tuple(sizes) == tuple(own.shape):
                value = shard(value, layout, module.plan.mesh, module.groups.coordinate)
        state[prefix + name] = value
