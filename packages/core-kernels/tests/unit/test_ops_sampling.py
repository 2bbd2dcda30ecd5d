"""Sampling, relabelling and blocks: the reference's draws, independence of context, uniformity, errors."""

from __future__ import annotations

import pytest
import torch

from core_kernels import Graph, backend, ops
from core_kernels.kernels.numba import relabel

NUM_NODES = 60


def random_graph(seed=0, num_edges=2500, sorted_edges=False):
    edges = torch.randint(0, NUM_NODES - 5, (2, num_edges), generator=torch.Generator().manual_seed(seed))
    if sorted_edges:
        edges = edges[:, edges[1].argsort(stable=True)]
    return Graph.from_edge_index(edges, NUM_NODES)


def in_both(function):
    with backend("numba"):
        ours = function()
    with backend("torch"):
        return ours, function()


@pytest.mark.parametrize("sorted_edges", [False, True])
@pytest.mark.parametrize(
    ("fanout", "replace"), [(1, False), (5, False), (33, False), (5, True), (70, True), (-1, False)]
)
def test_draws_equal_the_reference(fanout, replace, sorted_edges):
    graph = random_graph(sorted_edges=sorted_edges)
    seeds = torch.randperm(NUM_NODES)[:30]
    draw = lambda: ops.sample_neighbors(graph, seeds, fanout, -7, replace, step=3, layer=1)  # noqa: E731
    ours, reference = in_both(draw)
    assert all(torch.equal(a, b) for a, b in zip(ours, reference, strict=True))
    indptr, sources, edge_ids = ours
    assert torch.equal(graph.edge_index()[0][edge_ids], sources.long())
    destinations = torch.repeat_interleave(seeds, indptr.diff())
    assert torch.equal(graph.edge_index()[1][edge_ids], destinations)
    if not replace:
        assert edge_ids.unique().numel() == edge_ids.numel()
        degrees = graph.in_degrees()[seeds]
        assert torch.equal(indptr.diff(), degrees if fanout < 0 else degrees.clamp(max=fanout))


def test_a_draw_does_not_depend_on_the_other_seeds():
    graph = random_graph()
    _, _, alone = ops.sample_neighbors(graph, torch.tensor([7]), 4, seed=5)
    indptr, _, together = ops.sample_neighbors(graph, torch.tensor([3, 7, 9]), 4, seed=5)
    assert torch.equal(alone, together[indptr[1] : indptr[2]])
    assert not torch.equal(alone, ops.sample_neighbors(graph, torch.tensor([7]), 4, seed=6)[2])
    assert not torch.equal(alone, ops.sample_neighbors(graph, torch.tensor([7]), 4, seed=5, step=1)[2])


def test_keys_make_draws_survive_renumbering():
    graph, perm = random_graph(), torch.randperm(NUM_NODES)
    renumbered = graph.permute(perm)
    old = torch.arange(20)
    new = perm.argsort()[old]
    expected = ops.sample_neighbors(graph, old, 6, seed=1)
    found = ops.sample_neighbors(renumbered, new, 6, seed=1, keys=old)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(perm[found[1].long()], expected[1].long())


def test_every_edge_is_equally_likely():
    degree, fanout, trials = 12, 5, 4000
    graph = Graph(torch.tensor([0, degree]), torch.arange(degree), num_src=degree)
    counts = torch.zeros(degree)
    for step in range(trials):
        counts[ops.sample_neighbors(graph, torch.tensor([0]), fanout, step=step)[1].long()] += 1
    expected = trials * fanout / degree
    chi_squared = ((counts - expected) ** 2 / expected).sum().item()
    # 11 degrees of freedom: the 1 - 1e-4 quantile is 37.4.
    assert chi_squared < 37.4


def test_threads_draw_the_same():
    graph = random_graph(num_edges=200_000)
    seeds, before, results = torch.arange(NUM_NODES).repeat(400), torch.get_num_threads(), []
    try:
        for num_threads in (1, 3):
            torch.set_num_threads(num_threads)
            results.append(ops.sample_neighbors(graph, seeds, 40))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(
    "ids",
    [
        torch.randint(-5, 5, (100,)),
        torch.randint(0, 2**40, (1000,)) // 7,
        torch.randint(0, 50, (100,)).int(),
        torch.tensor([2**62, -(2**62), 2**62]),
        torch.empty(0, dtype=torch.int64),
        torch.zeros(1000, dtype=torch.int64),
    ],
    ids=["negative", "large", "int32", "extreme", "empty", "equal"],
)
def test_relabel(ids):
    ours, reference = in_both(lambda: ops.unique_relabel(ids[:0], ids))
    assert all(torch.equal(a, b) for a, b in zip(ours, reference, strict=True))
    unique, local = ours
    assert torch.equal(unique[local], ids)
    assert sorted(unique.tolist()) == sorted(set(ids.tolist()))


def test_relabel_puts_seeds_first():
    unique, first, second = ops.unique_relabel(torch.tensor([9, 4]), torch.tensor([4, 7]), torch.tensor([7, 9, 1]))
    assert unique.tolist() == [9, 4, 7, 1]
    assert (first.tolist(), second.tolist()) == ([1, 2], [2, 0, 3])


def test_the_table_is_clean_after_every_call():
    ops.unique_relabel(torch.randint(0, 1000, (500,)))
    assert (relabel.direct_table(1000, 500) == -1).all()


def test_blocks_chain_and_carry_global_degrees():
    graph, seeds = random_graph(), torch.tensor([5, 1, 30])
    blocks = ops.sample_blocks(graph, seeds, [4, -1], seed=3)
    assert torch.equal(blocks[1].dst_ids, seeds)
    assert torch.equal(blocks[0].dst_ids, blocks[1].src_ids)
    for block in blocks:
        assert torch.equal(block.src_ids[: block.num_dst], block.dst_ids)
        assert torch.equal(block.global_in_degrees, graph.in_degrees()[block.dst_ids])
        assert torch.equal(block.global_out_degrees, graph.out_degrees()[block.src_ids])
        sources, destinations = block.coo()
        edges = torch.stack([block.src_ids[sources.long()], block.dst_ids[destinations]])
        assert torch.equal(edges, graph.edge_index()[:, block.global_edge_ids])
    with backend("torch"):
        for ours, reference in zip(blocks, ops.sample_blocks(graph, seeds, [4, -1], seed=3), strict=True):
            assert torch.equal(ours.src_ids, reference.src_ids)
            assert torch.equal(ours.indices, reference.indices)


def test_blocks_without_edges_or_seeds():
    graph = Graph.from_edge_index(torch.empty(2, 0, dtype=torch.int64), 3)
    block = ops.sample_block(graph, torch.tensor([2, 0]), 5)
    assert (block.num_src, block.num_dst, block.num_edges) == (2, 2, 0)
    assert ops.sample_block(graph, torch.empty(0, dtype=torch.int64), 5).num_src == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda g: ops.sample_neighbors(g, torch.tensor([-1]), 3), "-1"),
        (lambda g: ops.sample_neighbors(g, torch.tensor([NUM_NODES]), 3), f"{NUM_NODES}"),
        (lambda g: ops.sample_block(g, torch.tensor([NUM_NODES + 1]), 3), f"{NUM_NODES + 1}"),
        (lambda g: ops.sample_block(g, torch.tensor([1, 2, 1]), 3), "repeats"),
        (lambda g: ops.sample_neighbors(g, torch.tensor([1]), float("nan")), "fanout=nan"),
        (lambda g: ops.sample_neighbors(g, torch.tensor([1]), 0), "fanout=0"),
        (lambda g: ops.sample_neighbors(g, torch.tensor([1]), -1, replace=True), "replace"),
        (lambda g: ops.sample_neighbors(g, torch.tensor([1.0]), 3), "int32 or int64"),
        (lambda g: ops.sample_neighbors(g, torch.tensor([1]), 3, keys=torch.tensor([1, 2])), "keys"),
        (lambda g: ops.sample_blocks(g, torch.tensor([1]), []), "fanouts"),
        (lambda g: ops.unique_relabel(torch.tensor([1]), torch.tensor([1]).int()), "like seeds"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call(random_graph())
