"""The messages of a plan: in which stage which device sends which rows to which device.

All planners end here, and everything after planning starts here. A message is one (stage, sender, receiver) with its
rows, named by their ids after partitioning; both ends derive their lists from the same array, so they cannot disagree.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from core_kernels.topology import Topology
from gnn_comm.planners.chunks import Chunks, ragged_arange

__all__ = ["Transfers", "transfers_of_chunks"]


@dataclass(frozen=True)
class Transfers:
    """Messages ordered by stage, then sender, then receiver.

    Args:
        num_devices: Number P of devices.
        stage: int64 ``[num_messages]``.
        sender: int64 ``[num_messages]``.
        receiver: int64 ``[num_messages]``.
        row_indptr: int64 ``[num_messages + 1]``.
        rows: int64; the rows of message ``m`` stand at ``row_indptr[m] : row_indptr[m + 1]``, in message order.
    """

    num_devices: int
    stage: np.ndarray
    sender: np.ndarray
    receiver: np.ndarray
    row_indptr: np.ndarray
    rows: np.ndarray

    def __len__(self) -> int:
        return len(self.stage)

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return int(self.stage.max()) + 1 if len(self.stage) else 0

    @cached_property
    def num_rows(self) -> np.ndarray:
        """int64 ``[num_messages]``: rows of each message."""
        return np.diff(self.row_indptr)

    def rows_of(self, message: int | np.integer) -> np.ndarray:
        """Return the rows of one message, in message order."""
        return self.rows[self.row_indptr[message] : self.row_indptr[message + 1]]

    def row_loads(self, topology: Topology) -> np.ndarray:
        """Return int64 ``[num_stages, num_resources]``: rows that occupy each resource in each stage."""
        routes = topology.routes
        loads = np.zeros((self.num_stages, len(topology.resource_bytes_per_second)), np.int64)
        pair = self.sender * self.num_devices + self.receiver
        lengths = routes.indptr[pair + 1] - routes.indptr[pair]
        items = routes.items[np.repeat(routes.indptr[pair], lengths) + ragged_arange(lengths)]
        np.add.at(loads, (np.repeat(self.stage, lengths), items), np.repeat(self.num_rows, lengths))
        return loads


def transfers_of_chunks(
    chunks: Chunks, chunk: np.ndarray, stage: np.ndarray, sender: np.ndarray, receiver: np.ndarray
) -> Transfers:
    """Fuse the tree edges of all chunks into one message per (stage, sender, receiver).

    Args:
        chunks: The chunks.
        chunk: int ``[num_edges]``; chunk of each tree edge.
        stage: int ``[num_edges]``; empty stages are closed up.
        sender: int ``[num_edges]``.
        receiver: int ``[num_edges]``.
    """
    num_devices = chunks.num_devices
    stage = np.unique(np.asarray(stage, np.int64), return_inverse=True)[1]
    pair = np.asarray(sender, np.int64) * num_devices + np.asarray(receiver, np.int64)
    key = stage.astype(np.int64) * num_devices**2 + pair
    order = np.lexsort((chunks.row_start[chunk], key)) if len(key) else np.zeros(0, np.int64)
    key, chunk = key[order], np.asarray(chunk, np.int64)[order]
    messages, first = np.unique(key, return_index=True)
    sizes = chunks.num_rows[chunk]
    rows = chunks.rows[np.repeat(chunks.row_start[chunk], sizes) + ragged_arange(sizes)]
    ends = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return Transfers(
        num_devices,
        messages // num_devices**2,
        messages % num_devices**2 // num_devices,
        messages % num_devices,
        np.append(ends[first], ends[-1]),
        rows,
    )
