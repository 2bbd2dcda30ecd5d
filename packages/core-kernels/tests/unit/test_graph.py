"""Graphs and blocks: small cases by hand, files, and the messages for bad input."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import scipy.sparse
import torch
from torch.autograd import gradcheck

from core_kernels import Block, Graph
from core_kernels.errors import ArgumentError, ArgumentTypeError

EDGES = torch.tensor([[2, 0, 2, 1, 0, 2], [1, 3, 1, 0, 0, 3]])  # a duplicate, a self-loop, node 2 without in-edges


@pytest.fixture
def graph() -> Graph:
    return Graph.from_edge_index(EDGES, num_nodes=5)


def test_rows_hold_in_edges_in_user_order(graph):
    assert graph.indptr.tolist() == [0, 2, 4, 4, 6, 6]
    assert graph.indices.tolist() == [1, 0, 2, 2, 0, 2]
    assert graph.edge_ids.tolist() == [3, 4, 0, 2, 1, 5]
    assert graph.indices.dtype == torch.int32
    assert torch.equal(graph.edge_index(), EDGES)


def test_a_sorted_list_needs_no_edge_ids():
    graph = Graph.from_edge_index(torch.tensor([[1, 0, 2], [0, 1, 1]]), 3)
    assert graph.edge_ids is None
    values = torch.rand(3)
    assert graph.to_positions(values) is values
    assert graph.from_positions(values) is values


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("form", ["tensor", "pair", "numpy", "strided"])
def test_every_form_of_edge_list_gives_the_same_graph(graph, dtype, form):
    edges = EDGES.to(dtype)
    given = {"tensor": edges, "pair": tuple(edges), "numpy": edges.numpy(), "strided": edges.t().contiguous().t()}[form]
    assert Graph.from_edge_index(given, 5).fingerprint() == graph.fingerprint()


def test_degrees(graph):
    assert graph.in_degrees().tolist() == [2, 2, 0, 2, 0]
    assert graph.out_degrees().tolist() == [2, 1, 3, 0, 0]
    assert graph.global_in_degrees is graph.in_degrees()
    assert graph.global_out_degrees is graph.out_degrees()


def test_edge_values_travel_both_ways_with_gradients(graph):
    values = torch.rand(6, 2, dtype=torch.float64, requires_grad=True)
    assert torch.equal(graph.from_positions(graph.to_positions(values)), values)
    assert gradcheck(graph.to_positions, values)
    assert gradcheck(graph.from_positions, values)


def test_the_transpose_keeps_edge_ids(graph):
    reverse = graph.transpose()
    assert torch.equal(reverse.edge_index(), EDGES.flip(0))
    assert reverse is graph.transpose()
    assert torch.equal(graph.edge_ids[graph.transpose_positions()], reverse.edge_ids)


def test_a_bipartite_graph_has_no_num_nodes():
    graph = Graph.from_edge_index(torch.tensor([[0, 6], [1, 0]]), (7, 2))
    assert (graph.num_src, graph.num_dst) == (7, 2)
    assert graph.transpose().num_src == 2
    with pytest.raises(ArgumentError, match=r"num_nodes='\(7, 2\)'"):
        _ = graph.num_nodes


def test_empty_graphs():
    for graph in (Graph.from_edge_index(torch.tensor([[], []])), Graph.from_edge_index(torch.empty(2, 0).long(), 3)):
        assert graph.num_edges == 0
        assert graph.transpose().num_edges == 0
        assert graph.symmetrized().num_edges == 0
        assert graph.edge_index().shape == (2, 0)
        assert graph.with_self_loops().num_edges == graph.num_nodes


def test_wide_ids_get_wide_indices():
    graph = Graph.from_edge_index(torch.tensor([[2**31 + 5, 1], [0, 0]]), (2**31 + 6, 1))
    assert graph.indices.dtype == torch.int64
    assert graph.indices.tolist() == [2**31 + 5, 1]


def test_scipy_and_pyg_and_dgl_like_objects(graph):
    matrix = scipy.sparse.coo_array((np.ones(6), EDGES.numpy()), shape=(5, 5))
    assert Graph.from_scipy(matrix).fingerprint() == graph.fingerprint()

    class Data:
        edge_index, num_nodes = EDGES, 5

    class DglGraph:
        etypes = ("links",)
        num_src_nodes = num_dst_nodes = staticmethod(lambda: 5)
        edges = staticmethod(lambda order: tuple(EDGES) if order == "eid" else None)

    assert Graph.from_pyg(Data()).fingerprint() == graph.fingerprint()
    assert Graph.from_dgl(DglGraph()).fingerprint() == graph.fingerprint()
    Data.edge_index = None
    with pytest.raises(ArgumentError, match="with edge_index"):
        Graph.from_pyg(Data())
    with pytest.raises(ArgumentTypeError, match="matrix is a ndarray"):
        Graph.from_scipy(np.eye(3))


@pytest.mark.parametrize("mmap", [False, True])
def test_files_hold_the_same_graph(graph, tmp_path, mmap):
    graph.save(tmp_path / "graph")
    again = Graph.load(tmp_path / "graph", mmap=mmap)
    assert again.fingerprint() == graph.fingerprint()
    block = graph.in_subgraph(torch.tensor([3, 0]))
    block.save(tmp_path / "block")
    assert Block.load(tmp_path / "block", mmap=mmap).fingerprint() == block.fingerprint()
    with pytest.raises(ArgumentError, match="a saved Graph, found a Block"):
        Graph.load(tmp_path / "block")
    with pytest.raises(ArgumentError, match=r"graph\.json"):
        Graph.load(tmp_path)


def test_a_mapped_graph_cannot_change_its_files(tmp_path):
    edges = torch.randint(0, 500, (2, 2000))
    Graph.from_edge_index(edges, 500).save(tmp_path)
    mapped = Graph.load(tmp_path, mmap=True)
    mapped.indices[0] = 499
    assert Graph.load(tmp_path).fingerprint() == Graph.from_edge_index(edges, 500).fingerprint()


def test_the_fingerprint_follows_the_content(graph):
    wide = Graph(graph.indptr, graph.indices.long(), 5, graph.edge_ids)
    assert wide.fingerprint() == graph.fingerprint()
    assert Graph.from_edge_index(EDGES, 6).fingerprint() != graph.fingerprint()
    assert Graph.from_edge_index(EDGES.flip(1), 5).fingerprint() != graph.fingerprint()


def test_graphs_can_be_sent_to_other_processes(graph):
    for made in (graph, graph.transpose(), graph.in_subgraph(torch.tensor([1]))):
        made.transpose()
        again = pickle.loads(pickle.dumps(made))
        assert again.fingerprint() == made.fingerprint()
        assert again.transpose().fingerprint() == made.transpose().fingerprint()


def test_permute_renames_both_ends(graph):
    perm = torch.tensor([4, 2, 0, 1, 3])
    moved = graph.permute(perm)
    assert torch.equal(perm[moved.edge_index()], EDGES)
    assert torch.equal(moved.in_degrees(), graph.in_degrees()[perm])


def test_a_block_holds_all_in_edges_of_its_nodes(graph):
    block = graph.in_subgraph(torch.tensor([3, 1], dtype=torch.int32))
    assert block.src_ids.tolist() == [3, 1, 0, 2]
    assert block.dst_ids.tolist() == [3, 1]
    assert block.global_edge_ids.tolist() == [1, 5, 0, 2]
    assert block.indices.tolist() == [2, 3, 3, 3]
    assert block.global_in_degrees.tolist() == [2, 2]
    assert block.global_out_degrees.tolist() == [0, 1, 2, 3]
    assert block.edge_ids is None
    Block(block.indptr, block.indices, src_ids=block.src_ids, dst_ids=block.dst_ids)  # valid as it is
    with pytest.raises(ArgumentError, match="begin with dst_ids"):
        Block(block.indptr, block.indices, src_ids=block.src_ids.flip(0), dst_ids=block.dst_ids)
    with pytest.raises(ArgumentError, match="global_in_degrees"):
        Block(
            block.indptr,
            block.indices,
            src_ids=block.src_ids,
            dst_ids=block.dst_ids,
            global_in_degrees=torch.zeros(3, dtype=torch.int64),
        )


def test_to_keeps_everything(graph):
    assert graph.to("cpu") is graph
    meta = graph.to("meta")
    assert meta.device.type == "meta"
    assert meta.num_edges == 6


@pytest.mark.parametrize(
    ("build", "error", "words"),
    [
        (lambda: Graph.from_edge_index(torch.tensor([[0, -1], [0, 1]])), ArgumentError, r"edge_index=-1 .*source ids"),
        (lambda: Graph.from_edge_index(EDGES, 3), ArgumentError, r"edge_index=3 .*destination ids in \[0, 3\)"),
        (lambda: Graph.from_edge_index(EDGES, -1), ArgumentError, "num_nodes=-1"),
        (lambda: Graph.from_edge_index(EDGES, (1, 2, 3)), ArgumentError, "num_nodes"),
        (lambda: Graph.from_edge_index(EDGES.float()), ArgumentTypeError, r"torch\.float32"),
        (lambda: Graph.from_edge_index(EDGES.t()), ArgumentError, r"edge_index\.shape=\(6, 2\)"),
        (lambda: Graph.from_edge_index((EDGES[0], EDGES[1, :2])), ArgumentError, "one length"),
        (lambda: Graph.from_edge_index([1, 2]), ArgumentTypeError, "a list of 2"),
        (lambda: Graph(torch.tensor([0, 2, 1]), torch.zeros(1, dtype=torch.int32)), ArgumentError, "row 1 has one"),
        (lambda: Graph(torch.tensor([0, 2]), torch.zeros(1, dtype=torch.int32)), ArgumentError, "num_edges=1"),
        (lambda: Graph(torch.tensor([1, 1]), torch.zeros(1, dtype=torch.int32)), ArgumentError, r"indptr=\[1, 1\]"),
        (lambda: Graph(torch.tensor([0, 1]).int(), torch.zeros(1).int()), ArgumentTypeError, "indptr has dtype"),
        (lambda: Graph(torch.tensor([0, 1]), torch.zeros(1).short()), ArgumentTypeError, "indices has dtype"),
        (lambda: Graph(torch.tensor([0, 1]), torch.ones(1).int()), ArgumentError, r"indices=1 .*\[0, 1\)"),
        (lambda: Graph(torch.tensor([0, 1]), torch.zeros(1, 1).int()), ArgumentError, "1-D"),
        (
            lambda: Graph(torch.tensor([0, 2]), torch.zeros(2).int(), edge_ids=torch.zeros(2).long()),
            ArgumentError,
            "edge_ids=2 .*distinct",
        ),
        (
            lambda: Graph(torch.tensor([0, 2]), torch.zeros(2).int(), edge_ids=torch.zeros(1).long()),
            ArgumentError,
            "permutation of 2",
        ),
        (lambda: Graph.from_edge_index(EDGES).to_positions(torch.rand(5)), ArgumentError, r"edge_values\.shape=\(5,\)"),
        (lambda: Graph.from_edge_index(EDGES).permute(torch.arange(3)), ArgumentError, "perm=3"),
        (lambda: Graph.from_edge_index(EDGES).in_subgraph(torch.tensor([4])), ArgumentError, "nodes=4"),
        (lambda: Graph.from_edge_index(EDGES).in_subgraph(torch.tensor([0, 0])), ArgumentError, "nodes=2 .*distinct"),
        (lambda: Graph.from_edge_index(EDGES).in_subgraph([0]), ArgumentError, "nodes='list'"),
    ],
)
def test_bad_input_is_named(build, error, words):
    with pytest.raises(error, match=words):
        build()


def test_a_block_pickles_with_its_degrees_and_without_the_full_graph():
    graph = Graph.from_edge_index(torch.randint(0, 5_000, (2, 40_000)), 5_000)
    block = graph.in_subgraph(torch.tensor([3, 1]))
    data = pickle.dumps(block)
    copy = pickle.loads(data)
    assert len(data) < 20_000
    assert torch.equal(copy.global_in_degrees, graph.in_degrees()[block.dst_ids])
    assert torch.equal(copy.global_out_degrees, graph.out_degrees()[block.src_ids])
    assert torch.equal(copy.global_source_in_degrees, graph.in_degrees()[block.src_ids])


def test_a_bipartite_graph_has_no_symmetric_form():
    bipartite = Graph(torch.tensor([0, 1, 2]), torch.tensor([4, 3]), 5)
    with pytest.raises(ValueError, match=r"num_nodes=.*5, 2.*as many sources as destinations"):
        bipartite.symmetrized()
