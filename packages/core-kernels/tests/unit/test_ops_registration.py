"""What torch sees: schemas, fake tensors, compile and export, lazy lookup of implementations."""

from __future__ import annotations

import pytest
import torch

from core_kernels import Graph, backend, ops
from core_kernels.ops import _library
from core_kernels.ops._schemas import OPERATORS

RAW = torch.ops.core_kernels


def graph_arrays():
    graph = Graph.from_edge_index(torch.tensor([[0, 1, 2, 2, 0], [1, 0, 1, 1, 3]]), 4)
    transposed = graph.transpose()
    return graph.indptr, graph.indices, graph.edge_ids, transposed.indptr, transposed.indices, transposed.edge_ids


def differentiable_calls():
    indptr, indices, edge_ids, *transposed = graph_arrays()
    x, weight = torch.randn(4, 6, requires_grad=True), torch.randn(5, 2, requires_grad=True)
    logits, ids = torch.randn(5, 2, requires_grad=True), torch.tensor([1, 0, 1])
    return {
        "spmm_sum": (indptr, indices, x, weight, edge_ids, None, None, *transposed),
        "sddmm": (indptr, indices, x, torch.randn(4, 6, requires_grad=True), edge_ids, "dot", 2, *transposed),
        "segment_softmax": (logits, indptr, edge_ids),
        "segment_sum": (logits, indptr, edge_ids, None),
        "gather": (x, ids, True),
        "scatter_add": (x, torch.tensor([1, 0, 1, 2]), 3, True),
        "embedding_bag": (x, ids, torch.tensor([0, 2, 3]), None, True, True),
    }


@pytest.mark.parametrize("op", differentiable_calls())
def test_opcheck_of_differentiable_operators(op):
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(getattr(RAW, op).default, differentiable_calls()[op], test_utils=checks)


def test_opcheck_of_the_others():
    indptr, indices, edge_ids, *_ = graph_arrays()
    seeds, ids, x = torch.tensor([1, 3]), torch.tensor([5, 2, 5]), torch.randn(4, 6)
    calls = {
        "spmm_sum_out": (indptr, indices, x, None, edge_ids, None, None, torch.empty(4, 6)),
        "spmm_extremum": (indptr, indices, x, None, edge_ids, True, None, None, None),
        "segment_extremum": (torch.randn(5, 2), indptr, edge_ids, False),
        "sample_neighbors": (indptr, indices, edge_ids, seeds, None, 2, False, 1, 0, 0),
        "sample_block": (indptr, indices, edge_ids, seeds, None, 2, False, 1, 0, 0, 4),
        "unique_relabel": (ids,),
        "gather_out": (x, seeds, True, torch.empty(2, 6)),
        "bucket_by_owner": (ids, torch.tensor([0, 3, 6]), True),
        "unpack_rows_": (torch.zeros(4, 6), seeds, x[:2].clone(), True, True),
        "quantize_rows": (x, 4),
        "sketch_insert_": (torch.zeros(3, 8), ids, torch.randn(3), 7),
    }
    for op, arguments in calls.items():
        torch.library.opcheck(getattr(RAW, op).default, arguments, test_utils=("test_schema", "test_faketensor"))


def attention(graph, x, logits):
    return ops.spmm(graph, x, ops.segment_softmax(graph, logits)).relu()


def test_compile_without_graph_breaks():
    graph = Graph.from_edge_index(torch.randint(0, 20, (2, 90)), 20)
    graph.transpose()
    x, logits = torch.randn(20, 3, 4, requires_grad=True), torch.randn(90, 3, requires_grad=True)
    compiled = torch.compile(lambda x, logits: attention(graph, x, logits), fullgraph=True, backend="aot_eager")
    ours = torch.autograd.grad(compiled(x, logits).sum(), (x, logits))
    eager = torch.autograd.grad(attention(graph, x, logits).sum(), (x, logits))
    assert all(torch.allclose(a, b) for a, b in zip(ours, eager, strict=True))


def test_export_keeps_the_operators():
    graph = Graph.from_edge_index(torch.randint(0, 20, (2, 90)), 20)

    class Layer(torch.nn.Module):
        def forward(self, x, logits):
            return attention(graph, x, logits)

    x, logits = torch.randn(20, 3, 4), torch.randn(90, 3)
    program = torch.export.export(Layer(), (x, logits))
    targets = {str(node.target) for node in program.graph.nodes}
    assert {"core_kernels.spmm_sum.default", "core_kernels.segment_softmax.default"} <= targets
    assert torch.equal(program.module()(x, logits), attention(graph, x, logits))


def test_every_operator_is_registered_and_has_both_cpu_implementations():
    for op in OPERATORS:
        assert hasattr(RAW, op), op
        if not op.endswith("_out"):
            assert callable(_library.implementation(op, "numba"))
            assert callable(_library.implementation(op, "torch"))


def test_a_backend_that_cannot_run_says_so():
    with backend("cuda"), pytest.raises(ValueError, match="CUDA tensors"):
        ops.gather(torch.randn(2, 2), torch.tensor([0]))
