"""Symbolic memory of a stage: bytes as a linear function of the rows in a block.

Walking the steps with their lifetimes gives, for each step, the live bytes per row of each row set::

    bytes(step) = sum over row sets r of  live_bytes(step, r) * rows(r)

with rows(r) the destinations D, the distinct source rows S of a space and the edges E of an edge set. The peak of a
block is the maximum over steps. Nothing has to be tried out: how many destinations fit a budget is a binary search.
What the operators allocate inside themselves is not seen; :class:`Correction` learns it from measured peaks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from gnn_eval.lowering import Rows, StageProgram, Step
from gnn_eval.patterns import reduction_of
from gnn_eval.program import Program

__all__ = ["Correction", "StageMemory", "measure_stage"]

_ALIASES = {"view", "reshape", "expand", "unsqueeze", "squeeze", "transpose", "permute", "t", "select", "slice"}
_ALIASES |= {"getitem", "_unsafe_view", "narrow", "unbind", "split", "chunk"}
_INTERNAL_COPIES = {"lstm": 12, "gru": 10, "softmax": 1, "layer_norm": 1, "scatter_add": 0, "einsum": 1, "matmul": 1}
_INDEX_BYTES = 8
_SCATTER_INDEX_BYTES = 40  # torch sorts (value, position) pairs of an expanded index before it adds


@dataclass
class StageMemory:
    """Bytes per row of each row set, for each step of a stage.

    Args:
        keys: Keys of the row sets.
        bytes_per_row: [steps, row sets], bytes that are live while the step runs, per row of the set.
        bytes_ahead: [row sets], bytes read ahead for the next block, per row of its set.
    """

    keys: list[str]
    bytes_per_row: np.ndarray
    bytes_ahead: np.ndarray

    def peak(self, counts: Mapping[str, float], following: Mapping[str, float] | None = None) -> float:
        """Return the predicted peak in bytes of a block.

        Args:
            counts: Rows of each row set.
            following: Those of the block that is read meanwhile; as many as in this one if left out.
        """
        own = self._as_rows(counts)
        ahead = own if following is None else self._as_rows(following)
        return float((self.bytes_per_row @ own).max(initial=0.0) + self.bytes_ahead @ ahead)

    def _as_rows(self, counts: Mapping[str, float]) -> np.ndarray:
        return np.array([counts.get(key, 0) for key in self.keys], dtype=np.float64)

    def formula(self) -> str:
        """Return the step of largest slopes as text: ``1.2 KiB * range n + 512 B * edge e``."""
        from core_kernels.console import format_bytes

        worst = self.bytes_per_row[self.bytes_per_row.sum(1).argmax()] if len(self.bytes_per_row) else []
        parts = [f"{format_bytes(b)} per {key}" for key, b in zip(self.keys, worst, strict=True) if b]
        return " + ".join(parts) or "0 B"


@dataclass
class Correction:
    """Measured over predicted bytes: near the highest ratio seen, since a budget is a bound.

    A much larger block than any before tells better than those and replaces what they told; else a higher ratio counts
    at once and a lower one little by little.

    Args:
        factor: Current estimate.
        weight: Weight of a new measurement that is lower.
        seen: All ratios.
        largest_bytes: Largest prediction measured so far.
    """

    factor: float = 1.0
    weight: float = 0.05
    seen: list[float] = field(default_factory=list)
    largest_bytes: float = 0.0

    def learn(self, predicted: float, measured: float) -> None:
        """Take one measurement into account; small blocks say nothing and are left out.

        >>> correction = Correction()
        >>> for predicted, measured in ((1e7, 2e7), (4e7, 5e7), (4e7, 6e7), (4e7, 4e7)):
        ...     correction.learn(predicted, measured)
        ...     print(round(correction.factor, 3))
        2.0
        1.25
        1.5
        1.475
        """
        ratio = min(max(measured / max(predicted, 1.0), 0.25), 4.0)
        self.seen.append(ratio)
        if predicted < 2**22 or measured <= 0:
            return
        if predicted > 2 * self.largest_bytes or ratio > self.factor:
            self.factor = ratio
        else:
            self.factor += self.weight * (ratio - self.factor)
        self.largest_bytes = max(self.largest_bytes, predicted)


def measure_stage(
    program: Program, stage: StageProgram, direct: set, on_disk: Collection[str] = (), ahead: bool = False
) -> StageMemory:
    """Return the symbolic memory of a stage.

    Args:
        program: The typed program.
        stage: The stage.
        direct: Spaces read as stored, whose source rows cost nothing.
        on_disk: Names of the values loaded from disk; a range of any other is read as a view.
        ahead: Whether the next block is read meanwhile: then what is loaded from disk is held from the first step to
            the last, to be used again, and with the edges once more for the next block.
    """
    born, last, size, home = _lifetimes(program, stage, direct, on_disk)
    keys = sorted({rows.key for rows in home.values()} | _index_keys(stage))
    column = {key: place for place, key in enumerate(keys)}
    table, indices_bytes, ahead_bytes = np.zeros((max(len(stage.steps), 1), len(keys))), np.zeros(len(keys)), 0.0
    for edge_set, indices in stage.edge_sets.items():
        if edge_set.grouping is not None:
            key = Rows("edge", edge_set.space, edge_set.grouping).key
            indices_bytes[column[key]] += _INDEX_BYTES * (2 + len(indices))
        for space in indices.values():
            key = Rows("source", space).key
            if key in column and space not in direct:
                indices_bytes[column[key]] += _INDEX_BYTES
    if ahead:
        ahead_bytes = indices_bytes.copy()
        for step in stage.loads():
            if step.name in on_disk:
                born[step.slot], last[step.slot] = 0, len(stage.steps) - 1
                ahead_bytes[column[step.rows.key]] += size[step.slot]
    for slot, num_bytes in size.items():
        table[born[slot] : last[slot] + 1, column[home[slot].key]] += num_bytes
    for place, step in enumerate(stage.steps):
        _add_internal(program, step, table[place], column)
    return StageMemory(keys, table + indices_bytes, np.zeros(len(keys)) + ahead_bytes)


def _index_keys(stage: StageProgram) -> set[str]:
    keys = {Rows("range", stage.space).key}
    for edge_set, indices in stage.edge_sets.items():
        if edge_set.grouping is not None:
            keys.add(Rows("edge", edge_set.space, edge_set.grouping).key)
        keys |= {Rows("source", space).key for space in indices.values()}
    return keys


def _lifetimes(
    program: Program, stage: StageProgram, direct: set, on_disk: Collection[str]
) -> tuple[dict[str, int], dict[str, int], dict[str, int], dict[str, Rows]]:
    """Return birth, last use, bytes per row and row set of each slot that has memory of its own."""
    root: dict[str, str] = {}
    born: dict[str, int] = {}
    last: dict[str, int] = {}
    size: dict[str, int] = {}
    home: dict[str, Rows] = {}
    for place, step in enumerate(stage.steps):
        value = program[step.name]
        owners = [root[slot] for slot in step.inputs.values() if slot in root]
        for owner in owners:
            last[owner] = place
        is_alias = value.short_op in _ALIASES and step.action == "apply" and owners
        root[step.slot] = owners[0] if is_alias else step.slot
        if is_alias:
            continue
        born[step.slot] = last[step.slot] = place
        home[step.slot] = step.rows
        size[step.slot] = _bytes_of(program, step, direct, on_disk)
    for slot in stage.results.values():
        if slot in root:
            last[root[slot]] = len(stage.steps) - 1
    return born, last, size, home


def _bytes_of(program: Program, step: Step, direct: set, on_disk: Collection[str]) -> int:
    value = program[step.name]
    if step.action == "load":
        is_view = step.rows.kind == "range" or (step.rows.kind == "source" and step.rows.space in direct)
        return 0 if is_view and step.name not in on_disk else value.row_bytes()
    if step.action == "reduce" and program[reduction_of(program, value).base].type.uniform:
        return 0  # added to in place
    return value.row_bytes() if value.is_tensor else 0


def _add_internal(program: Program, step: Step, row: np.ndarray, column: dict[str, int]) -> None:
    value = program[step.name]
    if step.action == "reduce":
        edges = step.edge_set
        row[column[Rows("edge", edges.space, edges.grouping).key]] += _SCATTER_INDEX_BYTES
        return
    copies = _INTERNAL_COPIES.get(value.short_op, 0)
    if step.action == "apply" and copies:
        widest = max(
            (program[n].row_bytes() for n in step.inputs if program[n].is_tensor and program[n].type.space), default=0
        )
        row[column[step.rows.key]] += copies * widest
