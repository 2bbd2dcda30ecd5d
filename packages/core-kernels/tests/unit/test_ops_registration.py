"""What torch sees: schemas, fake tensors, compile and export, lazy lookup of implementations."""

from __future__ import annotations

import pytest
import torch

from core_kernels import Graph, backend, ops
from core_kernels.nn.gat import gat
from core_kernels.ops import _library
from core_kernels.ops._schemas import OPERATORS
from core_kernels.vertex.compiled import compiled
from core_kernels.vertex.program import _graph_arrays

RAW = torch.ops.core_kernels


def operator_calls():
    """Arguments for every raw operator; tensors that want gradients are those it is differentiable in."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape, grad=False):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_(grad)

    graph = Graph.from_edge_index(torch.tensor([[0, 1, 2, 2, 0], [1, 0, 1, 1, 3]]), 4)
    transposed = graph.transpose()
    arrays, rows = (graph.indptr, graph.indices), graph.indptr
    reverse = (transposed.indptr, transposed.indices)
    ids, seeds, offsets = torch.tensor([1, 0, 1]), torch.tensor([1, 3]), torch.tensor([0, 2, 3])
    slots = torch.where(rows.diff() > 0, 0, -1).int().unsqueeze(1).expand(4, 6).contiguous()
    sampling = (*arrays, graph.edge_ids, seeds, None, 2, False, 1, 0, 0)
    score, own, h = draw(4, 2, 1, grad=True), draw(4, 2, 1, grad=True), draw(4, 2, 3, grad=True)
    shapes = tuple(tuple(tensor.shape[1:]) for tensor in (score, own, h))
    text, _ = gat.specialise(shapes, (0, 1, 2))
    program = (*_graph_arrays([graph], True), text)
    code = compiled(text)
    results = RAW.vertex_forward([score.detach(), own.detach(), h.detach()], *program)
    saved = [results[position] for position in code.saved_results]
    return {
        "spmm_sum": (*arrays, draw(4, 6, grad=True), draw(5, 2, grad=True), graph.edge_ids, None, None)
        + (*reverse, transposed.edge_ids),
        "spmm_sum_out": (*arrays, draw(4, 6), None, graph.edge_ids, None, None, torch.empty(4, 6).double()),
        "spmm_extremum": (*arrays, draw(4, 6, grad=True), draw(5, 2, grad=True), graph.edge_ids, True)
        + (*reverse, graph.transpose_positions()),
        "spmm_extremum_backward": (*arrays, draw(4, 6), slots, draw(5, 2), graph.edge_ids)
        + (*reverse, graph.transpose_positions()),
        "spmm_extremum_weight_backward": (*arrays, draw(4, 6), draw(4, 6), slots, graph.edge_ids, 2),
        "sddmm": (*arrays, draw(4, 6, grad=True), draw(4, 6, grad=True), graph.edge_ids, "dot", 2)
        + (*reverse, transposed.edge_ids),
        "segment_sum": (draw(5, 2, grad=True), rows, graph.edge_ids, None),
        "segment_expand": (draw(4, 2, grad=True), rows, graph.edge_ids, None, 5),
        "segment_extremum": (draw(5, 2, grad=True), rows, graph.edge_ids, False),
        "segment_extremum_backward": (draw(4, 6), slots, rows, graph.edge_ids, 5),
        "segment_softmax": (draw(5, 2, grad=True), rows, graph.edge_ids),
        "segment_softmax_backward": (draw(5, 2, grad=True), draw(5, 2, grad=True), rows, graph.edge_ids),
        "sample_neighbors": sampling,
        "sample_block": (*sampling, 4),
        "unique_relabel": (ids,),
        "gather": (draw(4, 6, grad=True), ids, True),
        "gather_out": (draw(4, 6), seeds, True, torch.empty(2, 6).double()),
        "scatter_add": (draw(3, 6, grad=True), ids, 3, True),
        "bucket_by_owner": (ids, offsets, True),
        "unpack_rows_": (draw(4, 6), seeds, draw(2, 6), True, True),
        "embedding_bag": (draw(4, 6, grad=True), ids, offsets, draw(3, grad=True), True, True),
        "embedding_bag_backward": (draw(2, 6), ids, offsets, draw(3), True, 4, True),
        "embedding_bag_sample_weight_backward": (draw(2, 6), draw(4, 6), ids, offsets, False, True),
        "embedding_update_": (draw(4, 6), draw(4, 6).abs(), None, ids, offsets, draw(2, 6), None, "adagrad", False)
        + (0.1, 1e-8, 0.0, 0.0, 0.0, 1, True),
        "quantize_rows": (draw(4, 6).float(), 4),
        "dequantize_rows": (torch.ones(4, 3, dtype=torch.uint8), torch.ones(4), torch.zeros(4), 4, 6),
        "sketch_insert_": (torch.zeros(3, 8), ids, draw(3).float(), 7),
        "sketch_estimate": (torch.ones(3, 8), ids, 7),
        "vertex_forward": ([score, own, h], *program),
        "vertex_backward": ([score.detach(), own.detach(), h.detach()], saved, [draw(4, 2, 3)], *program),
    }


def wants_gradient(arguments):
    flat = [one for arg in arguments for one in (arg if isinstance(arg, list) else [arg])]
    return any(isinstance(one, torch.Tensor) and one.requires_grad for one in flat)


def test_every_operator_has_a_call():
    names = [name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("core_kernels::")]
    assert set(operator_calls()) == set(names)
    assert set(OPERATORS) | {"vertex_forward", "vertex_backward"} == set(names)


@pytest.mark.parametrize("op", [*OPERATORS, "vertex_forward", "vertex_backward"])
def test_opcheck(op):
    arguments = operator_calls()[op]
    checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
    if wants_gradient(arguments):
        checks.append("test_aot_dispatch_static")
    torch.library.opcheck(getattr(RAW, op).default, arguments, test_utils=checks)


@pytest.mark.parametrize("op", sorted(op for op, arguments in operator_calls().items() if wants_gradient(arguments)))
def test_gradients_of_differentiable_operators(op):
    operator, arguments = getattr(RAW, op).default, operator_calls()[op]
    for name in ("torch", "numba"):
        with backend(name):
            if isinstance(arguments[0], list):
                first = arguments[0]
                assert torch.autograd.gradcheck(lambda *inputs: operator(list(inputs), *arguments[1:])[0], first)
                continue
            assert torch.autograd.gradcheck(lambda *inputs: floating(operator(*inputs)), arguments)


def floating(result):
    """Return the differentiable part of a result: extrema come with integer slots."""
    return result[0] if isinstance(result, tuple) else result


def attention(graph, x, logits):
    return ops.spmm(graph, x, ops.segment_softmax(graph, logits)).relu()


def test_compile_without_graph_breaks():
    graph = Graph.from_edge_index(torch.randint(0, 20, (2, 90)), 20)
    x, logits = torch.randn(20, 3, 4, requires_grad=True), torch.randn(90, 3, requires_grad=True)
    compiled = torch.compile(lambda x, logits: attention(graph, x, logits), fullgraph=True, backend="aot_eager")
    ours = torch.autograd.grad(compiled(x, logits).sum(), (x, logits))
    eager = torch.autograd.grad(attention(graph, x, logits).sum(), (x, logits))
    assert all(torch.allclose(a, b) for a, b in zip(ours, eager, strict=True))


def test_export_keeps_the_operators_and_leaves_the_graph_usable():
    graph = Graph.from_edge_index(torch.randint(0, 20, (2, 90)), 20)

    class Layer(torch.nn.Module):
        def forward(self, x, logits):
            return attention(graph, x, logits)

    x, logits = torch.randn(20, 3, 4, requires_grad=True), torch.randn(90, 3)
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
