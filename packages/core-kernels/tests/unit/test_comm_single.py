"""A group of one rank, counters, and argument checks: nothing here starts a process or needs torch.distributed."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from core_kernels import launch
from core_kernels.comm import Group, autograd, broadcast_bytes, ring_all_reduce_bytes
from core_kernels.errors import ArgumentError, ArgumentTypeError


@pytest.fixture
def group():
    return Group.single()


def test_every_collective_works_alone_and_counts_nothing(group):
    x = torch.arange(6.0).view(3, 2)
    assert torch.equal(group.all_reduce(x), x)
    assert torch.equal(group.all_gather_v(x)[0], x)
    assert torch.equal(group.reduce_scatter_v(x, [3]), x)
    rows, counts = group.all_to_all_v(x, [3])
    assert torch.equal(rows, x)
    assert counts == [3]
    assert torch.equal(group.broadcast(x), x)
    assert group.send_recv([]) == []
    assert group.all_gather_object("a") == ["a"]
    group.barrier()
    assert group.counters.sent() == group.counters.received() == 0
    assert not dist.is_initialized()


def test_results_never_share_memory_with_inputs(group):
    x = torch.ones(2, 2)
    results = group.all_reduce(x), group.all_gather_v(x)[0], group.all_to_all_v(x, [2])[0], group.broadcast(x)
    for result in results:
        assert result.data_ptr() != x.data_ptr()


def test_handles_wait_more_than_once(group):
    handle = group.all_reduce(torch.ones(2), async_op=True)
    assert handle.is_done()
    assert handle.wait() is handle.wait()


def test_autograd_forms_pass_gradcheck_alone(group):
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    for function in (
        lambda t: autograd.all_to_all_v(group, t, [3])[0],
        lambda t: autograd.all_gather_v(group, t)[0],
        lambda t: autograd.reduce_scatter_v(group, t, [3]),
        lambda t: autograd.all_reduce(group, t),
        lambda t: autograd.broadcast(group, t),
    ):
        assert torch.autograd.gradcheck(function, x)
        assert torch.autograd.gradgradcheck(function, x)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda g: g.all_reduce(torch.ones(2), op="product"), "op='product'.*sum, mean, max, min"),
        (lambda g: g.all_reduce(torch.ones(2, dtype=torch.bool)), "'max'.*'min'"),
        (lambda g: g.all_reduce(torch.ones(2), out=torch.ones(3)), r"out=\(3,\)"),
        (lambda g: g.all_gather_v(torch.tensor(1.0)), "at least one dimension"),
        (lambda g: g.all_gather_v(torch.ones(2), counts=[3]), "2 rows for rank 0"),
        (lambda g: g.all_to_all_v(torch.ones(2), [1, 1]), "1 numbers of at least 0"),
        (lambda g: g.all_to_all_v(torch.ones(2), [-1]), "at least 0"),
        (lambda g: g.all_to_all_v(torch.ones(2), [2], [1]), "2 rows from rank 0 itself"),
        (lambda g: g.reduce_scatter_v(torch.ones(2), [1]), "a sum of 2 rows, not 1"),
        (lambda g: g.broadcast(torch.ones(2), root=1), "root=1"),
        (lambda g: g.send_recv([(torch.ones(1), 0)]), "Send or Recv"),
        (lambda g: g.subgroup([1]), "distinct ranks below 1"),
        (lambda g: autograd.all_reduce(g, torch.ones(2), op="max"), "'sum' or 'mean'"),
        (lambda g: Group(), "initialised torch.distributed"),
        (lambda g: launch.run_ranks(print, 0), "world_size=0"),
        (lambda g: launch.run_ranks(print, 1, backend="mpi"), "'gloo' or 'nccl'"),
        (lambda g: launch.run_ranks(lambda group: 1, 1), "top of a module"),
    ],
)
def test_bad_arguments_are_named(group, call, message):
    with pytest.raises(ArgumentError, match=message):
        call(group)


def test_lists_are_refused_by_type(group):
    with pytest.raises(ArgumentTypeError, match=r"list; expected a torch\.Tensor"):
        group.all_gather_v([1, 2])


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("num_elements", [0, 1, 7, 64])
def test_ring_formula_conserves_bytes(world_size, num_elements):
    pairs = [ring_all_reduce_bytes(num_elements, 4, rank, world_size) for rank in range(world_size)]
    assert sum(sent for sent, _ in pairs) == sum(received for _, received in pairs)
    assert sum(sent for sent, _ in pairs) == 2 * (world_size - 1) * num_elements * 4


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("root", [0, 1])
def test_broadcast_tree_reaches_every_rank_once(world_size, root):
    pairs = [broadcast_bytes(10, rank, root % world_size, world_size) for rank in range(world_size)]
    assert sum(sent for sent, _ in pairs) == 10 * (world_size - 1)
    assert [received for _, received in pairs].count(0) == 1
