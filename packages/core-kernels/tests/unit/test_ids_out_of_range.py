"""Ids of -1, n and n + 1 are refused wherever ids are taken, forward and backward, and the message says which."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from core_kernels import Graph, PartitionBook, nn, ops, partition_graph
from core_kernels.ops._schemas import OPERATORS
from core_kernels.store import FeatureStore, NpyRows

N = 4
RAW = torch.ops.core_kernels
GRAPH = Graph.from_edge_index(torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), N)
BOOK = partition_graph(GRAPH, 2, "random")
OFFSETS = torch.tensor([0, 2, 3])


def table():
    return torch.ones(N, 2)


def rows():
    return torch.ones(3, 2)


#: Raw operators that take ids: calls with three ids, of which the second is bad.
RAW_CALLS = {
    "gather": lambda ids: RAW.gather(table(), ids, True),
    "gather_out": lambda ids: RAW.gather_out(table(), ids, True, rows()),
    "scatter_add": lambda ids: RAW.scatter_add(rows(), ids, N, True),
    "bucket_by_owner": lambda ids: RAW.bucket_by_owner(ids, torch.tensor([0, 2, N]), True),
    "unpack_rows_": lambda ids: RAW.unpack_rows_(table(), ids, rows(), False, True),
    "embedding_bag": lambda ids: RAW.embedding_bag(table(), ids, OFFSETS, None, False, True),
    "embedding_bag_backward": lambda ids: RAW.embedding_bag_backward(rows()[:2], ids, OFFSETS, None, False, N, True),
    "embedding_bag_sample_weight_backward": lambda ids: RAW.embedding_bag_sample_weight_backward(
        rows()[:2], table(), ids, OFFSETS, False, True
    ),
    "embedding_update_": lambda ids: RAW.embedding_update_(
        table(), None, None, ids, OFFSETS, rows()[:2], None, "sgd", False, 0.1, 0.0, 0.0, 0.0, 0.0, 1, True
    ),
    "sample_neighbors": lambda ids: RAW.sample_neighbors(
        GRAPH.indptr, GRAPH.indices, None, ids, None, 1, False, 0, 0, 0
    ),
    "sample_block": lambda ids: RAW.sample_block(GRAPH.indptr, GRAPH.indices, None, ids, None, 1, False, 0, 0, 0, N),
}

#: Public functions and methods that take ids.
PUBLIC_CALLS = {
    "gather": lambda ids: ops.gather(table(), ids),
    "gather, with gradient": lambda ids: ops.gather(table().requires_grad_(), ids),
    "gather, int32": lambda ids: ops.gather(table(), ids.int()),
    "gather, given output": lambda ids: ops.gather(table(), ids, out=rows()),
    "pack_rows": lambda ids: ops.pack_rows(table(), ids),
    "scatter_add": lambda ids: ops.scatter_add(rows(), ids, N),
    "unpack_rows": lambda ids: ops.unpack_rows(table(), ids, rows()),
    "bucket_by_owner": lambda ids: ops.bucket_by_owner(ids, torch.tensor([0, 2, N])),
    "embedding_bag": lambda ids: ops.embedding_bag(table().requires_grad_(), ids, OFFSETS),
    "fused_sgd_": lambda ids: ops.fused_sgd_(table(), ids, OFFSETS, rows()[:2], 0.1),
    "fused_adagrad_": lambda ids: ops.fused_adagrad_(table(), table(), ids, OFFSETS, rows()[:2], 0.1),
    "fused_rowwise_adagrad_": lambda ids: ops.fused_rowwise_adagrad_(
        table(), torch.ones(N), ids, OFFSETS, rows()[:2], 0.1
    ),
    "fused_adam_": lambda ids: ops.fused_adam_(table(), table(), table(), ids, OFFSETS, rows()[:2], 0.1, 1),
    "sample_neighbors": lambda ids: ops.sample_neighbors(GRAPH, ids, 2),
    "sample_block": lambda ids: ops.sample_block(GRAPH, ids, 2),
    "sample_blocks": lambda ids: ops.sample_blocks(GRAPH, ids, [2, 2]),
    "Graph": lambda ids: Graph(torch.tensor([0, 1, 2, 3, 3]), ids, N),
    "Graph.from_edge_index, sources": lambda ids: Graph.from_edge_index(torch.stack([ids, ids.clamp(0, N - 1)]), N),
    "Graph.from_edge_index, destinations": lambda ids: Graph.from_edge_index(
        torch.stack([ids.clamp(0, N - 1), ids]), N
    ),
    "Graph.in_subgraph": lambda ids: GRAPH.in_subgraph(ids),
    "Graph.permute": lambda ids: GRAPH.permute(torch.cat([ids, torch.tensor([2])])),
    "PartitionBook.owner": lambda ids: BOOK.owner(ids),
    "PartitionBook.to_new": lambda ids: BOOK.to_new(ids),
    "PartitionBook.to_old": lambda ids: BOOK.to_old(ids),
    "PartitionBook": lambda ids: PartitionBook(
        torch.tensor([0, N]), torch.cat([ids, torch.tensor([2])]), "given", 0, 1.0
    ),
    "partition_graph": lambda ids: partition_graph(GRAPH, N, "given", parts=torch.cat([ids, torch.tensor([2])])),
    "FeatureStore.gather": lambda ids: FeatureStore(table()).gather(ids),
    "FeatureStore.prefetch": lambda ids: FeatureStore(table()).prefetch(ids),
    "RGCNConv": lambda ids: nn.RGCNConv(2, 2, N)(GRAPH, table(), torch.cat([ids, torch.tensor([2])])),
}


def refused(call, bad):
    with pytest.raises(ValueError, match=rf"(?<![\d.]){re.escape(str(bad))}(?!\d)"):
        call(torch.tensor([1, bad, 0]))


@pytest.mark.parametrize("bad", [-1, N, N + 1])
@pytest.mark.parametrize("name", RAW_CALLS)
def test_raw_operators(name, bad):
    refused(RAW_CALLS[name], bad)


@pytest.mark.parametrize("bad", [-1, N, N + 1])
@pytest.mark.parametrize("name", PUBLIC_CALLS)
def test_public_functions(name, bad):
    refused(PUBLIC_CALLS[name], bad)


@pytest.mark.parametrize("calls", [RAW_CALLS, PUBLIC_CALLS], ids=["raw", "public"])
def test_the_same_calls_with_good_ids_pass(calls):
    for call in calls.values():
        call(torch.tensor([1, 3, 0]))


def test_every_operator_that_takes_ids_is_listed():
    takes = {name for name, one in OPERATORS.items() if re.search(r"Tensor (ids|index|seeds)\b", one.signature)}
    assert takes - {"unique_relabel"} == set(RAW_CALLS)  # relabelling takes any number for an id


@pytest.mark.parametrize("bad", [-1, N, N + 1])
def test_ids_that_turn_bad_before_the_backward(bad):
    # Memory shared with numpy changes without torch's knowledge, and a gradient must not be written outside its table.
    ids = np.array([1, 3, 0])
    index = torch.from_numpy(ids)
    factors = torch.ones(3, requires_grad=True)
    for call in (
        lambda: ops.gather(table().requires_grad_(), index),
        lambda: ops.scatter_add(rows().requires_grad_(), index, N),
        lambda: ops.embedding_bag(table().requires_grad_(), index, OFFSETS),
        lambda: ops.embedding_bag(table(), index, OFFSETS, factors),
    ):
        ids[1] = 3
        out = call()
        ids[1] = bad
        with pytest.raises(ValueError, match=f"holds {bad}, outside"):
            out.sum().backward()


@pytest.mark.parametrize("bad", [-1, N, N + 1])
def test_rows_of_files(tmp_path, bad):
    np.save(tmp_path / "table.npy", table().numpy())
    reader = NpyRows(tmp_path / "table.npy")
    with pytest.raises(ValueError, match=f"rows={bad}"):
        reader.read(torch.tensor([bad]))
    reader.close()
    with FeatureStore(tmp_path / "table.npy") as store:
        refused(store.prefetch, bad)
