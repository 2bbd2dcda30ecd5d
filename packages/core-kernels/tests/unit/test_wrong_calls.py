"""Wrong calls: each message names the argument, shows the value, and says what to do instead."""

from __future__ import annotations

import re

import pytest
import torch

from core_kernels import Graph, PartitionBook, backend, nn, ops, partition_graph, vertex
from core_kernels.comm import Group
from core_kernels.comm.compress import ClusterAllReduce, SketchAllReduce
from core_kernels.errors import CoreKernelsError
from core_kernels.interconnect import Curve, Interconnect
from core_kernels.launch import run_ranks
from core_kernels.store import FeatureStore
from core_kernels.testing import RankPool, ShapedHosts
from core_kernels.topology import Topology

GRAPH = Graph.from_edge_index(torch.tensor([[0, 1, 2], [1, 2, 0]]), 3)
X = torch.ones(3, 2)
ARRAY = torch.zeros(3, dtype=torch.int64)


def plain_function(group):
    return group.rank


@vertex.program
def layer(v):
    return vertex.sum(e.src.h for e in v.in_edges)


#: What is called, the argument at fault as it must be named, the value as it must be shown, words of the remedy.
WRONG_CALLS = {
    "spmm, reduce": (lambda: ops.spmm(GRAPH, X, reduce="median"), "reduce", "'median'", "scale yourself"),
    "spmm, rows": (lambda: ops.spmm(GRAPH, X[:2]), "x.shape", "(2, 2)", "one row for each"),
    "spmm, weight": (lambda: ops.spmm(GRAPH, X, torch.ones(4)), "weight.shape", "(4,)", "one row for each"),
    "spmm, integers": (lambda: ops.spmm(GRAPH, X.long()), "x", "torch.int64", "x.float()"),
    "spmm, out": (lambda: ops.spmm(GRAPH, X, out=X.double()), "out", "torch.float64 (3, 2)", "torch.empty"),
    "spmm, out is x": (lambda: ops.spmm(GRAPH, X, out=X), "out", "memory of x", "leave out= away"),
    "gather, out is x": (
        lambda: ops.gather(X, ARRAY, out=X),
        "out",
        "memory of x",
        "leave out= away",
    ),
    "sddmm, op": (lambda: ops.sddmm(GRAPH, X, X, "sub"), "op", "'sub'", 'use "dot"'),
    "gather, index": (lambda: ops.gather(X, torch.tensor([0, 3])), "index", "3", "pass ids below 3"),
    "gather, bounds": (lambda: ops.gather(X, ARRAY, bounds="skip"), "bounds", "'skip'", "keep"),
    "gather, floats": (lambda: ops.gather(X, X[:, 0]), "index", "torch.float32", "index.long()"),
    "scatter_add, num_rows": (lambda: ops.scatter_add(X, ARRAY, -1), "num_rows", "-1", "number of output rows"),
    "segment_reduce, indptr": (
        lambda: ops.segment_reduce(X, torch.tensor([0, 2])),
        "indptr",
        "0..2",
        "lengths.cumsum(0)",
    ),
    "sample_neighbors, fanout": (lambda: ops.sample_neighbors(GRAPH, ARRAY, 0), "fanout", "0", "pass for example 10"),
    "sample_neighbors, seed": (lambda: ops.sample_neighbors(GRAPH, ARRAY, 2, seed=2**64), "seed", str(2**64), "modulo"),
    "sample_block, seeds": (lambda: ops.sample_block(GRAPH, ARRAY, 2), "seeds", "0", "unique_relabel"),
    "sample_blocks, fanouts": (lambda: ops.sample_blocks(GRAPH, ARRAY, []), "fanouts", "[]", "[10, 10]"),
    "embedding_bag, mode": (
        lambda: ops.embedding_bag(X, ARRAY, torch.tensor([0, 3]), mode="max"),
        "mode",
        "'max'",
        "use segment_reduce",
    ),
    "quantize_rows, bits": (lambda: ops.quantize_rows(X, 3), "bits", "3", "use 8"),
    "Graph, indices": (
        lambda: Graph(torch.tensor([0, 1]), torch.tensor([7]), 3),
        "indices",
        "7",
        "remove the ids outside",
    ),
    "Graph, indptr": (
        lambda: Graph(torch.tensor([0, 2, 1]), torch.tensor([0, 0])),
        "indptr",
        "[0, 1]",
        "use Graph.from_edge_index",
    ),
    "Graph.from_edge_index, num_nodes": (
        lambda: Graph.from_edge_index(torch.zeros(2, 4).long(), 3.0),
        "num_nodes",
        "3.0",
        "pass the number of nodes",
    ),
    "Graph.from_edge_index": (
        lambda: Graph.from_edge_index(torch.zeros(3, 4).long()),
        "edge_index",
        "(3, 4)",
        "edge_index.t()",
    ),
    "partition_graph, num_parts": (lambda: partition_graph(GRAPH, 0), "num_parts", "0", "number of ranks"),
    "partition_graph, method": (lambda: partition_graph(GRAPH, 2, "spectral"), "method", "'spectral'", 'use "metis"'),
    "PartitionBook, offsets": (
        lambda: PartitionBook(torch.tensor([0, 2]), torch.arange(3), "given", 0, 1.0),
        "offsets",
        "[0, 2]",
        "cumulate",
    ),
    "SAGEConv, aggr": (lambda: nn.SAGEConv(2, 2, aggr="lstm"), "aggr", "'lstm'", "vertex.program"),
    "SAGEConv, edge_weight": (lambda: nn.SAGEConv(2, 2)(GRAPH, X, X[:, 0]), "edge_weight", "Tensor", "GCNConv"),
    "GCNConv, long edge_weight": (
        lambda: nn.GCNConv(2, 2)(GRAPH, X, torch.ones(4)),
        "edge_weight.shape",
        "(4,)",
        "one number for each",
    ),
    "APPNP, column of edge_weight": (
        lambda: nn.APPNP(2, 0.1)(GRAPH, X, torch.ones(3, 1)),
        "edge_weight.shape",
        "(3, 1)",
        "one number for each",
    ),
    "GCNConv, integer edge_weight": (
        lambda: nn.GCNConv(2, 2)(GRAPH, X, ARRAY),
        "edge_weight",
        "torch.int64",
        "edge_weight.to(x.dtype)",
    ),
    "GCNConv, double edge_weight": (
        lambda: nn.GCNConv(2, 2)(GRAPH, X, torch.ones(3).double()),
        "weight",
        "torch.float64",
        ".to(dtype)",
    ),
    "GATConv, long edge_attr": (
        lambda: nn.GATConv(2, 2, edge_dim=2)(GRAPH, X, torch.ones(4, 2)),
        "edge values",
        "(4, 2)",
        "check the graph",
    ),
    "RGCNConv, num_blocks": (lambda: nn.RGCNConv(3, 4, 2, num_blocks=2), "num_blocks", "2", "change it"),
    "RGCNConv, edge_type": (lambda: nn.RGCNConv(2, 2, 2)(GRAPH, X, ARRAY + 2), "edge_type", "2", "num_relations"),
    "GATConv, edge_attr": (lambda: nn.GATConv(2, 2)(GRAPH, X, X), "edge_attr", "(3, 2)", "set edge_dim"),
    "vertex program, missing": (lambda: layer(GRAPH, src={"x": X}), "'h'", "['x']", "pass src={'h': tensor}"),
    "vertex program, rows": (lambda: layer(GRAPH, src={"h": X[:2]}), "h.shape", "(2, 2)", "check the graph"),
    "vertex program, bind": (lambda: layer.bind(slope=1), "constants", "['slope']", "check the spelling"),
    "vertex.program": (lambda: vertex.program(lambda: None), "function", "'<lambda>'", "write def layer(v)"),
    "backend": (lambda: backend("gpu").__enter__(), "backend", "'gpu'", 'use "auto"'),
    "FeatureStore, capacity": (lambda: FeatureStore(X, num_device_rows=4), "num_device_rows", "4", "cache fewer"),
    "FeatureStore, ids": (lambda: FeatureStore(X).gather(torch.tensor([3])), "ids", "3", "remove the ids"),
    "run_ranks, world_size": (lambda: run_ranks(plain_function, 0), "world_size", "0", "pass the number of ranks"),
    "run_ranks, backend": (lambda: run_ranks(plain_function, 1, backend="mpi"), "backend", "'mpi'", "choose one"),
    "run_ranks, fn": (lambda: run_ranks(lambda group: 0, 1), "fn", "<lambda>", "top of a module"),
    "RankPool": (lambda: RankPool(0).run(plain_function), "world_size", "0", "pass the number of ranks"),
    "ShapedHosts": (lambda: ShapedHosts([2, 0], 100), "hosts", "[2, 0]", "list ranks per host"),
    "all_reduce, op": (lambda: Group.single().all_reduce(X, "product"), "op", "'product'", "choose one"),
    "ClusterAllReduce": (lambda: ClusterAllReduce(Group.single(), 3), "bits", "3", "choose one"),
    "SketchAllReduce": (lambda: SketchAllReduce(Group.single(), 0), "num_columns", "0", "pass a few"),
    "Interconnect.preset": (lambda: Interconnect.preset("pigeon"), "name", "'pigeon'", "choose one, or measure"),
    "Interconnect.seconds": (
        lambda: Interconnect.preset("loopback-cpu").seconds("gossip", 1),
        "operation",
        "'gossip'",
        "choose one",
    ),
    "Curve": (lambda: Curve((1.0,), (1.0, 2.0)), "curve", "((1.0,), (1.0, 2.0))", "Curve.fit"),
    "Topology.preset": (lambda: Topology.preset("abacus"), "name", "'abacus'", "load a topology"),
}


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_the_message_names_argument_value_and_remedy(name):
    call, argument, value, remedy = WRONG_CALLS[name]
    with pytest.raises(CoreKernelsError) as caught:
        call()
    message = str(caught.value)
    assert argument in message
    assert value in message
    assert remedy in message
    # Three parts: the fact, what was expected (or where it lies outside), and what to do, behind the last semicolon.
    assert re.search(r"expected|outside", message), message
    assert len(message.rpartition(";")[2].split()) >= 2, message


def test_all_of_them_are_argument_errors_of_python_too():
    kinds = set()
    for call, *_ in WRONG_CALLS.values():
        with pytest.raises((ValueError, TypeError)) as caught:
            call()
        kinds.add(caught.type.__name__)
    assert kinds == {"ArgumentError", "ArgumentTypeError"}
