"""Emulated kernels at element offsets beyond 32 bits, in address ranges that are reserved but never filled."""

import mmap

import pytest
import torch

from core_kernels.kernels.cuda import embedding, gather, pack, quantize, sampling, sddmm, segment, spmm
from core_kernels.testing import emulator

pytestmark = pytest.mark.skipif(
    emulator.compiler_skip_reason() is not None, reason=str(emulator.compiler_skip_reason())
)

ROWS, WIDTH = (1 << 17) + 3, 1 << 15  # 2**32 elements and some
LAST = ROWS - 1
assert LAST * WIDTH > 2**32


def reserved(*shape, dtype=torch.float32):
    """A tensor of zeros that takes memory only where it is touched."""
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE, which Python names from 3.13 on
    return torch.frombuffer(mmap.mmap(-1, num_bytes, flags=flags), dtype=dtype).view(shape)


def last_blocks(num_threads, count=1):
    return emulator.block_window(-(-num_threads // 128) - count, count)


@pytest.fixture(scope="module")
def last_row():
    return torch.randn(WIDTH, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def table(last_row):
    table = reserved(ROWS, WIDTH)
    table[LAST] = last_row
    return table


INDPTR = torch.tensor([0, 1])
ONE = torch.tensor([LAST], dtype=torch.int32)


def test_emulated_sums_read_far_rows(table, last_row):
    out = torch.empty(1, WIDTH)
    spmm.spmm_sum(INDPTR, ONE, table, None, None, None, None, out)
    assert torch.equal(out[0], last_row)
    embedding.embedding_bag(table, ONE, INDPTR, None, False, out.zero_())
    assert torch.equal(out[0], last_row)
    arg = torch.empty(1, WIDTH, dtype=torch.int32)
    spmm.spmm_extremum(INDPTR, ONE, table, None, None, True, out.zero_(), arg)
    assert torch.equal(out[0], last_row)


def test_emulated_sums_write_far_rows(last_row):
    out, row_ids = reserved(ROWS, WIDTH), torch.tensor([LAST])
    spmm.sum_rows(INDPTR, None, last_row.view(1, -1), out, num_edges=1, row_ids=row_ids, accumulate=True, cached=False)
    assert torch.equal(out[LAST], last_row)


def test_emulated_copies_reach_far_rows(table, last_row):
    out = torch.empty(1, WIDTH)
    gather.gather(table, ONE, out)
    assert torch.equal(out[0], last_row)
    position = torch.tensor([-1 - LAST])
    gather.tiered_gather(position, torch.tensor([0]), last_row.view(1, -1), table, out.zero_())
    assert torch.equal(out[0], last_row)
    target = reserved(ROWS, WIDTH)
    pack.unpack_rows_(target, ONE, last_row.view(1, -1), False)
    pack.unpack_rows_(target, ONE, last_row.view(1, -1), True)
    assert torch.equal(target[LAST], 2 * last_row)


def test_emulated_dot_products_read_far_rows(table, last_row):
    out = torch.empty(1, 1)
    sddmm.sddmm(INDPTR, ONE, table, last_row.view(1, -1), None, "dot", 1, out)
    torch.testing.assert_close(out[0, 0], last_row @ last_row)


def test_emulated_update_writes_a_far_row(table, last_row):
    grad, state = torch.ones(1, WIDTH), reserved(ROWS)
    numbers = (0.5, 1e-8, 0.0, 0.0, 0.0, 1)
    embedding.embedding_update_(table, None, None, ONE, INDPTR, grad, None, "sgd", False, *numbers)
    assert torch.equal(table[LAST], last_row - 0.5)
    embedding.embedding_update_(table, state, None, ONE, INDPTR, grad, None, "rowwise_adagrad", False, *numbers)
    assert state[LAST] == 1.0
    assert torch.allclose(table[LAST], last_row - 1.0)


@pytest.mark.parametrize("bits", [8, 4])
def test_emulated_quantisation_of_far_rows(table, last_row, bits):
    num_bytes = WIDTH * bits // 8
    codes, scale, offset = reserved(ROWS, num_bytes, dtype=torch.uint8), reserved(ROWS), reserved(ROWS)
    with last_blocks(ROWS * 32):
        quantize.quantize_rows(table, bits, codes, scale, offset)
        out = reserved(ROWS, WIDTH)
        quantize.dequantize_rows(codes, scale, offset, bits, WIDTH, out)
    step = (last_row.max() - last_row.min()) / (2**bits - 1)
    assert (out[LAST] - last_row).abs().max() <= step * 0.5001


def test_emulated_segments_read_far_positions():
    # One segment, at the last two of 2**28 positions.
    num_edges, heads = 1 << 28, 17
    logits, out = reserved(num_edges, heads), reserved(num_edges, heads)
    indptr = torch.tensor([num_edges - 2, num_edges])
    logits[-1] = 1.0
    segment.segment_softmax(logits, indptr, None, out)
    probability = torch.tensor([0.0, 1.0]).softmax(0)
    assert torch.allclose(out[-2:], probability.unsqueeze(1).expand(2, heads))


def test_emulated_sampling_reads_far_edges():
    first = 1 << 32
    indices = reserved(first + 50, dtype=torch.int32)
    indices[first:] = torch.arange(50, dtype=torch.int32)
    indptr = torch.tensor([first, first + 50])
    seeds = torch.tensor([0])
    _, sources, edge_ids = sampling.sample_neighbors(indptr, indices, None, seeds, None, 8, False, 1, 0, 0)
    assert torch.equal(edge_ids - first, sources.long())
    assert len(set(sources.tolist())) == 8
