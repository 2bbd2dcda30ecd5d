from __future__ import annotations

import numpy as np
import pytest
import torch

from core_kernels import Graph, datasets
from core_kernels.topology import Topology, cluster
from gnn_comm import Communicator, GnnCommArgumentError, PlanMismatchError, partition, plan
from gnn_comm.verify import verify_exchange  # noqa: F401 (found by name on the ranks)

pytestmark = pytest.mark.distributed

PLANNERS = ("spst", "hierarchical", "p2p", "ring", "swap", "replication")


def shared(num_ranks: int) -> Topology:
    return cluster([2, num_ranks - 2] if num_ranks > 2 else [num_ranks], 8e9, 1e9)


def relaying_plan(graph: Graph, num_ranks: int = 4):
    """A ring plan: its rows pass through devices that do not need them."""
    topology = shared(num_ranks)
    return plan(partition(graph, topology, "random"), topology, "ring")


def on_ranks(group, made, body, *args):
    """Run the function of this file called ``body`` with a communicator, on as many ranks as the plan has devices."""
    if group.rank >= made.num_devices:
        return None
    part = group.subgroup(range(made.num_devices))
    communicator = Communicator(made, part)
    try:
        return globals()[body](communicator, *args)
    finally:
        communicator.close()


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("planner", PLANNERS)
def test_rows_and_gradients_are_exact(ranks, num_ranks, planner):
    graph = datasets.rmat(2**8, 2**11).graph
    topology = shared(num_ranks)
    made = plan(partition(graph, topology, "hierarchical"), topology, planner, num_stages=4)
    for checks in ranks.run(on_ranks, made, "verify_exchange")[:num_ranks]:
        assert checks == {"rows_equal": True, "gradients_exact": True, "backward_repeatable": True}


def awkward(communicator: Communicator) -> bool:
    """Gather rows of every dtype and shape, strided ones too, and compare with the table."""
    book, rows = communicator.plan.partition.book, torch.from_numpy(communicator.layout.global_rows)
    num_nodes = communicator.plan.partition.graph.num_nodes
    held = book.to_old(rows)
    generator = torch.Generator().manual_seed(1)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool):
        for shape in ((), (1,), (3,), (7,), (65,), (2, 5), (0,)):
            table = torch.randint(0, 2, (num_nodes, *shape), generator=generator).to(dtype)
            if not torch.equal(communicator.graph_all_gather(communicator.dispatch(table)), table[held]):
                return False
    wide = torch.randn(num_nodes, 10, generator=generator)
    strided = communicator.dispatch(wide)[:, ::2]
    before = strided.clone()
    same = torch.equal(communicator.graph_all_gather(strided), wide[held][:, ::2])
    return same and torch.equal(strided, before)


def test_any_dtype_and_shape(ranks):
    made = relaying_plan(datasets.rmat(2**7, 2**10).graph)
    assert all(ranks.run(on_ranks, made, "awkward"))


CASES = {
    "no edges": ([], 8, [0, 1, 2, 3] * 2),
    "no nodes": ([], 0, []),
    "empty parts": ([(0, 1), (1, 2), (2, 0)], 3, [1, 1, 3]),
    "one reads all": ([(k, 0) for k in range(8)], 8, [0, 0, 1, 1, 2, 2, 3, 3]),
    "one is read by all": ([(0, k) for k in range(8)], 8, [0, 0, 1, 1, 2, 2, 3, 3]),
    "one way only": ([(0, 7), (1, 7), (1, 6)], 8, [0, 0, 1, 1, 2, 2, 3, 3]),
    "loops and copies": ([(0, 0), (0, 7), (0, 7), (7, 7)], 8, [0, 0, 1, 1, 2, 2, 3, 3]),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("planner", ["spst", "p2p", "ring"])
def test_zero_rows_in_every_position(ranks, case, planner):
    edges, num_nodes, parts = CASES[case]
    graph = Graph.from_edge_index(torch.tensor(edges, dtype=torch.int64).reshape(-1, 2).T, num_nodes)
    topology = shared(4)
    made = plan(partition(graph, topology, "given", parts=parts), topology, planner)
    for checks in ranks.run(on_ranks, made, "verify_exchange"):
        assert all(checks.values())


def twenty_backwards(communicator: Communicator, dtype) -> bool:
    generator = torch.Generator().manual_seed(communicator.rank)
    x = torch.randn(communicator.num_local, 33, generator=generator).to(dtype).requires_grad_()
    gradient = torch.randn(communicator.num_rows, 33, generator=generator).to(dtype)
    kept = gradient.clone()
    found = [torch.autograd.grad(communicator.graph_all_gather(x), x, gradient)[0] for _ in range(20)]
    return all(torch.equal(found[0], other) for other in found) and torch.equal(gradient, kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_twenty_backward_passes_agree_bit_for_bit(ranks, dtype):
    made = relaying_plan(datasets.rmat(2**8, 2**12).graph)
    assert all(ranks.run(on_ranks, made, "twenty_backwards", dtype))


def stale_relays(communicator: Communicator) -> float:
    """Forward a large value, then run backward: nothing of it may be left in relay slots."""
    x = torch.full((communicator.num_local, 4), 1e30, dtype=torch.float64, requires_grad=True)
    rows = communicator.graph_all_gather(x)
    gradient = torch.autograd.grad(rows, x, torch.ones_like(rows))[0]
    return gradient.max().item()


def test_relay_slots_do_not_leak_between_passes(ranks):
    made = relaying_plan(datasets.rmat(2**8, 2**11).graph)
    assert max(ranks.run(on_ranks, made, "stale_relays")) <= 4


def overlap(communicator: Communicator) -> bool:
    x = torch.randn(communicator.num_local, 8, requires_grad=True)
    first = communicator.graph_all_gather_async(x)
    second = communicator.graph_all_gather_async(2 * x)  # two in flight keep their order
    own = x * 3
    a, b = first.wait(), second.wait()
    again = first.wait() is a and first.is_done()
    (a.sum() + b.sum() + own.sum()).backward()
    return again and torch.equal(2 * a.detach(), b.detach()) and x.grad is not None


def test_async_handles_overlap_and_keep_order(ranks):
    made = relaying_plan(datasets.rmat(2**8, 2**11).graph)
    assert all(ranks.run(on_ranks, made, "overlap"))


def in_and_out(communicator: Communicator) -> tuple:
    num_nodes = communicator.plan.partition.graph.num_nodes
    table = torch.arange(num_nodes * 3, dtype=torch.float32).view(num_nodes, 3)
    own = communicator.dispatch(table)
    from_root = communicator.dispatch(table if communicator.rank == 1 else None, src=1)
    from_array = communicator.dispatch(table.numpy())
    sent = communicator.sent_bytes()
    kept = communicator.gather_once("x", own)
    once = communicator.sent_bytes() - sent
    same = communicator.gather_once("x", own) is kept and communicator.sent_bytes() - sent == once
    collected = communicator.collect(own)
    refused = 0
    for bad in (own[:-1], torch.tensor(1.0)):
        try:
            communicator.graph_all_gather(bad)
        except GnnCommArgumentError:
            refused += 1
    return (
        torch.equal(own, from_root) and torch.equal(own, from_array),
        same,
        torch.equal(collected, table),
        refused,
        communicator.local_ids.tolist(),
        communicator.sent_bytes() - sent,
    )


def test_dispatch_collect_and_kept_features(ranks):
    graph = datasets.rmat(2**7, 2**10).graph
    topology = shared(4)
    made = plan(partition(graph, topology, "random"), topology, "spst")
    found = ranks.run(on_ranks, made, "in_and_out")
    assert all(result[:3] == (True, True, True) and result[3] == 2 for result in found)
    assert sorted(i for result in found for i in result[4]) == list(range(2**7))
    # Counted bytes are those of the plan.
    assert sum(result[5] for result in found) == int(made.transfers.num_rows.sum()) * 3 * 4


def quantised(communicator_bits, group, made):
    if group.rank >= made.num_devices:
        return None
    communicator = Communicator(made, group, quantize_bits=communicator_bits)
    num_nodes = made.partition.graph.num_nodes
    table = torch.rand(num_nodes, 64, generator=torch.Generator().manual_seed(0))
    x = communicator.dispatch(table).requires_grad_()
    rows = communicator.graph_all_gather(x)
    held = made.partition.book.to_old(torch.from_numpy(communicator.layout.global_rows))
    error = (rows.detach() - table[held]).abs()
    rows.sum().backward()
    counts = x.grad[:, 0]
    sent = communicator.group.counters.sent("gnn_comm.forward")
    communicator.close()
    own = communicator.num_local
    return error[:own].max().item(), error[own:].max().item(), counts.tolist(), sent


def quantised_ranks(group, made, bits):
    return quantised(bits, group, made)


@pytest.mark.parametrize(("bits", "largest"), [(8, 0.5 / 255), (4, 0.5 / 15)])
def test_quantised_rows_are_smaller_and_close(ranks, bits, largest):
    made = relaying_plan(datasets.rmat(2**7, 2**10).graph)
    exact = int(made.transfers.num_rows.sum()) * 64 * 4
    found = ranks.run(quantised_ranks, made, bits)
    for own, remote, counts, _ in found:
        assert own == 0
        assert 0 < remote <= largest * 1.05
        assert all(count == int(count) >= 1 for count in counts)  # gradients stay exact
    assert sum(result[3] for result in found) < exact * (bits + 4) / 32


def wrong_world(group, made):
    try:
        Communicator(made, group)
    except PlanMismatchError as error:
        return str(error)
    return None


def different_plans(group, made, other):
    try:
        Communicator(made if group.rank < 3 else other, group)
    except PlanMismatchError as error:
        return str(error)
    return None


def test_wrong_plans_are_refused_before_anything_is_sent(ranks):
    graph = datasets.rmat(2**7, 2**10).graph
    small = shared(2)
    made = plan(partition(graph, small, "random"), small)
    assert all("2 devices but the group has 4 ranks" in text for text in ranks.run(wrong_world, made))
    topology = shared(4)
    split = partition(graph, topology, "random")
    one, other = plan(split, topology, "p2p"), plan(split, topology, "ring")
    assert all("rank 3 holds plan" in text for text in ranks.run(different_plans, one, other))


def local_graph_matches(communicator: Communicator) -> bool:
    """Every in-edge of an own vertex is there, in the full graph's order, with its edge id."""
    graph, block = communicator.plan.partition.graph, communicator.local_graph
    rows = communicator.layout.global_rows
    (interior, inner), (boundary, _) = communicator.split
    assert interior.num_edges + boundary.num_edges == block.num_edges
    assert interior.num_dst + boundary.num_dst == block.num_dst
    assert len(inner) == 0 or int(inner.max()) < communicator.num_local
    for v in range(block.num_dst):
        begin, end = int(block.indptr[v]), int(block.indptr[v + 1])
        u = int(rows[v])
        expected = graph.indices[int(graph.indptr[u]) : int(graph.indptr[u + 1])].numpy()
        if not np.array_equal(rows[block.indices[begin:end].numpy()], expected):
            return False
    whole = communicator.plan.partition.book.to_new(torch.arange(graph.num_nodes))
    edges = graph.edge_index()
    mine = block.global_edge_ids
    return torch.equal(edges[0][mine], torch.from_numpy(rows)[block.indices.long()]) and len(whole) == graph.num_nodes


def test_local_graph_is_a_slice_of_the_whole(ranks):
    made = relaying_plan(datasets.rmat(2**7, 2**10).graph)
    assert all(ranks.run(on_ranks, made, "local_graph_matches"))
