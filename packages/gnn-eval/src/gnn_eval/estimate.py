"""Cost of a plan on a graph of which only the counts are known.

Per stage, with ``N`` rows, ``E`` edges, mean degree ``d = E / N`` and blocks of ``b`` rows on a graph without locality:

- source rows of a block ``S(b) = R * (1 - exp(-b * d / R))``, with ``R`` rows in the space read;
- block size: the largest ``b`` with ``memory(D=b, S=S(b), E=b*d) <= budget``; blocks ``B = ceil(N / b)``;
- read bytes ``B * S(b) * source_row_bytes + N * range_row_bytes``; written bytes ``N * result_row_bytes``;
- work ``N * (own + B * S(b) / N * redone)`` multiply-adds, and ``E * message_bytes`` moved by edges;
- seconds ``= bytes / disk_rate + work / multiply_rate + edge_bytes / memory_rate``.

Rates are measured on this machine when asked for; none is built in. Locality of a real graph only makes reads fewer.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gnn_eval.lowering import Rows, StageProgram
from gnn_eval.memory import measure_stage
from gnn_eval.program import Program
from gnn_eval.sizes import Size
from gnn_eval.storage import work_of

if TYPE_CHECKING:
    from gnn_eval.plan import Compiled

__all__ = ["Rates", "StageEstimate", "estimate_stages", "measure_rates"]

_PROBE_BYTES = 64 << 20


@dataclass(frozen=True)
class Rates:
    """Measured speeds of this machine, per second."""

    disk_bytes: float
    memory_bytes: float
    multiply_adds: float


@dataclass(frozen=True)
class StageEstimate:
    """Predicted cost of one stage."""

    level: int
    rows: int
    block_rows: int
    blocks: int
    peak_bytes: float
    read_bytes: float
    written_bytes: float
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a dict."""
        return asdict(self)


def measure_rates(directory: str | Path | None = None) -> Rates:
    """Measure disk, memory and multiplication speed in about half a second."""
    block = torch.ones(_PROBE_BYTES // 4)
    with tempfile.NamedTemporaryFile(dir=directory) as file:
        started = time.perf_counter()
        file.write(block.numpy().tobytes())
        file.flush()
        os.fsync(file.fileno())
        disk = _PROBE_BYTES / (time.perf_counter() - started)
    rows = block.view(-1, 128)
    index = torch.randint(rows.size(0), (rows.size(0),))
    started = time.perf_counter()
    rows.index_select(0, index)
    memory = 2 * _PROBE_BYTES / (time.perf_counter() - started)
    left, right = torch.ones(2048, 256), torch.ones(256, 256)
    left @ right
    started = time.perf_counter()
    left @ right
    return Rates(disk, memory, 2048 * 256 * 256 / (time.perf_counter() - started))


def estimate_stages(compiled: Compiled, counts: dict[str, int], memory_bytes: int, rates: Rates) -> list[StageEstimate]:
    """Predict each stage of a plan with inputs and intermediate values on disk.

    Args:
        compiled: The plan.
        counts: Numbers of nodes and edges: ``{"n_node": ..., "e_edge_index": ...}``; counts the graph would tell, such
            as edges without self-loops, are taken as the edges of the first relation.
        memory_bytes: Budget of one block.
        rates: Speeds of the machine.
    """
    return [_estimate(compiled.program, stage, counts, memory_bytes, rates) for stage in compiled.stages]


def _value(size: Size, counts: dict[str, int]) -> int:
    edges = max((count for name, count in counts.items() if name.startswith("e_")), default=0)
    return size.constant + sum(c * counts.get(name, edges) for name, c in size.terms)


def _estimate(
    program: Program, stage: StageProgram, counts: dict[str, int], memory_bytes: int, rates: Rates
) -> StageEstimate:
    memory = measure_stage(program, stage, set(), {step.name for step in stage.loads()}, ahead=True)
    rows = _value(stage.space, counts)
    low, high = 1, max(rows, 1)
    while low < high:
        middle = (low + high + 1) // 2
        fits = memory.peak(_block_counts(stage, middle, rows, counts)) <= memory_bytes
        low, high = (middle, high) if fits else (low, middle - 1)
    blocks = math.ceil(rows / low)
    block = _block_counts(stage, low, rows, counts)
    read = work = edge_bytes = 0.0
    for step in stage.steps:
        value = program[step.name]
        number = blocks * block[step.rows.key] if step.rows.kind == "source" else float(rows)
        if step.rows.kind == "edge":
            number = _value(step.rows.space, counts)
            edge_bytes += number * (value.row_bytes() if value.is_tensor else 0)
        if step.action == "load" and not value.type.static:
            read += number * value.row_bytes()
        elif step.action == "apply":
            work += number * work_of(program, value)
    written = rows * sum(program[name].row_bytes() for name in stage.results)
    read += sum(4 * _value(edge_set.space, counts) * len(found) for edge_set, found in stage.edge_sets.items())
    seconds = (read + written) / rates.disk_bytes + work / rates.multiply_adds + 2 * edge_bytes / rates.memory_bytes
    return StageEstimate(stage.level, rows, low, blocks, memory.peak(block), read, written, seconds)


def _block_counts(stage: StageProgram, block_rows: int, rows: int, counts: dict[str, int]) -> dict[str, float]:
    found: dict[str, float] = {Rows("range", stage.space).key: block_rows}
    for edge_set, indices in stage.edge_sets.items():
        edges = _value(edge_set.space, counts) * block_rows / max(rows, 1)
        if edge_set.grouping is not None:
            found[Rows("edge", edge_set.space, edge_set.grouping).key] = edges
        for space in indices.values():
            total = max(_value(space, counts), 1)
            key = Rows("source", space).key
            found[key] = max(found.get(key, 0.0), total * (1 - math.exp(-edges / total)))
    return found
