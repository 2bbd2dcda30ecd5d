"""One run of a plan on an actual graph.

A run evaluates structure, then goes through the stages: it cuts the rows of each into blocks that fit the memory
budget, runs the steps on each block, writes the results to where the next stages read them, and frees what no later
stage loads. It reports predicted beside measured bytes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gnn_eval.batches import Batcher
from gnn_eval.block import Block, BlockBuilder, Destinations
from gnn_eval.edge_structure import RowNumbers
from gnn_eval.errors import EvaluationArgumentError
from gnn_eval.executor import Slots, StageRunner
from gnn_eval.hoisting import StructureEvaluator
from gnn_eval.hubs import run_in_edge_parts
from gnn_eval.lowering import StageProgram
from gnn_eval.memory import measure_stage
from gnn_eval.order import choose_order
from gnn_eval.process_memory import PeakMeter
from gnn_eval.program import Program
from gnn_eval.requests import rows_to_compute
from gnn_eval.row_stores import RamRows, RowStore
from gnn_eval.sizes import Size

if TYPE_CHECKING:
    from gnn_eval.out_of_core import Workspace

__all__ = ["Engine", "RunOptions", "RunReport", "StageReport"]

_logger = logging.getLogger(__name__)
_CACHE_FRIENDLY_BYTES = {True: 256 * 2**20, False: 48 * 2**20}  # by whether kernels are fused
_MARGIN = 0.95


@dataclass
class RunOptions:
    """How a plan is run; see :func:`gnn_eval.evaluate` for their meaning."""

    asked: dict[str, Tensor | None]
    memory_bytes: int | None = None
    batch_rows: int | None = None
    order: str = "natural"
    fuse: bool = True
    group: Any = None
    workspace: Workspace | None = None
    outputs: dict[str, RowStore] = field(default_factory=dict)
    on_progress: Callable[[int, int, str], None] | None = None


@dataclass
class StageReport:
    """What one stage did.

    Attributes:
        level: Number of the stage.
        rows: Rows computed.
        blocks: Number of blocks.
        edges: Edges visited.
        source_rows: Source rows read over all blocks; 0 where edges index the store itself.
        predicted_peak_bytes: Largest prediction of a block.
        measured_peak_bytes: Largest measured rise of memory during a block, 0 if it was not measured.
        seconds: Duration.
    """

    level: int
    space: str
    rows: int = 0
    blocks: int = 0
    edges: int = 0
    source_rows: int = 0
    predicted_peak_bytes: float = 0.0
    measured_peak_bytes: float = 0.0
    seconds: float = 0.0


@dataclass
class RunReport:
    """What a run did, stage by stage."""

    stages: list[StageReport] = field(default_factory=list)
    held_bytes: int = 0

    @property
    def num_edges(self) -> int:
        """Edges visited in all stages."""
        return sum(stage.edges for stage in self.stages)

    @property
    def source_rows(self) -> int:
        """Source rows read in all stages."""
        return sum(stage.source_rows for stage in self.stages)


class Engine:
    """A run of a program on a graph.

    Args:
        program: The typed program.
        stages: Its stages.
        model: The model, whose parameters are read now.
        stores: Rows of the inputs, by name of the value.
        structure: Gives structural values.
        options: How to run.
    """

    def __init__(
        self,
        program: Program,
        stages: list[StageProgram],
        model: nn.Module,
        stores: dict[str, RowStore],
        structure: StructureEvaluator,
        options: RunOptions,
    ):
        self._program, self._stages, self._model, self._options = program, stages, model, options
        self._stores, self._structure = stores, structure
        self._structures = structure.edge_structures(stages)
        self._numbers: dict[Size, RowNumbers] = {}
        self._counts = {s: structure.count_of(s) for stage in stages for s in (stage.space, *stage.source_spaces())}
        self.report = RunReport()

    def run(self) -> dict[str, RowStore]:
        """Run all stages; return the rows of each output."""
        results: dict[str, RowStore] = {}
        rows = rows_to_compute(self._program, self._stages, self._structures, self._counts, self._options.asked)
        last_load = self._last_loads()
        for place, stage in enumerate(self._stages):
            made = self._run_stage(place, stage, rows[place])
            self._stores.update(made)
            results |= {name: store for name, store in made.items() if name in self._program.outputs}
            for name, last in last_load.items():
                if last == place and name in self._stores:
                    freed = self._stores.pop(name)
                    if self._options.workspace is not None and name not in results:
                        self._options.workspace.discard(freed)
        for name in self._program.outputs:
            results.setdefault(name, self._stores.get(name))
        return results

    def _last_loads(self) -> dict[str, int]:
        return {step.name: place for place, stage in enumerate(self._stages) for step in stage.loads()}

    def _run_stage(self, place: int, stage: StageProgram, rows: Tensor | None) -> dict[str, RowStore]:
        started = time.perf_counter()
        report = StageReport(stage.level, str(stage.space))
        self.report.stages.append(report)
        num_space_rows = self._counts[stage.space]
        made = {name: self._new_store(name, num_space_rows) for name in stage.results}
        direct = self._direct_spaces(stage)
        runner = StageRunner(self._program, stage, self._stores, self._structure, self._options.fuse)
        memory = measure_stage(self._program, runner.stage, direct, self._options.workspace is None)
        structures = {edge_set: self._structures[edge_set] for edge_set in stage.edge_sets}
        ordered = self._options.workspace is not None
        builder = BlockBuilder(runner.stage, structures, self._counts, direct, self._numbers_of, ordered)
        copies = direct != set(stage.source_spaces()) and self._options.workspace is None
        rows = choose_order(
            self._options.order, rows, num_space_rows, stage, structures, self._options.batch_rows, copies
        )
        total = num_space_rows if rows is None else rows.numel()
        spaces = {space: self._counts[space] for space in stage.source_spaces()}
        batcher = Batcher(
            runner.stage,
            memory,
            structures,
            rows,
            total,
            self._block_budget(made),
            self._options.batch_rows,
            spaces,
            direct,
            measured=self._options.memory_bytes is not None and PeakMeter().works,
        )
        self._run_blocks(place, batcher, builder, runner, made, report)
        self._exchange(batcher, made)
        report.seconds = time.perf_counter() - started
        return made

    def _run_blocks(
        self,
        place: int,
        batcher: Batcher,
        builder: BlockBuilder,
        runner: StageRunner,
        made: dict[str, RowStore],
        report: StageReport,
    ) -> None:
        start, stop = self._own_part(batcher)
        workspace, meter = self._options.workspace, PeakMeter()
        if workspace is not None:
            start = max(start, workspace.done_rows(place))
        in_list_order = batcher.takes_all and self._options.group is None and not runner.needs_groups and start == 0
        end = stop
        limit = batcher.num_rows
        measure = self._options.memory_bytes is not None
        while start < stop:
            if not in_list_order:
                end = min(batcher.next_stop(start), start + limit, stop)
            if measure:
                meter.mark()
            try:
                end, block, slots = self._run_block(batcher, builder, runner, start, end, in_list_order)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error) or end - start <= 1:
                    raise
                limit = max(1, (end - start) // 2)
                in_list_order = False
                _logger.info("out of memory with %d rows; going on with %d", end - start, limit)
                continue
            self._write(block.destinations, slots, runner.stage, made)
            predicted = batcher.block_bytes(block)
            if measure:
                report.measured_peak_bytes = max(report.measured_peak_bytes, meter.rise())
                batcher.correction.learn(predicted / batcher.correction.factor, meter.rise())
            _count(report, block, end - start, predicted)
            batcher.learn(block)
            start = end
            if workspace is not None:
                workspace.mark_done(place, start)
            if self._options.on_progress is not None:
                self._options.on_progress(place, end, f"stage {runner.stage.level}")

    def _run_block(
        self, batcher: Batcher, builder: BlockBuilder, runner: StageRunner, start: int, end: int, in_list_order: bool
    ) -> tuple[int, Block, Slots]:
        """Run the block of rows ``start`` to ``end``, cut down if it is too large; return where it ended."""
        is_single = batcher.budget_bytes is not None and end - start == 1 and not in_list_order
        if is_single and batcher.predicted_bytes(start, end) > batcher.budget_bytes:
            block, slots = run_in_edge_parts(batcher, builder, runner, start)
            return end, block, slots
        block = builder.build(batcher.destinations(start, end), in_list_order)
        while not in_list_order and (nearer := batcher.shrink(block, start, end)) < end:
            end = nearer
            block = builder.build(batcher.destinations(start, end))
        return end, block, runner.run(block)

    def _write(self, destinations: Destinations, slots: Slots, stage: StageProgram, made: dict[str, RowStore]) -> None:
        for name, slot in stage.results.items():
            if destinations.ids is None:
                made[name].write_range(destinations.start, slots[slot])
            else:
                made[name].write_rows(destinations.ids, slots[slot])

    def _new_store(self, name: str, num_rows: int) -> RowStore:
        given = self._options.outputs.get(name)
        if given is not None:
            return given
        value = self._program[name]
        shape = [self._structure.count_of(size) for size in value.shape]
        workspace = self._options.workspace
        if workspace is not None and value.type.row_dim == 0:
            return workspace.new_rows(name, shape, value.dtype)
        return RamRows(torch.empty(shape, dtype=value.dtype), value.type.row_dim)

    def _direct_spaces(self, stage: StageProgram) -> set[Size]:
        direct = {space for space, as_stored in stage.source_spaces().items() if as_stored}
        for step in stage.loads():
            store = self._stores.get(step.name)
            if step.rows.kind == "source" and store is not None and store.whole() is None:
                direct.discard(step.rows.space)
        return direct

    def _block_budget(self, made: dict[str, RowStore]) -> float | None:
        """Return the bytes one block may use: the budget less what is held between stages."""
        if self._options.memory_bytes is None:
            return _CACHE_FRIENDLY_BYTES[self._options.fuse] if self._options.batch_rows is None else None
        kept = {id(s): s for s in (*self._stores.values(), *made.values())}
        inputs = set(self._program.inputs)
        named = {**self._stores, **made}
        held = sum(_bytes(s) for n, s in named.items() if n not in inputs and id(s) in kept)
        held += self._structure.held_bytes() + sum(s.held_bytes() for s in self._structures.values())
        self.report.held_bytes = max(self.report.held_bytes, held)
        left = self._options.memory_bytes - held
        if left < 2**20:
            raise EvaluationArgumentError(
                f"memory={self._options.memory_bytes} leaves {max(left, 0)} bytes for computing: "
                f"{held} bytes are held between stages; pass store=PATH to keep them on disk, or more memory"
            )
        return left * _MARGIN

    def _numbers_of(self, space: Size) -> RowNumbers:
        if space not in self._numbers:
            self._numbers[space] = RowNumbers(self._counts[space])
        return self._numbers[space]

    def _own_part(self, batcher: Batcher) -> tuple[int, int]:
        """Return the rows this rank computes: contiguous, of equal work."""
        group = self._options.group
        if group is None or group.size == 1:
            return 0, batcher.num_rows
        work = batcher.work_prefix()
        targets = torch.tensor([int(work[-1]) * r // group.size for r in range(group.size + 1)])
        cuts = torch.searchsorted(work, targets)
        cuts[0], cuts[-1] = 0, batcher.num_rows
        return int(cuts[group.rank]), int(cuts[group.rank + 1])

    def _exchange(self, batcher: Batcher, made: dict[str, RowStore]) -> None:
        """Give every rank the rows the others computed."""
        group = self._options.group
        if group is None or group.size == 1:
            return
        start, stop = self._own_part(batcher)
        order = batcher.rows
        for store in made.values():
            own = store.read_range(start, stop) if order is None else store.read_rows(order[start:stop])
            dim = store.row_dim
            rows, _ = group.all_gather_v(own.movedim(dim, 0).contiguous())
            rows = rows.movedim(0, dim)
            if order is None:
                store.write_range(0, rows)
            else:
                store.write_rows(order, rows)


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error says that memory ran out, on a device or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error)
    return "can't allocate memory" in text or "not enough memory" in text


def _count(report: StageReport, block: Block, rows: int, predicted: float) -> None:
    report.rows += rows
    report.blocks += 1
    report.edges += block.num_edges
    report.source_rows += sum(ids.numel() for ids in block.sources.values())
    report.predicted_peak_bytes = max(report.predicted_peak_bytes, predicted)


def _bytes(store: RowStore) -> int:
    whole = store.whole()
    return 0 if whole is None else whole.numel() * whole.element_size()
