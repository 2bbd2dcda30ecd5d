"""The stateless generator of :mod:`core_kernels.random` as functions that Numba inlines into kernels.

Every function takes and returns ``uint64``. A kernel derives ``stream_key(seed, step, layer)`` once, ``row_key`` once
per row, and pays one mixing (two multiplications) per draw.
"""

from __future__ import annotations

import numpy as np
from numba import njit, uint64

from core_kernels.kernels.numba._copy_loop import prefetch_row

__all__ = ["absorb", "bounded", "hash_u64", "mix64", "row_key", "shuffle", "stream_key", "uniform"]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31, _S32, _S11 = np.uint64(27), np.uint64(30), np.uint64(31), np.uint64(32), np.uint64(11)
#: Exchanges of a shuffle whose places are drawn ahead.
_SHUFFLE_BLOCK = 64
_TWO_TO_MINUS_53 = 1.0 / 9007199254740992.0


@njit(cache=True, nogil=True, inline="always")
def mix64(z):
    """Return the finaliser of splitmix64 applied to ``z``, a bijection of 64 bits."""
    z = uint64(z)
    z = (z ^ (z >> _S30)) * _MULTIPLIER_1
    z = (z ^ (z >> _S27)) * _MULTIPLIER_2
    return z ^ (z >> _S31)


@njit(cache=True, nogil=True, inline="always")
def absorb(state, key):
    """Return ``mix64((state XOR key) + golden)``: the state after one more key."""
    return mix64((uint64(state) ^ uint64(key)) + _GOLDEN)


@njit(cache=True, nogil=True, inline="always")
def stream_key(seed, step, layer):
    """Return the state after the keys that are constant in one kernel call."""
    return absorb(absorb(absorb(uint64(0), seed), step), layer)


@njit(cache=True, nogil=True, inline="always")
def row_key(stream, row):
    """Return the state after ``row``; ``absorb(row_key(...), draw)`` gives the bits of a draw."""
    return absorb(stream, row)


@njit(cache=True, nogil=True, inline="always")
def hash_u64(seed, step, layer, row, draw):
    """Return the 64 random bits of (seed, step, layer, row, draw)."""
    return absorb(row_key(stream_key(seed, step, layer), row), draw)


@njit(cache=True, nogil=True, inline="always")
def bounded(bits, bound):
    """Map 64 bits to an int64 in [0, bound), 1 <= bound <= 2**31: the upper 32 bits times bound, over 2**32."""
    return np.int64(((uint64(bits) >> _S32) * uint64(bound)) >> _S32)


@njit(cache=True, nogil=True, inline="always")
def uniform(bits):
    """Map 64 bits to a float64 in [0, 1): the upper 53 bits times 2**-53."""
    return np.float64(uint64(bits) >> _S11) * _TWO_TO_MINUS_53


@njit(cache=True, nogil=True)
def shuffle(seed, step, layer, values):
    """Shuffle ``values`` in place: from the last place down, exchange with a random place not behind it."""
    stream = stream_key(seed, step, layer)
    chosen = np.empty(_SHUFFLE_BLOCK, np.int64)
    for high in range(values.shape[0] - 1, 0, -_SHUFFLE_BLOCK):
        low = max(high - _SHUFFLE_BLOCK, 0)
        # The places of a block are asked for before the first exchange: they are read at random.
        for last in range(high, low, -1):
            place = np.int64(bounded(absorb(row_key(stream, last), 0), last + 1))
            prefetch_row(values.ctypes.data + place * values.itemsize, 1, True)
            chosen[high - last] = place
        for last in range(high, low, -1):
            place = chosen[high - last]
            values[last], values[place] = values[place], values[last]
