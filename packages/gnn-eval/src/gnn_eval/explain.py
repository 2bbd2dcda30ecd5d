"""A plan in words and numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from core_kernels.console import format_bytes
from gnn_eval.lowering import StageProgram
from gnn_eval.memory import measure_stage
from gnn_eval.program import Program
from gnn_eval.sizes import Size

if TYPE_CHECKING:
    from gnn_eval.plan import Compiled

__all__ = ["StageSummary", "explain_plan", "summarise_stages"]


@dataclass(frozen=True)
class StageSummary:
    """One stage of a plan.

    Attributes:
        level: Number of the stage; stage 0 reads no neighbours.
        rows: Text of the size of the space whose rows it computes.
        reads: Values it loads, with where: ``range``, ``source`` or ``edge``.
        computes: Operators, in order.
        stores: Values it stores or returns, with bytes per row.
        memory: Working memory per row of a block.
        edge_sets: Number of edge sets it reads through.
    """

    level: int
    rows: str
    reads: tuple[str, ...]
    computes: tuple[str, ...]
    stores: tuple[tuple[str, int], ...]
    memory: str
    edge_sets: int


def summarise_stages(compiled: Compiled) -> list[StageSummary]:
    """Return a summary of each stage."""
    return [_summary(compiled.program, stage) for stage in compiled.stages]


def _summary(program: Program, stage: StageProgram) -> StageSummary:
    direct = {space for space, as_stored in stage.source_spaces().items() if as_stored}
    reads = [f"{_shown(program, step.name)} at {step.rows.kind} rows" for step in stage.loads()]
    computes = [program[step.name].short_op for step in stage.steps if step.action != "load"]
    stores = [(_shown(program, name), program[name].row_bytes()) for name in stage.results]
    memory = measure_stage(program, stage, direct).formula()
    edge_sets = sum(edge_set.grouping is not None for edge_set in stage.edge_sets)
    rows = str(stage.space)
    return StageSummary(stage.level, rows, tuple(reads), tuple(computes), tuple(stores), memory, edge_sets)


def _shown(program: Program, name: str) -> str:
    value = program[name]
    return str(value.args[0]) if value.op == "input" else name


def explain_plan(compiled: Compiled, counts: dict[str, int] | None) -> str:
    """Return the text of :meth:`gnn_eval.Plan.explain`."""
    program = compiled.program
    num_static = sum(value.type.static and value.type.space is not None for value in program.values.values())
    lines = [
        f"{len(program.values)} operators captured by the {compiled.frontend} front end, "
        f"{num_static} of them structure, computed once",
        f"{len(compiled.stages)} stages, {len(compiled.stored)} values stored between them",
    ]
    for summary in summarise_stages(compiled):
        lines.append(f"stage {summary.level} over rows {summary.rows}, {summary.edge_sets} edge sets")
        lines += [f"  reads   {text}" for text in dict.fromkeys(summary.reads)]
        lines.append(f"  runs    {' '.join(summary.computes)}")
        lines += [f"  stores  {name}: {format_bytes(size)} per row" for name, size in summary.stores]
        lines.append(f"  memory  {summary.memory}")
    if counts is not None:
        lines.append(_whole_graph(compiled, counts))
    return "\n".join(lines)


def _whole_graph(compiled: Compiled, counts: dict[str, int]) -> str:
    total = 0
    for stage in compiled.stages:
        for name in stage.results:
            total += compiled.program[name].row_bytes() * _count(stage.space, counts)
    return f"stored and returned over the whole graph: {format_bytes(total)}"


def _count(space: Size, counts: dict[str, int]) -> int:
    return sum(coefficient * counts.get(name, 0) for name, coefficient in space.terms) + space.constant
