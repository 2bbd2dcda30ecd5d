"""What a run did, stage by stage: measured beside predicted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gnn_eval.block import Block

__all__ = ["RunReport", "StageReport"]


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
        measured_peak_bytes: Largest measured memory of a block above what is held, 0 if it was not measured.
        read_bytes: Bytes read from files, gaps between rows included.
        written_bytes: Bytes written to files.
        reused_rows: Rows copied from the block before instead of being read.
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
    read_bytes: int = 0
    written_bytes: int = 0
    reused_rows: int = 0
    seconds: float = 0.0

    def count(self, block: Block, rows: int, predicted_bytes: float) -> None:
        """Add one block of ``rows`` rows."""
        self.rows += rows
        self.blocks += 1
        self.edges += block.num_edges
        self.source_rows += sum(ids.numel() for ids in block.sources.values())
        self.predicted_peak_bytes = max(self.predicted_peak_bytes, predicted_bytes)


@dataclass
class RunReport:
    """What a run did, stage by stage.

    Attributes:
        stages: The stages in order.
        held_bytes: Most bytes held beside the blocks.
        peak_bytes: Highest allocated memory above that at the start of the run, 0 if it was not measured.
    """

    stages: list[StageReport] = field(default_factory=list)
    held_bytes: int = 0
    peak_bytes: int = 0

    @property
    def num_edges(self) -> int:
        """Edges visited in all stages."""
        return sum(stage.edges for stage in self.stages)

    @property
    def source_rows(self) -> int:
        """Source rows read in all stages."""
        return sum(stage.source_rows for stage in self.stages)

    @property
    def read_bytes(self) -> int:
        """Bytes read from files in all stages."""
        return sum(stage.read_bytes for stage in self.stages)

    @property
    def written_bytes(self) -> int:
        """Bytes written to files in all stages."""
        return sum(stage.written_bytes for stage in self.stages)
