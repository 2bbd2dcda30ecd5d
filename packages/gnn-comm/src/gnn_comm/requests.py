"""Which rows must travel where, grouped into classes of interchangeable rows.

A row is needed by every part that owns a destination of one of its out-edges. Rows with the same owner and the same
set of needing parts are interchangeable for any planner, so they form one class: at most ``P * 2^(P-1)`` classes,
however large the graph. One pass over the in-edges marks the parts that need each row in a bit mask; sorting the
masks gives the classes. The cost of planning depends on classes, not on vertices.

Rows are named by their ids after partitioning (``PartitionBook`` order), where part ``p`` owns one contiguous range.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numba import njit

__all__ = ["RequestClasses", "collect_requests"]


@dataclass(frozen=True)
class RequestClasses:
    """Classes of rows with equal owner and equal set of needing devices.

    Args:
        num_devices: Number P of devices.
        source: int64 ``[num_classes]``; owner of the rows.
        need_indptr: int64 ``[num_classes + 1]``.
        need: int64; the needing devices of class ``c`` stand at ``need_indptr[c] : need_indptr[c + 1]``, ascending.
        row_indptr: int64 ``[num_classes + 1]``.
        rows: int64; the rows of each class, ascending.
    """

    num_devices: int
    source: np.ndarray
    need_indptr: np.ndarray
    need: np.ndarray
    row_indptr: np.ndarray
    rows: np.ndarray

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.source)

    @cached_property
    def num_rows(self) -> np.ndarray:
        """int64 ``[num_classes]``: rows of each class."""
        return np.diff(self.row_indptr)

    @cached_property
    def needs(self) -> np.ndarray:
        """bool ``[num_classes, num_devices]``: which devices need the class."""
        table = np.zeros((self.num_classes, self.num_devices), bool)
        table[np.repeat(np.arange(self.num_classes), np.diff(self.need_indptr)), self.need] = True
        return table

    def num_remote_rows(self) -> np.ndarray:
        """int64 ``[P, P]``: rows of part ``i`` that part ``j`` needs."""
        table = np.zeros((self.num_devices, self.num_devices), np.int64)
        num_needs = np.diff(self.need_indptr)
        np.add.at(table, (np.repeat(self.source, num_needs), self.need), np.repeat(self.num_rows, num_needs))
        return table


def collect_requests(indptr: np.ndarray, indices: np.ndarray, offsets: np.ndarray) -> RequestClasses:
    """Group the rows that must travel.

    Args:
        indptr: int64 ``[num_nodes + 1]``; in-edges by destination, ids after partitioning.
        indices: int ``[num_edges]``; sources.
        offsets: int64 ``[P + 1]``; part ``p`` owns ids ``offsets[p] : offsets[p + 1]``.

    Returns:
        The classes, ordered by owner.

    Cost: one pass over the edges and one sort of the rows that travel.

    >>> import numpy as np
    >>> path = collect_requests(np.array([0, 0, 1, 2, 3]), np.array([0, 1, 2]), np.array([0, 2, 4]))
    >>> path.source, path.need, path.rows
    (array([0]), array([1]), array([1]))
    """
    offsets = np.ascontiguousarray(offsets, np.int64)
    num_devices, num_nodes = len(offsets) - 1, int(offsets[-1])
    num_words = (num_devices + 63) // 64
    masks = np.zeros((num_nodes, num_words), np.uint64)
    part_of = np.repeat(np.arange(num_devices, dtype=np.int16), np.diff(offsets))
    _mark_needs(np.asarray(indptr), np.asarray(indices), part_of, offsets, masks)
    rows = np.flatnonzero(masks.any(axis=1))
    keys = masks[rows]
    order = np.lexsort((*keys.T, part_of[rows]))
    rows, keys = rows[order], keys[order]
    owner = part_of[rows].astype(np.int64)
    starts = np.ones(len(rows), bool)
    starts[1:] = (owner[1:] != owner[:-1]) | (keys[1:] != keys[:-1]).any(axis=1)
    first = np.flatnonzero(starts)
    bits = (keys[first][:, :, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)
    table = bits.reshape(len(first), 64 * num_words)[:, :num_devices].astype(bool)
    need_indptr = np.concatenate([[0], np.cumsum(table.sum(axis=1))]).astype(np.int64)
    row_indptr = np.append(first, len(rows)).astype(np.int64)
    return RequestClasses(
        num_devices, owner[first], need_indptr, np.nonzero(table)[1].astype(np.int64), row_indptr, rows
    )


@njit(cache=True, nogil=True)
def _mark_needs(indptr, indices, part_of, offsets, masks):
    for part in range(len(offsets) - 1):
        word, bit = part >> 6, np.uint64(1) << np.uint64(part & 63)
        for position in range(indptr[offsets[part]], indptr[offsets[part + 1]]):
            row = indices[position]
            if part_of[row] != part:
                masks[row, word] |= bit
