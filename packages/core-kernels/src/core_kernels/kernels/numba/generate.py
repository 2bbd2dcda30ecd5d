"""Edges of recursive-matrix (R-MAT) graphs, a few nanoseconds each."""

from __future__ import annotations

import numpy as np
from numba import njit, uint64

from core_kernels.kernels.numba.random import absorb, row_key, stream_key

__all__ = ["rmat_edges"]

_MASK_16 = np.uint64(0xFFFF)
_S16 = np.uint64(16)


@njit(cache=True, nogil=True)
def rmat_edges(seed, scale, threshold_a, threshold_b, threshold_c, name_of_node, sources, destinations):
    """Fill the two columns: edge ``i`` descends ``scale`` levels, four levels per 64 random bits of row ``i``.

    Thresholds are cumulated probabilities of the quadrants in units of 2**-16. An id of ``scale`` bits is squeezed to
    the number of nodes and renamed by ``name_of_node``.
    """
    num_nodes = name_of_node.shape[0]
    stream = stream_key(seed, 0, 0)
    for edge in range(sources.shape[0]):
        row = row_key(stream, edge)
        bits = uint64(0)
        u = np.int64(0)
        v = np.int64(0)
        for level in range(scale):
            if level & 3 == 0:
                bits = absorb(row, level >> 2)
            draw = np.int64(bits & _MASK_16)
            bits = bits >> _S16
            lower = draw >= threshold_b
            right = (draw >= threshold_c) if lower else (draw >= threshold_a)
            u = (u << 1) | lower
            v = (v << 1) | right
        sources[edge] = name_of_node[(u * num_nodes) >> scale]
        destinations[edge] = name_of_node[(v * num_nodes) >> scale]
