"""Random numbers without state: the same bits on every device, thread count, number of ranks and strategy.

A draw is a pure function of five integer keys (seed, step, layer, row, draw). Nothing is consumed, so no order of
execution can change a result: a neighbour sampled for node 7 in step 3 is the same whoever samples it.

The function, on unsigned 64-bit integers with wrap-around (``^`` is exclusive or, ``>>`` shifts in zeros)::

    mix(z):            z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
                       z = (z ^ (z >> 27)) * 0x94D049BB133111EB
                       return z ^ (z >> 31)
    absorb(state, k):  return mix((state ^ k) + 0x9E3779B97F4A7C15)
    bits(seed, step, layer, row, draw):
                       state = 0
                       for k in (seed, step, layer, row, draw): state = absorb(state, k)
                       return state

Negative keys enter as their two's complement. Derived values::

    bounded(bits, n) = ((bits >> 32) * n) >> 32        in [0, n), 1 <= n <= 2**31; bias below n / 2**32
    uniform(bits)    = (bits >> 11) * 2**-53           float64 in [0, 1)

Each ``absorb`` is a bijection in its key, so two draws of one row never share their 64 bits. The generator is meant for
sampling and tests, not for cryptography.

Source: G. L. Steele, D. Lea, C. H. Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014 (the finaliser,
with D. Stafford's constants). We differ in keying by position instead of by a split tree.

``hash_u64`` and its parts for Numba kernels live in :mod:`core_kernels.kernels.numba.random`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from core_kernels.errors import argument_error

__all__ = ["bounded", "permutation", "random_bits", "uniform"]

# Constants above 2**63 are written as the int64 with the same bits.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MULTIPLIER_2 = 0x94D049BB133111EB - (1 << 64)
_MAX_BOUND = 1 << 31


def random_bits(
    seed: int, step: int, layer: int, rows: Tensor | int, draws: Tensor | int, device: torch.device | None = None
) -> Tensor:
    """Return the 64 random bits of every (row, draw), the two broadcast against each other.

    Args:
        seed: Any integer of at most 64 bits.
        step: Training step or epoch.
        layer: Layer, hop or purpose.
        rows: Node or row ids, int64 tensor of any shape, or one integer.
        draws: Numbers of the draws, int64 tensor of any shape, or one integer.
        device: Where to compute when neither ``rows`` nor ``draws`` is a tensor.

    Returns:
        int64 tensor of the broadcast shape; read it as 64 bits, half of the values are negative.

    Raises:
        ArgumentError: A key does not fit 64 bits.

    Determinism: bitwise equal on every device and to ``core_kernels.kernels.numba.random.hash_u64``.

    >>> random_bits(seed=1, step=0, layer=0, rows=torch.arange(2), draws=0).shape
    torch.Size([2])
    """
    state = 0
    for name, key in (("seed", seed), ("step", step), ("layer", layer)):
        state = _absorb_int(state, _as_int64(name, key))
    on = next((key.device for key in (rows, draws) if isinstance(key, Tensor)), device)
    state = torch.tensor(state, dtype=torch.int64, device=on)
    for name, key in (("rows", rows), ("draws", draws)):
        if isinstance(key, Tensor):
            if key.dtype.is_floating_point or key.dtype.is_complex or key.dtype == torch.bool:
                raise argument_error(name, key.dtype, "an integer tensor", f"convert with {name}.long()")
            key = key.to(torch.int64)
        else:
            key = _as_int64(name, key)
        state = _mix((state ^ key) + _GOLDEN)
    return state


def bounded(bits: Tensor, bound: Tensor | int) -> Tensor:
    """Map random bits to integers in [0, bound).

    Args:
        bits: Result of :func:`random_bits`.
        bound: At least 1 and at most 2**31; a tensor is broadcast and trusted.

    Returns:
        int64 tensor.

    Raises:
        ArgumentError: An integer ``bound`` is out of range.

    >>> bounded(random_bits(0, 0, 0, torch.arange(1000), 0), 3).unique().tolist()
    [0, 1, 2]
    """
    if isinstance(bound, int) and not 1 <= bound <= _MAX_BOUND:
        raise argument_error("bound", bound, f"an integer in [1, {_MAX_BOUND}]", "split the range into smaller ones")
    return (_shift(bits, 32) * bound) >> 32


def uniform(bits: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Map random bits to floating-point numbers in [0, 1).

    Args:
        bits: Result of :func:`random_bits`.
        dtype: ``torch.float64`` takes the upper 53 bits, ``torch.float32`` the upper 24.

    Returns:
        Tensor of ``dtype``.

    Raises:
        ArgumentError: Another ``dtype``.

    >>> float(uniform(random_bits(0, 0, 0, torch.arange(100_000), 0)).mean().round(decimals=2))
    0.5
    """
    if dtype == torch.float64:
        return _shift(bits, 11).to(dtype) * 2.0**-53
    if dtype == torch.float32:
        return _shift(bits, 40).to(dtype) * 2.0**-24
    raise argument_error("dtype", dtype, "torch.float32 or torch.float64", "convert the result afterwards")


def permutation(num_rows: int, seed: int, step: int = 0, layer: int = 0, device: torch.device | None = None) -> Tensor:
    """Return a random order of ``range(num_rows)``, by the shuffle of Fisher and Yates.

    Counting ``i`` down from ``num_rows - 1`` to 1, places ``i`` and ``bounded(bits of row i and draw 0, i + 1)`` change
    their contents.

    Args:
        num_rows: Length of the permutation, at most 2**31.
        seed: Seed.
        step: Step, for example the epoch.
        layer: Purpose, to keep streams apart.
        device: Where the result shall lie; the CPU computes it.

    Returns:
        int64 tensor [num_rows].

    Raises:
        ArgumentError: ``num_rows`` is out of range.

    >>> sorted(permutation(5, seed=3).tolist())
    [0, 1, 2, 3, 4]
    """
    if not 0 <= num_rows <= _MAX_BOUND:
        raise argument_error("num_rows", num_rows, f"0 to {_MAX_BOUND}", "pass the number of rows to order")
    from core_kernels.kernels.numba.random import shuffle

    order = torch.arange(num_rows)
    shuffle(_as_int64("seed", seed), _as_int64("step", step), _as_int64("layer", layer), order.numpy())
    return order.to(device)


def _shift(bits: Tensor, by: int) -> Tensor:
    """Shift right by ``by`` bits, zeros coming in from the left (torch shifts in the sign)."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shift(z, 30)) * _MULTIPLIER_1
    z = (z ^ _shift(z, 27)) * _MULTIPLIER_2
    return z ^ _shift(z, 31)


def _absorb_int(state: int, key: int) -> int:
    """Absorb one key in Python integers: cheaper than three scalar tensors per call. Returns an int64."""
    mask = (1 << 64) - 1
    z = ((state ^ key) + _GOLDEN) & mask
    z = ((z ^ (z >> 30)) * _MULTIPLIER_1) & mask
    z = ((z ^ (z >> 27)) * _MULTIPLIER_2) & mask
    z ^= z >> 31
    return z - (1 << 64) if z >> 63 else z


def _as_int64(name: str, key: int) -> int:
    """Return ``key`` as the int64 with the same 64 bits."""
    if not -(1 << 63) <= key < 1 << 64:
        raise argument_error(name, key, "an integer of at most 64 bits", f"reduce {name} modulo 2**64")
    return key - (1 << 64) if key >= 1 << 63 else int(key)
