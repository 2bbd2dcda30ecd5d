// Kernels with faults on purpose: the sanitized emulator must stop at each of them.

#pragma once

#include "common.cuh"

namespace core {

// Reads one element past the end of x.
__global__ void read_past_the_end(const float* x, float* out, i64 count) {
    i64 i = global_thread();
    if (i <= count) out[0] += x[i];
}

// Reads wide from an address that is not aligned for it.
__global__ void read_unaligned(const float* x, float* out) {
    Pack<float, 4> pack = load_pack<4>(x + 1);
    out[0] = pack.value[threadIdx.x];
}

// Overflows a signed 64-bit product.
__global__ void overflow(i64* out, i64 rows, i64 columns) { out[0] = rows * columns; }

__global__ void correct(const float* x, float* out, i64 count) {
    i64 i = global_thread();
    if (i < count) out[i] = x[i];
}

}  // namespace core
