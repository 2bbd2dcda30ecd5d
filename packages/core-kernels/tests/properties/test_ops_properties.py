"""Operators on arbitrary small graphs: fast kernels against the reference in float64, and laws between operators."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core_kernels import Graph, backend, ops


@st.composite
def graphs(draw):
    """Graphs with parallel edges, self-loops, isolated nodes, in any order of edges; also empty ones."""
    num_src, num_dst = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    edge = st.tuples(st.integers(0, num_src - 1), st.integers(0, num_dst - 1))
    edges = draw(st.lists(edge, max_size=40))
    if draw(st.booleans()):
        edges.sort(key=lambda pair: pair[1])
    if edges and draw(st.booleans()):
        edges = [edges[0]] * len(edges)
    edge_index = torch.tensor(edges, dtype=torch.int64).reshape(-1, 2).t()
    return Graph.from_edge_index(edge_index, (num_src, num_dst))


def values(seed, *shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def grads(function, *leaves):
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out).cumsum(0))]


def check(function, *leaves):
    ours = grads(function, *leaves)
    with backend("torch"):
        expected = grads(function, *(leaf.double() for leaf in leaves))
    for found, oracle in zip(ours, expected, strict=True):
        assert torch.allclose(found.double(), oracle, atol=1e-3, rtol=1e-4)


@settings(max_examples=40, deadline=None)
@given(graphs(), st.integers(1, 65), st.sampled_from(["sum", "mean", "max", "min"]), st.integers(0, 99))
def test_spmm(graph, width, reduce, seed):
    x, weight = values(seed, graph.num_src, width), values(seed + 1, graph.num_edges)
    check(lambda x, w: ops.spmm(graph, x, w, reduce), x, weight)


@settings(max_examples=30, deadline=None)
@given(graphs(), st.integers(1, 5), st.integers(1, 20), st.integers(0, 99))
def test_attention(graph, heads, width, seed):
    x, y = values(seed, graph.num_src, heads, width), values(seed + 1, graph.num_dst, heads, width)
    check(lambda x, y: ops.spmm(graph, x, ops.segment_softmax(graph, ops.sddmm(graph, x, y))), x, y)


@settings(max_examples=30, deadline=None)
@given(graphs(), st.integers(0, 99))
def test_adjoint_of_spmm_is_spmm_of_the_transpose(graph, seed):
    x, y = values(seed, graph.num_src, 9, dtype=torch.float64), values(seed, graph.num_dst, 9, dtype=torch.float64)
    weight = values(seed + 1, graph.num_edges, dtype=torch.float64)
    forward = (ops.spmm(graph, x, weight) * y).sum()
    assert torch.allclose(forward, (x * ops.spmm(graph.transpose(), y, weight)).sum())


@settings(max_examples=30, deadline=None)
@given(graphs(), st.integers(1, 6), st.booleans(), st.integers(0, 2**32))
def test_sampling(graph, fanout, replace, seed):
    seeds = torch.arange(graph.num_dst)
    ours = ops.sample_neighbors(graph, seeds, fanout, seed, replace)
    with backend("torch"):
        expected = ops.sample_neighbors(graph, seeds, fanout, seed, replace)
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(-3, 12), max_size=50), st.booleans())
def test_relabel(ids, wide):
    keys = torch.tensor(ids, dtype=torch.int64) * (10**15 if wide else 1)
    unique, local = ops.unique_relabel(keys[:0], keys)
    assert torch.equal(unique[local], keys)
    assert unique.tolist() == list(dict.fromkeys(keys.tolist()))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 9), st.lists(st.integers(0, 8), max_size=40), st.integers(1, 65), st.integers(0, 99))
def test_scatter_add_is_the_adjoint_of_gather(num_rows, ids, width, seed):
    index = torch.tensor([i % num_rows for i in ids], dtype=torch.int64)
    x = values(seed, num_rows, width, dtype=torch.float64)
    y = values(seed + 1, len(ids), width, dtype=torch.float64)
    assert torch.allclose((ops.gather(x, index) * y).sum(), (x * ops.scatter_add(y, index, num_rows)).sum())
