"""The stateless generator: one definition, three implementations, the same bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numba import njit

from core_kernels import random
from core_kernels.errors import ArgumentError
from core_kernels.kernels.numba.random import bounded, hash_u64, uniform

MASK = (1 << 64) - 1


def bits_by_definition(*keys: int) -> int:
    """The formula of the module docstring in Python integers."""
    state = 0
    for key in keys:
        z = ((state ^ (key & MASK)) + 0x9E3779B97F4A7C15) & MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        state = z ^ (z >> 31)
    return state


@njit
def fill_by_kernel(seed, step, layer, rows, draws, bits, floats, integers, bound):
    for i in range(rows.shape[0]):
        bits[i] = hash_u64(seed, step, layer, rows[i], draws[i])
        floats[i] = uniform(bits[i])
        integers[i] = bounded(bits[i], bound)


@pytest.mark.parametrize("keys", [(0, 0, 0), (1, 2, 3), (-1, 7, 0), ((1 << 63) + 5, 0, 2), (2**31, 2**40, 1)])
def test_torch_and_definition_agree(keys):
    rows = torch.tensor([0, 1, 17, 2**31, 2**62, -3])
    draws = torch.tensor([[0], [1], [255]])
    bits = random.random_bits(*keys, rows, draws)
    for i, draw in enumerate(draws.flatten().tolist()):
        for j, row in enumerate(rows.tolist()):
            assert int(bits[i, j]) & MASK == bits_by_definition(*keys, row, draw)


def test_numba_and_torch_agree_bit_for_bit():
    generator = np.random.default_rng(0)
    rows = generator.integers(-(2**62), 2**62, 5000)
    draws = generator.integers(0, 100, 5000)
    bits, floats, integers = np.empty(5000, np.uint64), np.empty(5000), np.empty(5000, np.int64)
    fill_by_kernel(-5, 3, 2, rows, draws, bits, floats, integers, 1000)
    expected = random.random_bits(-5, 3, 2, torch.from_numpy(rows), torch.from_numpy(draws))
    assert np.array_equal(bits.view(np.int64), expected.numpy())
    assert np.array_equal(floats, random.uniform(expected).numpy())
    assert np.array_equal(integers, random.bounded(expected, 1000).numpy())


def test_every_key_changes_every_draw():
    rows = torch.arange(1000)
    base = random.random_bits(1, 1, 1, rows, 1)
    for keys in ((2, 1, 1), (1, 2, 1), (1, 1, 2)):
        assert not (random.random_bits(*keys, rows, 1) == base).any()
    assert not (random.random_bits(1, 1, 1, rows, 2) == base).any()
    assert base.unique().numel() == 1000


def test_draws_are_uniform_and_uncorrelated():
    bits = random.random_bits(11, 0, 0, torch.arange(4000)[:, None], torch.arange(16))
    counts = torch.bincount(random.bounded(bits, 64).flatten(), minlength=64).double()
    expected = bits.numel() / 64
    chi_square_per_freedom = float(((counts - expected) ** 2 / expected).sum() / 63)
    assert 0.5 < chi_square_per_freedom < 1.6
    correlation = torch.corrcoef(random.uniform(bits).T)
    assert float((correlation - torch.eye(16, dtype=torch.float64)).abs().max()) < 0.08


def test_bounds_reach_both_ends_of_the_largest_range():
    all_ones, none = torch.tensor(-1), torch.tensor(0)
    assert int(random.bounded(all_ones, 1 << 31)) == (1 << 31) - 1
    assert int(random.bounded(none, 1 << 31)) == 0
    assert float(random.uniform(all_ones)) < 1
    assert float(random.uniform(all_ones, torch.float32)) < 1


def test_permutations_are_even():
    orders = torch.stack([random.permutation(4, seed) for seed in range(4800)])
    counts = torch.unique(orders, dim=0, return_counts=True)[1]
    assert counts.shape[0] == 24
    assert 140 < int(counts.min()) <= int(counts.max()) < 260


def test_permutation_orders_every_row():
    assert sorted(random.permutation(1000, seed=1).tolist()) == list(range(1000))
    assert random.permutation(1000, seed=1).tolist() != random.permutation(1000, seed=2).tolist()
    assert random.permutation(0, seed=1).numel() == 0
    order = list(range(50))
    for last in range(49, 0, -1):
        chosen = int(random.bounded(random.random_bits(-7, 2, 3, last, 0), last + 1))
        order[last], order[chosen] = order[chosen], order[last]
    assert random.permutation(50, -7, 2, 3).tolist() == order


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: random.random_bits(1 << 64, 0, 0, 0, 0), "seed=18446744073709551616"),
        (lambda: random.random_bits(0, 0, 0, torch.rand(2), 0), "rows=torch.float32"),
        (lambda: random.bounded(torch.tensor(1), 0), "bound=0"),
        (lambda: random.bounded(torch.tensor(1), 1 << 32), "bound=4294967296"),
        (lambda: random.uniform(torch.tensor(1), torch.float16), "dtype=torch.float16"),
        (lambda: random.permutation(-1, 0), "num_rows=-1"),
    ],
)
def test_bad_arguments_are_named(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()
