"""Single-precision sums over a row of 64k edges stay close to float64, on every path that sums over edges."""

from __future__ import annotations

import pytest
import torch

from core_kernels import Graph, backend, nn, ops
from core_kernels.nn.gat import gat
from core_kernels.nn.gcn import plain_sum
from core_kernels.nn.sage import sage_mean
from core_kernels.testing.emulator import compiler_skip_reason

DEGREE = 1 << 16
#: Errors relative to the sum. Chunks of 4,096 edges, and 16 partial sums of them, err by a few times 1e-7 here; what a
#: generated kernel accumulates besides the score of attention is added edge by edge, and errs by a few times 1e-6.
CHUNKED, SEQUENTIAL = 5e-7, 4e-6


@pytest.fixture(scope="module")
def hub():
    """One destination with 64k in-edges of distinct sources."""
    sources = torch.arange(DEGREE)
    return Graph.from_edge_index(torch.stack([sources, torch.zeros_like(sources)]), (DEGREE, 1))


@pytest.fixture(scope="module")
def square_hub():
    """The same on one set of vertices, of which vertex 0 is the hub."""
    sources = torch.arange(1, DEGREE + 1)
    return Graph.from_edge_index(torch.stack([sources, torch.zeros_like(sources)]), DEGREE + 1)


@pytest.fixture(scope="module")
def x():
    return torch.rand(DEGREE, 2, generator=torch.Generator().manual_seed(0)) + 1


def sums(hub, x):
    """Every way to sum over the edges of a row, as functions of the rows."""
    indptr = torch.tensor([0, DEGREE])
    weight = torch.ones(DEGREE)
    return {
        "spmm": lambda x: ops.spmm(hub, x),
        "spmm, mean": lambda x: DEGREE * ops.spmm(hub, x, reduce="mean"),
        "spmm, weights": lambda x: ops.spmm(hub, x, weight.to(x.dtype)),
        "segment_reduce": lambda x: ops.segment_reduce(x, indptr),
        "scatter_add": lambda x: ops.scatter_add(x, torch.zeros(DEGREE, dtype=torch.int64), 1),
        "embedding_bag": lambda x: ops.embedding_bag(x, torch.arange(DEGREE), indptr),
        "partial_aggregate": lambda x: ops.partial_aggregate(hub, x).result(),
        "softmax and spmm": lambda x: DEGREE * ops.spmm(hub, x, ops.segment_softmax(hub, weight.to(x.dtype))),
        "GATConv, attention": lambda x: (
            DEGREE
            * gat(
                hub,
                src={"score": x.new_zeros(DEGREE, 1, 1), "h": x.unsqueeze(1)},
                dst={"score": x.new_zeros(1, 1, 1)},
            ).squeeze(1)
        ),
        "GCNConv": lambda x: plain_sum(hub, src={"h": x}),
        "SAGEConv": lambda x: DEGREE * sage_mean(hub, src={"h": x}),
    }


NAMES = list(sums(None, None))


def check(found, x, bound):
    exact = x.double().sum(0)
    assert ((found[0].double() - exact).abs() / exact).max() <= bound


@pytest.mark.parametrize("name", NAMES)
def test_sums_over_a_hub(hub, x, name):
    check(sums(hub, x)[name](x), x, SEQUENTIAL if "attention" in name else CHUNKED)


@pytest.mark.skipif(compiler_skip_reason() is not None, reason=str(compiler_skip_reason()))
@pytest.mark.parametrize("name", NAMES)
def test_emulated_sums_over_a_hub(hub, x, name):
    with backend("emulate"):
        found = sums(hub, x)[name](x)
    check(found, x, SEQUENTIAL if "Conv" in name else CHUNKED)


def test_a_sum_edge_by_edge_leaves_the_tighter_bound(x):
    total = torch.zeros(2)
    for row in x:
        total += row
    with pytest.raises(AssertionError):
        check(total.unsqueeze(0), x, CHUNKED)


@pytest.mark.parametrize("make", [nn.GCNConv, nn.SAGEConv, nn.GATConv, nn.GATv2Conv], ids=lambda make: make.__name__)
def test_layers_and_their_gradients(square_hub, make):
    torch.manual_seed(0)
    layer, x = make(2, 3), torch.rand(DEGREE + 1, 2) + 1
    results = []
    for dtype in (torch.float32, torch.float64):
        layer = layer.to(dtype)
        inputs = x.to(dtype).requires_grad_()
        out = layer(square_hub, inputs)
        results.append([out[0], *torch.autograd.grad(out[0].sum(), [inputs, *layer.parameters()])])
    # Terms of a softmax's gradient cancel: their absolute values add up to about 1 here.
    for found, exact in zip(*results, strict=True):
        assert (found.double() - exact).abs().max() <= 1e-5 * max(1.0, exact.abs().max())
