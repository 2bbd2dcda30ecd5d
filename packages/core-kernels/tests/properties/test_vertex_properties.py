"""All emitters agree with autograd on the plain torch code, forward and every gradient."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core_kernels import Graph, backend
from core_kernels.nn.gat import gat, gat_with_edges, gatv2, gatv2_with_edges
from core_kernels.nn.gcn import gcn, plain_sum, weighted_gcn
from core_kernels.nn.sage import sage_max, sage_mean, sage_min
from core_kernels.testing.emulator import compiler_skip_reason
from core_kernels.vertex.compiled import compiled
from core_kernels.vertex.emit_torch import compile_torch
from core_kernels.vertex.passes import Widths

#: Shape of each input by kind and name; "w" is the width drawn, "h" the number of heads.
PROGRAMS = {
    "gcn": (gcn, {"norm": (1,), "h": ("w",)}),
    "weighted_gcn": (weighted_gcn, {"weight": (1,), "norm": (1,), "h": ("w",)}),
    "gin": (plain_sum, {"h": ("w",)}),
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


def assert_agree(program, shapes, graph, width, heads, name, tolerance=1e-10):
    groups = make_inputs(program, shapes, graph, width, heads)
    grad = lambda out: torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)  # noqa: E731
    expected = run_plain(program, graph, groups, grad)
    with backend(name):
        found = run(program, graph, groups, grad)
    for one, other in zip(found, expected, strict=True):
        other = torch.zeros_like(one) if other is None else other
        scale = 1 + (other.abs().max() if other.numel() else 0)
        assert one.shape == other.shape
        assert one.numel() == 0 or (one - other).abs().max() <= tolerance * scale


@pytest.mark.parametrize("key", sorted(PROGRAMS.keys() - {"gat", "gatv2", "sage_min"}))
@settings(max_examples=20, deadline=None)
@given(graph=graphs(), width=st.integers(1, 65), heads=st.sampled_from([1, 2, 3]))
def test_numba_and_torch_agree_with_autograd(key, graph, width, heads):
    program, shapes = PROGRAMS[key]
    for name in ("torch", "numba"):
        assert_agree(program, shapes, graph, width, heads, name)


@pytest.mark.parametrize("key", ["gat_with_edges", "gatv2", "sage_max", "weighted_gcn"])
def test_every_width_from_1_to_65(key):
    program, shapes = PROGRAMS[key]
    edges = torch.randint(0, 9, (2, 30), generator=torch.Generator().manual_seed(0))
    graph = Graph.from_edge_index(edges, 10)
    for width in range(1, 66):
        assert_agree(program, shapes, graph, width, 2, "numba")


@pytest.mark.skipif(compiler_skip_reason() is not None, reason=str(compiler_skip_reason()))
@pytest.mark.parametrize("key", ["gat", "sage_max", "weighted_gcn"])
def test_every_width_from_1_to_65_as_cuda(key):
    program, shapes = PROGRAMS[key]
    edges = torch.randint(0, 5, (2, 12), generator=torch.Generator().manual_seed(0))
    graph = Graph.from_edge_index(edges, 6)
    for width in (*range(1, 34), 63, 64, 65):
        assert_agree(program, shapes, graph, width, 2, "emulate")


@pytest.mark.slow
@pytest.mark.skipif(compiler_skip_reason() is not None, reason=str(compiler_skip_reason()))
@pytest.mark.parametrize("key", PROGRAMS)
@settings(max_examples=10, deadline=None)
@given(graph=graphs(), width=st.integers(1, 65), heads=st.sampled_from([1, 3]))
def test_cuda_agrees_with_autograd(key, graph, width, heads):
    program, shapes = PROGRAMS[key]
    assert_agree(program, shapes, graph, width, heads, "emulate")


def test_a_wrong_gradient_would_be_seen(monkeypatch):
    from core_kernels.vertex import autodiff

    broken = autodiff._DERIVATIVES | {"leaky_relu": autodiff._DERIVATIVES["relu"]}
    monkeypatch.setattr(autodiff, "_DERIVATIVES", broken)
    program, shapes = gat.bind(slope=0.3), PROGRAMS["gat"][1]
    graph = Graph.from_edge_index(torch.tensor([[0, 1, 2, 3, 1], [1, 2, 3, 0, 0]]), 4)
    with pytest.raises(AssertionError):
        assert_agree(program, shapes, graph, 5, 2, "torch")
