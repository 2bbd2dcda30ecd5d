"""What is stored between stages, by minimum cut.

Everything a later stage needs must be stored or recomputed from what is. Recomputing is cheap for narrow row-wise
operators and lets a wide value be replaced by a narrow ancestor or descendant: a linear layer that narrows runs before
the cut, one that widens after it. The choice over all values at once is a minimum cut:

- source side: computed in its own stage; sink side: recomputed in later stages from what is stored;
- a reduction cannot be recomputed, an input is stored already;
- ``store(v)  = row_bytes(v) * (1 + reads)``, one write and the expected reads per row;
- ``redo(v)   = work(v) * repeats``, where ``repeats`` is how often a source row occurs over all batches;
- ``own(v)    = work(v)``, with ``work`` in bytes of memory traffic of the same duration.

Source: the cost of what crosses a boundary is sketched in the code of DGI (Yin et al., KDD 2023) as a greedy rule; the
minimum cut replaces it here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from gnn_eval.patterns import gather_of, reduction_of
from gnn_eval.program import Program, Value
from gnn_eval.stages import LaterUse, is_computed

if TYPE_CHECKING:
    from gnn_eval.lowering import StageProgram

__all__ = ["EXPECTED_REPEATS", "choose_stored", "cost_of", "work_of"]

EXPECTED_REPEATS = 4
"""How often a source row is read over all batches of a stage, as long as nothing better is known."""

_UNCUTTABLE = 2**30


def work_of(program: Program, value: Value) -> int:
    """Return the work of one row of a row-wise operator, in bytes of memory traffic that take as long.

    A multiply-add of a parameter counts one byte: a core does about as many of them per second as it moves bytes.
    """
    weights = 0
    for name in value.refs():
        argument = program[name]
        if argument.type.space is None and argument.shape is not None and len(argument.shape) > 1:
            weights += int(np.prod([size.constant for size in argument.shape]))
    return weights + (value.row_bytes() if value.is_tensor else 0)


def choose_stored(program: Program, uses: list[LaterUse], repeats: int = EXPECTED_REPEATS) -> set[str]:
    """Return the names of the values to store between stages; inputs count as stored and are not in the result.

    Args:
        program: A typed program.
        uses: What later stages need.
        repeats: Expected number of times a source row is read in one stage.
    """
    computed = [n for n, v in program.values.items() if is_computed(v) and v.is_tensor]
    place = {name: 2 + 2 * position for position, name in enumerate(computed)}
    edges: dict[tuple[int, int], int] = {}

    def connect(start: int, end: int, capacity: int) -> None:
        edges[(start, end)] = min(edges.get((start, end), 0) + max(capacity, 0), _UNCUTTABLE)

    at_sources = _reaching_sources(program, uses)
    num_later = _num_later_stages(uses)
    for name in computed:
        value, inner = program[name], place[name]
        outer = inner + 1
        reads = repeats if name in at_sources else 1
        connect(inner, outer, 0 if value.op == "input" else value.row_bytes() * (1 + reads))
        if _is_origin(program, value):
            connect(0, inner, _UNCUTTABLE)
            continue
        for argument in _row_wise_ancestors(program, value):
            connect(place[argument] + 1, inner, _UNCUTTABLE)
        connect(0, inner, work_of(program, value) * reads * num_later.get(name, 1))
        connect(inner, 1, work_of(program, value))
    for use in uses:
        if use.name in place:
            connect(place[use.name] + 1, 1, _UNCUTTABLE)
    return _cut(edges, place, program)


def cost_of(program: Program, stages: list[StageProgram], repeats: int = EXPECTED_REPEATS) -> int:
    """Return the bytes loaded, stored and worth the work of lowered stages, per row."""
    total = 0
    for stage in stages:
        total += sum(program[name].row_bytes() for name in stage.results)
        for step in stage.steps:
            value, times = program[step.name], repeats if step.rows.kind == "source" else 1
            if step.action == "apply":
                total += work_of(program, value) * times
            elif step.action == "load" and not value.type.static:
                total += value.row_bytes() * times
    return total


def _is_origin(program: Program, value: Value) -> bool:
    """Whether a value starts row-wise work: an input, a reduction, a convolution or a gather."""
    if value.op in ("input", "conv"):
        return True
    reduction, gather = reduction_of(program, value), gather_of(program, value)
    reduces = reduction is not None and program[reduction.source].type.space is not None
    return reduces or (gather is not None and program[gather.source].type.space is not None)


def _row_wise_ancestors(program: Program, value: Value) -> list[str]:
    """Return the computed tensors ``value`` is made of, looking through tuples."""
    found: list[str] = []
    for name in value.refs():
        argument = program[name]
        if is_computed(argument):
            found += [name] if argument.is_tensor else _row_wise_ancestors(program, argument)
    return found


def _reaching_sources(program: Program, uses: list[LaterUse]) -> set[str]:
    """Return the values that are read, or recomputed, at source rows of a later stage."""
    reaching: set[str] = set()
    waiting = [use.name for use in uses if use.at_sources]
    while waiting:
        name = waiting.pop()
        if name in reaching:
            continue
        reaching.add(name)
        if not _is_origin(program, program[name]):
            waiting.extend(_row_wise_ancestors(program, program[name]))
    return reaching


def _num_later_stages(uses: list[LaterUse]) -> dict[str, int]:
    stages: dict[str, set[int]] = {}
    for use in uses:
        stages.setdefault(use.name, set()).add(use.level)
    return {name: len(levels) for name, levels in stages.items()}


def _cut(edges: dict[tuple[int, int], int], place: dict[str, int], program: Program) -> set[str]:
    size = 2 + 2 * len(place)
    if not edges or not place:
        return set()
    starts, ends = np.array(list(edges)).T
    capacity = csr_matrix((np.array(list(edges.values()), dtype=np.int32), (starts, ends)), shape=(size, size))
    flow = maximum_flow(capacity, 0, 1).flow
    left = capacity - flow
    left.data = np.maximum(left.data, 0)
    left.eliminate_zeros()
    reachable = set(breadth_first_order(left, 0, return_predecessors=False).tolist())
    return {
        name
        for name, inner in place.items()
        if program[name].op != "input" and inner in reachable and inner + 1 not in reachable
    }
