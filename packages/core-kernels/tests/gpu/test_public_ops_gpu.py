"""Every public operator on a device against the CPU, with gradients where it has them."""

from __future__ import annotations

import pytest
import torch

from core_kernels import Graph, ops

pytestmark = pytest.mark.gpu
needs_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")

N, E = 200, 3000


class Inputs:
    """Tensors of one device, the same values on every device."""

    def __init__(self, device):
        self.device = device
        edges = torch.randint(0, N, (2, E), generator=torch.Generator().manual_seed(1))
        self.graph = Graph.from_edge_index(edges, N).to(device)
        self.ids = torch.randint(0, N, (90,), generator=torch.Generator().manual_seed(2)).to(device)
        self.bags = torch.tensor([0, 0, 40, 90], device=device)
        self.leaves: list[torch.Tensor] = []

    def plain(self, *shape, seed=0):
        made = torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)
        return made.to(self.device)

    def leaf(self, *shape, seed=0):
        self.leaves.append(self.plain(*shape, seed=seed).requires_grad_())
        return self.leaves[-1]


def fused(update, *states):
    def call(t):
        table = t.plain(N, 6)
        made = [t.plain(*shape, seed=3).abs() for shape in states]
        update(table, *made, t.ids, t.bags, t.plain(3, 6))
        return [table, *made]

    return call


def sketch(t):
    made = ops.CountSketch(3, 64, seed=5, device=t.device)
    made.insert(t.ids, t.plain(90).float())
    return [made.table, made.estimate(t.ids)]


def quantise(t):
    codes, scale, offset = ops.quantize_rows(t.plain(N, 7).float(), 4)
    return [codes, scale, offset, ops.dequantize_rows(codes, scale, offset, 4, 7)]


def merge(t):
    x, logits = t.leaf(N, 2, 4), t.leaf(E, 2)
    state = ops.partial_aggregate(t.graph, x, "softmax", logits=logits)
    return [state.merge(state).result()]


def block_arrays(block):
    return [block.indptr, block.indices.long(), block.src_ids, block.dst_ids, block.global_edge_ids]


CALLS = {
    "spmm": lambda t: [ops.spmm(t.graph, t.leaf(N, 2, 5), t.leaf(E, 2)), ops.spmm(t.graph, t.leaf(N, 9), reduce="max")],
    "sddmm": lambda t: [
        ops.sddmm(t.graph, t.leaf(N, 2, 5), t.leaf(N, 2, 5, seed=1), op) for op in ("dot", "add", "mul")
    ],
    "segment_reduce": lambda t: [
        ops.segment_reduce(t.leaf(E, 3), t.graph.indptr, how) for how in ("sum", "mean", "min")
    ],
    "segment_softmax": lambda t: [ops.segment_softmax(t.graph, t.leaf(E, 3))],
    "partial_aggregate": merge,
    "PartialState": merge,
    "gather": lambda t: [ops.gather(t.leaf(N, 7), t.ids)],
    "pack_rows": lambda t: [ops.pack_rows(t.plain(N, 7), t.ids)],
    "scatter_add": lambda t: [ops.scatter_add(t.leaf(90, 7), t.ids, N)],
    "unpack_rows": lambda t: [ops.unpack_rows(t.plain(N, 7), t.ids, t.plain(90, 7), how) for how in (False, True)],
    "bucket_by_owner": lambda t: [*ops.bucket_by_owner(t.ids, torch.tensor([0, 50, 50, N], device=t.device))],
    "unique_relabel": lambda t: [*ops.unique_relabel(t.ids.unique()[:5], t.ids)],
    "sample_neighbors": lambda t: [*ops.sample_neighbors(t.graph, t.ids, 4, seed=3)],
    "sample_block": lambda t: block_arrays(ops.sample_block(t.graph, t.ids.unique(), 4, seed=3)),
    "sample_blocks": lambda t: [
        array for block in ops.sample_blocks(t.graph, t.ids.unique(), [4, 3]) for array in block_arrays(block)
    ],
    "embedding_bag": lambda t: [ops.embedding_bag(t.leaf(N, 6), t.ids, t.bags, t.leaf(90), mode="mean")],
    "fused_sgd_": fused(lambda w, ids, bags, grad: ops.fused_sgd_(w, ids, bags, grad, 0.1)),
    "fused_adagrad_": fused(lambda w, s, *rest: ops.fused_adagrad_(w, s, *rest, 0.1), (N, 6)),
    "fused_rowwise_adagrad_": fused(lambda w, s, *rest: ops.fused_rowwise_adagrad_(w, s, *rest, 0.1), (N,)),
    "fused_adam_": fused(lambda w, m, v, *rest: ops.fused_adam_(w, m, v, *rest, 0.1, 2), (N, 6), (N, 6)),
    "quantize_rows": quantise,
    "dequantize_rows": quantise,
    "CountSketch": sketch,
}


def results_of(name, device):
    """Return the results of a call, and its gradients, on the CPU."""
    inputs = Inputs(device)
    results = CALLS[name](inputs)
    if inputs.leaves:
        total = sum((one * torch.ones_like(one).cumsum(0)).sum() for one in results)
        results += torch.autograd.grad(total, inputs.leaves)
    return [one.detach().cpu() for one in results]


@needs_device
@pytest.mark.parametrize("name", CALLS)
def test_matches_the_cpu(name):
    for found, expected in zip(results_of(name, "cuda"), results_of(name, "cpu"), strict=True):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
