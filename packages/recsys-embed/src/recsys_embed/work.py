"""What ids and rows cost the processor: seconds per step, id, row and byte, on top of what the interconnect costs.

``WorkCosts.measure(group)`` measures, ``WorkCosts.load(path)`` reads, ``WorkCosts.assumed(interconnect)`` guesses.

Callers may not assume that rates hold for other numbers of ranks or of threads per rank; measure as you will train.
"""

from __future__ import annotations

import math
from dataclasses import asdict, astuple, dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from core_kernels.interconnect import Interconnect
from core_kernels.plan import PlanDocument
from recsys_embed.errors import input_error

if TYPE_CHECKING:
    from core_kernels.comm import Group
    from recsys_embed.optimizers import RowOptimizer

__all__ = ["WorkCosts", "WorkLoad"]

#: Times a row's bytes pass through memory: owner's read, buffer, pooling, summing, sending, merging, update.
_COLD_PASSES, _HOT_PASSES = 8.0, 6.0


@dataclass(frozen=True)
class WorkLoad:
    """What one rank handles in a step.

    Attributes:
        has_tier: 1 with a hot tier, 0 without.
        has_cold: 1 while owners are asked for rows, 0 when the tier holds all of them.
        ids: Ids of the batch.
        id_bytes: Bytes of the rows they name, duplicates counted.
        rows: Distinct cold rows.
        row_bytes: Their bytes.
        hot_bytes: Bytes of the hot tier.
    """

    has_tier: float
    has_cold: float
    ids: float
    id_bytes: float
    rows: float
    row_bytes: float
    hot_bytes: float


@dataclass(frozen=True)
class WorkCosts(PlanDocument):
    """Processor seconds by cause; ``save`` and ``load`` keep them in one JSON file.

    Attributes:
        per_step: Every step, whatever its batch.
        per_tier: Every step that has a hot tier.
        per_exchange: Every step that asks owners for rows.
        per_id: Id of the batch.
        per_id_byte: Byte of the row that an id names.
        per_row: Distinct cold row.
        per_row_byte: Byte of it.
        per_hot_byte: Byte of the hot tier, touched or not.
        ranks_per_core: Factor on all of them while every rank works.
        name: Where they come from.

    >>> costs = WorkCosts(per_step=1e-3, per_id=1e-7, ranks_per_core=2.0)
    >>> round(costs.seconds(WorkLoad(0, 1, 10_000, 0, 0, 0, 0)), 6)
    0.004
    """

    schema: ClassVar[str] = "recsys_embed.work"
    version: ClassVar[int] = 1

    per_step: float = 0.0
    per_tier: float = 0.0
    per_exchange: float = 0.0
    per_id: float = 0.0
    per_id_byte: float = 0.0
    per_row: float = 0.0
    per_row_byte: float = 0.0
    per_hot_byte: float = 0.0
    ranks_per_core: float = 1.0
    name: str = "given"

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            least = 1.0 if name == "ranks_per_core" else 0.0
            if name != "name" and not (isinstance(value, int | float) and least <= value < math.inf):
                raise input_error(name, value, f"a finite number of at least {least:g}", "measure on the machine")

    def seconds(self, load: WorkLoad) -> float:
        """Return the wall-clock seconds that a rank's work takes when all ranks do as much."""
        tier = (self.per_tier, self.per_exchange)
        rates = (*tier, self.per_id, self.per_id_byte, self.per_row, self.per_row_byte, self.per_hot_byte)
        parts = (rate * amount for rate, amount in zip(rates, astuple(load), strict=True))
        return self.ranks_per_core * (self.per_step + sum(parts))

    @classmethod
    def assumed(cls, interconnect: Interconnect) -> Self:
        """Return what the kernel rates of an interconnect suggest: nothing per step, and a core for every rank."""
        per_byte = 1 / interconnect.rate("gather_bytes_per_second")
        return cls(
            per_id=1 / interconnect.rate("relabel_ids_per_second"),
            per_row_byte=_COLD_PASSES * per_byte,
            per_hot_byte=_HOT_PASSES * per_byte,
            name=f"rates of {interconnect.name}",
        )

    @classmethod
    def measure(cls, group: Group, optimizer: RowOptimizer | None = None, steps: int = 6) -> Self:
        """Measure on all ranks of ``group`` at once; see :func:`recsys_embed.work_probe.measure_work`."""
        from recsys_embed.work_probe import measure_work

        return cls(**measure_work(group, optimizer, steps))
