"""The emulated thread block itself: barriers, collectives, early exits, atomics, and faults that must not hang."""

import pytest
import torch

from core_kernels.testing import emulator

pytestmark = pytest.mark.skipif(
    emulator.compiler_skip_reason() is not None, reason=str(emulator.compiler_skip_reason())
)

SOURCE = """
#include "common.cuh"

using core::i64;
using core::u64;

__global__ void block_sum(const float* x, float* out) {
    __shared__ float part[256];
    part[threadIdx.x] = x[blockIdx.x * blockDim.x + threadIdx.x];
    for (int half = blockDim.x / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
    }
    if (threadIdx.x == 0) out[blockIdx.x] = part[0];
}

__global__ void early_exit(i64* out, i64 num_stay) {
    if (threadIdx.x >= num_stay) return;
    i64 sum = 1;
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    __syncthreads();
    out[threadIdx.x] = __syncthreads_count(1);
}

__global__ void votes(i64* out) {
    unsigned lane = threadIdx.x & 31, mask = lane < 16 ? 0xffffu : 0xffff0000u;
    out[threadIdx.x] = __ballot_sync(mask, lane % 3 == 0);
    if (lane < 16) out[threadIdx.x] += __any_sync(mask, lane == 5) * 1000000;
    i64 before = __shfl_up_sync(0xffffffffu, i64(lane), 1), after = __shfl_down_sync(0xffffffffu, i64(lane), 1);
    out[32 + threadIdx.x] = before * 100 + after;
}

__global__ void atomics(float* sum, u64* smallest, i64* taken, i64* largest) {
    atomicAdd(sum, float(threadIdx.x));
    atomicMin(smallest, u64(1000 - threadIdx.x));
    atomicMax(largest, i64(threadIdx.x));
    if (atomicCAS((u64*)taken, 0ull, u64(threadIdx.x + 1)) == 0) atomicAdd(sum, 1000.0f);
}

__global__ void order(i64* turn, i64* seen) { seen[atomicAdd((u64*)turn, 1ull)] = threadIdx.x; }

__global__ void stuck() {
    if (threadIdx.x < 3) __syncthreads();
    else __syncwarp();
}

__global__ void outside_mask() { __shfl_sync(0x1u, 0, 0); }

__global__ void trap() { if (threadIdx.x == 2) __trap(); }

__global__ void round_trip(core::f16* half, core::bf16* brain, const float* x, i64 count) {
    for (i64 i = threadIdx.x; i < count; i += blockDim.x) {
        half[i] = core::narrow<core::f16>(x[i]);
        brain[i] = core::narrow<core::bf16>(x[i]);
    }
}

__global__ void widen_all(const core::f16* half, float* out) {
    i64 i = core::global_thread();
    out[i] = core::widen(half[i]);
}
"""
KERNELS = (
    "block_sum",
    "early_exit",
    "votes",
    "atomics",
    "order",
    "stuck",
    "outside_mask",
    "trap",
    "round_trip",
    "widen_all",
)


@pytest.fixture(scope="module")
def run():
    """Call a kernel of SOURCE; all are built as one library."""
    library = emulator.build(SOURCE, KERNELS)
    return lambda kernel, grid, block, args: emulator.run_library(library, kernel, grid, block, args)


def test_barriers_and_shared_memory(run):
    x = torch.randn(4 * 256)
    out = torch.empty(4)
    run("block_sum", (4,), (256,), [x, out])
    torch.testing.assert_close(out, x.view(4, 256).sum(1))


@pytest.mark.parametrize("num_stay", [0, 1, 31, 33, 64])
def test_threads_that_returned_are_not_waited_for(run, num_stay):
    out = torch.zeros(64, dtype=torch.int64)
    run("early_exit", (1,), (64,), [out, num_stay])
    assert out.tolist() == [num_stay] * num_stay + [0] * (64 - num_stay)


def test_votes_and_shuffles(run):
    out = torch.zeros(64, dtype=torch.int64)
    run("votes", (1,), (32,), [out])
    ballot = sum(1 << lane for lane in range(0, 32, 3))
    assert out[:16].tolist() == [(ballot & 0xFFFF) + 1000000] * 16
    assert out[16:32].tolist() == [ballot & 0xFFFF0000] * 16
    assert out[32:].tolist() == [max(lane - 1, 0) * 100 + min(lane + 1, 31) for lane in range(32)]


def test_atomics(run):
    total, smallest = torch.zeros(1), torch.full((1,), 1 << 40)
    taken, largest = torch.zeros(1, dtype=torch.int64), torch.full((1,), -5)
    run("atomics", (1,), (100,), [total, smallest, taken, largest])
    assert total.item() == 4950 + 1000
    assert (smallest.item(), largest.item()) == (901, 99)
    assert 1 <= taken.item() <= 100


def test_seed_sets_the_thread_order(run):
    seen = {}
    for seed in (1, 1, 2):
        order = torch.empty(64, dtype=torch.int64)
        with emulator.shuffle_seed(seed):
            run("order", (1,), (64,), [torch.zeros(1, dtype=torch.int64), order])
        assert sorted(order.tolist()) == list(range(64))
        assert seen.setdefault(seed, order.tolist()) == order.tolist()
    assert seen[1] != seen[2]


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        ("stuck", "stuck: 32 threads wait"),
        ("outside_mask", "mask leaves it out"),
        ("trap", "thread 2: the kernel trapped"),
    ],
)
def test_faults_are_errors_and_leave_the_emulator_usable(run, kernel, message):
    with pytest.raises(emulator.EmulatorError, match=message):
        run(kernel, (1,), (32,), [])
    out = torch.empty(1)
    run("block_sum", (1,), (32,), [torch.ones(32), out])
    assert out.item() == 32


def test_wrong_calls_are_errors(run):
    with pytest.raises(emulator.EmulatorError, match="takes 2 arguments, got 1"):
        run("block_sum", (1,), (32,), [torch.ones(32)])
    with pytest.raises(emulator.EmulatorError, match="1025 threads"):
        run("trap", (1,), (1025,), [])
    with pytest.raises(emulator.EmulatorError, match="g\\+\\+ cannot build"):
        emulator.run_source("__global__ void broken() { undeclared(); }", "broken", (1,), (1,), [])


def test_half_precision_equals_torch(run):
    edges = torch.tensor([0.0, -0.0, 65504.0, 65519.9, 65520.0, 1e9, -1e9, 6.1e-5, 6.0e-8, 2.9e-8, 3e-8, float("inf")])
    x = torch.cat((edges, torch.randn(3000), torch.randn(3000) * 1e-5, 1 + torch.arange(200) * 2.0**-12))
    half, brain = torch.empty(len(x), dtype=torch.float16), torch.empty(len(x), dtype=torch.bfloat16)
    run("round_trip", (1,), (128,), [half, brain, x, len(x)])
    assert torch.equal(half.view(torch.int16), x.half().view(torch.int16))
    assert torch.equal(brain.view(torch.int16), x.bfloat16().view(torch.int16))
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.float16)
    wide = torch.empty(1 << 16)
    run("widen_all", (512,), (128,), [every, wide])
    assert torch.equal(wide.nan_to_num(7.0), every.float().nan_to_num(7.0))
