"""Destinations with more edges than the memory budget holds.

The edges of such a hub are taken in parts. Each reduction of the stage makes one pass over the parts, computing only
the edge values it needs and adding them to the rows reduced so far; reductions that build on others (the sum of a
softmax on its maximum) find those complete. Sums, means, maxima and minima are exact this way: sums are added in the
same order as without parts, and a mean is its sum divided at the end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gnn_eval.errors import UnsupportedModelError
from gnn_eval.lowering import Step
from gnn_eval.memory import measure_stage
from gnn_eval.patterns import reduction_of

if TYPE_CHECKING:
    from gnn_eval.batches import Batcher
    from gnn_eval.block import Block, BlockBuilder
    from gnn_eval.executor import Slots, StageRunner

__all__ = ["run_in_edge_parts"]


def run_in_edge_parts(batcher: Batcher, builder: BlockBuilder, runner: StageRunner, row: int) -> tuple[Block, Slots]:
    """Run the single destination number ``row``, its edges in parts; return its block and slots."""
    plain = runner.unfused()
    block = builder.edges_of(batcher.destinations(row, row + 1))
    part_edges = _edges_per_part(batcher, plain)
    slots: Slots = {}
    for step, _ in plain.actions:
        if step.action == "reduce":
            slots[step.slot] = _reduce_in_parts(plain, builder, block, step, slots, part_edges)
        elif step.rows.kind == "range":
            plain.run_steps({step.slot}, slots, block)
    return block, {slot: slots[slot] for slot in plain.stage.results.values()}


def _edges_per_part(batcher: Batcher, plain: StageRunner) -> int:
    memory = measure_stage(plain.program, plain.stage, batcher.direct)
    one = {key: 0 if key.startswith("range") else 1 for key in memory.keys}
    return max(1, int(batcher.budget_bytes / max(memory.peak(one) * batcher.correction.factor, 1)))


def _reduce_in_parts(
    plain: StageRunner, builder: BlockBuilder, block: Block, step: Step, slots: Slots, part_edges: int
) -> torch.Tensor:
    value = plain.program[step.name]
    reduction = reduction_of(plain.program, value)
    if reduction.reduce not in ("sum", "mean", "amax", "amin", "prod"):
        raise UnsupportedModelError(
            value.op,
            f"a node has more edges than the memory budget holds, and {reduction.reduce!r} cannot be taken in parts",
            "pass more memory",
            value.source,
        )
    wanted = _edge_steps(plain, step.inputs[reduction.source])
    is_mean, num_edges = reduction.reduce == "mean", block.edges[step.edges].num_edges
    combine = plain.combiner(step, "sum" if is_mean else None)
    result = slots[step.inputs[reduction.base]].clone()
    include_self = reduction.include_self
    if is_mean and not include_self:
        result.zero_()
    for start in range(0, num_edges, part_edges):
        part = builder.part(block, step.edges, start, min(start + part_edges, num_edges))
        local = dict(slots)
        plain.run_steps(wanted, local, part)
        rows = local[step.inputs[reduction.source]]
        with torch.inference_mode():
            result = combine(result, rows, part.edges[step.edges].rows_of_edges(), include_self or is_mean)
        include_self = True
    return result / (num_edges + reduction.include_self) if is_mean else result


def _edge_steps(plain: StageRunner, slot: str) -> set[str]:
    """Return the steps at edges and source rows that lead to ``slot``."""
    steps = {step.slot: step for step, _ in plain.actions}
    found: set[str] = set()
    waiting = [slot]
    while waiting:
        current = steps.get(waiting.pop())
        if current is not None and current.slot not in found and current.rows.kind != "range":
            found.add(current.slot)
            waiting.extend(current.inputs.values())
    return found
