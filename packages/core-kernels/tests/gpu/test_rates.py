"""The last of the tests on a device: a table of rates of the kernels, against a device copy and torch's own product."""

import statistics
import warnings

import pytest
import torch

from core_kernels.kernels.cuda import embedding, gather, relabel, sampling, segment, spmm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
    pytest.mark.timeout(280),
]

CUDA = torch.device("cuda")


@pytest.fixture(scope="module", autouse=True)
def _cupy():
    pytest.importorskip("cupy", reason="CUDA kernels run through CuPy, which is not installed")


def seconds_of(function, repeats=7):
    """Median seconds of one call on the device, after one call that compiles and plans."""
    function()
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return statistics.median(times)


def rates():
    """Yield (what, seconds, bytes moved without any reuse) of each kernel at a size that fills a device."""
    num_nodes, num_edges, width = 1_000_000, 16_000_000, 128
    generator = torch.Generator(CUDA).manual_seed(0)
    draw = lambda bound, count: torch.randint(0, bound, (count,), generator=generator, device=CUDA)  # noqa: E731
    dst, indices = draw(num_nodes, num_edges).sort().values, draw(num_nodes, num_edges)
    indptr = torch.searchsorted(dst, torch.arange(num_nodes + 1, device=CUDA))
    x, out = (torch.randn(num_nodes, width, device=CUDA, generator=generator) for _ in range(2))
    row = width * 4
    yield "device copy", seconds_of(lambda: out.copy_(x)), 2 * num_nodes * row
    order = torch.randperm(num_nodes, device=CUDA)
    yield "gather, 512-byte rows", seconds_of(lambda: gather.gather(x, order, out)), num_nodes * (2 * row + 8)
    moved = num_edges * (row + 8) + num_nodes * (row + 8)
    run = lambda: spmm.spmm_sum(indptr, indices, x, None, None, None, None, out)  # noqa: E731
    yield "spmm sum", seconds_of(run), moved
    narrow = indices.int()
    run = lambda: spmm.spmm_sum(indptr, narrow, x, None, None, None, None, out)  # noqa: E731
    yield "spmm sum, int32", seconds_of(run), moved - 4 * num_edges
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says once that its CSR tensors are in beta
        ones = torch.ones(num_edges, device=CUDA)
        sparse = torch.sparse_csr_tensor(indptr, indices, ones, (num_nodes, num_nodes))
    yield "torch.sparse.mm (CSR)", seconds_of(lambda: torch.sparse.mm(sparse, x)), moved
    logits = torch.randn(num_edges, 4, device=CUDA, generator=generator)
    soft = torch.empty_like(logits)
    run = lambda: segment.segment_softmax(logits, indptr, None, soft)  # noqa: E731
    yield "segment softmax, 4 heads", seconds_of(run), 2 * logits.numel() * 4
    seeds = torch.randperm(num_nodes, device=CUDA)[:200_000]
    run = lambda: sampling.sample_neighbors(indptr, indices, None, seeds, None, 10, False, 0, 0, 0)  # noqa: E731
    yield "sample 10 of 16, 200k seeds", seconds_of(run), 200_000 * 10 * (8 + 8 + 8)
    yield "unique and relabel, 2M ids", seconds_of(lambda: relabel.unique_relabel(indices[:2_000_000])), 2_000_000 * 16
    bags = torch.arange(0, 2_000_001, 10, device=CUDA)
    ids, grad, state = indices[:2_000_000], x[:200_000], torch.ones(num_nodes, device=CUDA)
    numbers = (0.01, 1e-8, 0.0, 0.0, 0.0, 1)
    run = lambda: embedding.embedding_update_(  # noqa: E731
        out, state, None, ids, bags, grad, None, "rowwise_adagrad", False, *numbers
    )
    yield "embedding backward + row-wise Adagrad", seconds_of(run), 2_000_000 * 3 * row


def test_rates_table(capsys):
    measured = list(rates())
    copy_rate = measured[0][2] / measured[0][1]
    lines = [f"{'kernel':<40}{'ms':>10}{'GB/s':>10}{'of copy':>10}"]
    for what, seconds, moved in measured:
        rate = moved / seconds
        lines.append(f"{what:<40}{seconds * 1e3:>10.3f}{rate / 1e9:>10.0f}{rate / copy_rate:>10.2f}")
    seconds = {what: taken for what, taken, _ in measured}
    ratio = seconds["torch.sparse.mm (CSR)"] / seconds["spmm sum"]
    lines.append(f"spmm sum runs at {ratio:.2f} times the speed of torch.sparse.mm on {torch.cuda.get_device_name()}")
    with capsys.disabled():
        print("\n" + "\n".join(lines))
    assert copy_rate > 0
    assert ratio > 0.3, lines[-1]
