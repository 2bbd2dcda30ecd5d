"""Copies instead of messages: every device holds the neighbourhood its own vertices read over all layers.

With k layers a device needs the features of every vertex within k in-edges of its own vertices. It then computes the
layers for all of them, the outer ones with incomplete neighbourhoods whose results nobody reads, and never
communicates.
"""

from __future__ import annotations

import numpy as np

from gnn_comm.errors import GnnCommArgumentError
from gnn_comm.partitioning import Partition

__all__ = ["replicated_rows"]


def replicated_rows(partition: Partition, num_layers: int) -> tuple[np.ndarray, ...]:
    """Return, per device, the rows of others within ``num_layers`` in-edges, ascending.

    Raises:
        GnnCommArgumentError: ``num_layers`` is below 1.
    """
    if num_layers < 1:
        raise GnnCommArgumentError(f"num_layers={num_layers}: expected at least 1; pass the layers of the model")
    indptr, indices = partition.graph.indptr.cpu().numpy(), partition.graph.indices.cpu().numpy()
    found = []
    for part in range(partition.num_parts):
        begin, end = int(partition.offsets[part]), int(partition.offsets[part + 1])
        reached = np.zeros(len(indptr) - 1, bool)
        reached[begin:end] = True
        frontier = np.arange(begin, end)
        for _ in range(num_layers):
            lengths = indptr[frontier + 1] - indptr[frontier]
            positions = np.repeat(indptr[frontier] - (np.cumsum(lengths) - lengths), lengths) + np.arange(lengths.sum())
            neighbours = np.unique(indices[positions])
            frontier = neighbours[~reached[neighbours]]
            reached[frontier] = True
        reached[begin:end] = False
        found.append(np.flatnonzero(reached))
    return tuple(found)
