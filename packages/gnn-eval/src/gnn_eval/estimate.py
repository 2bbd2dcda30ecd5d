"""Cost of a plan on a graph of which only the counts are known.

Per stage, with ``N`` rows, ``E`` edges, mean degree ``d = E / N`` and blocks of ``b`` rows:

- source rows of a block ``S(b) = l * R * (1 - exp(-b * d / R))``, with ``R`` rows in the space read and ``l`` the share
  of the source rows a graph without locality would have; 1 unless it was sampled from the graph;
- block size: the largest ``b`` with ``memory(D=b, S=S(b), E=b*d) <= budget``; blocks ``B = ceil(N / b)``;
- read bytes ``B * S(b) * source_row_bytes + N * range_row_bytes``, the second without the rows that are sources of
  their own block (a share of ``S(b) / R``, or ``1 - exp(-d)`` of the local part);
- written bytes ``N * result_row_bytes``;
- work ``N * own + B * S(b) * redone`` multiply-adds, and ``E * message_bytes`` moved by edges;
- seconds ``= max(read / read_rate, work / multiply_rate + edge_bytes / memory_rate) + written / write_rate``, since
  reading goes on while a block is computed.

Rates are measured on this machine when asked for; none is built in.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gnn_eval.fusion import fuse_stage
from gnn_eval.lowering import Rows, StageProgram
from gnn_eval.memory import measure_stage
from gnn_eval.program import Program
from gnn_eval.sizes import Size
from gnn_eval.storage import work_of

if TYPE_CHECKING:
    from gnn_eval.plan import Compiled
    from gnn_eval.stored_graph import StoredGraph

__all__ = ["Rates", "StageEstimate", "estimate_stages", "mean_aggregation", "measure_rates", "sample_source_share"]

_PROBE_BYTES, _READ_BYTES = 64 << 20, 1 << 20


@dataclass(frozen=True)
class Rates:
    """Measured speeds of this machine, per second."""

    read_bytes: float
    written_bytes: float
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
    """Measure disk, memory and multiplication speed in about a second.

    Args:
        directory: Where to write and read a file of 64 MB; the system's temporary directory if left out.
    """
    block = torch.ones(_PROBE_BYTES // 4)
    with tempfile.NamedTemporaryFile(dir=directory) as file:
        started = time.perf_counter()
        os.pwrite(file.fileno(), block.numpy().tobytes(), 0)
        os.fsync(file.fileno())
        written = _PROBE_BYTES / (time.perf_counter() - started)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        started = time.perf_counter()
        for start in range(0, _PROBE_BYTES, _READ_BYTES):
            os.pread(file.fileno(), _READ_BYTES, start)
        read = _PROBE_BYTES / (time.perf_counter() - started)
    rows = block.view(-1, 128)
    index = torch.randint(rows.size(0), (rows.size(0),))
    memory = 2 * _PROBE_BYTES / _best_seconds(lambda: rows.index_select(0, index))
    left, right = torch.ones(2048, 256), torch.ones(256, 256)
    return Rates(read, written, memory, 2048 * 256 * 256 / _best_seconds(lambda: torch.mm(left, right)))


def _best_seconds(call: Callable[[], Any]) -> float:
    def once() -> float:
        started = time.perf_counter()
        call()
        return time.perf_counter() - started

    return min(once() for _ in range(3))


def sample_source_share(graph: StoredGraph, block_rows: int = 50_000) -> float:
    """Return the source rows of some blocks of a stored graph, relative to a graph without locality."""
    nodes, edges, block_rows = graph.num_nodes, graph.num_edges, min(block_rows, graph.num_nodes)
    sources = graph.rows("indices")
    found = expected = 0.0
    for start in torch.linspace(0, nodes - block_rows, 4).long().tolist():
        first, last = graph.indptr[start].item(), graph.indptr[start + block_rows].item()
        found += sources.read_range(int(first), int(last)).unique().numel()
        expected += nodes * (1 - math.exp(-(last - first) / max(nodes, 1)))
    return found / expected if edges and expected else 1.0


def estimate_stages(
    compiled: Compiled, counts: dict[str, int], memory_bytes: int, rates: Rates, source_share: float = 1.0
) -> list[StageEstimate]:
    """Predict each stage of a plan with inputs and intermediate values on disk.

    Args:
        compiled: The plan.
        counts: Numbers of nodes and edges: ``{"n_node": ..., "e_edge_index": ...}``; counts the graph would tell, such
            as edges without self-loops, are taken as the edges of the first relation.
        memory_bytes: Budget of one block.
        rates: Speeds of the machine.
        source_share: Source rows relative to a graph without locality, from :func:`sample_source_share`.
    """
    program = compiled.program
    stages = [fuse_stage(program, stage) for stage in compiled.stages]
    return [_estimate(program, stage, counts, memory_bytes, rates, source_share) for stage in stages]


def _value(size: Size, counts: dict[str, int]) -> int:
    edges = max((count for name, count in counts.items() if name.startswith("e_")), default=0)
    return size.constant + sum(c * counts.get(name, edges) for name, c in size.terms)


def _estimate(
    program: Program, stage: StageProgram, counts: dict[str, int], memory_bytes: int, rates: Rates, share: float
) -> StageEstimate:
    memory = measure_stage(program, stage, set(), {step.name for step in stage.loads()}, ahead=True)
    rows = _value(stage.space, counts)
    low, high = 1, max(rows, 1)
    while low < high:
        middle = (low + high + 1) // 2
        fits = memory.peak(_block_counts(stage, middle, rows, counts, share)) <= memory_bytes
        low, high = (middle, high) if fits else (low, middle - 1)
    blocks = math.ceil(rows / low)
    block = _block_counts(stage, low, rows, counts, share)
    at_sources = {step.name: step.rows for step in stage.loads() if step.rows.kind == "source"}
    read = work = moved = 0.0
    for step in stage.steps:
        value = program[step.name]
        number = blocks * block[step.rows.key] if step.rows.kind == "source" else float(rows)
        if step.rows.kind == "edge" or step.action == "spmm":
            number = float(_value(step.rows.space if step.rows.kind == "edge" else step.edges.space, counts))
            moved += number * (value.row_bytes() if value.is_tensor else 0)
        if step.action == "load" and not value.type.static:
            if step.rows.kind == "range" and step.name in at_sources:
                number *= 1 - _share_among_sources(stage, block, rows, counts, share)
            read += number * value.row_bytes()
        elif step.action == "apply":
            work += number * work_of(program, value)
    written = float(rows * sum(program[name].row_bytes() for name in stage.results))
    read += sum(4 * _value(edge_set.space, counts) * len(found) for edge_set, found in stage.edge_sets.items())
    computing = work / rates.multiply_adds + 2 * moved / rates.memory_bytes
    seconds = max(read / rates.read_bytes, computing) + written / rates.written_bytes
    return StageEstimate(stage.level, rows, low, blocks, memory.peak(block), read, written, seconds)


def _share_among_sources(
    stage: StageProgram, block: dict[str, float], rows: int, counts: dict[str, int], share: float
) -> float:
    """Return the share of a block's own rows that are among its source rows."""
    edges = sum(_value(edge_set.space, counts) for edge_set, indices in stage.edge_sets.items() if indices)
    anywhere = block.get(Rows("source", stage.space).key, 0.0) / max(rows, 1)
    return max(anywhere, (1 - share) * (1 - math.exp(-edges / max(rows, 1))))


def _block_counts(
    stage: StageProgram, block_rows: int, rows: int, counts: dict[str, int], share: float
) -> dict[str, float]:
    found: dict[str, float] = {Rows("range", stage.space).key: block_rows}
    for edge_set, indices in stage.edge_sets.items():
        edges = _value(edge_set.space, counts) * block_rows / max(rows, 1)
        if edge_set.grouping is not None:
            found[Rows("edge", edge_set.space, edge_set.grouping).key] = edges
        for space in indices.values():
            total = max(_value(space, counts), 1)
            key = Rows("source", space).key
            found[key] = max(found.get(key, 0.0), share * total * (1 - math.exp(-edges / total)))
    return found


def mean_aggregation(width: int, hidden: int, classes: int, num_layers: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a model of plain mean aggregation (the form of GraphSAGE) and a small example, to plan from counts alone.

    Args:
        width: Width of the features.
        hidden: Width of the layers between.
        classes: Width of the result.
        num_layers: Number of layers.
    """
    widths = [width, *[hidden] * (num_layers - 1), classes]
    edges = torch.randint(64, (2, 256), generator=torch.Generator().manual_seed(0))
    return _MeanAggregation(widths).eval(), {"x": torch.randn(64, width), "edge_index": edges}


class _MeanAggregation(nn.Module):
    def __init__(self, widths: list[int]):
        super().__init__()
        self.own = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.neighbours = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in pairwise(widths))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        source, target = edge_index[0], edge_index[1]
        degree = torch.zeros(x.size(0)).index_add(0, target, torch.ones(target.size(0))).clamp(min=1).unsqueeze(1)
        for place, (own, neighbours) in enumerate(zip(self.own, self.neighbours, strict=True)):
            mean = torch.zeros(x.size(0), x.size(1)).index_add(0, target, x[source]) / degree
            x = own(x) + neighbours(mean)
            x = x if place + 1 == len(self.own) else x.relu()
        return x
