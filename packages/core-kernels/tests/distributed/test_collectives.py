"""Collectives against plain tensor arithmetic, on groups of 1 to 4 ranks, for uneven and empty splits and all
dtypes."""

from __future__ import annotations

import pytest
import torch

from core_kernels.comm import Recv, Send, autograd, broadcast_bytes, ring_all_reduce_bytes
from core_kernels.errors import ArgumentError
from core_kernels.testing import RankPool

pytestmark = pytest.mark.distributed
SIZES = (1, 2, 3, 4)
DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int16,
    torch.uint8,
    torch.bool,
)


@pytest.fixture(scope="module")
def pool():
    with RankPool(4) as pool:
        yield pool


_groups = {}


def group_of(world, size):
    """The group of the first ``size`` ranks, made once per process; ``None`` on the others."""
    if world.rank >= size:
        return None
    if size not in _groups:
        _groups[size] = world.subgroup(range(size))
    return _groups[size]


def values(rank, shape, dtype, seed=0):
    """Small integers, exact in every dtype."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randint(0, 4, shape, generator=generator).to(dtype)


def counts_between(size, seed):
    """Rows that rank i sends to rank j, with zeros, and one rank that sends nothing."""
    counts = torch.randint(0, 5, (size, size), generator=torch.Generator().manual_seed(seed))
    counts[seed % size] = 0
    return counts.tolist()


def check_all_to_all(world, size, dtype, width):
    group = group_of(world, size)
    if group is None:
        return None
    for seed in range(3):
        counts = counts_between(size, seed)
        inputs = [values(rank, (sum(counts[rank]), *width), dtype, seed) for rank in range(size)]
        blocks = [inputs[source].split(counts[source])[group.rank] for source in range(size)]
        receive = [counts[source][group.rank] for source in range(size)]
        x = torch.stack([inputs[group.rank]] * 2, dim=-1)[..., 0]  # not contiguous
        group.counters.reset()
        for known in (None, receive):
            rows, received = group.all_to_all_v(x, counts[group.rank], known, tag="t", async_op=True).wait()
            assert received == receive
            assert rows.dtype == dtype
            assert torch.equal(rows, torch.cat(blocks))
        row = x.element_size() * torch.Size(width).numel()
        kept = counts[group.rank][group.rank]
        assert group.counters.sent("t") == 2 * row * (sum(counts[group.rank]) - kept)
        assert group.counters.received("t") == 2 * row * (sum(receive) - kept)
    return True


@pytest.mark.parametrize("size", SIZES)
def test_all_to_all_v(pool, size):
    for dtype in DTYPES:
        assert pool.run(check_all_to_all, size, dtype, (3,))[0]
    for width in ((), (0,), (2, 65)):
        assert pool.run(check_all_to_all, size, torch.float32, width)[0]


def check_gather_and_scatter(world, size, dtype):
    group = group_of(world, size)
    if group is None:
        return None
    for rows_of in ([2] * size, [3 * rank for rank in range(size)], [0] * size, [0] * (size - 1) + [4]):
        inputs = [values(rank, (rows_of[rank], 3), dtype) for rank in range(size)]
        x = inputs[group.rank].t().contiguous().t()
        for known in (None, rows_of):
            rows, counts = group.all_gather_v(x, counts=known, tag="gather")
            assert counts == rows_of
            assert torch.equal(rows, torch.cat(inputs))
        whole = [values(rank, (sum(rows_of), 3), dtype, seed=1) for rank in range(size)]
        ops = ("max", "min") if dtype == torch.bool else ("sum", "max", "min")
        for op in ops:
            stacked = torch.stack(whole).double()
            combined = {"sum": stacked.sum(0), "max": stacked.amax(0), "min": stacked.amin(0)}[op]
            share = group.reduce_scatter_v(whole[group.rank], rows_of, op=op, tag="scatter", async_op=True).wait()
            assert share.dtype == dtype
            assert torch.equal(share.double(), combined.split(rows_of)[group.rank])
    return True


@pytest.mark.parametrize("size", SIZES)
def test_all_gather_v_and_reduce_scatter_v(pool, size):
    for dtype in DTYPES:
        assert pool.run(check_gather_and_scatter, size, dtype)[0]


def check_all_reduce(world, size, dtype):
    group = group_of(world, size)
    if group is None:
        return None
    for shape in ((), (1,), (5, 7), (0, 3)):
        inputs = [values(rank, shape, dtype) for rank in range(size)]
        stacked = torch.stack(inputs).double()
        wanted = {"sum": stacked.sum(0), "max": stacked.amax(0), "min": stacked.amin(0), "mean": stacked.mean(0)}
        ops = ["max", "min"] + ["sum"] * (dtype != torch.bool) + ["mean"] * dtype.is_floating_point
        for op in ops:
            for ordered in (False, True):
                x = inputs[group.rank].clone()
                result = group.all_reduce(x, op, ordered=ordered, async_op=True).wait()
                assert torch.equal(x, inputs[group.rank])
                assert torch.allclose(result.double(), wanted[op], rtol=0, atol=0 if op != "mean" else 1e-2)
                assert group.all_reduce(x, op, ordered=ordered, out=x) is not None
                assert torch.equal(x, result)
    return True


@pytest.mark.parametrize("size", SIZES)
def test_all_reduce(pool, size):
    for dtype in DTYPES:
        assert pool.run(check_all_reduce, size, dtype)[0]


def ordered_sums(world, tensors):
    summed = world.all_reduce(tensors[world.rank], ordered=True)
    scattered = world.reduce_scatter_v(tensors[world.rank].half(), [250] * 4)
    return summed, scattered


def test_ordered_sums_are_in_rank_order_bit_by_bit(pool):
    # Magnitudes far apart, so that any other order of addition gives other bits.
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1000, generator=generator) * 10.0 ** (3 - rank) for rank in range(4)]
    wanted = ((tensors[0] + tensors[1]) + tensors[2]) + tensors[3]
    backwards = ((tensors[3] + tensors[2]) + tensors[1]) + tensors[0]
    halves = sum(t.half().float() for t in tensors).half()
    results = pool.run(ordered_sums, tensors)
    for rank, (summed, scattered) in enumerate(results):
        assert torch.equal(summed, wanted)
        assert torch.equal(scattered, halves[250 * rank : 250 * (rank + 1)])
    assert not torch.equal(wanted, backwards)


def check_traffic(world, size):
    group = group_of(world, size)
    if group is None:
        return None
    group.counters.reset()
    group.all_reduce(torch.ones(10), tag="reduce")
    group.broadcast(torch.ones(10), root=size - 1, tag="broadcast")
    group.all_gather_v(torch.ones(group.rank, 2), tag="gather")
    group.reduce_scatter_v(torch.ones(sum(range(size)), 2), list(range(size)), tag="scatter")
    group.all_reduce(torch.ones(10), tag="ordered", ordered=True)
    return group.counters.snapshot()


@pytest.mark.parametrize("size", SIZES)
def test_counters_follow_the_formulas_and_what_is_sent_is_received(pool, size):
    snapshots = pool.run(check_traffic, size)[:size]
    for tag in ("reduce", "broadcast", "gather", "scatter", "ordered"):
        entries = [snapshot.get(tag, {"sent_bytes": 0, "received_bytes": 0}) for snapshot in snapshots]
        assert sum(e["sent_bytes"] for e in entries) == sum(e["received_bytes"] for e in entries)
        for rank, entry in enumerate(entries):
            rows = sum(range(size))
            wanted = {
                "reduce": ring_all_reduce_bytes(10, 4, rank, size),
                "broadcast": broadcast_bytes(40, rank, size - 1, size),
                "gather": (8 * rank * (size - 1), 8 * (rows - rank)),
                "scatter": (8 * (rows - rank), 8 * rank * (size - 1)),
            }
            if tag in wanted:
                assert (entry["sent_bytes"], entry["received_bytes"]) == wanted[tag]
    total = sum(s.get("ordered", {"sent_bytes": 0})["sent_bytes"] for s in snapshots)
    assert total == 2 * (size - 1) * 40


def check_point_to_point(world):
    n, rank = world.size, world.rank
    ahead, behind = (rank + 1) % n, (rank - 1) % n
    first, second, empty = (
        torch.empty(rank + 1, dtype=torch.bfloat16),
        torch.empty((), dtype=torch.bool),
        torch.empty(0),
    )
    ops = [
        Recv(first, ahead),
        Send(torch.full((behind + 1,), rank, dtype=torch.bfloat16), behind),
        Send(torch.tensor(rank % 2 == 0), behind),
        Recv(second, ahead),
        Send(empty, ahead),
        Recv(empty.clone(), behind),
    ]
    received = world.send_recv(ops, async_op=True).wait()
    values = world.broadcast(torch.full((2, 3), rank).t(), root=2)
    objects = world.all_gather_object({"rank": rank})
    world.barrier()
    return (
        [r.tolist() for r in received],
        values.tolist(),
        objects,
        world.broadcast_object(f"from {rank}", root=3),
    )


def test_point_to_point_broadcast_and_objects(pool):
    for rank, (received, broadcast, objects, text) in enumerate(pool.run(check_point_to_point)):
        ahead = (rank + 1) % 4
        assert received == [[float(ahead)] * (rank + 1), ahead % 2 == 0, []]
        assert broadcast == [[2, 2], [2, 2], [2, 2]]
        assert objects == [{"rank": r} for r in range(4)]
        assert text == "from 3"


def gradients(world, size):
    """Gradients through a chain of all collectives; float64."""
    group = group_of(world, size)
    if group is None:
        return None
    x = values(group.rank, (group.rank + 1, 2), torch.float64).requires_grad_()
    w = torch.arange(1.0, 3.0, dtype=torch.float64).requires_grad_()
    rows, _ = autograd.all_gather_v(group, x * w)
    share = autograd.reduce_scatter_v(group, rows.square(), [len(rows)] + [0] * (size - 1))
    shifted, _ = autograd.all_to_all_v(group, share, [0] * (size - 1) + [len(share)])
    total = autograd.all_reduce(group, shifted.sum() ** 2, "mean")
    scaled = autograd.broadcast(group, w * (group.rank + 1), root=size - 1)
    loss = total * scaled.sum() * (group.rank + 1)
    (first,) = torch.autograd.grad(loss, w, create_graph=True, retain_graph=True)
    (second,) = torch.autograd.grad(first[0], w, retain_graph=True)
    grad_x, grad_w = torch.autograd.grad(loss, (x, w))
    return grad_x, group.all_reduce(grad_w), group.all_reduce(second)


@pytest.mark.parametrize("size", SIZES)
def test_gradients_equal_those_of_one_process(pool, size):
    xs = [values(rank, (rank + 1, 2), torch.float64).requires_grad_() for rank in range(size)]
    w = torch.arange(1.0, 3.0, dtype=torch.float64).requires_grad_()
    everything = (torch.cat(xs) * w).square() * size
    total = everything.sum() ** 2 / size
    loss = sum(total * (w * size).sum() * (rank + 1) for rank in range(size))
    (first,) = torch.autograd.grad(loss, w, create_graph=True, retain_graph=True)
    (second,) = torch.autograd.grad(first[0], w, retain_graph=True)
    grads = torch.autograd.grad(loss, (*xs, w))
    for rank, (grad_x, grad_w, grad_second) in enumerate(pool.run(gradients, size)[:size]):
        torch.testing.assert_close(grad_x, grads[rank], rtol=1e-12, atol=0)
        torch.testing.assert_close(grad_w, grads[-1], rtol=1e-12, atol=0)
        torch.testing.assert_close(grad_second, second, rtol=1e-12, atol=0)


def wrong_arguments(world):
    return world.all_to_all_v(torch.ones(3, 2), [1, 1, 1, 1])


def test_argument_faults_leave_the_pool_usable(pool):
    pids = pool.pids()
    with pytest.raises(ArgumentError, match=r"send_counts=\[1, 1, 1, 1\].*a sum of 3 rows, not 4"):
        pool.run(wrong_arguments)
    assert pool.run(check_point_to_point)
    assert pool.pids() == pids
