"""One run of a plan on an actual graph.

A run evaluates structure, then goes through the stages: it cuts the rows of each into blocks that fit the memory
budget, runs the steps on each block, writes the results to where the next stages read them, and frees what no later
stage loads. It reports predicted beside measured bytes.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gnn_eval.batches import Batcher
from gnn_eval.block import Block, BlockBuilder, Destinations
from gnn_eval.disk_rows import DiskRows
from gnn_eval.edge_structure import RowNumbers
from gnn_eval.errors import EvaluationArgumentError
from gnn_eval.executor import Slots, StageRunner
from gnn_eval.hoisting import StructureEvaluator
from gnn_eval.hubs import run_in_edge_parts
from gnn_eval.look_ahead import BlockFeed, Prepared, disk_loads
from gnn_eval.lowering import StageProgram
from gnn_eval.memory import measure_stage
from gnn_eval.order import choose_order
from gnn_eval.process_memory import PeakMeter
from gnn_eval.program import Program
from gnn_eval.requests import rows_to_compute
from gnn_eval.row_stores import RamRows, RowStore
from gnn_eval.run_report import RunReport, StageReport
from gnn_eval.sizes import Size

if TYPE_CHECKING:
    from gnn_eval.out_of_core import Workspace

__all__ = ["Engine", "RunOptions"]

_CACHE_FRIENDLY_BYTES = {True: 256 * 2**20, False: 48 * 2**20}  # by whether kernels are fused
_MARGIN = 0.95
_RESERVED_BYTES = 24 * 2**20
"""Room of the reading threads and of the allocator, which does not grow with a block."""
_EXCHANGED_BYTES = 64 * 2**20
_MEASURED_BYTES = 64 * 2**20
"""Budgets below are kept by the symbolic model alone: the allocator's own reserve is as large as they are."""


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
    outputs: dict[str, RowStore | Path] = field(default_factory=dict)
    on_progress: Callable[[int, float, str], None] | None = None
    meter: PeakMeter = field(init=False)

    def __post_init__(self) -> None:
        self.meter = PeakMeter(hand_back=self.memory_bytes is not None)


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
                if last == place and name in self._stores and name not in self._program.outputs:
                    freed = self._stores.pop(name)
                    if self._options.workspace is not None:
                        self._options.workspace.discard(freed)
        for name in self._program.outputs:
            if name not in results:  # the model returns an input
                results[name] = self._stores[name]
        if self._is_measured:
            self.report.peak_bytes = self._options.meter.highest() - self._options.meter.start_bytes
        return results

    def _last_loads(self) -> dict[str, int]:
        return {step.name: place for place, stage in enumerate(self._stages) for step in stage.loads()}

    def _run_stage(self, place: int, stage: StageProgram, rows: Tensor | None) -> dict[str, RowStore]:
        started = time.perf_counter()
        report = StageReport(stage.level, str(stage.space))
        self.report.stages.append(report)
        options, num_space_rows = self._options, self._counts[stage.space]
        made = {name: self._new_store(name, place) for name in stage.results}
        direct = self._direct_spaces(stage)
        runner = StageRunner(self._program, stage, self._stores, self._structure, options.fuse)
        on_disk = {step.name for step in disk_loads(runner.stage, self._stores)}
        structures = {edge_set: self._structures[edge_set] for edge_set in stage.edge_sets}
        builder = BlockBuilder(runner.stage, structures, self._counts, direct, self._numbers_of, bool(on_disk))
        copies = direct != set(stage.source_spaces()) and not on_disk and options.workspace is None
        rows = choose_order(options.order, rows, num_space_rows, stage, structures, options.batch_rows, copies)
        batcher = Batcher(
            runner.stage,
            measure_stage(self._program, runner.stage, direct, on_disk, ahead=bool(on_disk)),
            structures,
            rows,
            num_space_rows if rows is None else rows.numel(),
            None,
            options.batch_rows,
            {space: self._counts[space] for space in stage.source_spaces()},
            direct,
            self._is_measured,
        )
        batcher.budget_bytes = self._block_budget(batcher, made)
        before = self._bytes_moved(made)
        self._run_blocks(place, batcher, builder, runner, made, report)
        self._exchange(batcher, made)
        after = self._bytes_moved(made)
        report.read_bytes, report.written_bytes = after[0] - before[0], after[1] - before[1]
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
        workspace, meter = self._options.workspace, self._options.meter
        is_kept = workspace is not None and all(isinstance(store, DiskRows) for store in made.values())
        if is_kept:
            start = max(start, workspace.done_rows(place))
        whole = batcher.takes_all and self._options.group is None and not runner.needs_groups and start == 0
        base_bytes = meter.mark() if self._is_measured else 0
        feed = BlockFeed(runner.stage, batcher, builder, self._stores, stop, ahead=not whole)
        try:
            ready = feed.prepare(start, whole)
            while ready is not None:
                if self._is_measured:
                    meter.mark()
                later = feed.prepare_later(ready.end) if ready.block is not None else None
                try:
                    block, slots = self._run_block(batcher, builder, runner, ready)
                    self._write(block.destinations, slots, runner.stage, made)
                except (RuntimeError, MemoryError) as error:
                    if later is not None:
                        later.exception()  # the thread is done with what it shares before anything is made again
                    feed.lower_limit(ready.end - ready.start, error)
                    ready = feed.prepare(ready.start)
                    continue
                del slots
                following = later.result() if later is not None else None
                after = following.block if following is not None else None
                predicted = batcher.block_bytes(block, after or Block(block.destinations))
                if self._is_measured:
                    used = meter.peak() - base_bytes
                    report.measured_peak_bytes = max(report.measured_peak_bytes, used)
                    batcher.correction.learn(predicted / batcher.correction.factor, used)
                report.count(block, ready.end - ready.start, predicted)
                batcher.learn(block)
                if is_kept:
                    workspace.mark_done(place, ready.end)
                if self._options.on_progress is not None:
                    self._options.on_progress(place, ready.end / batcher.num_rows, f"stage {runner.stage.level}")
                del block
                ready = following if later is not None else feed.prepare(ready.end)
            report.reused_rows = feed.reused_rows
        finally:
            feed.close()

    def _run_block(
        self, batcher: Batcher, builder: BlockBuilder, runner: StageRunner, ready: Prepared
    ) -> tuple[Block, Slots]:
        if ready.block is None:
            return run_in_edge_parts(batcher, builder, runner, ready.start)
        return ready.block, runner.run(ready.block)

    def _write(self, destinations: Destinations, slots: Slots, stage: StageProgram, made: dict[str, RowStore]) -> None:
        for name, slot in stage.results.items():
            if destinations.ids is None:
                made[name].write_range(destinations.start, slots[slot])
            else:
                made[name].write_rows(destinations.ids, slots[slot])

    def _new_store(self, name: str, place: int) -> RowStore:
        given, workspace, value = self._options.outputs.get(name), self._options.workspace, self._program[name]
        shape = [self._structure.count_of(size) for size in value.dims]
        dtype = value.dtype or torch.get_default_dtype()
        if workspace is not None and value.type.row_dim == 0 and (given is None or isinstance(given, Path)):
            return workspace.new_rows(given or workspace.path_of(name), place, shape, dtype)
        if isinstance(given, Path):
            return DiskRows.create(given, shape, dtype)
        if given is not None:
            return given
        rows = torch.empty(shape, dtype=dtype)
        # Touched now where memory is measured, so that a block's own memory can be told from it.
        return RamRows(rows.zero_() if self._is_measured else rows, value.type.row_dim)

    def _direct_spaces(self, stage: StageProgram) -> set[Size]:
        direct = {space for space, as_stored in stage.source_spaces().items() if as_stored}
        for step in stage.loads():
            store = self._stores.get(step.name)
            if step.rows.kind == "source" and store is not None and store.whole() is None:
                direct.discard(step.rows.space)
        return direct

    def _block_budget(self, batcher: Batcher, made: dict[str, RowStore]) -> float | None:
        """Return the bytes one block may use: the budget less what is held while the stage runs."""
        options = self._options
        if options.memory_bytes is None:
            return _CACHE_FRIENDLY_BYTES[options.fuse] if options.batch_rows is None else None
        for space in batcher.space_rows.keys() - batcher.direct:
            self._numbers_of(space)
        named = {**self._stores, **made}
        kept = {id(store): store for name, store in named.items() if name not in self._program.inputs}
        held = sum(_bytes(store) for store in kept.values()) + batcher.held_bytes()
        held += self._structure.held_bytes() + sum(s.held_bytes() for s in self._structures.values())
        if self._is_measured:  # orders, workspaces and whatever else stays
            held = max(held, options.meter.mark() - options.meter.start_bytes)
        self.report.held_bytes = max(self.report.held_bytes, held)
        left = options.memory_bytes - held
        if left < 2**20:
            raise EvaluationArgumentError(
                f"memory={options.memory_bytes} leaves {max(left, 0)} bytes for computing: "
                f"{held} bytes are held between stages; pass store=PATH to keep them on disk, or more memory"
            )
        return left * _MARGIN - (_RESERVED_BYTES if self._is_measured else 0)

    @property
    def _is_measured(self) -> bool:
        limit = self._options.memory_bytes
        return limit is not None and limit >= _MEASURED_BYTES and self._options.meter.works

    def _bytes_moved(self, made: dict[str, RowStore]) -> tuple[int, int]:
        files = {id(s): s for s in (*self._stores.values(), *made.values()) if isinstance(s, DiskRows)}
        return sum(f.read_bytes for f in files.values()), sum(f.written_bytes for f in files.values())

    def _numbers_of(self, space: Size) -> RowNumbers:
        if space not in self._numbers:
            self._numbers[space] = RowNumbers(self._counts[space])
        return self._numbers[space]

    def _parts(self, batcher: Batcher) -> list[tuple[int, int]]:
        """Return the rows each rank computes: contiguous, of equal work."""
        group = self._options.group
        if group is None or group.size == 1:
            return [(0, batcher.num_rows)]
        work = batcher.work_prefix()
        targets = torch.tensor([int(work[-1]) * r // group.size for r in range(group.size + 1)])
        cuts = torch.searchsorted(work, targets)
        cuts[0], cuts[-1] = 0, batcher.num_rows
        return list(itertools.pairwise(cuts.tolist()))

    def _own_part(self, batcher: Batcher) -> tuple[int, int]:
        parts = self._parts(batcher)
        return parts[0] if len(parts) == 1 else parts[self._options.group.rank]

    def _exchange(self, batcher: Batcher, made: dict[str, RowStore]) -> None:
        """Give every rank the rows the others computed, a window at a time; files are shared already."""
        group = self._options.group
        if group is None or group.size == 1:
            return
        parts = self._parts(batcher)
        order = torch.arange(batcher.num_rows) if batcher.rows is None else batcher.rows
        for store in made.values():
            if isinstance(store, DiskRows):
                continue
            row_bytes = _bytes(store) // max(store.num_rows, 1)
            step = max(_EXCHANGED_BYTES // max(row_bytes * group.size, 1), 1)
            for first in range(0, max((stop - start for start, stop in parts), default=0), step):
                windows = [order[min(a + first, b) : min(a + first + step, b)] for a, b in parts]
                own = store.read_rows(windows[group.rank]).movedim(store.row_dim, 0).contiguous()
                rows, _ = group.all_gather_v(own)
                store.write_rows(torch.cat(windows), rows.movedim(0, store.row_dim))
        group.barrier()


def _bytes(store: RowStore) -> int:
    whole = store.whole()
    return 0 if whole is None else whole.numel() * whole.element_size()
