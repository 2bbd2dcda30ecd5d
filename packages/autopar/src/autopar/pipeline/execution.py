"""A pipeline plan run: this rank's part of its stage of the captured step, in 1F1B order.

:func:`apply` gives each rank a :class:`PipelineModule` that holds its parts of the parameters of its stage under their
own names. Stages of one device are driven by ``torch.distributed.pipelining`` (``Schedule1F1B``, or ``ScheduleGPipe``
with fewer micro-batches than stages); its ``PipelineStage`` has one peer per neighbour, so where a stage has several
devices :mod:`autopar.pipeline.driver` plays the same order. Every rank passes the whole batch; stages take the inputs
they read themselves, so only activations and their gradients travel. What one micro-batch drops, and its weight in the
mean loss, follow from its place in the batch, so the numbers are those of one device.

A parameter that several stages use is held whole by each; they add their gradients after the last backward pass, so
that its copies stay equal under any optimiser that treats parameters alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autopar.collectives import MeshGroups
from autopar.errors import PlanMismatchError
from autopar.execution import check_ranks_agree
from autopar.graph import Graph
from autopar.pipeline.boundary import Boundary, meetings
from autopar.pipeline.driver import Driver
from autopar.pipeline.microbatches import cut_batch
from autopar.pipeline.piece import Piece
from autopar.pipeline.plan import PipelinePlan
from autopar.pipeline.schedule import stage_order
from autopar.placement import parse_layout, shard
from autopar.schedule import count_messages
from autopar.sharded import ShardedModule, register
from core_kernels.comm import Group
from core_kernels.comm.counters import broadcast_bytes, ring_all_reduce_bytes

__all__ = ["PipelineModule", "apply"]


def apply(
    model: nn.Module, plan: PipelinePlan, graph: Graph, group: Group | None = None, verify: bool = True, seed: int = 0
) -> PipelineModule:
    """Return this rank's stage of a module, ready to train.

    Args:
        model: The module that was traced, with real parameters, equal on all ranks.
        plan: A plan of its frontier.
        graph: Its captured step.
        group: The ranks, one per device: the first rank stands for the device with the lowest number;
            :func:`core_kernels.launch.current_group` when left out.
        verify: Check that all ranks apply the same plan to the same parameter values.
        seed: Key of dropout.

    Raises:
        PlanMismatchError: The plan belongs to another model or torch version, or ranks disagree.

    Collective: all ranks of ``group``.

    >>> from autopar import Cluster, models, trace
    >>> from autopar.pipeline import search
    >>> model, batch = models.mlp()
    >>> graph = trace(model, batch)
    >>> plan = search(graph, Cluster.preset("loopback-cpu", 1), micro_batches=[4]).mini_time()
    >>> pipeline = apply(model, plan, graph)
    >>> torch.allclose(pipeline.forward_backward(*batch), model(*batch))
    True
    """
    if group is None:
        from core_kernels.launch import current_group

        group = current_group()
    plan.check(graph)
    if group.size != plan.num_devices:
        raise PlanMismatchError(
            f"the group has {group.size} ranks; expected {plan.num_devices}, one per device of the plan's "
            f"{plan.num_stages} stages; start as many ranks, or search for a cluster of {group.size} devices"
        )
    pipeline = PipelineModule(model, plan, graph, group, seed)
    if verify:
        check_ranks_agree(group, plan.fingerprint, model)
    return pipeline


class PipelineModule(ShardedModule):
    """One rank's part of a pipeline; made by :func:`apply`.

    Attributes:
        plan: The plan.
        stage: Which stage this rank works for.
        group: All ranks; its counters hold what was sent under ``"activations"``, ``"gradients"`` and ``"loss"``.
        groups: The ranks of the stage along the axes of its mesh.
        step: Number of training steps so far, one key of dropout; set it when resuming.
    """

    def __init__(self, model: nn.Module, plan: PipelinePlan, graph: Graph, group: Group, seed: int):
        self._ranks = plan.ranks()
        self.stage = next(place for place, ranks in enumerate(self._ranks) if group.rank in ranks)
        mine = self._ranks[self.stage]
        super().__init__(MeshGroups(group if len(mine) == group.size else group.subgroup(mine), self._mesh_of(plan)))
        self.plan, self.group, self.step = plan, group, 0
        self._piece = Piece(graph, cut_batch(graph, plan.num_micro_batches), plan, self.stage, self.groups, seed)
        self._adopt(model)
        self._tied = self._tied_groups()
        self._schedule: Any = None
        self._driver: Driver | None = None
        if plan.num_devices > plan.num_stages:
            self._driver = self._make_driver()
        elif plan.num_stages > 1:
            self._schedule = self._make_schedule()

    def _mesh_of(self, plan: PipelinePlan) -> tuple[int, ...]:
        return tuple(plan.stages[self.stage].mesh)

    def _adopt(self, model: nn.Module) -> None:
        """Register this rank's parts of the parameters and buffers that its stage reads, under their own names."""
        full = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
        made: dict[str, Tensor] = {}
        for name, layout in self._piece.layouts.items():
            own = shard(full[name].detach(), layout, self.groups.mesh, self.groups.coordinate).clone()
            made[name] = nn.Parameter(own) if isinstance(full[name], nn.Parameter) else own
        home = {id(full[name]): name for name in made}
        for name, whole in full.items():
            first = home.get(id(whole))
            if first is not None:
                self._layouts[name] = self._piece.layouts[first]
                register(self, name, made[first])
        self._piece.adopt(made)

    def _tied_groups(self) -> dict[str, Group]:
        """Return the ranks of all stages that share a parameter of this one, per parameter."""
        found: dict[str, Group] = {}
        for name, stages in sorted(self.plan.tied.items()):
            if self.stage in stages:
                found[name] = self.group.subgroup(sorted(rank for place in stages for rank in self._ranks[place]))
        return found

    def _make_driver(self) -> Driver:
        order = stage_order(self.stage, self.plan.num_stages, self.plan.num_micro_batches)
        return Driver(self._piece, order, self.group, self.groups.coordinate, self._neighbours())

    def _neighbours(self) -> list[tuple[Boundary, list[int]] | None]:
        """Return the other sides of the cuts before and behind this stage, with their ranks."""
        found: list[tuple[Boundary, list[int]] | None] = []
        for side, place in ((self._piece.before, self.stage - 1), (self._piece.behind, self.stage + 1)):
            if side is None:
                found.append(None)
                continue
            stage = self.plan.stages[place]
            found.append((Boundary(side.info, tuple(stage.mesh), parse_layout(stage.boundary)), self._ranks[place]))
        return found

    def _make_schedule(self) -> Any:
        from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

        try:
            stage = _counting_stage(self._piece, self.plan, self.stage, self.group)
        except ValueError as error:
            raise PlanMismatchError(
                f"the group of {self.group.size} ranks cannot carry a pipeline ({error}); expected a process group "
                "that torch.distributed knows; pass the group of all ranks, or one made of dist.new_group"
            ) from error
        stage.stage_index_to_group_rank = {place: ranks[0] for place, ranks in enumerate(self._ranks)}
        kind = Schedule1F1B if self.plan.schedule == "1F1B" else ScheduleGPipe
        # The loss of a micro-batch is its share of the whole, so gradients add up unscaled.
        return kind(stage, self.plan.num_micro_batches, loss_fn=lambda loss, _: loss, scale_grads=False)

    def forward_backward(self, *inputs: Tensor) -> Tensor:
        """Run one step on a whole batch: gradients are added to this rank's parameters; return the loss, on every rank.

        Collective: all ranks, with the same inputs.

        Raises:
            PlanMismatchError: Inputs of other shapes than traced.
        """
        self._check_inputs(inputs)
        before = {name: self.get_parameter(name).grad for name in self._tied}
        for name in self._tied:
            self.get_parameter(name).grad = None
        self._piece.begin(inputs, self.step)
        losses = self._run_micro_batches()
        self._piece.end()
        self._add_tied(before)
        self.step += 1
        last = self.stage == self.plan.num_stages - 1
        total = torch.stack(losses).sum() if last else self._empty_loss()
        if self.plan.num_stages == 1:
            return total
        return self.group.broadcast(total, root=self._ranks[-1][0], tag="loss")

    def _run_micro_batches(self) -> list[Tensor]:
        """Run both passes of all micro-batches; return their losses on the last stage."""
        count = self.plan.num_micro_batches
        if self._driver is not None:
            return self._driver.step()
        losses: list[Tensor] = []
        if self._schedule is not None:
            numbers = torch.arange(count)
            self._schedule.step(micro_batch=numbers, target=numbers, losses=losses, return_outputs=False)
            return [loss.detach() for loss in losses]
        for index in range(count):
            loss = self._piece(micro_batch=torch.tensor([index]))
            loss.backward()
            losses.append(loss.detach())
        return losses

    def forward(self, *inputs: Tensor) -> Tensor:
        """Refuse a plain call: a pipeline has no forward pass apart from its backward pass."""
        raise PlanMismatchError(
            "a pipeline was called as a module; expected forward_backward(*batch), which runs both passes of all "
            "micro-batches and returns the loss; call that, then step the optimiser"
        )

    def _empty_loss(self) -> Tensor:
        graph = self._piece.graph
        return torch.zeros((), dtype=graph.operators[graph.result].output.dtype, device=self.group.device)

    def _add_tied(self, before: dict[str, Tensor | None]) -> None:
        """Add the gradients of this step over the stages that share a parameter, then what was there before.

        All ranks of a stage hold the same gradient; the first of each adds it.
        """
        is_first = not any(self.groups.coordinate)
        for name, shared in self._tied.items():
            parameter = self.get_parameter(name)
            own = parameter.grad if parameter.grad is not None and is_first else torch.zeros_like(parameter)
            total = shared.all_reduce(own.contiguous(), tag="tied")
            earlier = before[name]
            parameter.grad = total if earlier is None else earlier + total

    def _check_inputs(self, inputs: Sequence[Tensor]) -> None:
        wanted = [o.output.shape for o in self._piece.graph.operators if o.kind == "input"]
        shapes = [tuple(value.shape) for value in inputs]
        if shapes != wanted:
            raise PlanMismatchError(
                f"inputs have shapes {shapes}; expected {wanted}, the whole batch that was traced; pass that batch "
                "on every rank, or trace and search again for this one"
            )

    @property
    def gives_dtensors(self) -> bool:
        """Whether ``state_dict`` gives DTensors: not where every stage has one device."""
        return self.plan.num_devices > self.plan.num_stages

    def _make_device_mesh(self) -> Any:
        """Return the mesh of this rank's stage; every rank takes part in making every stage's."""
        from torch.distributed.device_mesh import DeviceMesh

        kind, made = self.group.device.type, []
        for ranks, stage in zip(self._ranks, self.plan.stages, strict=True):
            names = tuple(f"axis{axis}" for axis in range(len(stage.mesh)))
            made.append(DeviceMesh(kind, torch.tensor(ranks).reshape(tuple(stage.mesh)), mesh_dim_names=names))
        return made[self.stage]

    def counted(self) -> dict[str, dict[str, int]]:
        """Return messages and bytes this rank sent since the counters were reset.

        Between stages as ``"activations"`` and ``"gradients"``, then ``"loss"`` and ``"tied"``; inside a stage as
        ``"<axis>.<collective>.<phase>"``.
        """
        found = {
            tag: dict(c)
            for tag, c in self.group.counters.snapshot().items()
            if tag in ("activations", "gradients", "loss")
        }
        for shared in self._tied.values():
            for counts in (c for tag, c in shared.counters.snapshot().items() if tag == "tied"):
                entry = found.setdefault("tied", {"sent_bytes": 0, "received_bytes": 0, "calls": 0})
                for key, value in counts.items():
                    entry[key] += value
        between = {tag: {"calls": c["calls"], "sent_bytes": c["sent_bytes"]} for tag, c in sorted(found.items())}
        return between | self.groups.counted()

    def reset_counters(self) -> None:
        """Forget what was counted so far."""
        self.groups.reset_counters()
        for group in (self.group, *self._tied.values()):
            group.counters.reset()

    def predicted_messages(self) -> dict[str, dict[str, int]]:
        """Return the messages and bytes that one step sends from this rank, as :meth:`counted` counts them."""
        plan, count = self.plan, self.plan.num_micro_batches
        found: dict[str, dict[str, int]] = {}
        sides = (("gradients", self._piece.before), ("activations", self._piece.behind))
        for (tag, side), other in zip(sides, self._neighbours(), strict=True):
            if side is not None and other is not None:
                peers = meetings(side, self.groups.coordinate, other[0])
                sent = sum(stop - start for _, start, stop in peers) * side.info.dtype.itemsize
                found[tag] = {"calls": count, "sent_bytes": count * sent}
        for name, shared in self._tied.items():
            parameter = self.get_parameter(name)
            sent, _ = ring_all_reduce_bytes(parameter.numel(), parameter.element_size(), shared.rank, shared.size)
            entry = found.setdefault("tied", {"calls": 0, "sent_bytes": 0})
            entry["calls"], entry["sent_bytes"] = entry["calls"] + 1, entry["sent_bytes"] + sent
        if plan.num_stages > 1:
            root, size = self._ranks[-1][0], self._empty_loss().element_size()
            sent, _ = broadcast_bytes(size, self.group.rank, root, self.group.size)
            found["loss"] = {"calls": 1, "sent_bytes": sent}
        return dict(sorted(found.items())) | count_messages(self._piece.messages())


def _counting_stage(piece: Piece, plan: PipelinePlan, stage: int, group: Group) -> Any:
    """Return torch's stage, its sizes known beforehand, counting what it sends."""
    from torch.distributed.pipelining import PipelineStage

    class CountingStage(PipelineStage):
        def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[Any]:
            return _count(super().get_fwd_send_ops(fwd_chunk_id), "activations", group)

        def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[Any]:
            return _count(super().get_bwd_send_ops(bwd_chunk_id), "gradients", group)

    inputs = () if piece.before is None else (_example(piece.before.info.num_elements, piece.before.info.dtype),)
    loss = piece.graph.operators[piece.graph.result].output
    output = (
        _example(None, loss.dtype)
        if piece.behind is None
        else _example(piece.behind.info.num_elements, piece.behind.info.dtype)
    )
    return CountingStage(
        piece, stage, plan.num_stages, group.device, input_args=inputs, output_args=(output,),
        group=group.process_group,
    )  # fmt: skip


def _example(num_elements: int | None, dtype: torch.dtype) -> Tensor:
    """Return a tensor without storage, of one dim or none."""
    shape = () if num_elements is None else (num_elements,)
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)


def _count(operations: list[Any], tag: str, group: Group) -> list[Any]:
    for operation in operations:
        group.counters.add(tag, operation.tensor.numel() * operation.tensor.element_size(), 0)
    return operations
