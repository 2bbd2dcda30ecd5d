"""A pipeline plan run: this rank's stage of the captured step, driven by ``torch.distributed.pipelining``.

:func:`apply` gives each rank a :class:`PipelineModule` that holds the parameters of its stage under their own names.
A step runs the schedule of torch (``Schedule1F1B``, or ``ScheduleGPipe`` with fewer micro-batches than stages) over a
``PipelineStage`` whose module interprets the stage's operators on one micro-batch. Every rank passes the whole batch;
stages take the inputs they read themselves, so only activations and their gradients travel. What one micro-batch
drops, and its weight in the mean loss, follow from its place in the batch, so the numbers are those of one device.

A parameter that several stages use is held by each; they add their gradients after the last backward pass, so that
its copies stay equal under any optimiser that treats parameters alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import PlanMismatchError
from autopar.execution import _register, check_ranks_agree
from autopar.graph import Graph
from autopar.local_operators import LocalContext, run_operator
from autopar.pipeline.microbatches import MicroBatches, cut_batch
from autopar.pipeline.plan import PipelinePlan
from autopar.pipeline.units import required_operators
from autopar.placement import local_shape, shard
from core_kernels.comm import Group
from core_kernels.comm.counters import broadcast_bytes, ring_all_reduce_bytes

__all__ = ["PipelineModule", "apply"]


def apply(
    model: nn.Module, plan: PipelinePlan, graph: Graph, group: Group | None = None, verify: bool = True, seed: int = 0
) -> PipelineModule:
    """Return this rank's stage of a module, ready to train.

    Args:
        model: The module that was traced, with real parameters, equal on all ranks.
        plan: A plan with one device per stage.
        graph: Its captured step.
        group: The ranks, one per stage: the first rank stands for the device with the lowest number;
            :func:`core_kernels.launch.current_group` when left out.
        verify: Check that all ranks apply the same plan to the same parameter values.
        seed: Key of dropout.

    Raises:
        PlanMismatchError: The plan belongs to another model or torch version, has stages of several devices, or ranks
            disagree.

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
    plan.check_runnable()
    if group.size != plan.num_stages:
        raise PlanMismatchError(
            f"the group has {group.size} ranks; expected {plan.num_stages}, one per stage of the plan; start as many "
            f"ranks, or search with num_stages={group.size}"
        )
    pipeline = PipelineModule(model, plan, graph, group, seed)
    if verify:
        check_ranks_agree(group, plan.fingerprint, model)
    return pipeline


class PipelineModule(nn.Module):
    """One stage of a pipeline on its rank; made by :func:`apply`.

    Attributes:
        plan: The plan.
        stage: Which stage this rank runs.
        group: All ranks; its counters hold what was sent under ``"activations"``, ``"gradients"`` and ``"loss"``.
        step: Number of training steps so far, one key of dropout; set it when resuming.
    """

    def __init__(self, model: nn.Module, plan: PipelinePlan, graph: Graph, group: Group, seed: int):
        super().__init__()
        self.plan, self.group, self.step = plan, group, 0
        devices = sorted(device for stage in plan.stages for device in stage.devices)
        self._rank_of = {place: devices.index(stage.devices[0]) for place, stage in enumerate(plan.stages)}
        self.stage = next(place for place, rank in self._rank_of.items() if rank == group.rank)
        self._piece = _Piece(graph, cut_batch(graph, plan.num_micro_batches), plan, self.stage, seed)
        self._adopt(model)
        self._tied = self._tied_groups()
        self._schedule: Any = self._make_schedule() if plan.num_stages > 1 else None

    def _adopt(self, model: nn.Module) -> None:
        """Register copies of the parameters and buffers that this stage reads, under their own names."""
        full = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
        made: dict[int, Tensor] = {}
        for position in self._piece.positions:
            operator = self._piece.graph.operators[position]
            if operator.kind not in ("parameter", "buffer"):
                continue
            whole = full[operator.target]
            if id(whole) not in made:
                own = whole.detach().clone()
                made[id(whole)] = nn.Parameter(own) if operator.kind == "parameter" else own
            self._piece.tensors[position] = made[id(whole)]
        for name, whole in full.items():
            if id(whole) in made:
                _register(self, name, made[id(whole)])

    def _tied_groups(self) -> dict[str, Group]:
        """Return the groups of stages that share a parameter of this one, per parameter."""
        found: dict[str, Group] = {}
        for name, stages in sorted(self.plan.tied.items()):
            if self.stage in stages:
                found[name] = self.group.subgroup(sorted(self._rank_of[place] for place in stages))
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
        stage.stage_index_to_group_rank = dict(self._rank_of)
        kind = Schedule1F1B if self.plan.schedule == "1F1B" else ScheduleGPipe
        # The loss of a micro-batch is its share of the whole, so gradients add up unscaled.
        return kind(stage, self.plan.num_micro_batches, loss_fn=lambda loss, _: loss, scale_grads=False)

    def forward_backward(self, *inputs: Tensor) -> Tensor:
        """Run one step on a whole batch: gradients are added to the stage's parameters; return the loss, on every rank.

        Collective: all ranks, with the same inputs.

        Raises:
            PlanMismatchError: Inputs of other shapes than traced.
        """
        self._check_inputs(inputs)
        self._piece.begin(inputs, self.step)
        before = {name: self.get_parameter(name).grad for name in self._tied}
        for name in self._tied:
            self.get_parameter(name).grad = None
        count = self.plan.num_micro_batches
        losses: list[Tensor] = []
        if self._schedule is None:
            for index in range(count):
                loss = self._piece(micro_batch=torch.tensor([index]))
                loss.backward()
                losses.append(loss.detach())
        else:
            numbers = torch.arange(count)
            self._schedule.step(micro_batch=numbers, target=numbers, losses=losses, return_outputs=False)
        self._piece.end()
        self._add_tied(before)
        self.step += 1
        last = self.stage == self.plan.num_stages - 1
        total = torch.stack([loss.detach() for loss in losses]).sum() if last else self._empty_loss()
        if self.group.size == 1:
            return total
        return self.group.broadcast(total, root=self._rank_of[self.plan.num_stages - 1], tag="loss")

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
        """Add the gradients of this step over the stages that share a parameter, then what was there before."""
        for name, shared in self._tied.items():
            parameter = self.get_parameter(name)
            own = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
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

    def counted(self) -> dict[str, dict[str, int]]:
        """Return messages and bytes this rank sent since the counters were reset, per kind."""
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
        return {tag: {"calls": c["calls"], "sent_bytes": c["sent_bytes"]} for tag, c in sorted(found.items())}

    def reset_counters(self) -> None:
        """Forget what was counted so far."""
        self.group.counters.reset()
        for shared in self._tied.values():
            shared.counters.reset()

    def predicted_messages(self) -> dict[str, dict[str, int]]:
        """Return the messages and bytes that one step sends from this rank, as :meth:`counted` counts them."""
        plan, count, piece = self.plan, self.plan.num_micro_batches, self._piece
        found: dict[str, dict[str, int]] = {}
        if self.stage < plan.num_stages - 1:
            found["activations"] = {"calls": count, "sent_bytes": count * piece.example(piece.result).nbytes}
        if piece.source is not None:
            found["gradients"] = {"calls": count, "sent_bytes": count * piece.example(piece.source).nbytes}
        for name, shared in self._tied.items():
            parameter = self.get_parameter(name)
            sent, _ = ring_all_reduce_bytes(parameter.numel(), parameter.element_size(), shared.rank, shared.size)
            entry = found.setdefault("tied", {"calls": 0, "sent_bytes": 0})
            entry["calls"], entry["sent_bytes"] = entry["calls"] + 1, entry["sent_bytes"] + sent
        if plan.num_stages > 1:
            root = self._rank_of[plan.num_stages - 1]
            sent, _ = broadcast_bytes(self._empty_loss().element_size(), self.group.rank, root, self.group.size)
            found["loss"] = {"calls": 1, "sent_bytes": sent}
        return dict(sorted(found.items()))


class _Piece(nn.Module):
    """The operators of one stage, interpreted on one micro-batch."""

    def __init__(self, graph: Graph, batches: MicroBatches, plan: PipelinePlan, stage: int, seed: int):
        super().__init__()
        self.graph, self.batches = graph, batches
        names = {operator.name: position for position, operator in enumerate(graph.operators)}
        first, last = names[plan.stages[stage].first], names[plan.stages[stage].last]
        self.source = None if stage == 0 else _value_across(graph, first)
        self.result = graph.result if stage == plan.num_stages - 1 else _value_across(graph, last + 1)
        wanted = [
            p for p, o in enumerate(graph.operators) if first <= p <= last and not o.is_leaf and o.output.has_gradient
        ]
        readers = graph.consumers()
        begin = 0 if stage == 0 else names[plan.stages[stage - 1].last] + 1
        # What nobody reads is there for its effect: buffers that count steps.
        wanted += [p for p in range(begin, last + 1) if not graph.operators[p].is_leaf and not readers[p]]
        given = [] if self.source is None else [self.source]
        self.positions = required_operators(graph, wanted, given)
        self.tensors: dict[int, Tensor] = {}
        numbers = {operator.name: number for number, operator in enumerate(graph.operators)}
        self._contexts = [LocalContext((batches.count,), (i,), None, seed, 0, numbers) for i in range(batches.count)]
        self._inputs: dict[int, Tensor] = {}
        self._input_positions = [p for p, operator in enumerate(graph.operators) if operator.kind == "input"]
        here = set(self.positions)
        self._last_use = {
            source: position
            for position in self.positions
            for source in graph.operators[position].inputs
            if source in here
        }

    def begin(self, inputs: Sequence[Tensor], step: int) -> None:
        """Take the batch of a step."""
        self._inputs = dict(zip(self._input_positions, inputs, strict=True))
        for context in self._contexts:
            context.step = step

    def end(self) -> None:
        """Let go of the batch."""
        self._inputs = {}

    def forward(self, *received: Tensor, micro_batch: Tensor) -> Tensor:
        """Run one micro-batch."""
        context = self._contexts[int(micro_batch)]
        values: dict[int, Any] = {} if self.source is None else {self.source: received[0]}
        for position in self.positions:
            operator, config = self.graph.operators[position], self.batches.configs[position]
            if config is None:
                values[position] = self._leaf(position, context)
                continue
            taken = []
            for source, (wanted,) in zip(operator.inputs, config.inputs, strict=True):
                value = values[source]
                if wanted >= 0 > self.batches.forms[source]:  # a whole value of which only some samples are used
                    value = shard(value, (wanted,), context.mesh, context.coordinate)
                taken.append(value)
            values[position] = run_operator(operator, config, taken, context)
            for source in operator.inputs:
                if self._last_use.get(source) == position and source != self.result:
                    values.pop(source, None)
        result = values[self.result]
        return result if self.result == self.graph.result else result.contiguous()

    def example(self, position: int) -> Tensor:
        """Return a tensor without storage of the shape that a value has in one micro-batch."""
        info, form = self.graph.operators[position].output, self.batches.forms[position]
        shape = local_shape(info.shape, (form,), (self.batches.count,)) if form >= 0 else info.shape
        return torch.empty(shape, dtype=info.dtype, device="meta", requires_grad=True)

    def _leaf(self, position: int, context: LocalContext) -> Tensor:
        operator = self.graph.operators[position]
        if operator.kind == "constant":
            return self.graph.constants[operator.name]
        if operator.kind != "input":
            return self.tensors[position]
        return shard(self._inputs[position], (self.batches.forms[position],), context.mesh, context.coordinate)


def _value_across(graph: Graph, position: int) -> int:
    """Return the one value with a gradient that is made before a position and read from there on."""
    crossing = {
        source
        for reader in range(position, len(graph.operators))
        for source in graph.operators[reader].inputs
        if source < position and not graph.operators[source].is_leaf and graph.operators[source].output.has_gradient
    }
    if len(crossing) != 1:
        names = sorted(graph.operators[source].name for source in crossing)
        raise PlanMismatchError(
            f"{len(crossing)} values cross the boundary at {graph.operators[position].name} ({', '.join(names)}); "
            "expected one, as autopar.pipeline.find_units cuts; search again"
        )
    return crossing.pop()


def _counting_stage(piece: _Piece, plan: PipelinePlan, stage: int, group: Group) -> Any:
    """Return torch's stage, its sizes known beforehand, counting what it sends."""
    from torch.distributed.pipelining import PipelineStage

    class CountingStage(PipelineStage):
        def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[Any]:
            return _count(super().get_fwd_send_ops(fwd_chunk_id), "activations", group)

        def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[Any]:
            return _count(super().get_bwd_send_ops(bwd_chunk_id), "gradients", group)

    inputs = () if piece.source is None else (piece.example(piece.source),)
    outputs = (piece.example(piece.result),)
    return CountingStage(
        piece, stage, plan.num_stages, group.device, input_args=inputs, output_args=outputs, group=group.process_group
    )  # fmt: skip


def _count(operations: list[Any], tag: str, group: Group) -> list[Any]:
    for operation in operations:
        group.counters.add(tag, operation.tensor.numel() * operation.tensor.element_size(), 0)
    return operations
