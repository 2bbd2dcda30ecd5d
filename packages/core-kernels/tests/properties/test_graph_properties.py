"""Graphs of every shape against a plain list of edges."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core_kernels import Graph, backend
from core_kernels.graph import build


@st.composite
def edge_lists(draw) -> tuple[list[tuple[int, int]], int]:
    """Edges with duplicates, self-loops and isolated nodes."""
    num_nodes = draw(st.integers(1, 12))
    node = st.integers(0, num_nodes - 1)
    return draw(st.lists(st.tuples(node, node), max_size=40)), num_nodes


def make_graph(edges: list[tuple[int, int]], num_nodes: int) -> Graph:
    return Graph.from_edge_index(torch.tensor(edges, dtype=torch.int64).reshape(-1, 2).t(), num_nodes)


def rows_of(graph: Graph) -> list[list[tuple[int, int]]]:
    """Per destination the (source, edge id) pairs, in order."""
    ids = torch.arange(graph.num_edges) if graph.edge_ids is None else graph.edge_ids
    bounds = graph.indptr.tolist()
    pairs = list(zip(graph.indices.tolist(), ids.tolist(), strict=True))
    return [pairs[start:stop] for start, stop in pairwise(bounds)]


@settings(max_examples=60, deadline=None)
@given(edge_lists(), st.sampled_from([0, 1, 2]))
def test_building_is_a_stable_sort(case, row_bits):
    """Also with coarse buckets of a few rows, so that small graphs cross bucket borders."""
    edges, num_nodes = case
    expected = [[(u, i) for i, (u, v) in enumerate(edges) if v == row] for row in range(num_nodes)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "_MIN_ROW_BITS", row_bits)
        assert rows_of(make_graph(edges, num_nodes)) == expected


@settings(max_examples=40, deadline=None)
@given(edge_lists(), st.sampled_from([0, 1, 12]))
def test_the_transpose_has_every_edge_reversed(case, row_bits):
    edges, num_nodes = case
    graph = make_graph(edges, num_nodes)
    by_position = sorted(range(len(edges)), key=lambda i: (edges[i][1], i))
    expected = [[(edges[i][1], i) for i in by_position if edges[i][0] == row] for row in range(num_nodes)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "_MIN_ROW_BITS", row_bits)
        assert rows_of(graph.transpose()) == expected
    assert torch.equal(graph.out_degrees(), torch.bincount(graph.indices, minlength=num_nodes))


@settings(max_examples=40, deadline=None)
@given(edge_lists())
def test_symmetric_graphs_hold_each_pair_once(case):
    edges, num_nodes = case
    graph = make_graph(edges, num_nodes).symmetrized()
    pairs = {(u, v) for u, v in edges} | {(v, u) for u, v in edges}
    assert [[u for u, _ in row] for row in rows_of(graph)] == [
        sorted(u for u, v in pairs if v == row) for row in range(num_nodes)
    ]


@settings(max_examples=40, deadline=None)
@given(edge_lists())
def test_self_loops_are_added_only_where_missing(case):
    edges, num_nodes = case
    graph = make_graph(edges, num_nodes).with_self_loops()
    had = {u for u, v in edges if u == v}
    loops = [(node, node) for node in range(num_nodes) if node not in had]
    assert [tuple(edge) for edge in graph.edge_index().t().tolist()] == edges + loops


@settings(max_examples=40, deadline=None)
@given(edge_lists(), st.randoms(use_true_random=False))
def test_renumbering_and_cutting_keep_every_edge(case, random):
    edges, num_nodes = case
    graph = make_graph(edges, num_nodes)
    order = list(range(num_nodes))
    random.shuffle(order)
    perm = torch.tensor(order)
    assert torch.equal(perm[graph.permute(perm).edge_index()], graph.edge_index())

    nodes = perm[: max(1, num_nodes // 2)]
    block = graph.in_subgraph(nodes)
    sources, destinations = block.coo()
    found = Counter(zip(block.src_ids[sources].tolist(), block.dst_ids[destinations].tolist(), strict=True))
    assert found == Counter((u, v) for u, v in edges if v in set(nodes.tolist()))
    assert torch.equal(block.src_ids[: len(nodes)], nodes)
    assert block.src_ids.unique().numel() == block.num_src
    ends = graph.edge_index()[:, block.global_edge_ids]
    assert torch.equal(ends, torch.stack([block.src_ids[sources], block.dst_ids[destinations]]))


@settings(max_examples=40, deadline=None)
@given(edge_lists())
def test_torch_and_numba_build_the_same_graphs(case):
    """Other devices than the CPU take the torch branches."""
    edges, num_nodes = case

    def make_all() -> list[str]:
        graph = make_graph(edges, num_nodes)
        perm = torch.arange(num_nodes).flip(0)
        graphs = [graph, graph.transpose(), graph.symmetrized(), graph.permute(perm), graph.with_self_loops()]
        return [made.fingerprint() for made in graphs] + [str(graph.out_degrees().tolist())]

    with backend("torch"):
        by_torch = make_all()
    assert make_all() == by_torch
