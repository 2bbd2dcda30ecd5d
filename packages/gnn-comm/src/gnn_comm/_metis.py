"""METIS with target sizes and the volume objective, for one level of a hierarchical partition."""

from __future__ import annotations

import numpy as np

__all__ = ["split_by_metis"]

_MIN_NODES_PER_PART = 4


def split_by_metis(indptr: np.ndarray, indices: np.ndarray, shares: list[int], seed: int) -> np.ndarray:
    """Split a symmetric graph into parts of given relative sizes with few copies of rows.

    Args:
        indptr: int64 ``[num_nodes + 1]`` of a symmetric graph without self-loops.
        indices: Neighbours.
        shares: Relative size of each part, for example the devices of each host.
        seed: Of METIS.

    Returns:
        int64 ``[num_nodes]``: part of each node. Graphs too small for METIS are dealt out by share.
    """
    num_nodes, total = len(indptr) - 1, sum(shares)
    if len(shares) == 1:
        return np.zeros(num_nodes, np.int64)
    if num_nodes < _MIN_NODES_PER_PART * total or len(indices) == 0:
        ends = np.cumsum(shares) * num_nodes // total
        return np.searchsorted(ends, np.arange(num_nodes), side="right").astype(np.int64)
    import pymetis

    dtype = pymetis.zero_copy_dtype()
    options = pymetis.Options(seed=seed, objtype=1)  # METIS_OBJTYPE_VOL: few copies rather than few cut edges
    _, parts = pymetis.part_graph(
        len(shares),
        adjacency=pymetis.CSRAdjacency(indptr.astype(dtype), indices.astype(dtype)),
        tpwgts=[share / total for share in shares],
        recursive=False,
        options=options,
    )
    return np.asarray(parts, np.int64)
