"""Group positions by key, in order: a stable counting sort."""

from __future__ import annotations

import numpy as np
from numba import njit

__all__ = ["group_positions"]


@njit(cache=True, nogil=True)
def group_positions(keys, num_keys):
    """Return row pointers [num_keys + 1] and the positions of each key, ascending.

    Keys lie in ``[0, num_keys)``.
    """
    pointers = np.zeros(num_keys + 1, np.int64)
    for key in keys:
        pointers[key + 1] += 1
    for key in range(num_keys):
        pointers[key + 1] += pointers[key]
    positions = np.empty(len(keys), np.int64)
    cursor = pointers[:-1].copy()
    for place in range(len(keys)):
        positions[cursor[keys[place]]] = place
        cursor[keys[place]] += 1
    return pointers, positions
