"""Fused kernels where a stage's steps have a known pattern.

Three patterns are replaced, all inside one block whose edges are sorted by destination:

- gather, optional multiplication by an edge weight, sum (or maximum) -> sparse times dense, without a message per edge;
- subtract the maximum, exponential, divide by the sum -> segment softmax;
- any other sum, maximum or minimum of edge values -> segment reduction over row pointers instead of a scatter.

Sums are taken in another order than torch's scatter takes them, so results agree to rounding, not bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from core_kernels import Graph, ops
from gnn_eval.block import Block
from gnn_eval.lowering import StageProgram, Step
from gnn_eval.patterns import Reduction, reduction_of
from gnn_eval.program import Program, Value

__all__ = ["FUSED_MAKERS", "fuse_stage"]

_REDUCE_NAMES = {"sum": "sum", "amax": "max", "amin": "min"}


def fuse_stage(program: Program, stage: StageProgram) -> StageProgram:
    """Return the stage with patterns replaced by fused steps, or the stage itself if there are none."""
    steps = {step.slot: step for step in stage.steps}
    fused: list[Step] = []
    for step in stage.steps:
        better = _fuse_softmax(program, steps, step) or _fuse_reduction(program, steps, step)
        fused.append(better or step)
    if all(new is old for new, old in zip(fused, stage.steps, strict=True)):
        return stage
    return replace(stage, steps=_live_steps(fused, set(stage.results.values())))


def _live_steps(steps: list[Step], needed: set[str]) -> list[Step]:
    kept: list[Step] = []
    for step in reversed(steps):
        if step.slot in needed:
            kept.append(step)
            needed = needed | set(step.inputs.values())
    return kept[::-1]


def _fuse_reduction(program: Program, steps: dict[str, Step], step: Step) -> Step | None:
    if step.action != "reduce":
        return None
    value = program[step.name]
    reduction = reduction_of(program, value)
    if reduction is None or not _is_plain(program, value, reduction):
        return None
    source = steps[step.inputs[reduction.source]]
    reduce = _REDUCE_NAMES[reduction.reduce]
    if source.action == "gather" and not source.at_range and reduce in ("sum", "max", "min"):
        inputs = {"rows": next(iter(source.inputs.values()))}
        return Step("spmm", step.slot, step.name, step.rows, inputs, step.edge_set, source.index)
    if reduce == "sum" and source.action == "apply" and program[source.name].op == "aten.mul.Tensor":
        found = _weighted_rows(program, steps, source)
        if found is not None:
            gather, weight_slot = found
            inputs = {"rows": next(iter(gather.inputs.values())), "weight": weight_slot}
            return Step("spmm", step.slot, step.name, step.rows, inputs, step.edge_set, gather.index)
    return Step("segment", step.slot, step.name, step.rows, {"edges": source.slot}, step.edge_set)


def _is_plain(program: Program, value: Value, reduction: Reduction) -> bool:
    """Whether a reduction starts from zeros, over whole rows of floating-point numbers."""
    base = program[reduction.base]
    zeros = base.op == "aten.full.default" and base.args[1] == 0
    plain = reduction.reduce == "sum" or not reduction.include_self
    floating = value.dtype is not None and value.dtype.is_floating_point
    return zeros and plain and floating and value.type.row_dim == 0 and reduction.reduce in _REDUCE_NAMES


def _weighted_rows(program: Program, steps: dict[str, Step], product: Step) -> tuple[Step, str] | None:
    """Return the gather and the slot of the weight if a product is source rows times one weight per edge or head."""
    left, right = (ref.name for ref in program[product.name].args[:2]) if _two_refs(program, product) else ("", "")
    for rows_name, weight_name in ((left, right), (right, left)):
        gather = steps.get(product.inputs.get(rows_name, ""))
        weight = program.values.get(weight_name)
        if gather is None or weight is None or gather.action != "gather" or gather.at_range:
            continue
        rows_first = weight.type.row_dim == 0 and program[rows_name].type.row_dim == 0
        if rows_first and weight_name in product.inputs and _is_factor(program[rows_name], weight):
            return gather, product.inputs[weight_name]
    return None


def _two_refs(program: Program, product: Step) -> bool:
    args = program[product.name].args
    return len(args) == 2 and all(hasattr(arg, "name") for arg in args)


def _is_factor(rows: Value, weight: Value) -> bool:
    """Whether a weight has one number per edge, or one per edge and head of ``[edges, heads, features]``."""
    if weight.type.space is None or len(weight.dims) != len(rows.dims) or weight.dtype != rows.dtype:
        return False
    widths = [size.constant for size in weight.dims[1:]]
    if all(width == 1 for width in widths):
        return True
    return len(widths) > 1 and widths[0] == rows.dims[1].constant and all(width == 1 for width in widths[1:])


def _fuse_softmax(program: Program, steps: dict[str, Step], step: Step) -> Step | None:
    """Match ``exp(a - max[dst]) / (sum[dst] + tiny)``."""
    if step.action != "apply" or program[step.name].op != "aten.div.Tensor":
        return None
    args = [steps.get(step.inputs.get(getattr(arg, "name", ""), "")) for arg in program[step.name].args[:2]]
    if None in args:
        return None
    exponential, denominator = args
    total = _range_gather_source(steps, denominator)
    if total is not None and total.action == "apply" and program[total.name].op == "aten.add.Tensor":
        total = steps.get(next(iter(total.inputs.values())))
    shifted = _argument(steps, exponential, program, "aten.exp.default")
    if shifted is None or total is None or total.action != "reduce" or program[shifted.name].op != "aten.sub.Tensor":
        return None
    reduction = reduction_of(program, program[total.name])
    if reduction.reduce != "sum" or total.inputs[reduction.source] != exponential.slot:
        return None
    names = [arg.name for arg in program[shifted.name].args[:2]]
    logits, maximum = (steps.get(shifted.inputs[name]) for name in names)
    peak = _range_gather_source(steps, maximum)
    if logits is None or peak is None or peak.action != "reduce":
        return None
    largest = reduction_of(program, program[peak.name])
    if largest.reduce != "amax" or peak.inputs[largest.source] != logits.slot or total.edge_set != peak.edge_set:
        return None
    if program[step.name].type.row_dim != 0:
        return None
    return Step("softmax", step.slot, step.name, step.rows, {"edges": logits.slot}, total.edge_set)


def _range_gather_source(steps: dict[str, Step], step: Step | None) -> Step | None:
    if step is None or step.action != "gather" or not step.at_range:
        return None
    return steps.get(next(iter(step.inputs.values())))


def _argument(steps: dict[str, Step], step: Step | None, program: Program, op: str) -> Step | None:
    if step is None or step.action != "apply" or program[step.name].op != op:
        return None
    return steps.get(next(iter(step.inputs.values())))


def _make_spmm(program: Program, step: Step) -> Callable[[dict[str, Any], Block], Tensor]:
    reduce = _REDUCE_NAMES[reduction_of(program, program[step.name]).reduce]
    rows_slot, weight_slot, key = step.inputs["rows"], step.inputs.get("weight"), (step.edges, step.index)

    def run(slots: dict[str, Any], block: Block) -> Tensor:
        rows = slots[rows_slot]
        graph = Graph(block.edges[step.edges].pointers, block.local[key], rows.size(0), validate=False)
        if weight_slot is None:
            return ops.spmm(graph, rows, reduce=reduce)
        weight = slots[weight_slot]
        heads = weight.size(1) if weight.dim() > 1 else 1
        weight = weight.reshape(weight.size(0), heads) if heads > 1 else weight.reshape(-1)
        return ops.spmm(graph, rows, weight)

    return run


def _make_segment(program: Program, step: Step) -> Callable[[dict[str, Any], Block], Tensor]:
    reduce = _REDUCE_NAMES[reduction_of(program, program[step.name]).reduce]
    slot = step.inputs["edges"]
    return lambda slots, block: ops.segment_reduce(slots[slot], block.edges[step.edges].pointers, reduce)


def _make_softmax(program: Program, step: Step) -> Callable[[dict[str, Any], Block], Tensor]:
    slot = step.inputs["edges"]
    return lambda slots, block: ops.segment_softmax(block.edges[step.edges].pointers, slots[slot])


FUSED_MAKERS = {"spmm": _make_spmm, "segment": _make_segment, "softmax": _make_softmax}
