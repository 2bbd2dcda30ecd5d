"""Evaluating some nodes: the exact set of rows each stage must compute.

Working backwards from the rows asked for, a stage needs of every value it loads the rows at hand and the source rows of
their edges. Nothing is estimated: the edges a run visits are exactly those of the closure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from gnn_eval.edge_structure import EdgeStructure
from gnn_eval.errors import EvaluationArgumentError
from gnn_eval.lowering import EdgeSet, StageProgram
from gnn_eval.program import Program
from gnn_eval.sizes import Size

__all__ = ["as_node_ids", "rows_to_compute"]


def as_node_ids(nodes: Any, num_nodes: int, node_type: str) -> Tensor:
    """Return int64 ids from an index tensor, a boolean mask or a sequence; checks that they exist."""
    try:
        ids = torch.as_tensor(nodes)
    except (TypeError, ValueError, RuntimeError):
        raise EvaluationArgumentError(
            f"nodes is {nodes!r:.80}; expected ids, a mask, or a dict of these by node type; pass a list or a tensor"
        ) from None
    if ids.dtype == torch.bool:
        if ids.numel() != num_nodes:
            raise EvaluationArgumentError(
                f"nodes is a mask of {ids.numel()} entries; expected {num_nodes}, one per node of type {node_type!r}; "
                "pass ids instead"
            )
        return ids.nonzero().flatten()
    if ids.numel() and (ids.is_floating_point() or ids.is_complex()):
        raise EvaluationArgumentError(
            f"nodes has dtype {ids.dtype}; expected integers or a mask; call .long() on the ids"
        )
    ids = ids.flatten().to(torch.int64)
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= num_nodes):
        bad = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
        raise EvaluationArgumentError(
            f"nodes holds {bad}, outside [0, {num_nodes}); pass ids of nodes of type {node_type!r} below {num_nodes}"
        )
    return ids


def rows_to_compute(
    program: Program,
    stages: list[StageProgram],
    structures: Mapping[EdgeSet, EdgeStructure],
    counts: Mapping[Size, int],
    asked: Mapping[str, Tensor | None],
) -> list[Tensor | None]:
    """Return for each stage the rows it must compute, in increasing order; ``None`` means all.

    Args:
        program: The typed program.
        stages: Its stages.
        structures: Their edge sets on the actual graph.
        counts: Number of rows of each space.
        asked: Rows asked for of each output; ``None`` means all.
    """
    needed: dict[str, np.ndarray | None] = {}
    for name, ids in asked.items():
        mask = _mask(counts[program[name].type.rows], ids)
        needed[name] = _either(needed[name], mask) if name in needed else mask
    rows: list[Tensor | None] = [None] * len(stages)
    for place in range(len(stages) - 1, -1, -1):
        stage = stages[place]
        mask: np.ndarray | None = np.zeros(counts[stage.space], bool)
        for name in stage.results:
            if name in needed:
                mask = _either(mask, needed[name])
        ids = None if mask is None or mask.all() else torch.from_numpy(np.flatnonzero(mask))
        rows[place] = ids
        sources = _source_masks(stage, structures, counts, ids)
        for step in stage.loads():
            reached = mask if step.rows.kind == "range" else sources.get(step.rows.space)
            if step.rows.kind == "edge":
                reached = None
            needed[step.name] = _either(needed[step.name], reached) if step.name in needed else reached
    return rows


def _mask(num_rows: int, ids: Tensor | None) -> np.ndarray | None:
    if ids is None:
        return None
    mask = np.zeros(num_rows, bool)
    mask[ids.numpy()] = True
    return mask


def _either(left: np.ndarray | None, right: np.ndarray | None) -> np.ndarray | None:
    return None if left is None or right is None else left | right


def _source_masks(
    stage: StageProgram,
    structures: Mapping[EdgeSet, EdgeStructure],
    counts: Mapping[Size, int],
    ids: Tensor | None,
) -> dict[Size, np.ndarray | None]:
    masks: dict[Size, np.ndarray | None] = {}
    for edge_set, indices in stage.edge_sets.items():
        for name, space in indices.items():
            if ids is None:
                masks[space] = None
                continue
            mask = masks.setdefault(space, np.zeros(counts[space], bool))
            if mask is not None:
                structure = structures[edge_set]
                _mark(structure.indptr.numpy(), ids.numpy(), structure.sorted_index(name).numpy(), mask)
    return masks


@njit(cache=True, nogil=True)
def _mark(pointers, rows, sources, mask):
    for row in rows:
        for position in range(pointers[row], pointers[row + 1]):
            mask[sources[position]] = True
