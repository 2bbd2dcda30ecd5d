"""Every operator on a GPU against the float64 reference on the CPU."""

import pytest
import torch

import core_kernels
from core_kernels import Graph, ops
from core_kernels.kernels.cuda import gather, numba_random
from core_kernels.random import random_bits
from core_kernels.testing.operator_cases import compare, operator_cases, run_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
    pytest.mark.timeout(280),
]

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INDICES = (torch.int64, torch.int32)
CUDA = torch.device("cuda")


@pytest.fixture(scope="module", autouse=True)
def _cupy():
    pytest.importorskip("cupy", reason="CUDA kernels run through CuPy, which is not installed")


def check(case):
    """Run twice on the device: the bits agree, and the values are right."""
    results, again = run_case(case, "cuda", device=CUDA), run_case(case, "cuda", device=CUDA)
    for first, second in zip(results, again, strict=True):
        assert torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8)), str(case)
    compare(case, results)


@pytest.mark.parametrize("index", INDICES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_operators_match_the_reference(dtype, index):
    for width, heads in ((7, 1), (12, 3), (1, 1), (64, 4), (130, 2)):
        for case in operator_cases(dtype, index, width, heads):
            check(case)


def test_every_width():
    for width in range(1, 66):
        for case in operator_cases(torch.float32, torch.int64, width, width, seed=width):
            compare(case, run_case(case, "cuda", device=CUDA))


def test_hubs_are_cut_into_chunks():
    for case in operator_cases(torch.float32, torch.int32, 3, 3, hub=9000):
        check(case)


def test_kernels_run_on_the_current_stream():
    x = torch.zeros(1 << 20, 4, device=CUDA)
    index = torch.arange(1 << 20, device=CUDA)
    out = torch.empty_like(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for value in range(1, 6):
            x.fill_(value)
            gather.gather(x, index, out)
    stream.synchronize()
    assert (out == 5).all()


def test_public_operators_with_gradients():
    edges = torch.randint(0, 200, (2, 3000), generator=torch.Generator().manual_seed(1))
    graph = Graph.from_edge_index(edges, 200)
    gradients = []
    for device in ("cpu", "cuda"):
        x = torch.linspace(-1, 1, 200 * 9, dtype=torch.float64).view(200, 9).sin().to(device).requires_grad_()
        weight = torch.linspace(0, 1, 3000, dtype=torch.float64).to(device).requires_grad_()
        there = graph.to(device)
        with core_kernels.backend("torch" if device == "cpu" else "cuda"):
            out = ops.spmm(there, x, weight) + ops.spmm(there, x, weight, reduce="max")
            gradients.append([one.cpu() for one in torch.autograd.grad(out.square().sum(), (x, weight))])
    for wanted, found in zip(*gradients, strict=True):
        torch.testing.assert_close(found, wanted)


def test_large_sample_is_bit_equal_to_the_cpu():
    generator = torch.Generator().manual_seed(2)
    degree = torch.randint(0, 60, (20_000,), generator=generator)
    degree[7] = 50_000
    indptr = torch.cat((torch.zeros(1, dtype=torch.int64), degree.cumsum(0)))
    indices = torch.randint(0, 20_000, (int(indptr[-1]),), generator=generator)
    seeds = torch.randperm(20_000, generator=generator)[:5000]
    arrays = [indptr, indices, None, seeds, None]
    on_device = [None if one is None else one.to(CUDA) for one in arrays]
    for fanout, replace in ((15, False), (40, False), (15, True)):
        options = (fanout, replace, 77, 3, 1)
        with core_kernels.backend("numba"):
            wanted = torch.ops.core_kernels.sample_block(*arrays, *options, 20_000)
        found = torch.ops.core_kernels.sample_block(*on_device, *options, 20_000)
        assert all(torch.equal(a, b.cpu()) for a, b in zip(wanted, found, strict=True))


def test_numba_random_bits_equal_the_cpu():
    pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")
    rows = torch.arange(-500, 500).repeat(3)
    draws = torch.arange(3000) % 7
    found = numba_random.random_bits(2**40, -3, 1, rows.to(CUDA), draws.to(CUDA))
    assert torch.equal(found.cpu(), random_bits(2**40, -3, 1, rows, draws))
