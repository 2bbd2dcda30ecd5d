"""Gather, scatter-add, packing, quantisation and sketches: values, in-place forms, bounds, 64-bit offsets."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from core_kernels import backend, ops
from core_kernels.kernels.numba import gather as gather_kernels

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


@pytest.mark.parametrize("shape", [(20,), (20, 1), (20, 3), (20, 2, 16), (20, 65), (20, 0)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gather_and_unpack_equal_indexing(dtype, shape):
    x, index = (torch.randn(shape) * 5).to(dtype), torch.randint(0, 20, (77,))
    out = torch.empty((77, *shape[1:]), dtype=dtype)
    assert torch.equal(ops.gather(x, index), x[index])
    assert torch.equal(ops.gather(x, index.int(), out=out), x[index])
    places, expected = torch.randperm(20)[:9], torch.zeros(shape, dtype=dtype)
    expected[places] = x[:9]
    assert torch.equal(ops.unpack_rows(torch.zeros(shape, dtype=dtype), places, x[:9]), expected)


def test_large_results_live_in_ordinary_memory():
    """Results above 32 MiB take another way of allocation; it must not show."""
    out = ops.gather(torch.arange(4.0).view(4, 1).expand(4, 64), torch.arange(4).repeat(35_000))
    assert out.shape == (140_000, 64)
    assert torch.equal(out[-4:, 63], torch.arange(4.0))
    assert out.is_contiguous()


def test_large_gathers_are_streamed_right():
    x, index = torch.randn(100, 64), torch.randint(0, 100, (70_000,))
    out = torch.empty(70_000, 64)
    assert torch.equal(ops.gather(x, index, out=out), torch.index_select(x, 0, index))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_scatter_add_equals_float64(dtype):
    x, index = torch.randn(500, 7).to(dtype), torch.randint(0, 30, (500,))
    expected = torch.zeros(31, 7, dtype=torch.float64).index_add_(0, index, x.double())
    for name in ("numba", "torch"):
        with backend(name):
            found = ops.scatter_add(x, index, 31).double()
        assert (found - expected).abs().max() < {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.5}[dtype]


def test_gradients():
    x, index = torch.randn(10, 3, dtype=torch.float64, requires_grad=True), torch.randint(0, 10, (10,))
    assert torch.autograd.gradcheck(lambda x: ops.gather(x, index), x)
    assert torch.autograd.gradcheck(lambda x: ops.scatter_add(x, index, 11), x)


def test_unpack_into_strided_rows_and_accumulate():
    table = torch.zeros(50, 100)
    ops.unpack_rows(table[:, 10:23], torch.tensor([3, 3]), torch.ones(2, 13), accumulate=True)
    assert table.sum() == 26
    assert torch.equal(ops.gather(table[:, 10:23], torch.tensor([3])), torch.full((1, 13), 2.0))
    last = ops.unpack_rows(torch.zeros(2, 1), torch.tensor([1, 1]), torch.tensor([[5.0], [7.0]]))
    assert last.flatten().tolist() == [0.0, 7.0]


def test_buckets_equal_the_reference():
    ids, offsets = torch.randint(0, 100, (1000,)), torch.tensor([0, 0, 13, 50, 50, 100])
    order, counts = ops.bucket_by_owner(ids, offsets)
    with backend("torch"):
        expected = ops.bucket_by_owner(ids, offsets)
    assert torch.equal(order, expected[0])
    assert torch.equal(counts, expected[1])
    assert counts.tolist() == [int(((ids >= a) & (ids < b)).sum()) for a, b in itertools.pairwise(offsets)]


def test_offsets_beyond_32_bits():
    """With a row stride of 2**33 bytes, row 1 is read from the address 2**33 behind the base."""
    row, out, stride = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8), 1 << 33
    index = np.array([1], dtype=np.int32)
    gather_kernels._copy_rows(0, 1, index, row.ctypes.data - stride, stride, out.ctypes.data, 64, False)
    assert (out == row).all()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("width", [1, 2, 7, 64, 0])
def test_quantisation(width, bits):
    x = torch.randn(33, width)
    x[3] = 1.5
    codes, scale, offset = ops.quantize_rows(x, bits)
    with backend("torch"):
        for ours, expected in zip((codes, scale, offset), ops.quantize_rows(x, bits), strict=True):
            assert torch.equal(ours, expected)
        expected = ops.dequantize_rows(codes, scale, offset, bits, width)
    restored = ops.dequantize_rows(codes, scale, offset, bits, width)
    assert torch.allclose(restored, expected, atol=1e-6)
    # Half a step, and the rounding of fp32.
    assert ((restored - x).abs() <= scale.unsqueeze(1) * 0.5 + 1e-5).all()
    assert torch.equal(restored[3], x[3])


@pytest.mark.parametrize("num_rows", [1, 4, 5])
def test_sketch_equals_the_reference(num_rows):
    keys, values = torch.randint(-(2**62), 2**62, (1000,)), torch.randn(1000)

    def run():
        sketch = ops.CountSketch(num_rows, 64, seed=-3)
        sketch.insert(keys, values)
        return sketch.table, sketch.estimate(keys)

    ours = run()
    with backend("torch"):
        expected = run()
    assert torch.allclose(ours[0], expected[0], atol=1e-4)
    assert torch.allclose(ours[1], expected[1], atol=1e-4)


def test_sketches_merge_and_bound_the_error():
    keys = torch.arange(5000)
    values = 1000.0 / (keys + 1)
    whole, left, right = (ops.CountSketch(5, 1024, seed=2) for _ in range(3))
    whole.insert(keys, values)
    left.insert(keys[:2000], values[:2000])
    right.insert(keys[2000:], values[2000:])
    left.merge(right)
    assert torch.allclose(left.table, whole.table, atol=1e-3)
    error = (whole.estimate(keys[:50]) - values[:50]).abs()
    assert (error <= 3 * values.norm() / 1024**0.5).all()
    with pytest.raises(ValueError, match="seed"):
        left.merge(ops.CountSketch(5, 1024, seed=3))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.gather(torch.randn(3, 2), torch.tensor([0.0])), "int32 or int64"),
        (lambda: ops.gather(torch.randn(3, 2), torch.tensor([[0]])), "one dimension"),
        (lambda: ops.gather(torch.randn(3, 2), torch.tensor([0]), bounds="ignore"), "bounds='ignore'"),
        (lambda: ops.gather(torch.randn(3, 2), torch.tensor([0]), out=torch.empty(2, 2)), "out="),
        (lambda: ops.scatter_add(torch.randn(3, 2), torch.tensor([0]), 3), r"len\(index\)=1"),
        (lambda: ops.unpack_rows(torch.zeros(3, 2), torch.tensor([0]), torch.zeros(1, 3)), "rows like out"),
        (lambda: ops.bucket_by_owner(torch.tensor([0]), torch.tensor([0, 3, 2])), "ascending"),
        (lambda: ops.quantize_rows(torch.randn(3, 2), 2), "bits=2"),
        (lambda: ops.CountSketch(0, 4), "num_rows=0"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call()
