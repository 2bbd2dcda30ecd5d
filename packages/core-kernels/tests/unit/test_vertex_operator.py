"""The registered operators: gradients, torch's own checks, compile, export, the cache on disk."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time

import pytest
import torch

from core_kernels import Graph, backend, nn, vertex
from core_kernels.nn.gat import gat, gatv2


@pytest.fixture
def graph():
    generator = torch.Generator().manual_seed(0)
    edges = torch.randint(0, 7, (2, 20), generator=generator)
    edges[1][edges[1] == 3] = 4
    return Graph.from_edge_index(torch.cat([edges, edges[:, :4]], 1), 7)


def attention_inputs(width=3):
    generator = torch.Generator().manual_seed(1)
    shapes = ((7, 2, 1), (7, 2, 1), (7, 2, width))
    return [torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes]


@pytest.mark.parametrize("name", ["torch", "numba"])
@pytest.mark.parametrize("width", [1, 3])
def test_gradcheck_of_attention(graph, name, width):
    def run(score, own, h):
        return gat(graph, src={"score": score, "h": h}, dst={"score": own})

    with backend(name):
        assert torch.autograd.gradcheck(run, attention_inputs(width))


@pytest.mark.parametrize("name", ["torch", "numba"])
def test_gradcheck_of_every_operation(graph, name):
    @vertex.program
    def program(v, p):
        (e,) = v.in_edges
        a = vertex.exp(-abs(e.src.x)) / (1.0 + e.w**2) + vertex.sqrt(2.0 + vertex.tanh(v.y))
        b = vertex.sigmoid(a * p) - vertex.log(3.0 + vertex.relu(a))
        c = vertex.elu(vertex.maximum(b, e.src.x)) + vertex.leaky_relu(vertex.minimum(b, v.y), 0.1)
        return vertex.max([c]) + vertex.mean([vertex.dot(c, e.src.x) * v.y]), vertex.softmax([c])

    generator = torch.Generator().manual_seed(2)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)

    def run(x, y, w, p):
        return program(graph, src={"x": x}, dst={"y": y}, edge={"w": w}, params={"p": p})

    with backend(name):
        assert torch.autograd.gradcheck(run, (draw(7, 2, 3), draw(7, 1, 3), draw(24, 2, 1), draw(2, 3)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(graph, dtype):
    score, own, h = (tensor.detach().to(dtype) for tensor in attention_inputs())
    out = gat(graph, src={"score": score, "h": h}, dst={"score": own})
    wide = gat(graph, src={"score": score.float(), "h": h.float()}, dst={"score": own.float()})
    assert out.dtype == dtype
    torch.testing.assert_close(out, wide.to(dtype))


def test_strided_inputs(graph):
    score, own, _ = (tensor.detach() for tensor in attention_inputs())
    wide = torch.randn(7, 2, 6, dtype=torch.float64)
    out = gat(graph, src={"score": score, "h": wide[..., ::2]}, dst={"score": own})
    torch.testing.assert_close(
        out, gat(graph, src={"score": score, "h": wide[..., ::2].contiguous()}, dst={"score": own})
    )


@pytest.mark.parametrize("num_nodes", [0, 3])
@pytest.mark.parametrize("name", ["torch", "numba"])
def test_no_edges(num_nodes, name):
    empty = Graph.from_edge_index(torch.zeros(2, 0, dtype=torch.int64), num_nodes)
    h = torch.randn(num_nodes, 2, 3, requires_grad=True)
    att = torch.randn(2, 3, requires_grad=True)
    with backend(name):
        out = gatv2(empty, src={"h": h}, dst={"query": h}, params={"att": att})
        out.sum().backward()
    assert not out.any()
    assert not h.grad.any()
    assert not att.grad.any()


def test_results_do_not_depend_on_the_number_of_threads():
    generator = torch.Generator().manual_seed(0)
    big = Graph.from_edge_index(torch.randint(0, 3000, (2, 60000), generator=generator), 3000)
    layer = nn.GATv2Conv(16, 16, heads=2)
    x = torch.randn(3000, 16, generator=generator)
    results, before = [], torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        layer.zero_grad()
        out = layer(big, torch.ones_like(x) * x)
        grad = torch.autograd.grad(out.square().sum(), [layer.att])[0]
        results.append((out.detach(), grad))
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


_FIRST_CALL = """
import time, torch, numba
from core_kernels import Graph, nn
graph = Graph.from_edge_index(torch.tensor([[0, 1, 2], [1, 2, 0]]), 3)
layer, x = nn.GATConv(4, 3, heads=2), torch.ones(3, 4)
from core_kernels.nn.self_loops import replace_self_loops
replace_self_loops(graph)
start = time.process_time()
layer(graph, x)
print(time.process_time() - start)
"""


def test_generated_code_is_cached_and_compiled_once_by_racing_processes(tmp_path):
    environment = os.environ | {"SEXTET_CACHE": str(tmp_path)}
    racers = [
        subprocess.Popen([sys.executable, "-c", _FIRST_CALL], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    seconds = [float(racer.communicate(timeout=100)[0]) for racer in racers]
    assert all(racer.returncode == 0 for racer in racers)
    sources = list((tmp_path / "vertex").glob("vertex_*.py"))
    stamp = [source.stat().st_mtime_ns for source in sources]
    again = subprocess.run(
        [sys.executable, "-c", _FIRST_CALL], env=environment, check=True, capture_output=True, text=True
    )
    assert float(again.stdout) < 0.5 * max(seconds)
    assert [source.stat().st_mtime_ns for source in sources] == stamp
    assert not list((tmp_path / "vertex").glob("*.tmp"))
    assert time.time_ns() > max(stamp)


@vertex.program
def shifted_max(v):
    return vertex.max(e.src.h * 3.25 + 1.75 for e in v.in_edges)


def test_a_full_disk_keeps_no_machine_code_but_layers_run(tmp_path, monkeypatch, caplog):
    def save(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setenv("SEXTET_CACHE", str(tmp_path))
    monkeypatch.setattr("numba.core.caching.IndexDataCacheFile.save", save)
    graph = Graph.from_edge_index(torch.tensor([[0, 1], [1, 1]]), 2)
    out = shifted_max(graph, src={"h": torch.tensor([[1.0], [3.0]])})
    assert out.tolist() == [[0.0], [11.5]]
    assert "not kept on disk: [Errno 28]" in caplog.text
