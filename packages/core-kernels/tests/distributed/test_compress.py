"""Lossy all-reduces keep their error bounds, send the bytes they promise, and lose nothing over time."""

from __future__ import annotations

import pytest
import torch

from core_kernels.comm import Group
from core_kernels.comm.compress import ClusterAllReduce, SketchAllReduce, fit_clusters, pack_bits, unpack_bits
from core_kernels.errors import ArgumentError, ArgumentTypeError
from core_kernels.testing import RankPool

NUM_RANKS, SIZE = 3, 4000


@pytest.fixture(scope="module")
def pool():
    with RankPool(NUM_RANKS) as pool:
        yield pool


def sparse_gradient(rank, step, num_nonzeros=120):
    generator = torch.Generator().manual_seed(17 * step + rank)
    gradient = torch.zeros(SIZE)
    gradient[torch.randperm(SIZE, generator=generator)[:num_nonzeros]] = torch.randn(num_nonzeros, generator=generator)
    return gradient


def run_steps(group, kind, argument, num_steps, error_feedback=True):
    group.counters.reset()
    if kind == "sketch":
        reducer = SketchAllReduce(group, argument, num_rows=3, error_feedback=error_feedback)
    else:
        reducer = ClusterAllReduce(group, argument, error_feedback=error_feedback)
    results = [reducer.all_reduce(sparse_gradient(group.rank, step), "w", tag="lossy") for step in range(num_steps)]
    carried = reducer.carried["w"] if error_feedback else None
    return results, carried, group.counters.snapshot()


def exact_sum(step):
    return sum(sparse_gradient(rank, step).double() for rank in range(NUM_RANKS))


@pytest.mark.distributed
@pytest.mark.parametrize(("kind", "argument"), [("sketch", 512), ("clusters", 2)])
def test_results_and_carried_errors_add_up_to_the_inputs(pool, kind, argument):
    answers = pool.run(run_steps, kind, argument, 5)
    results = [torch.stack(answer[0]) for answer in answers]
    assert all(torch.equal(result, results[0]) for result in results)
    wanted = sum(exact_sum(step) for step in range(5))
    carried = sum(answer[1].double() for answer in answers)
    assert carried.abs().max() > 1e-3  # something was lost, and is carried
    torch.testing.assert_close(results[0].double().sum(0) + carried, wanted, rtol=0, atol=1e-4)


@pytest.mark.distributed
def test_without_feedback_errors_are_dropped(pool):
    # The twin of the test above: its rule must fail when nothing is carried.
    results = pool.run(run_steps, "clusters", 2, 5, False)[0][0]
    wanted = sum(exact_sum(step) for step in range(5))
    assert (torch.stack(results).double().sum(0) - wanted).abs().max() > 1e-2


@pytest.mark.distributed
def test_a_wide_sketch_is_exact_and_sends_what_it_promises(pool):
    results, carried, counters = pool.run(run_steps, "sketch", 1 << 16, 1)[0]
    torch.testing.assert_close(results[0].double(), exact_sum(0), rtol=1e-5, atol=1e-6)
    assert carried.abs().max() < 1e-5
    table = 3 * (1 << 16) * 4
    assert counters["lossy"]["sent_bytes"] == pytest.approx(2 * (NUM_RANKS - 1) / NUM_RANKS * table, rel=1e-3)
    assert counters["lossy.bitmap"]["sent_bytes"] == pytest.approx(2 * (NUM_RANKS - 1) / NUM_RANKS * SIZE / 8, rel=0.01)
    clusters = pool.run(run_steps, "clusters", 4, 1)[0][2]
    assert clusters["lossy"]["sent_bytes"] == (NUM_RANKS - 1) * (SIZE // 2 + 4 * 16)


@pytest.mark.parametrize("num_columns", [64, 256])
def test_one_row_has_the_variance_of_a_count_sketch(num_columns):
    gradient = sparse_gradient(0, 0, num_nonzeros=400)
    errors = []
    for seed in range(40):
        reducer = SketchAllReduce(Group.single(), num_columns, num_rows=1, seed=1000 * seed, error_feedback=False)
        errors.append((reducer.all_reduce(gradient) - gradient)[gradient != 0])
    mean_square = torch.cat(errors).square().mean().item()
    bound = gradient.square().sum().item() / num_columns
    assert mean_square < 1.1 * bound
    assert mean_square > 0.7 * bound  # the bound is tight here: a test that any error would pass says nothing
    assert abs(torch.cat(errors).mean().item()) < 4 * (bound / 400) ** 0.5


def test_more_rows_estimate_better():
    gradient = sparse_gradient(0, 0, num_nonzeros=400)

    def mean_error(num_rows):
        reducer = SketchAllReduce(Group.single(), 512, num_rows=num_rows, error_feedback=False)
        return sum((reducer.all_reduce(gradient) - gradient).abs().mean().item() for _ in range(10))

    assert mean_error(5) < 0.8 * mean_error(1)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_clusters_are_never_worse_than_a_uniform_grid(bits):
    values = torch.distributions.StudentT(3.0).sample((20_000,))
    centres, codes = fit_clusters(values, 2**bits)
    grid = torch.linspace(0, 1, 2**bits) * (values.max() - values.min()) + values.min()
    rounded = grid[torch.bucketize(values, (grid[1:] + grid[:-1]) / 2)]
    error = (values - centres[codes]).square().mean()
    assert error <= (values - rounded).square().mean() * (1 + 1e-5)
    assert error <= ((values.max() - values.min()) / (2**bits - 1)) ** 2 / 4
    assert torch.equal(codes, (values[:, None] - centres).abs().argmin(1)) or bits == 8


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("length", [0, 1, 7, 8, 65])
def test_bits_are_packed_without_loss(bits, length):
    codes = torch.randint(0, 2**bits, (length,), dtype=torch.uint8)
    packed = pack_bits(codes, bits)
    assert len(packed) == (length * bits + 7) // 8
    assert torch.equal(unpack_bits(packed, bits, length), codes)


@pytest.mark.parametrize("reducer", [SketchAllReduce(Group.single(), 64), ClusterAllReduce(Group.single())])
def test_edge_cases_and_bad_arguments(reducer):
    for x in (torch.zeros(5), torch.empty(0), torch.zeros(2, 3, dtype=torch.float64), torch.tensor(2.0)):
        result = reducer.all_reduce(x, name=str(x.shape))
        assert torch.allclose(result, x)
        assert (result.shape, result.dtype) == (x.shape, x.dtype)
    with pytest.raises(ArgumentError, match="its own name"):
        reducer.all_reduce(torch.zeros(9), name=str(torch.zeros(5).shape))
    with pytest.raises(ArgumentTypeError, match="int64"):
        reducer.all_reduce(torch.zeros(5, dtype=torch.int64))
    with pytest.raises(ArgumentError, match="num_rows=2"):
        SketchAllReduce(Group.single(), 4, num_rows=2)
    with pytest.raises(ArgumentError, match="bits=3"):
        ClusterAllReduce(Group.single(), bits=3)
