"""Graphs, partitions and feature stores on a CUDA device equal those on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from core_kernels import Graph, partition_graph, random
from core_kernels.store import FeatureStore

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_graphs_are_built_alike(dtype):
    edges = torch.randint(300, (2, 4000), dtype=dtype)
    on_cpu, on_cuda = Graph.from_edge_index(edges, 310), Graph.from_edge_index(edges.cuda(), 310)
    nodes = torch.randperm(310)
    for cpu, cuda in (
        (on_cpu, on_cuda),
        (on_cpu.transpose(), on_cuda.transpose()),
        (on_cpu.symmetrized(), on_cuda.symmetrized()),
        (on_cpu.with_self_loops(), on_cuda.with_self_loops()),
        (on_cpu.permute(nodes), on_cuda.permute(nodes.cuda())),
        (on_cpu.in_subgraph(nodes[:40]), on_cuda.in_subgraph(nodes[:40].cuda())),
        (on_cpu, on_cpu.to("cuda").to("cpu")),
    ):
        assert cpu.fingerprint() == cuda.fingerprint()
    assert on_cuda.transpose().device.type == "cuda"
    assert torch.equal(on_cuda.out_degrees().cpu(), on_cpu.out_degrees())


def test_random_bits_are_the_same():
    rows, draws = torch.arange(1000)[:, None] * 2**40, torch.arange(8)
    expected = random.random_bits(-3, 2, 1, rows, draws)
    bits = random.random_bits(-3, 2, 1, rows.cuda(), draws.cuda())
    assert torch.equal(bits.cpu(), expected)
    assert torch.equal(random.uniform(bits).cpu(), random.uniform(expected))
    assert torch.equal(random.bounded(bits, 77).cpu(), random.bounded(expected, 77))


def test_partitions_of_graphs_on_the_device():
    graph = Graph.from_edge_index(torch.randint(300, (2, 4000)), 300)
    on_cpu, on_cuda = partition_graph(graph, 4, "random"), partition_graph(graph.to("cuda"), 4, "random")
    assert torch.equal(on_cpu.perm, on_cuda.perm.cpu())
    assert on_cpu.cut == on_cuda.cut
    ids = torch.arange(300, device="cuda")
    assert torch.equal(on_cuda.to_old(on_cuda.to_new(ids)), ids)
    assert torch.equal(on_cuda.owner(ids).cpu(), on_cpu.owner(ids.cpu()))


@pytest.mark.parametrize("on_disk", [False, True])
def test_batches_arrive_on_the_device(tmp_path, on_disk):
    table = torch.rand(500, 7)
    np.save(tmp_path / "table.npy", table.numpy())
    source = tmp_path / "table.npy" if on_disk else table
    options = {"num_device_rows": 50, "num_host_rows": 60 if on_disk else 0, "refresh_every": 2}
    with FeatureStore(source, device="cuda", **options) as store:
        batches = [torch.randint(500, (200,)) for _ in range(6)]
        for ids, rows in store.iterate([ids.cuda() for ids in batches]):
            assert rows.is_cuda
            assert torch.equal(rows.cpu(), table[ids.cpu()])
        assert store.counters.rows["device"] > 0
        assert store.counters.rows["reused"] > 0
