// Row-wise quantisation to 8 or 4 bits: code = round((x - min) / scale) with scale = (max - min) / (2**bits - 1).
//
// All arithmetic is fp32 with IEEE division and without fused multiply-add, so codes and values equal the CPU's.

#pragma once

#include "common.cuh"

namespace core {

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(double x) { return float(x); }
__device__ __forceinline__ float to_float(f16 x) { return widen(x); }
__device__ __forceinline__ float to_float(bf16 x) { return widen(x); }

template <class T>
__global__ void __launch_bounds__(block_threads, min_blocks)
    quantize_rows(const T* x, unsigned char* codes, float* scale, float* offset, i64 num_rows, i64 width, i64 bits,
                  i64 group_lanes) {
    int size = int(group_lanes), lane = threadIdx.x & (size - 1);
    i64 row = divide_by_power(global_thread(), size);
    if (row >= num_rows) return;
    u32 mask = group_mask(size);
    const T* values = x + row * width;
    float low = infinity<float>(), high = -infinity<float>();
    for (i64 c = lane; c < width; c += size) {
        float value = to_float(values[c]);
        low = fminf(low, value);
        high = fmaxf(high, value);
    }
    for (int step = size / 2; step > 0; step /= 2) {
        low = fminf(low, __shfl_xor_sync(mask, low, step));
        high = fmaxf(high, __shfl_xor_sync(mask, high, step));
    }
    float levels = bits == 8 ? 255.0f : 15.0f;
    float unit = __fdiv_rn(__fsub_rn(high, low), levels);
    if (lane == 0) {
        scale[row] = unit;
        offset[row] = low;
    }
    i64 per_byte = bits == 8 ? 1 : 2, num_bytes = (width + per_byte - 1) >> (per_byte - 1);
    for (i64 at = lane; at < num_bytes; at += size) {
        u32 byte = 0;
        for (i64 part = 0; part < per_byte && at * per_byte + part < width; ++part) {
            float value = to_float(values[at * per_byte + part]);
            float code = unit == 0 ? 0.0f : fminf(floorf(__fadd_rn(__fdiv_rn(__fsub_rn(value, low), unit), 0.5f)), levels);
            byte |= u32(code) << (4 * part);
        }
        codes[row * num_bytes + at] = (unsigned char)byte;
    }
}

// out[row, c] = offset[row] + scale[row] * code
__global__ void __launch_bounds__(block_threads, min_blocks)
    dequantize_rows(const unsigned char* codes, const float* scale, const float* offset, float* out, i64 num_rows, i64 width,
                    i64 bits, i64 group_lanes) {
    int size = int(group_lanes), lane = threadIdx.x & (size - 1);
    i64 row = divide_by_power(global_thread(), size);
    if (row >= num_rows) return;
    i64 num_bytes = bits == 8 ? width : (width + 1) >> 1;
    for (i64 c = lane; c < width; c += size) {
        u32 byte = codes[row * num_bytes + (bits == 8 ? c : c >> 1)];
        u32 code = bits == 8 ? byte : (c & 1 ? byte >> 4 : byte & 15);
        out[row * width + c] = __fadd_rn(offset[row], __fmul_rn(scale[row], float(code)));
    }
}

}  // namespace core
