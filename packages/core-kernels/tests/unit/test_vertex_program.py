"""Tracing, lowering, planning and what a program tells of itself."""

from __future__ import annotations

import copy
import inspect
import pickle
import threading

import pytest
import torch
import torch.nn.functional as F

from core_kernels import Graph, backend, nn, vertex
from core_kernels.errors import ArgumentError, ArgumentTypeError
from core_kernels.nn.gat import gat, gatv2
from core_kernels.nn.gcn import gcn
from core_kernels.nn.sage import sage_max, sage_mean
from core_kernels.vertex.compiled import CompiledProgram, compiled
from core_kernels.vertex.emit_numba import emit_numba
from core_kernels.vertex.emit_torch import emit_torch
from core_kernels.vertex.ir import AGGREGATIONS, Program

WIDE, NARROW = (4, 32), (4, 1)


def compile_program(program, **shapes):
    keys = tuple(tuple(shapes[name]) for _, _, name in program._inputs)
    text, _ = program.specialise(keys, tuple(range(len(keys))))
    return compiled(text)


@pytest.fixture
def square():
    return Graph.from_edge_index(torch.tensor([[0, 1, 2, 2, 1], [1, 2, 0, 0, 1]]), 4)


def test_a_gat_layer_is_at_most_six_lines():
    assert len(inspect.getsource(gat._function).splitlines()) <= 6


def test_reads_and_states_of_attention():
    assert gat.reads == vertex.Reads(("score", "h"), ("score",), (), ())
    assert gatv2.reads.params == ("att",)
    (state,) = gat.states
    assert state.kind == "softmax_sum"
    assert state.fields == ("shift", "normaliser", "total")
    assert [state.kind for state in sage_mean.states] == ["mean"]


@pytest.mark.parametrize("kind", ["sum", "mean", "max", "min"])
def test_states_of_parts_merge_into_the_whole(kind):
    x = torch.randn(9, 3, dtype=torch.float64)

    @vertex.program
    def layer(v):
        return getattr(vertex, kind)(e.src.x for e in v.in_edges)

    (state,) = layer.states

    def of(rows):
        if kind in ("max", "min"):
            return (getattr(rows, f"a{kind}")(0),)
        return (rows.sum(0), torch.tensor(float(len(rows)))) if kind == "mean" else (rows.sum(0),)

    merged = state.finish(state.merge(of(x[:4]), of(x[4:])))
    graph = Graph.from_edge_index(torch.stack([torch.arange(9), torch.zeros(9, dtype=torch.int64)]), (9, 1))
    torch.testing.assert_close(merged, layer(graph, src={"x": x})[0])


def test_softmax_states_merge_with_rescaling():
    (state,) = gat.states
    logits, h = torch.tensor([900.0, 1000.0, 1.0, -5.0]).double(), torch.randn(4, dtype=torch.float64)

    def of(part):
        shift = logits[part].max()
        weights = (logits[part] - shift).exp()
        return shift, weights.sum(), (weights * h[part]).sum()

    merged = state.finish(state.merge(of(slice(0, 1)), of(slice(1, 4))))
    torch.testing.assert_close(merged, (logits.softmax(0) * h).sum())
    unscaled = state.finish(tuple(a + b for a, b in zip(of(slice(0, 1)), of(slice(1, 4)), strict=True)))
    assert not torch.allclose(unscaled, merged)


def test_constants_fold_and_equal_values_are_shared():
    @vertex.program
    def layer(v):
        scale = 2.0 * 3.0 - 5.0
        left = vertex.sum(e.src.x * v.y for e in v.in_edges)
        right = vertex.sum(v.y * e.src.x for e in v.in_edges)
        return (left + right) * scale

    forward = compile_program(layer, x=(7,), y=(7,)).program
    assert sum(node.op in AGGREGATIONS for node in forward.nodes) == 1
    assert not any(node.op == "const" for node in forward.nodes)


def test_factors_of_the_destination_leave_the_sum():
    forward = compile_program(gcn, norm=(1,), h=(7,)).program
    inside = {node.args[0] for node in forward.nodes if node.op == "sum_dst"}
    assert not any(forward.nodes[number].kind == "E" for number in inside)


def test_unused_inputs_are_kept_and_dead_values_dropped():
    @vertex.program
    def layer(v):
        vertex.exp(v.unused)
        return vertex.sum(e.src.x for e in v.in_edges)

    assert [node.op for node in compile_program(layer, x=(7,)).program.nodes] == ["input", "sum_dst"]


def test_programs_survive_their_text():
    forward = compile_program(gat, score=NARROW, h=WIDE)
    assert Program.from_text(forward.program.to_text()) == forward.program
    assert compiled(forward.to_text()).program == forward.program


@pytest.mark.parametrize(
    ("program", "shapes"),
    [
        (gat, {"score": NARROW, "h": WIDE}),
        (gatv2, {"att": WIDE, "h": WIDE, "query": WIDE}),
        (gcn, {"norm": (1,), "h": (128,)}),
        (sage_max, {"h": (128,)}),
    ],
    ids=["gat", "gatv2", "gcn", "sage-max"],
)
def test_no_wide_edge_value_reaches_memory(program, shapes):
    code = compile_program(program, **shapes)
    for plan in (code.forward_plan, code.backward_plan):
        for number in plan.arrays:
            node = plan.program.nodes[number]
            assert not (node.kind == "E" and node.is_wide)


def test_a_wide_edge_gradient_that_is_asked_for_is_stored():
    @vertex.program
    def layer(v):
        return vertex.sum(e.h * e.src.h for e in v.in_edges)

    code = compile_program(layer, h=(7,))
    plan = code.backward_plan
    assert any(plan.program.nodes[n].kind == "E" and plan.program.nodes[n].is_wide for n in plan.arrays)


def test_attention_is_one_kernel_forward():
    code = compile_program(gat, score=NARROW, h=WIDE)
    assert len(code.forward_plan.kernels) == 1
    assert len(CompiledProgram(code.program, ()).forward_plan.arrays) == 1


def test_emitted_sources_can_be_read():
    code = compile_program(gat, score=NARROW, h=WIDE)
    assert "def layer(inputs, src, dst" in emit_torch(code.program)
    assert "for p in range(lo0, hi0):" in emit_numba(code.forward_plan)[0]


def test_tracing_from_many_threads():
    results, errors = [], []

    def work():
        try:
            results.extend([str(gat.bind(slope=slope).traced) for slope in (0.1, 0.2, 0.3)])
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(set(results)) == 3


def test_torch_is_not_patched():
    before = (torch.exp, F.leaky_relu, torch.Tensor.__add__)
    gat.bind(slope=0.4)
    assert before == (torch.exp, F.leaky_relu, torch.Tensor.__add__)


def test_two_edge_types(square):
    @vertex.program
    def layer(v):
        follows = vertex.mean(e.src.x for e in v.in_edges["follows"])
        return follows + vertex.max(e.src.y * v.z for e in v.in_edges["likes"])

    likes = Graph.from_edge_index(torch.tensor([[0, 1, 1], [3, 3, 0]]), (2, 4))
    x, y, z = (torch.randn(n, 5, dtype=torch.float64, requires_grad=True) for n in (4, 2, 4))

    def run(x, y, z):
        return layer({"follows": square, "likes": likes}, src={"follows": {"x": x}, "likes": {"y": y}}, dst={"z": z})

    for name in ("torch", "numba"):
        with backend(name):
            assert torch.autograd.gradcheck(run, (x, y, z))
    expected = torch.maximum(y[0] * z[3], y[1] * z[3])
    torch.testing.assert_close(run(x, y, z)[3], expected)


def test_edge_outputs_come_in_edge_id_order(square):
    @vertex.program
    def layer(v):
        return vertex.softmax(e.src.x + e.w for e in v.in_edges)

    x, w = torch.randn(4, 1, dtype=torch.float64), torch.randn(5, 1, dtype=torch.float64)
    alpha = layer(square, src={"x": x}, edge={"w": w})
    source, destination = square.edge_index()
    logits = x[source] + w
    for vertex_id in range(3):
        at = destination == vertex_id
        torch.testing.assert_close(alpha[at], logits[at].softmax(0))


def test_large_logits_do_not_overflow(square):
    h = torch.ones(4, 2, 3)
    score = torch.full((4, 2, 1), 500.0, requires_grad=True)
    out = gat(square, src={"score": score, "h": h}, dst={"score": score})
    out.sum().backward()
    assert out.isfinite().all()
    assert score.grad.isfinite().all()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"src": {}}, "reads 'h', which is not in src"),
        ({"src": {"h": torch.ones(3, 2)}}, r"\(4, \.\.\.\)"),
        ({"src": {"h": torch.ones(4, 2, 2, 2)}}, "at most"),
    ],
)
def test_bad_inputs_are_named(square, arguments, text):
    with pytest.raises(ArgumentError, match=text):
        sage_mean(square, **arguments)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (lambda v: vertex.sum(v.x for e in v.in_edges), "same for all edges"),
        (lambda v: vertex.sum(torch.cumsum(e.src.x, 0) for e in v.in_edges), "cannot be traced"),
        (lambda v: vertex.sum(e.src.x if e.src.x else e.y for e in v.in_edges), "truth"),
        (lambda v: vertex.sum(e.src.x * torch.ones(3) for e in v.in_edges), "by name"),
        (lambda v: 3.0, "expected values per destination"),
        (lambda v: vertex.sum(e.src.x**0.3 for e in v.in_edges), "exponent"),
        (lambda v: vertex.sum(e.src.x + f.src.x for e in v.in_edges["a"] for f in v.in_edges["b"]), "edge types"),
    ],
)
def test_what_cannot_be_traced_says_so(body, text):
    def function(v):
        return body(v)

    with pytest.raises((ArgumentError, ArgumentTypeError), match=text):
        vertex.program(function)


def test_unknown_constants_are_refused():
    with pytest.raises(ArgumentError, match="slope"):
        gat.bind(slop=0.1)


def test_two_graphs_of_equal_size_do_not_share_results():
    first = Graph.from_edge_index(torch.tensor([[0, 1], [1, 2]]), 3)
    second = Graph.from_edge_index(torch.tensor([[2, 0], [0, 1]]), 3)
    x = torch.tensor([[1.0], [2.0], [4.0]])
    assert not torch.equal(sage_mean(first, src={"h": x}), sage_mean(second, src={"h": x}))


@vertex.program
def scaled_sum(v, *, factor=2.0):
    return factor * vertex.sum(e.src.h for e in v.in_edges)


def test_layers_are_copied_and_pickled(square):
    layer, x = nn.GATConv(5, 3, heads=2, negative_slope=0.3), torch.randn(4, 5)
    for other in (copy.deepcopy(layer), copy.copy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(square, x), layer(square, x))
    assert copy.deepcopy(layer).program is layer.program
    assert copy.deepcopy(layer).lin.weight is not layer.lin.weight


def test_programs_are_pickled_by_name(square):
    h = torch.randn(4, 3)
    for program in (scaled_sum, scaled_sum.bind(factor=5.0)):
        found = pickle.loads(pickle.dumps(program))
        assert torch.equal(found(square, src={"h": h}), program(square, src={"h": h}))
    assert pickle.loads(pickle.dumps(scaled_sum)) is scaled_sum

    @vertex.program
    def local(v):
        return vertex.sum(e.src.h for e in v.in_edges)

    assert copy.deepcopy(local) is local
    with pytest.raises(pickle.PicklingError, match=r"local.*top of a module"):
        pickle.dumps(local)
