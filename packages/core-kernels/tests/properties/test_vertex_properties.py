"""All emitters agree with autograd on the plain torch code, forward and every gradient."""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import core_kernels.nn.gcn
import core_kernels.nn.gin
import core_kernels.nn.rgcn
import core_kernels.nn.sage
from core_kernels import Graph, backend, vertex
from core_kernels.nn import gat as gat_module
from core_kernels.nn.gat import gat, gat_with_edges, gatv2, gatv2_with_edges
from core_kernels.nn.gcn import gcn, plain_sum, weighted_gcn, weighted_sum
from core_kernels.nn.gin import gin
from core_kernels.nn.sage import sage_max, sage_mean, sage_min, sage_sum
from core_kernels.testing.emulator import compiler_skip_reason
from core_kernels.vertex.compiled import compiled
from core_kernels.vertex.emit_torch import compile_torch
from core_kernels.vertex.passes import Widths

EMITTERS = ["torch", "numba", *([] if compiler_skip_reason() else ["emulate"])]

#: The programs of all layers: APPNP runs those of graph convolution, relational convolution those of GraphSAGE.
#: Shape of each input by kind and name; "w" is the width drawn, "h" the number of heads.
PROGRAMS = {
    "gcn": (gcn, {"norm": (1,), "h": ("w",)}),
    "weighted_gcn": (weighted_gcn, {"weight": (1,), "norm": (1,), "h": ("w",)}),
    "weighted_sum": (weighted_sum, {"weight": (1,), "h": ("w",)}),
    "plain_sum": (plain_sum, {"h": ("w",)}),
    "gin": (gin, {"h": ("w",)}),
    "sage_sum": (sage_sum, {"h": ("w",)}),
    "sage_mean": (sage_mean, {"h": ("w",)}),
    "sage_max": (sage_max, {"h": ("w",)}),
    "sage_min": (sage_min, {"h": ("w",)}),
    "gat": (gat, {"score": ("h", 1), "h": ("h", "w")}),
    "gat_with_edges": (gat_with_edges, {"score": ("h", 1), "keep": ("h", 1), "h": ("h", "w")}),
    "gatv2": (gatv2, {"att": ("h", "w"), "h": ("h", "w"), "query": ("h", "w")}),
    "gatv2_with_edges": (
        gatv2_with_edges,
        {"att": ("h", "w"), "h": ("h", "w"), "query": ("h", "w"), "keep": (1, 1)},
    ),
}


@st.composite
def graphs(draw):
    """Draw a graph with duplicates, self-loops, isolated vertices and, at times, no edges at all."""
    num_nodes = draw(st.integers(1, 12))
    node = st.integers(0, num_nodes - 1)
    edges = draw(st.lists(st.tuples(node, node), max_size=40))
    if edges and draw(st.booleans()):
        edges = [edges[0]] * len(edges)
    return Graph.from_edge_index(torch.tensor(edges, dtype=torch.int64).reshape(-1, 2).t(), num_nodes)


def make_inputs(program, shapes, graph, width, heads):
    generator = torch.Generator().manual_seed(width * 31 + heads)
    sizes = {"w": width, "h": heads}
    rows = {"S": graph.num_src, "D": graph.num_dst, "E": graph.num_edges}
    groups = {"S": {}, "D": {}, "E": {}, "P": {}}
    for kind, _, name in program._inputs:
        shape = [sizes.get(axis, axis) for axis in shapes[name]]
        shape = shape if kind == "P" else [rows[kind], *shape]
        groups[kind][name] = torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
    return groups


def run(program, graph, groups, grad):
    arguments = {"src": groups["S"], "dst": groups["D"], "edge": groups["E"], "params": groups["P"]}
    out = program(graph, **arguments)
    inputs = [groups[kind][name] for kind, _, name in program._inputs]
    return [out.detach(), *torch.autograd.grad(out, inputs, grad(out))]


def run_plain(program, graph, groups, grad):
    """Run the emitted torch code under torch's own autograd: independent of our gradients and kernels."""
    tensors = [groups[kind][name] for kind, _, name in program._inputs]
    shapes = tuple(tuple(t.shape[kind != "P" :]) for t, (kind, _, _) in zip(tensors, program._inputs, strict=True))
    code = compiled(program.specialise(shapes, ())[0])
    flat = []
    for tensor, (kind, _, _), shape in zip(tensors, program._inputs, shapes, strict=True):
        rows = graph.to_positions(tensor) if kind == "E" else tensor
        flat.append(rows.reshape(1 if kind == "P" else rows.shape[0], *(1, 1, *shape)[-2:]))
    source, destination = graph.coo()
    sizes = {("S", ""): graph.num_src, ("D", ""): graph.num_dst}
    degree = {"": graph.in_degrees()}
    call = compile_torch(code.program)
    (out,) = call(flat, {"": source.long()}, {"": destination.long()}, sizes, Widths(), degree)
    rank = max(len(shape) for shape in shapes)
    out = out.expand(graph.num_dst, -1, -1).reshape(graph.num_dst, *out.shape[3 - rank :])
    return [out.detach(), *torch.autograd.grad(out, tensors, grad(out), allow_unused=True)]


def assert_agree(program, shapes, graph, width, heads, emitters, tolerance=1e-10):
    groups = make_inputs(program, shapes, graph, width, heads)
    grad = lambda out: torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)  # noqa: E731
    expected = run_plain(program, graph, groups, grad)
    for name in emitters:
        with backend(name):
            found = run(program, graph, groups, grad)
        for one, other in zip(found, expected, strict=True):
            other = torch.zeros_like(one) if other is None else other
            scale = 1 + (other.abs().max() if other.numel() else 0)
            assert one.shape == other.shape
            assert one.numel() == 0 or (one - other).abs().max() <= tolerance * scale, name


def test_the_programs_of_all_layers_are_listed():
    modules = (gat_module, core_kernels.nn.gcn, core_kernels.nn.gin, core_kernels.nn.rgcn, core_kernels.nn.sage)
    shipped = {
        id(value) for module in modules for value in vars(module).values() if isinstance(value, vertex.VertexProgram)
    }
    assert shipped == {id(program) for program, _ in PROGRAMS.values()}


@pytest.mark.parametrize("key", PROGRAMS)
@settings(max_examples=12, deadline=None)
@given(graph=graphs(), width=st.integers(1, 65), heads=st.sampled_from([1, 3]))
def test_all_emitters_agree_with_autograd(key, graph, width, heads):
    program, shapes = PROGRAMS[key]
    assert_agree(program, shapes, graph, width, heads, EMITTERS)


@pytest.mark.parametrize("key", PROGRAMS)
@settings(max_examples=3, deadline=None, phases=[Phase.generate])  # the first example is always the smallest
@given(sample=st.lists(graphs(), min_size=5, max_size=5))
def test_all_emitters_agree_at_every_width_from_1_to_65(key, sample):
    program, shapes = PROGRAMS[key]
    for width in range(1, 66):
        assert_agree(program, shapes, sample[width % len(sample)], width, 3, EMITTERS)


def test_a_wrong_gradient_would_be_seen(monkeypatch):
    from core_kernels.vertex import autodiff

    broken = autodiff._DERIVATIVES | {"leaky_relu": autodiff._DERIVATIVES["relu"]}
    monkeypatch.setattr(autodiff, "_DERIVATIVES", broken)
    graph = Graph.from_edge_index(torch.tensor([[0, 1, 2, 3, 1], [1, 2, 3, 0, 0]]), 4)
    compiled.cache_clear()  # what other tests have differentiated keeps its right gradient
    try:
        with pytest.raises(AssertionError):
            assert_agree(*PROGRAMS["gat"], graph, 5, 2, ["torch"])
    finally:
        compiled.cache_clear()  # and no other test may get the wrong one
