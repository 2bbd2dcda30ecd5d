"""Partitions: every node owned once, ranges, files, few cut edges with METIS, and bad input."""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core_kernels import Graph, PartitionBook, backend, partition_graph
from core_kernels.errors import ArgumentError, MissingDependencyError


def ring_of_cliques(num_cliques: int, size: int) -> Graph:
    """Dense groups joined in a ring by single edges: the best cut is known."""
    inside = torch.combinations(torch.arange(size)).t()
    edges = [inside + clique * size for clique in range(num_cliques)]
    bridges = [[[clique * size], [(clique + 1) % num_cliques * size]] for clique in range(num_cliques)]
    return Graph.from_edge_index(torch.cat([*edges, *map(torch.tensor, bridges)], dim=1), num_cliques * size)


def check_book(book: PartitionBook, graph: Graph, num_parts: int) -> None:
    assert book.num_parts == num_parts
    assert sorted(book.perm.tolist()) == list(range(graph.num_nodes))
    owners = [part for part in range(num_parts) for _ in book.range(part)]
    assert book.owner(torch.arange(graph.num_nodes)).tolist() == owners
    old = torch.arange(graph.num_nodes)
    assert torch.equal(book.to_old(book.to_new(old)), old)
    ends = book.owner(book.to_new(graph.edge_index().flatten())).view(2, -1)
    assert book.cut == int((ends[0] != ends[1]).sum())
    reordered = book.reorder(graph)
    assert torch.equal(book.to_old(reordered.edge_index().flatten()), graph.edge_index().flatten())


@pytest.mark.parametrize("method", ["metis", "random"])
@pytest.mark.parametrize("num_parts", [1, 2, 3, 4, 7])
def test_every_node_has_one_owner(method, num_parts):
    graph = ring_of_cliques(6, 8)
    book = partition_graph(graph, num_parts, method, seed=3)
    check_book(book, graph, num_parts)
    assert book.method == method
    assert int(book.sizes.min()) > 0


def test_metis_cuts_only_the_bridges():
    graph = ring_of_cliques(4, 12)
    by_metis, by_chance = partition_graph(graph, 4, "metis"), partition_graph(graph, 4, "random")
    assert by_metis.cut == 4
    assert by_metis.balance == 1.0
    assert by_chance.cut > 100


def test_the_seed_decides_a_random_split():
    graph = ring_of_cliques(4, 12)
    first, again, other = (partition_graph(graph, 3, "random", seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.perm, again.perm)
    assert not torch.equal(first.perm, other.perm)


@pytest.mark.parametrize("method", ["metis", "random"])
def test_more_parts_than_nodes_leaves_parts_empty(method):
    graph = Graph.from_edge_index(torch.tensor([[0, 1], [1, 2]]), 3)
    book = partition_graph(graph, 5, method)
    check_book(book, graph, 5)
    assert sorted(book.sizes.tolist()) == [0, 0, 1, 1, 1]


@pytest.mark.parametrize("method", ["metis", "random"])
def test_graphs_without_edges_or_nodes(method):
    for num_nodes in (0, 40):
        graph = Graph.from_edge_index(torch.empty(2, 0, dtype=torch.int64), num_nodes)
        check_book(partition_graph(graph, 2, method), graph, 2)
    loops = Graph.from_edge_index(torch.arange(40).expand(2, -1), 40)
    check_book(partition_graph(loops, 2, method), loops, 2)


@pytest.mark.parametrize(("method", "limit"), [("random", 1.01), ("metis", 1.3)])
def test_training_nodes_are_spread_evenly(method, limit):
    graph = ring_of_cliques(20, 10)
    mask = torch.zeros(200, dtype=torch.bool)
    mask[:40] = True  # the first four cliques: a split by cliques alone would pile them up
    book = partition_graph(graph, 4, method, balance=mask)
    check_book(book, graph, 4)
    marked = torch.bincount(book.owner(book.to_new(mask.nonzero().squeeze(1))), minlength=4)
    assert float(marked.max() / marked.double().mean()) == pytest.approx(book.balance)
    assert book.balance <= limit
    assert partition_graph(graph, 4, method).balance <= limit
    unaware = partition_graph(graph, 4, "given", parts=torch.arange(200) // 50, balance=mask)
    assert unaware.balance == 4.0


def test_a_partition_survives_a_folder(tmp_path):
    graph = ring_of_cliques(4, 5)
    book = partition_graph(graph, 3, "random")
    book.save(tmp_path)
    again = PartitionBook.load(tmp_path)
    assert torch.equal(again.perm, book.perm)
    assert torch.equal(again.offsets, book.offsets)
    assert (again.method, again.cut, again.balance) == (book.method, book.cut, book.balance)
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".npy", ".npy"]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=30))
def test_given_parts_are_kept(parts):
    graph = Graph.from_edge_index(torch.empty(2, 0, dtype=torch.int64), len(parts))
    book = partition_graph(graph, 5, "given", parts=torch.tensor(parts))
    assert book.owner(book.to_new(torch.arange(len(parts)))).tolist() == parts
    for part in range(5):
        old = book.perm[book.offsets[part] : book.offsets[part + 1]].tolist()
        assert old == sorted(old)


def test_torch_counts_the_same_cut():
    graph = ring_of_cliques(4, 12)
    with backend("torch"):
        by_torch = partition_graph(graph, 3, "random")
    assert partition_graph(graph, 3, "random").cut == by_torch.cut


def test_missing_pymetis_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "pymetis", None)
    with pytest.raises(MissingDependencyError, match=r"core-kernels\[partition\]"):
        partition_graph(ring_of_cliques(4, 12), 2)


BOOK = PartitionBook(torch.tensor([0, 2, 3]), torch.tensor([2, 0, 1]))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: partition_graph(ring_of_cliques(4, 4), 0), "num_parts=0"),
        (lambda: partition_graph(ring_of_cliques(4, 4), 2, "kmeans"), "method='kmeans'.*one of metis, random, given"),
        (lambda: partition_graph(ring_of_cliques(4, 4), 2, "given"), "parts='None'"),
        (lambda: partition_graph(ring_of_cliques(4, 4), 2, parts=torch.zeros(16).long()), "parts='a tensor'"),
        (lambda: partition_graph(ring_of_cliques(4, 4), 2, "given", torch.full((16,), 2)), r"parts=2 .*\[0, 2\)"),
        (lambda: partition_graph(ring_of_cliques(4, 4), 2, "given", torch.zeros(3).long()), r"parts=\(3,\)"),
        (lambda: partition_graph(ring_of_cliques(4, 4), 2, balance=torch.ones(16)), "balance=.*boolean mask"),
        (lambda: BOOK.owner(torch.tensor([3])), r"new_ids=3 .*\[0, 3\)"),
        (lambda: BOOK.to_new(torch.tensor([-1])), "old_ids=-1"),
        (lambda: BOOK.to_old(torch.tensor([0.5])), "new_ids"),
        (lambda: BOOK.range(2), "part=2"),
        (lambda: BOOK.reorder(ring_of_cliques(4, 4)), "perm=3"),
        (lambda: PartitionBook(torch.tensor([0, 2, 1, 3]), torch.arange(3)), r"offsets=\[0, 2, 1, 3\]"),
        (lambda: PartitionBook(torch.tensor([0]), torch.arange(3)), "offsets"),
        (lambda: PartitionBook(torch.tensor([0, 3]), torch.tensor([0, 0, 1])), "perm=3 .*distinct"),
        (lambda: PartitionBook.load("no-such-folder"), "dir='no-such-folder'"),
    ],
)
def test_bad_input_is_named(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()
