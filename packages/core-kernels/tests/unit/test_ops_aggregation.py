"""spmm, sddmm and segment operators: every implementation against float64, errors, hubs, threads, 64-bit offsets."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from core_kernels import Graph, backend, ops
from core_kernels.kernels.numba import _rows
from core_kernels.kernels.numba._threads import split_ranges

WIDTHS = [1, 2, 3, 7, 15, 16, 17, 31, 33, 64, 65, 127, 128, 130, 200]


def random_graph(num_src=40, num_dst=50, num_edges=300, seed=0):
    generator = torch.Generator().manual_seed(seed)
    sources = torch.randint(0, num_src, (num_edges,), generator=generator)
    # The last destinations stay without edges; small ranges give parallel edges.
    destinations = torch.randint(0, num_dst - 5, (num_edges,), generator=generator)
    return Graph.from_edge_index(torch.stack([sources, destinations]), (num_src, num_dst))


def run_and_grads(function, leaves):
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    out = function(*leaves)
    upstream = torch.arange(out.numel(), dtype=torch.float64).sin().view(out.shape).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


def assert_matches_float64(function, leaves, tolerance):
    with backend("torch"):
        expected = run_and_grads(function, [leaf.double() for leaf in leaves])
    for name in ("numba", "torch"):
        with backend(name):
            for result, oracle in zip(run_and_grads(function, leaves), expected, strict=True):
                scale = 1 + oracle.abs().max().item() if oracle.numel() else 1
                assert (result.double() - oracle).abs().max().item() <= tolerance * scale


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("width", WIDTHS)
def test_spmm_equals_float64_at_every_width(width, reduce):
    graph = random_graph(seed=width)
    leaves = [torch.randn(40, width), torch.rand(300) + 0.5]
    assert_matches_float64(lambda x, w: ops.spmm(graph, x, w, reduce), leaves, 1e-5)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float16, 5e-3), (torch.bfloat16, 4e-2)]
)
def test_dtypes(dtype, tolerance):
    graph = random_graph()
    x, y = torch.randn(40, 3, 5).to(dtype), torch.randn(50, 3, 5).to(dtype)
    weight = torch.rand(300, 3).to(dtype)
    assert_matches_float64(lambda x, w: ops.spmm(graph, x, w), [x, weight], tolerance)
    assert_matches_float64(lambda a, b: ops.sddmm(graph, a, b), [x, y], tolerance)
    assert_matches_float64(lambda logits: ops.segment_softmax(graph, logits), [weight], tolerance)


@pytest.mark.parametrize("features", [(2, 32), (3, 5), (8, 1), (1, 20)])
def test_one_weight_per_head(features):
    graph = random_graph()
    leaves = [torch.randn(40, *features), torch.randn(300, features[0])]
    for reduce in ("mean", "max"):
        assert_matches_float64(lambda x, w, reduce=reduce: ops.spmm(graph, x, w, reduce), leaves, 1e-5)


@pytest.mark.parametrize("op", ["dot", "add", "mul"])
@pytest.mark.parametrize("features", [(1,), (13,), (3, 5), (2, 32), (200,)])
def test_sddmm(op, features):
    graph = random_graph()
    leaves = [torch.randn(40, *features), torch.randn(50, *features)]
    assert_matches_float64(lambda a, b: ops.sddmm(graph, a, b, op), leaves, 1e-5)


@pytest.mark.parametrize("heads", [(), (1,), (2,), (3,), (4,), (8,), (11,)])
def test_softmax_and_segment_reductions(heads):
    graph = random_graph()
    logits = torch.randn(300, *heads) * 5
    for where in (graph, graph.indptr):
        assert_matches_float64(lambda x, where=where: ops.segment_softmax(where, x), [logits], 1e-5)
    for reduce in ("sum", "mean", "max", "min"):
        assert_matches_float64(lambda x, r=reduce: ops.segment_reduce(x, graph.indptr, r), [logits], 1e-5)


def test_softmax_of_extreme_logits():
    indptr = torch.tensor([0, 2, 4, 6])
    infinity = float("inf")
    weights = ops.segment_softmax(indptr, torch.tensor([1e4, -1e4, -infinity, -infinity, float("nan"), 0.0]))
    assert weights[:4].tolist() == [1.0, 0.0, 0.0, 0.0]
    assert weights[4:].isnan().all()


def test_gradients_of_gradients():
    graph = random_graph(8, 9, 30)
    x, logits = torch.randn(8, 2, 3, dtype=torch.float64), torch.randn(30, 2, dtype=torch.float64)
    leaves = (x.requires_grad_(), logits.requires_grad_())
    attention = lambda x, logits: ops.spmm(graph, x, ops.segment_softmax(graph, logits))  # noqa: E731
    assert torch.autograd.gradcheck(attention, leaves)
    assert torch.autograd.gradgradcheck(attention, leaves)


def test_gradient_of_max_goes_to_the_first_of_equals():
    graph = Graph.from_edge_index(torch.tensor([[2, 0, 1], [0, 0, 0]]), (3, 1))
    x = torch.ones(3, 1, requires_grad=True)
    ops.spmm(graph, x, reduce="max").sum().backward()
    assert x.grad.flatten().tolist() == [0.0, 0.0, 1.0]


def test_results_do_not_depend_on_threads():
    graph = random_graph(500, 600, 20_000)
    leaves = [torch.randn(500, 33), torch.randn(20_000)]
    before, results = torch.get_num_threads(), []
    try:
        for num_threads in (1, 3):
            torch.set_num_threads(num_threads)
            results.append(run_and_grads(lambda x, w: ops.spmm(graph, x, w, "max"), leaves))
            results[-1] += run_and_grads(lambda x, w: ops.spmm(graph, x, ops.segment_softmax(graph, w)), leaves)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, three) for one, three in zip(*results, strict=True))


def test_ranges_cover_all_rows_once_and_balance_edges():
    pointers = np.concatenate([[0], np.cumsum([0, 0, 100, 1, 1, 98, 0])])
    ranges = split_ranges(7, 2, pointers)
    assert [row for start, stop in ranges for row in range(start, stop)] == list(range(7))
    assert len(ranges) == 2
    assert max(pointers[stop] - pointers[start] for start, stop in ranges) <= 101


def test_offsets_beyond_32_bits():
    """A row that lies 2**33 bytes behind a false base address is read at the right place, without such an array."""
    real = np.arange(32, dtype=np.float32)
    row = (1 << 26) + 3
    false_base = real.ctypes.data - row * real.nbytes
    x = np.ctypeslib.as_array(ctypes.cast(false_base, ctypes.POINTER(ctypes.c_float)), shape=(row + 1, 32))
    pointers, indices, out = np.array([0, 1]), np.array([row], dtype=np.int32), np.empty((1, 32), np.float32)
    _rows.sum_rows(0, 1, pointers, indices, x, None, 1, None, None, None, out)
    assert (out[0] == real).all()
    dots = np.empty((1, 1), np.float32)
    _rows.dot_rows(0, 1, pointers, indices, x, np.ones((1, 32), np.float32), 1, None, dots)
    assert dots[0, 0] == real.sum()


def test_strided_inputs_and_given_outputs():
    graph = random_graph()
    wide = torch.randn(40, 60)
    for x in (wide[:, ::2], wide[:, 10:30], wide.t().contiguous().t()):
        out = torch.full((50, x.shape[1]), float("nan"))
        assert torch.equal(ops.spmm(graph, x), ops.spmm(graph, x.contiguous(), out=out))


def test_empty_graphs_and_widths():
    for num_src, num_dst in ((0, 0), (3, 0), (0, 3), (3, 3)):
        graph = Graph.from_edge_index(torch.empty(2, 0, dtype=torch.int64), (num_src, num_dst))
        x = torch.randn(num_src, 5, requires_grad=True)
        for reduce in ("sum", "mean", "max"):
            out = ops.spmm(graph, x, reduce=reduce)
            out.sum().backward()
            assert out.shape == (num_dst, 5)
            assert not out.any()
        assert not x.grad.any()
        assert ops.sddmm(graph, x, torch.randn(num_dst, 5)).shape == (0,)
        assert ops.segment_softmax(graph, torch.empty(0, 2)).shape == (0, 2)
    assert ops.spmm(random_graph(), torch.empty(40, 0)).shape == (50, 0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda g: ops.spmm(g, torch.randn(39, 2)), "num_src=40"),
        (lambda g: ops.spmm(g, torch.randn(40, 2), reduce="median"), "reduce='median'"),
        (lambda g: ops.spmm(g, torch.ones(40, 2, dtype=torch.int64)), "expected a floating-point tensor"),
        (lambda g: ops.spmm(g, torch.randn(40, 2), torch.randn(299)), "num_edges=300"),
        (lambda g: ops.spmm(g, torch.randn(40, 2), torch.randn(300, 3)), "heads"),
        (lambda g: ops.spmm(g, torch.randn(40, 2), torch.randn(300).double()), "like x"),
        (lambda g: ops.spmm(g, torch.randn(40, 2), out=torch.randn(50, 3)), "out="),
        (lambda g: ops.sddmm(g, torch.randn(40, 2), torch.randn(50, 3)), "like a_src"),
        (lambda g: ops.sddmm(g, torch.randn(40, 2), torch.randn(50, 2), "sub"), "op='sub'"),
        (lambda g: ops.segment_softmax(g, torch.randn(12)), "num_edges=300"),
        (lambda g: ops.segment_reduce(torch.randn(3), torch.tensor([0, 2])), "from 0 to 3"),
        (lambda g: ops.segment_reduce(torch.randn(3), torch.tensor([0, 4, 3])), "never decreasing"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call(random_graph())


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min", "softmax"])
def test_partial_states_merge_to_the_whole(reduce):
    graph = random_graph()
    sources, destinations = graph.edge_index()
    x, logits = torch.randn(40, 2, 4, dtype=torch.float64), torch.randn(300, 2, dtype=torch.float64) * 4
    owner = sources % 3
    edge_logits = logits if reduce == "softmax" else None
    leaves = [x.requires_grad_(), logits.requires_grad_()] if reduce == "softmax" else [x.requires_grad_()]

    states = []
    for part in range(4):  # Part 3 has no edge at all.
        mine = (owner == part).nonzero().flatten()
        piece = Graph.from_edge_index(torch.stack([sources[mine], destinations[mine]]), (40, 50))
        part_logits = None if edge_logits is None else edge_logits[mine]
        states.append(ops.partial_aggregate(piece, x, reduce, logits=part_logits))
    merged = states[0]
    for state in states[1:]:
        merged = merged.merge(state)
    whole = (
        ops.spmm(graph, x, ops.segment_softmax(graph, logits))
        if reduce == "softmax"
        else ops.spmm(graph, x, reduce=reduce)
    )
    assert torch.allclose(merged.result(), whole, atol=1e-12)
    for ours, oracle in zip(
        torch.autograd.grad(merged.result().sin().sum(), leaves),
        torch.autograd.grad(whole.sin().sum(), leaves),
        strict=True,
    ):
        assert torch.allclose(ours, oracle, atol=1e-12)
    if reduce == "mean":
        averaged = sum(state.result() for state in states) / len(states)
        assert not torch.allclose(averaged, whole, atol=1e-3), "averaging the means of parts must fail"
